//! Wrapping a volume key under a key-encryption key, with a commitment (specification 3.2, sealed part; 4.2, rows "slot").

use super::secret::SecretKey;
use crate::error::Result;

/// Length of the sealed part with its tag.
pub const WRAPPED: usize = 528;

/// What the sealed part of a slot holds.
pub struct SlotSecret {
    pub volume_key: SecretKey,
    pub rewrap_public: [u8; 32],
    pub created_seconds: i64,
    pub created_nanos: u32,
    pub label: String,
}

/// Commitment of a KEK: HKDF(KEK, `lockbox/v1/slot/commit`).
pub fn commitment(kek: &SecretKey, archive: &[u8; 16]) -> [u8; 32] {
    let _ = (kek, archive);
    todo!()
}

/// Seals the slot secret; `aad` is built by the caller from the clear part of the slot.
pub fn wrap(kek: &SecretKey, archive: &[u8; 16], nonce: &[u8; 24], aad: &[u8], secret: &SlotSecret) -> Vec<u8> {
    let _ = (kek, archive, nonce, aad, secret);
    todo!()
}

/// # Errors
/// `Damaged` when the seal does not open although the commitment did match.
pub fn unwrap(kek: &SecretKey, archive: &[u8; 16], nonce: &[u8; 24], aad: &[u8], sealed: &[u8]) -> Result<SlotSecret> {
    let _ = (kek, archive, nonce, aad, sealed);
    todo!()
}
