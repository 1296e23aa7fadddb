//! Specification section 3: the framing block and the key slots, before anything is unlocked.

use sha2::{Digest, Sha256};

use super::ids::{ArchiveId, FORMAT_VERSION};
use super::reader::Reader;
use crate::error::{Error, Result};

const MAGIC: [u8; 16] = *b"\x89LOCKBOX\r\n\x1a\n\0\0\0\0";
const SUITE: u16 = 1;
const MAC_AT: usize = 4032;
const CHECKSUM_AT: usize = 4064;
/// Bytes of the sealed part of a slot with its tag.
const SEALED: usize = 528;

/// Bytes of one header copy: framing and slots.
pub const HEADER_BYTES: usize = 33 * 4096;
/// Kind byte of an empty slot.
pub const SLOT_EMPTY: u8 = 0;
/// Kind byte of a passphrase slot.
pub const SLOT_PASSPHRASE: u8 = 1;

/// The framing fields of one header copy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Framing {
    pub copy: u8,
    pub archive: ArchiveId,
    pub sequence: u64,
    pub commitment: [u8; 32],
    pub slots: [u8; 32],
    pub mac: [u8; 32],
    /// Feature bits that forbid writing to a program that does not know them; this one knows none.
    pub read_only_compatible: u64,
}

/// SHA-256 over a copy with the checksum field zeroed.
fn checksum(copy_bytes: &[u8]) -> [u8; 32] {
    let mut hash = Sha256::new();
    hash.update(&copy_bytes[..CHECKSUM_AT]);
    hash.update([0; 32]);
    hash.update(&copy_bytes[4096..]);
    hash.finalize().into()
}

/// Parsed, with a right checksum, but not authenticated: the MAC needs the volume key.
#[derive(Clone)]
pub struct ParsedHeader {
    pub framing: Framing,
    /// The whole copy, [`HEADER_BYTES`] long; slot `i` is `bytes[(i + 1) * 4096..][..4096]`.
    pub bytes: Vec<u8>,
}

/// Parameters of a passphrase slot that are readable before unlocking.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KdfParameters {
    pub memory_kib: u32,
    pub passes: u32,
    pub lanes: u32,
}

/// The clear part of a passphrase slot.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PassphraseSlot {
    pub salt: [u8; 32],
    pub kdf: KdfParameters,
    pub commitment: [u8; 32],
    pub nonce: [u8; 24],
    /// Ciphertext and tag, 528 bytes.
    pub sealed: Vec<u8>,
}

/// Encodes a copy: framing (with `mac` as given) + 32 slot blocks, checksum filled in.
pub fn encode(framing: &Framing, slots: &[[u8; 4096]; 32]) -> Vec<u8> {
    let mut out = Vec::with_capacity(HEADER_BYTES);
    out.extend_from_slice(&MAGIC);
    out.extend_from_slice(&FORMAT_VERSION.to_le_bytes());
    out.extend_from_slice(&SUITE.to_le_bytes());
    out.extend_from_slice(&[framing.copy, 0]);
    out.extend_from_slice(&[0; 24]); // feature bits: none in version 1
    out.extend_from_slice(&framing.archive);
    out.extend_from_slice(&framing.sequence.to_le_bytes());
    out.extend_from_slice(&framing.commitment);
    out.extend_from_slice(&framing.slots);
    out.resize(MAC_AT, 0);
    out.extend_from_slice(&framing.mac);
    out.resize(4096, 0);
    for slot in slots {
        out.extend_from_slice(slot);
    }
    let checksum = checksum(&out);
    out[CHECKSUM_AT..4096].copy_from_slice(&checksum);
    out
}

/// The bytes that the header MAC covers: the copy with MAC and checksum zeroed.
pub fn mac_input(copy_bytes: &[u8]) -> Vec<u8> {
    let mut out = copy_bytes.to_vec();
    let end = out.len().min(4096);
    out[MAC_AT.min(end)..end].fill(0);
    out
}

/// Decodes one copy and verifies its checksum.
///
/// # Errors
/// `NotArchive` without the magic, `UnsupportedVersion` for another version, suite or unknown incompatible bit (named),
/// `Damaged` for a wrong checksum or copy number.
pub fn decode(bytes: &[u8], copy: u8) -> Result<ParsedHeader> {
    let mut reader = Reader::new(bytes, "header");
    if reader.take(16).ok() != Some(&MAGIC[..]) {
        return Err(Error::NotArchive("it does not begin like one".into()));
    }
    let version = reader.u32()?;
    if version != FORMAT_VERSION {
        return Err(Error::UnsupportedVersion(format!(
            "format version {version}, this program knows {FORMAT_VERSION}"
        )));
    }
    let suite = reader.u16()?;
    if suite != SUITE {
        return Err(Error::UnsupportedVersion(format!("cipher suite {suite}")));
    }
    // A header whose bytes rotted must not be mistaken for one of the future: features count only under a right checksum.
    if bytes.len() != HEADER_BYTES || checksum(bytes)[..] != bytes[CHECKSUM_AT..4096] {
        return Err(Error::damaged(format!("header copy {copy} has a wrong checksum")));
    }
    let found = reader.u8()?;
    reader.zero(1)?;
    if found != copy {
        return Err(Error::damaged(format!("header copy {copy} says that it is copy {found}")));
    }
    let incompatible = reader.u64()?;
    if incompatible != 0 {
        return Err(Error::UnsupportedVersion(format!("incompatible feature bits {incompatible:#x}")));
    }
    // Read-only-compatible and compatible bits do not hinder reading; a writer asks `Framing::writable`.
    let read_only_compatible = reader.u64()?;
    let _compatible = reader.u64()?;
    let framing = Framing {
        copy,
        archive: reader.array()?,
        sequence: reader.u64()?,
        commitment: reader.array()?,
        slots: reader.array()?,
        mac: {
            reader.zero(MAC_AT - 136)?;
            reader.array()?
        },
        read_only_compatible,
    };
    Ok(ParsedHeader { framing, bytes: bytes.to_vec() })
}

/// Encodes a passphrase slot block; `padding` fills what is random.
pub fn encode_passphrase_slot(slot: &PassphraseSlot, padding: &[u8; 3464]) -> [u8; 4096] {
    let mut out = Vec::with_capacity(4096);
    out.extend_from_slice(&slot.salt);
    out.extend_from_slice(&slot.kdf.memory_kib.to_le_bytes());
    out.extend_from_slice(&slot.kdf.passes.to_le_bytes());
    out.extend_from_slice(&slot.kdf.lanes.to_le_bytes());
    out.extend_from_slice(&[0; 4]);
    out.extend_from_slice(&slot.commitment);
    out.extend_from_slice(&slot.nonce);
    out.extend_from_slice(&slot.sealed);
    out.extend_from_slice(padding);
    let mut block = [0; 4096];
    block.copy_from_slice(&out);
    block
}

pub fn decode_passphrase_slot(block: &[u8]) -> Result<PassphraseSlot> {
    let mut reader = Reader::new(block, "key slot");
    let salt = reader.array()?;
    let kdf = KdfParameters { memory_kib: reader.u32()?, passes: reader.u32()?, lanes: reader.u32()? };
    reader.zero(4)?;
    let (commitment, nonce) = (reader.array()?, reader.array()?);
    Ok(PassphraseSlot { salt, kdf, commitment, nonce, sealed: reader.take(SEALED)?.to_vec() })
}
