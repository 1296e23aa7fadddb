//! Framing block and key slots, as readable before unlocking (specification section 3).

use sha2::{Digest, Sha256};

use super::codec::{array_at, check_zero, exact_array, put, u16_at, u32_at, u64_at};
use super::ids::{ArchiveId, BLOCK, FORMAT_VERSION};
use crate::error::{Error, Result};

/// Length of one header copy in bytes: framing and slots.
pub const HEADER_BYTES: usize = 33 * 4096;
/// Kind byte of an empty slot.
pub const SLOT_EMPTY: u8 = 0;
/// Kind byte of a passphrase slot.
pub const SLOT_PASSPHRASE: u8 = 1;

const MAGIC: [u8; 16] = *b"\x89LOCKBOX\r\n\x1a\n\0\0\0\0";
const SUITE: u16 = 1;

// Offsets in the framing block.
const VERSION_AT: usize = 16;
const SUITE_AT: usize = 20;
const COPY_AT: usize = 22;
const INCOMPATIBLE_AT: usize = 24;
const READ_ONLY_AT: usize = 32;
const COMPATIBLE_AT: usize = 40;
const ARCHIVE_AT: usize = 48;
const SEQUENCE_AT: usize = 64;
const COMMITMENT_AT: usize = 72;
const KINDS_AT: usize = 104;
const ZERO_AT: usize = 136;
const MAC_AT: usize = 4032;
const CHECKSUM_AT: usize = 4064;
const FRAMING_END: usize = 4096;

/// Incompatible feature of archives with a log (section 9.4).
pub const FEATURE_LOG: u64 = 1;

/// Framing fields of one header copy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Framing {
    pub copy: u8,
    /// Incompatible feature bits, all of them known.
    pub features: u64,
    pub archive: ArchiveId,
    pub sequence: u64,
    pub commitment: [u8; 32],
    pub slots: [u8; 32],
    pub mac: [u8; 32],
}

/// Parsed header copy with a valid checksum, not authenticated: the MAC needs the volume key.
#[derive(Clone)]
pub struct ParsedHeader {
    pub framing: Framing,
    /// Whole copy, [`HEADER_BYTES`] long; slot `i` is `bytes[(i + 1) * 4096..][..4096]`.
    pub bytes: Vec<u8>,
}

impl Framing {
    pub fn has_log(&self) -> bool {
        self.features & FEATURE_LOG != 0
    }
}

impl ParsedHeader {
    /// Returns the feature bits without which a program may read but must not write; version 1
    /// knows none.
    pub fn read_only_features(&self) -> u64 {
        u64_at(&self.bytes, READ_ONLY_AT)
    }

    /// Returns the feature bits that a program may ignore.
    pub fn compatible_features(&self) -> u64 {
        u64_at(&self.bytes, COMPATIBLE_AT)
    }
}

/// Parameters of a passphrase slot, readable before unlocking.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KdfParameters {
    pub memory_kib: u32,
    pub passes: u32,
    pub lanes: u32,
}

/// Clear part of a passphrase slot.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PassphraseSlot {
    pub salt: [u8; 32],
    pub kdf: KdfParameters,
    pub commitment: [u8; 32],
    pub nonce: [u8; 24],
    /// Ciphertext and tag, 528 bytes.
    pub sealed: Vec<u8>,
}

/// Encodes a copy: framing (with `mac` as given) and 32 slot blocks, with the checksum filled in.
pub fn encode(framing: &Framing, slots: &[[u8; 4096]; 32]) -> Vec<u8> {
    let mut out = Vec::with_capacity(HEADER_BYTES);
    out.extend_from_slice(&encode_framing(framing));
    for slot in slots {
        out.extend_from_slice(slot);
    }
    let sum = checksum(&out);
    put(&mut out, CHECKSUM_AT, sum);
    out
}

/// Encodes the framing block with a zero checksum, which also covers the slots.
pub fn encode_framing(framing: &Framing) -> [u8; FRAMING_END] {
    let mut out = [0; FRAMING_END];
    put(&mut out, 0, MAGIC);
    put(&mut out, VERSION_AT, FORMAT_VERSION.to_le_bytes());
    put(&mut out, SUITE_AT, SUITE.to_le_bytes());
    out[COPY_AT] = framing.copy;
    put(&mut out, INCOMPATIBLE_AT, framing.features.to_le_bytes());
    put(&mut out, ARCHIVE_AT, framing.archive);
    put(&mut out, SEQUENCE_AT, framing.sequence.to_le_bytes());
    put(&mut out, COMMITMENT_AT, framing.commitment);
    put(&mut out, KINDS_AT, framing.slots);
    put(&mut out, MAC_AT, framing.mac);
    out
}

/// Returns the input of the header MAC: the copy with MAC and checksum zeroed.
pub fn mac_input(copy_bytes: &[u8]) -> Vec<u8> {
    let mut out = copy_bytes.to_vec();
    if let Some(sums) = out.get_mut(MAC_AT..FRAMING_END) {
        sums.fill(0);
    }
    out
}

/// Decodes one copy and verifies its checksum.
///
/// # Errors
/// `NotArchive` without the magic, `UnsupportedVersion` for another version, suite or unknown
/// incompatible bit (named), `Damaged` for a wrong checksum or copy number.
pub fn decode(bytes: &[u8], copy: u8) -> Result<ParsedHeader> {
    // The version is checked before the checksum: another version may compute it differently.
    recognize(bytes, copy)?;
    let whole: &[u8; HEADER_BYTES] = exact_array(bytes, "header")?;
    if checksum(whole) != array_at::<32>(whole, CHECKSUM_AT) {
        return Err(Error::damaged(format!("header checksum differs: copy={copy}")));
    }
    let framing = decode_framing(&whole[..FRAMING_END], copy)?;
    Ok(ParsedHeader { framing, bytes: whole.to_vec() })
}

