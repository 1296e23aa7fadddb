//! AEAD, key derivation, key wrapping and types for secrets; independent of archives.

pub mod aead;
pub mod identity;
pub mod kdf;
mod recovery;
pub mod secret;
pub mod wrap;

pub use identity::{Identities, NoPrompts, Prompts};
pub use recovery::RecoveryCode;
pub use secret::{KeyFile, Passphrase, SecretKey};
