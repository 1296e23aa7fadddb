//! Framing block and key slots, as readable before unlocking (specification section 3): slots of
//! kinds 1 to 4 and 17 to 19, and the optional description of every slot.

#[cfg(test)]
mod key_slot_tests;
#[cfg(test)]
mod tests;

use sha2::{Digest, Sha256};

use super::ids::{ArchiveId, BLOCK, FORMAT_VERSION, Timestamp};
use super::{array_at, check_zero, exact_array, put, put_time, time_at, u16_at, u32_at, u64_at};
use crate::error::{Error, Result};

/// Length of one header copy in bytes: framing and slots.
pub(crate) const HEADER_BYTES: usize = 33 * 4096;
pub(crate) const SLOT_EMPTY: u8 = 0;
pub(crate) const SLOT_PASSPHRASE: u8 = 1;

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
pub(crate) const FEATURE_LOG: u64 = 1;

/// Framing fields of one header copy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Framing {
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
pub(crate) struct ParsedHeader {
    pub framing: Framing,
    /// Whole copy, [`HEADER_BYTES`] long; slot `i` is `bytes[(i + 1) * 4096..][..4096]`.
    pub bytes: Vec<u8>,
}

impl Framing {
    pub(crate) fn has_log(&self) -> bool {
        self.features & FEATURE_LOG != 0
    }
}

impl ParsedHeader {
    /// Returns the feature bits without which a program may read but must not write; version 1
    /// knows none.
    pub(crate) fn read_only_features(&self) -> u64 {
        u64_at(&self.bytes, READ_ONLY_AT)
    }

    /// Returns the feature bits that a program may ignore.
    pub(crate) fn compatible_features(&self) -> u64 {
        u64_at(&self.bytes, COMPATIBLE_AT)
    }
}

/// Parameters of a passphrase slot, readable before unlocking.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct KdfParameters {
    pub memory_kib: u32,
    pub passes: u32,
    pub lanes: u32,
}

/// Clear part of a passphrase slot.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct PassphraseSlot {
    pub salt: [u8; 32],
    pub kdf: KdfParameters,
    pub commitment: [u8; 32],
    pub nonce: [u8; 24],
    /// Ciphertext and tag, 528 bytes.
    pub sealed: Vec<u8>,
}

/// Encodes a copy: framing (with `mac` as given) and 32 slot blocks, with the checksum filled in.
pub(crate) fn encode(framing: &Framing, slots: &[[u8; 4096]; 32]) -> Vec<u8> {
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
pub(crate) fn encode_framing(framing: &Framing) -> [u8; FRAMING_END] {
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
pub(crate) fn mac_input(copy_bytes: &[u8]) -> Vec<u8> {
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
pub(crate) fn decode(bytes: &[u8], copy: u8) -> Result<ParsedHeader> {
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
pub(crate) fn mac_of(copy: &[u8; HEADER_BYTES]) -> [u8; 32] {
    array_at(copy, MAC_AT)
}

/// Returns whether two whole copies are equal except for version and copy number.
pub(crate) fn differ_by_version(one: &[u8], other: &[u8]) -> bool {
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
            "format version {version}, this program supports {FORMAT_VERSION}"
        )));
    }
    Ok(())
}

