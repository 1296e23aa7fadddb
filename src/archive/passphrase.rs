//! Changes the passphrase.
