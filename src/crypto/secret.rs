//! Types for secrets: zeroized on drop, without Debug and Clone.

use zeroize::{Zeroize, ZeroizeOnDrop, Zeroizing};

/// 256-bit key.
#[derive(Zeroize, ZeroizeOnDrop)]
pub struct SecretKey([u8; 32]);

impl SecretKey {
    pub fn new(bytes: [u8; 32]) -> SecretKey {
        SecretKey(bytes)
    }

    pub fn bytes(&self) -> &[u8; 32] {
        &self.0
    }
}

/// Passphrase as typed, without the line end.
pub struct Passphrase(Zeroizing<Vec<u8>>);

impl Passphrase {
    pub fn new(bytes: Vec<u8>) -> Passphrase {
        Passphrase(Zeroizing::new(bytes))
    }

    pub fn bytes(&self) -> &[u8] {
        &self.0
    }
}

impl From<Zeroizing<Vec<u8>>> for Passphrase {
    fn from(bytes: Zeroizing<Vec<u8>>) -> Passphrase {
        Passphrase(bytes)
    }
}
