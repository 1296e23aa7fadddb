//! Hexadecimal encoding of bytes in names and signatures.

/// Encodes bytes as lower-case digits.
pub(crate) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}
