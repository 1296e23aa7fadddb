//! Bytes as names of files and objects, and signatures, have them.

/// Two digits each, in small letters.
pub(crate) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}
