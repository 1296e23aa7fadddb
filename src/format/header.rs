//! Specification section 3: the framing block and the key slots, before anything is unlocked.

use super::ids::ArchiveId;
use crate::error::Result;

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
    let _ = (framing, slots);
    todo!()
}

/// The bytes that the header MAC covers: the copy with MAC and checksum zeroed.
pub fn mac_input(copy_bytes: &[u8]) -> Vec<u8> {
    let _ = copy_bytes;
    todo!()
}

/// Decodes one copy and verifies its checksum.
///
/// # Errors
/// `NotArchive` without the magic, `UnsupportedVersion` for another version, suite or unknown incompatible bit (named),
/// `Damaged` for a wrong checksum or copy number.
pub fn decode(bytes: &[u8], copy: u8) -> Result<ParsedHeader> {
    let _ = (bytes, copy);
    todo!()
}

/// Encodes a passphrase slot block; `padding` fills what is random.
pub fn encode_passphrase_slot(slot: &PassphraseSlot, padding: &[u8; 3464]) -> [u8; 4096] {
    let _ = (slot, padding);
    todo!()
}

pub fn decode_passphrase_slot(block: &[u8]) -> Result<PassphraseSlot> {
    let _ = block;
    todo!()
}
