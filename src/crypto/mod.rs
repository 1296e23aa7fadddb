//! AEAD, key derivation, key wrapping and the types that hold secrets; knows nothing of archives.

pub mod aead;
mod engine;
pub mod kdf;
pub mod secret;
pub mod wrap;

pub use secret::{Passphrase, SecretKey};