/// Returns the MAC of a whole copy, including copies with unknown features.
pub fn mac_of(copy: &[u8; HEADER_BYTES]) -> [u8; 32] {
    array_at(copy, MAC_AT)
}

/// Returns whether two whole copies are equal except for version and copy number.
pub fn differ_by_version(one: &[u8], other: &[u8]) -> bool {
    let comparable = |bytes: &[u8]| {
        let mut bytes = mac_input(bytes);
        for apart in [VERSION_AT..SUITE_AT, COPY_AT..COPY_AT + 1] {
            bytes[apart].fill(0);
        }
        bytes
    };
    one.len() == HEADER_BYTES && other.len() == HEADER_BYTES && comparable(one) == comparable(other)
}

/// Checks that the bytes, possibly truncated, begin like a copy of this version. Truncated zeros of
/// the magic count as present; a truncated version counts as missing.
///
/// # Errors
/// `NotArchive` without the magic, `UnsupportedVersion` for another version.
pub fn recognize(bytes: &[u8], copy: u8) -> Result<()> {
    let mut magic = [0; MAGIC.len()];
    let length = bytes.len().min(MAGIC.len());
    magic[..length].copy_from_slice(&bytes[..length]);
    if magic != MAGIC {
        return Err(Error::NotArchive(format!("header copy {copy} has no magic")));
    }
    if let Some(version) = bytes.get(VERSION_AT..SUITE_AT).map(|field| u32_at(field, 0))
        && version != FORMAT_VERSION
    {
        return Err(Error::UnsupportedVersion(format!(
            "format version {version}, this program knows {FORMAT_VERSION}"
        )));
    }
    Ok(())
}

/// Decodes a framing block accepted by [`recognize`]; the caller verifies its checksum before.
///
/// # Errors
/// `UnsupportedVersion` for another suite or unknown incompatible bit (named), `Damaged` for
/// another length or copy number.
pub fn decode_framing(block: &[u8], copy: u8) -> Result<Framing> {
    let block: &[u8; FRAMING_END] = exact_array(block, "header")?;
    let suite = u16_at(block, SUITE_AT);
    if suite != SUITE {
        return Err(Error::UnsupportedVersion(format!("cipher suite {suite}, this program knows {SUITE}")));
    }
    let features = u64_at(block, INCOMPATIBLE_AT);
    let unknown = features & !FEATURE_LOG;
    if unknown != 0 {
        let bits: Vec<String> = (0..64).filter(|bit| unknown >> bit & 1 == 1).map(|bit| bit.to_string()).collect();
        return Err(Error::UnsupportedVersion(format!("unknown incompatible feature bits: {}", bits.join(" "))));
    }
    if block[COPY_AT] != copy {
        return Err(Error::damaged(format!("header copy has a wrong number: copy={copy} found={}", block[COPY_AT])));
    }
    check_zero(&block[COPY_AT + 1..INCOMPATIBLE_AT], "header")?;
    check_zero(&block[ZERO_AT..MAC_AT], "header")?;
    Ok(Framing {
        copy,
        features,
        archive: array_at(block, ARCHIVE_AT),
        sequence: u64_at(block, SEQUENCE_AT),
        commitment: array_at(block, COMMITMENT_AT),
        slots: array_at(block, KINDS_AT),
        mac: array_at(block, MAC_AT),
    })
}

/// Encodes a passphrase slot block; `padding` fills the random part.
///
/// # Panics
/// When `slot.sealed` is not 528 bytes long, the sealed length of a 512-byte part.
pub fn encode_passphrase_slot(slot: &PassphraseSlot, padding: &[u8; 3464]) -> [u8; 4096] {
    let mut out = [0; 4096];
    put(&mut out, 0, slot.salt);
    put(&mut out, 32, slot.kdf.memory_kib.to_le_bytes());
    put(&mut out, 36, slot.kdf.passes.to_le_bytes());
    put(&mut out, 40, slot.kdf.lanes.to_le_bytes());
    put(&mut out, 48, slot.commitment);
    put(&mut out, 80, slot.nonce);
    out[104..632].copy_from_slice(&slot.sealed);
    put(&mut out, 632, *padding);
    out
}

/// Decodes a passphrase slot; the key derivation checks its parameters against their bounds.
///
/// # Errors
/// `Damaged` for a block of another length or a reserved field that is not zero.
pub fn decode_passphrase_slot(block: &[u8]) -> Result<PassphraseSlot> {
    let block: &[u8; BLOCK as usize] = exact_array(block, "key slot")?;
    check_zero(&block[44..48], "key slot")?;
    Ok(PassphraseSlot {
        salt: array_at(block, 0),
        kdf: KdfParameters { memory_kib: u32_at(block, 32), passes: u32_at(block, 36), lanes: u32_at(block, 40) },
        commitment: array_at(block, 48),
        nonce: array_at(block, 80),
        sealed: block[104..632].to_vec(),
    })
}

/// Returns the SHA-256 of a whole copy with the checksum field taken as zero.
fn checksum(copy_bytes: &[u8]) -> [u8; 32] {
    let mut hash = Sha256::new();
    hash.update(&copy_bytes[..CHECKSUM_AT]);
    hash.update([0; FRAMING_END - CHECKSUM_AT]);
    hash.update(&copy_bytes[FRAMING_END..]);
    hash.finalize().into()
}

#[cfg(test)]
mod tests;
