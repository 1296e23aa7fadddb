//! HKDF-SHA-256 with labels, HMAC and SHA-256 over headers, and Argon2id with clamped parameters.

use super::secret::{Passphrase, SecretKey};
use crate::error::Result;

/// Cost of one Argon2id derivation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KdfCost {
    pub memory_kib: u32,
    pub passes: u32,
    pub lanes: u32,
}

impl KdfCost {
    /// The least that `create` writes: RFC 9106's second choice.
    pub const FLOOR: KdfCost = KdfCost { memory_kib: 64 * 1024, passes: 3, lanes: 1 };
    /// For tests only: as cheap as the reader's bound allows.
    pub const TEST: KdfCost = KdfCost { memory_kib: 8, passes: 1, lanes: 1 };
}

/// HKDF-SHA-256 with `salt`, info `label`, 32 bytes.
pub fn hkdf(key: &SecretKey, salt: &[u8], label: &str) -> SecretKey {
    let _ = (key, salt, label);
    todo!()
}

/// Argon2id v1.3, 32 bytes. Bounds are checked before anything is allocated: memory 8 KiB x lanes..=4 GiB, passes 1..=64, lanes 1..=16.
///
/// # Errors
/// `Damaged` naming the bound for parameters out of bounds.
pub fn argon2id(passphrase: &Passphrase, salt: &[u8; 32], cost: KdfCost) -> Result<SecretKey> {
    let _ = (passphrase, salt, cost);
    todo!()
}

/// A cost that takes about `millis` on this machine, never under [`KdfCost::FLOOR`], never above 1 GiB or half of the memory.
/// `elapsed` measures one derivation (the caller has the clock).
pub fn calibrate(millis: u64, memory_limit_kib: u32, measure: impl FnMut(KdfCost) -> u64) -> KdfCost {
    let _ = (millis, memory_limit_kib, measure);
    todo!()
}

pub fn hmac_sha256(key: &SecretKey, data: &[u8]) -> [u8; 32] {
    let _ = (key, data);
    todo!()
}

pub fn sha256(data: &[u8]) -> [u8; 32] {
    let _ = data;
    todo!()
}

/// Constant-time comparison.
pub fn equal(a: &[u8], b: &[u8]) -> bool {
    let _ = (a, b);
    todo!()
}

/// Public half of the re-wrap key pair whose secret is `secret` (X25519, clamped).
pub fn rewrap_public(secret: &SecretKey) -> [u8; 32] {
    let _ = secret;
    todo!()
}