/// Decodes a framing block accepted by [`recognize`]; the caller verifies its checksum before.
///
/// # Errors
/// `UnsupportedVersion` for another suite or unknown incompatible bit (named), `Damaged` for
/// another length or copy number.
pub(crate) fn decode_framing(block: &[u8], copy: u8) -> Result<Framing> {
    let block: &[u8; FRAMING_END] = exact_array(block, "header")?;
    let suite = u16_at(block, SUITE_AT);
    if suite != SUITE {
        return Err(Error::UnsupportedVersion(format!("cipher suite {suite}, this program supports {SUITE}")));
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
pub(crate) fn encode_passphrase_slot(slot: &PassphraseSlot, padding: &[u8; 3464]) -> [u8; 4096] {
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
pub(crate) fn decode_passphrase_slot(block: &[u8]) -> Result<PassphraseSlot> {
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

fn checksum(copy_bytes: &[u8]) -> [u8; 32] {
    let mut hash = Sha256::new();
    hash.update(&copy_bytes[..CHECKSUM_AT]);
    hash.update([0; FRAMING_END - CHECKSUM_AT]);
    hash.update(&copy_bytes[FRAMING_END..]);
    hash.finalize().into()
}

pub(crate) const SLOT_KEY_FILE: u8 = 2;
pub(crate) const SLOT_RECOVERY: u8 = 3;
pub(crate) const SLOT_AGE: u8 = 4;
/// Added to kinds 1, 2 and 3 when the volume key is wrapped to the slot's public half.
pub(crate) const REWRAPPED: u8 = 16;

/// Bytes of a slot covered by associated data: salt, parameters, lengths and commitment.
pub(crate) const CLEAR: usize = 80;
/// Length of the sealed volume key with its tag.
pub(crate) const SEALED_KEY: usize = 48;
pub(crate) const MAX_AGE_FILE: usize = DESCRIPTION_AT - AGE_AT;
/// Maximum length of a label in bytes.
pub(crate) const MAX_LABEL: usize = 255;
pub(crate) const DESCRIPTION_PLAIN: usize = BLOCK as usize - DESCRIPTION_AT - 24 - 16;
/// Offset of the description: nonce 24, sealed part, tag 16; it ends the slot.
pub(crate) const DESCRIPTION_AT: usize = 2320;

const KDF_AT: usize = 32;
const AGE_LENGTH_AT: usize = 44;
const FACTORS_AT: usize = 46;
const SLOT_COMMITMENT_AT: usize = 48;
const NONCE_AT: usize = 80;
const SEALED_AT: usize = 104;
const EPHEMERAL_AT: usize = 152;
const AGE_AT: usize = 184;

/// Slot of one of these kinds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct KeySlot {
    pub salt: [u8; 32],
    /// Argon2id parameters if a passphrase is used.
    pub kdf: Option<KdfParameters>,
    pub commitment: [u8; 32],
    pub nonce: [u8; 24],
    pub sealed: [u8; SEALED_KEY],
    /// Ephemeral public key of a re-wrapped slot, otherwise random.
    pub ephemeral: [u8; 32],
    /// Age file; empty unless the kind is age.
    pub age: Vec<u8>,
}

impl KeySlot {
    pub(crate) fn clear(&self, kind: u8) -> [u8; CLEAR] {
        let mut out = [0; CLEAR];
        put(&mut out, 0, self.salt);
        if let Some(kdf) = &self.kdf {
            put(&mut out, KDF_AT, kdf.memory_kib.to_le_bytes());
            put(&mut out, KDF_AT + 4, kdf.passes.to_le_bytes());
            put(&mut out, KDF_AT + 8, kdf.lanes.to_le_bytes());
        }
        put(&mut out, AGE_LENGTH_AT, (self.age.len() as u16).to_le_bytes()); // at most MAX_AGE_FILE
        out[FACTORS_AT] = factors(kind, self.kdf.is_some());
        put(&mut out, SLOT_COMMITMENT_AT, self.commitment);
        out
    }

    /// Encodes the slot over `random` bytes.
    ///
    /// # Panics
    /// When `self.age` is longer than [`MAX_AGE_FILE`].
    pub(crate) fn encode(&self, kind: u8, random: &[u8; BLOCK as usize]) -> [u8; BLOCK as usize] {
        let mut out = *random;
        put(&mut out, 0, self.clear(kind));
        put(&mut out, NONCE_AT, self.nonce);
        put(&mut out, SEALED_AT, self.sealed);
        put(&mut out, EPHEMERAL_AT, self.ephemeral);
        assert!(self.age.len() <= MAX_AGE_FILE, "an age file that does not fit is refused before");
        out[AGE_AT..AGE_AT + self.age.len()].copy_from_slice(&self.age);
        out
    }

    /// # Errors
    /// `Damaged` for a block of another length, another kind, and lengths or parameters that the
    /// kind does not have.
    pub(crate) fn decode(block: &[u8], kind: u8) -> Result<KeySlot> {
        let block: &[u8; BLOCK as usize] = exact_array(block, "key slot")?;
        let damaged = |flaw: &str| Error::damaged(format!("key slot of kind {kind}: {flaw}"));
        if !is_key_slot(kind) {
            return Err(damaged("unknown kind"));
        }
        check_zero(&block[FACTORS_AT + 1..SLOT_COMMITMENT_AT], "key slot")?;
        let derives = block[FACTORS_AT] & PASSPHRASE_FACTOR != 0;
        if block[FACTORS_AT] != factors(kind, derives) {
            return Err(damaged("another combination of secrets"));
        }
        let kdf = KdfParameters {
            memory_kib: u32_at(block, KDF_AT),
            passes: u32_at(block, KDF_AT + 4),
            lanes: u32_at(block, KDF_AT + 8),
        };
        if !derives && kdf != (KdfParameters { memory_kib: 0, passes: 0, lanes: 0 }) {
            return Err(damaged("parameters of a derivation that it does not have"));
        }
        let age = usize::from(u16_at(block, AGE_LENGTH_AT));
        if age > MAX_AGE_FILE || (age == 0) != (kind != SLOT_AGE) {
            return Err(damaged("length of the age file out of bounds"));
        }
        Ok(KeySlot {
            salt: array_at(block, 0),
            kdf: derives.then_some(kdf),
            commitment: array_at(block, SLOT_COMMITMENT_AT),
            nonce: array_at(block, NONCE_AT),
            sealed: array_at(block, SEALED_AT),
            ephemeral: array_at(block, EPHEMERAL_AT),
            age: block[AGE_AT..AGE_AT + age].to_vec(),
        })
    }
}

const PASSPHRASE_FACTOR: u8 = 2;

/// Returns the secrets that a slot requires: 1 a file, a code or an identity, 2 a passphrase, 3
/// both.
fn factors(kind: u8, derives: bool) -> u8 {
    match (kind & !REWRAPPED, derives) {
        (SLOT_PASSPHRASE, _) => PASSPHRASE_FACTOR,
        (SLOT_KEY_FILE, true) => 1 | PASSPHRASE_FACTOR,
        _ => 1,
    }
}

/// Returns whether slots of this kind have the layout of [`KeySlot`].
pub(crate) fn is_key_slot(kind: u8) -> bool {
    const PASSPHRASE_AGAIN: u8 = SLOT_PASSPHRASE | REWRAPPED;
    const KEY_FILE_AGAIN: u8 = SLOT_KEY_FILE | REWRAPPED;
    const RECOVERY_AGAIN: u8 = SLOT_RECOVERY | REWRAPPED;
    matches!(kind, SLOT_KEY_FILE | SLOT_RECOVERY | SLOT_AGE | PASSPHRASE_AGAIN | KEY_FILE_AGAIN | RECOVERY_AGAIN)
}

/// Method to wrap another volume key to a slot without its secret.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Rewrap {
    /// Public half of the X25519 key pair derived from the slot's key-encryption key.
    Public([u8; 32]),
    Recipient(String),
}

/// Description of a slot, readable with the volume key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Description {
    pub created: Timestamp,
    /// Label of at most [`MAX_LABEL`] bytes.
    pub label: String,
    pub rewrap: Rewrap,
}

const FORM_PUBLIC: u8 = 1;
const FORM_TEXT: u8 = 2;
const FORM_BECH32: u8 = 3;
/// Bytes before the label: time 12, form, label length, length of the recipient u16.
const DESCRIPTION_HEAD: usize = 16;
const BECH32: &[u8; 32] = b"qpzry9x8gf2tvdw0s3jn54khce6mua7l";

impl Description {
    /// # Errors
    /// `Invalid` when label or recipient do not fit.
    pub(crate) fn encode(&self) -> Result<[u8; DESCRIPTION_PLAIN]> {
        let mut out = [0; DESCRIPTION_PLAIN];
        put_time(&mut out, 0, self.created);
        let (form, length, bytes) = match &self.rewrap {
            Rewrap::Public(public) => (FORM_PUBLIC, 0, public.to_vec()),
            Rewrap::Recipient(text) => match pack(text) {
                Some((length, bytes)) => (FORM_BECH32, length, bytes),
                None => (FORM_TEXT, text.len(), text.as_bytes().to_vec()),
            },
        };
        let label = self.label.as_bytes();
        if label.len() > MAX_LABEL {
            return Err(Error::invalid(format!("the label is too long: bytes={} most={MAX_LABEL}", label.len())));
        }
        let end = DESCRIPTION_HEAD + label.len();
        let length = u16::try_from(length).unwrap_or(u16::MAX);
        let Some(place) = out.get_mut(end..end + bytes.len()) else {
            return Err(Error::invalid("the recipient is too long for a key slot"));
        };
        place.copy_from_slice(&bytes);
        out[12] = form;
        out[13] = label.len() as u8; // at most 255
        put(&mut out, 14, length.to_le_bytes());
        out[DESCRIPTION_HEAD..end].copy_from_slice(label);
        Ok(out)
    }

    /// # Errors
    /// `Damaged` for anything that [`Description::encode`] does not produce.
    pub(crate) fn decode(plain: &[u8]) -> Result<Description> {
        let plain: &[u8; DESCRIPTION_PLAIN] = exact_array(plain, "description of a key slot")?;
        let damaged = |flaw: &str| Error::damaged(format!("description of a key slot: {flaw}"));
        let created = time_at(plain, 0, "description of a key slot")?;
        let (label, rest) = plain[DESCRIPTION_HEAD..].split_at(usize::from(plain[13]));
        let label = std::str::from_utf8(label).map_err(|_| damaged("label is not UTF-8"))?.to_owned();
        let length = usize::from(u16_at(plain, 14));
        let text = |bytes: &[u8]| {
            let text = std::str::from_utf8(bytes).ok().filter(|text| !text.is_empty());
            text.map(str::to_owned).ok_or_else(|| damaged("recipient is malformed"))
        };
        let (rewrap, used) = match plain[12] {
            FORM_PUBLIC if length == 0 => (Rewrap::Public(array_at(rest, 0)), 32),
            FORM_TEXT if length <= rest.len() => (Rewrap::Recipient(text(&rest[..length])?), length),
            FORM_BECH32 => {
                let (unpacked, used) = unpack(rest, length).ok_or_else(|| damaged("recipient is malformed"))?;
                (Rewrap::Recipient(text(&unpacked)?), used)
            }
            _ => return Err(damaged("unknown form")),
        };
        check_zero(&rest[used..], "description of a key slot")?;
        let description = Description { created, label, rewrap };
        // Each value has one encoding: a text that could have been packed is refused.
        if description.encode()? != *plain {
            return Err(damaged("not in its only form"));
        }
        Ok(description)
    }
}

/// Packs a Bech32 text: the part up to its last `1` with its length before it, then 5 bits for each
/// further character, lowest first. Returns the number of those characters.
fn pack(text: &str) -> Option<(usize, Vec<u8>)> {
    let (prefix, data) = text.split_at(text.rfind('1')? + 1);
    let values: Vec<u8> =
        data.bytes().map(|byte| BECH32.iter().position(|&c| c == byte).map(|at| at as u8)).collect::<Option<_>>()?;
    let mut out = vec![u8::try_from(prefix.len()).ok()?];
    out.extend_from_slice(prefix.as_bytes());
    let start = out.len();
    out.resize(start + (values.len() * 5).div_ceil(8), 0);
    for (number, value) in values.iter().enumerate() {
        let bits = u16::from(*value) << (number * 5 % 8);
        let at = start + number * 5 / 8;
        out[at] |= bits as u8;
        if bits > 0xff {
            out[at + 1] |= (bits >> 8) as u8;
        }
    }
    Some((values.len(), out))
}

/// Unpacks a text; returns it and the number of bytes consumed.
fn unpack(packed: &[u8], count: usize) -> Option<(Vec<u8>, usize)> {
    let (&prefix, rest) = packed.split_first()?;
    let (prefix, rest) = rest.split_at_checked(usize::from(prefix))?;
    let bytes = rest.get(..(count * 5).div_ceil(8))?;
    let mut text = prefix.to_vec();
    for number in 0..count {
        let at = number * 5 / 8;
        let pair = u16::from(bytes[at]) | u16::from(*bytes.get(at + 1).unwrap_or(&0)) << 8;
        text.push(BECH32[usize::from(pair >> (number * 5 % 8) & 31)]);
    }
    Some((text, 1 + prefix.len() + bytes.len()))
}
