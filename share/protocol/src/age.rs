//! Tells an age v1 file by its header, without any key.

/// First line of every age v1 file.
const INTRODUCTION: &[u8] = b"age-encryption.org/v1\n";
/// A header is at most so long: one X25519 stanza and a random one that may be added take about 300
/// bytes.
pub const MAX_HEADER: usize = 4096;
/// base64 of the 32-byte MAC, without padding.
const MAC: usize = 43;
/// The nonce of the payload and the tag of its last part.
const LEAST_PAYLOAD: usize = 16 + 16;

/// Header of a file that `age -r` wrote: for measurements and tests, which need something that
/// passes for a sealed file.
pub const SAMPLE_HEADER: &str = "age-encryption.org/v1\n\
    -> X25519 SVrzdFfkPxf0LPHOUGB1gNb9E5Vr8EUDa9kxk04iQ0o\n\
    0OrTkKHpE7klNLd0k+9Uam5hkQkzMxaqKcIPRIO1sNE\n\
    --- gxhoSa5BciRDt8lOpYNcx4EYtKpS0CJ06F3ZwN82VaM\n";

/// Result of parsing a prefix of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Prefix {
    /// A whole header of so many bytes.
    Header(usize),
    /// Begins as a header does and goes on behind the prefix.
    Unfinished,
    /// No age v1 file begins so.
    Foreign,
}

/// Returns whether `bytes` have the structure of a complete age v1 file; checked without a key.
pub fn is_file(bytes: &[u8]) -> bool {
    matches!(prefix(bytes), Prefix::Header(length) if bytes.len() - length >= LEAST_PAYLOAD)
}

/// Looks at the beginning of a file; total.
pub fn prefix(bytes: &[u8]) -> Prefix {
    let known = bytes.len().min(INTRODUCTION.len());
    if bytes[..known] != INTRODUCTION[..known] {
        return Prefix::Foreign;
    }
    let mut at = INTRODUCTION.len();
    let mut stanzas = 0;
    while at < MAX_HEADER {
        let rest = &bytes[at.min(bytes.len())..];
        let Some(end) = rest.iter().take(MAX_HEADER - at).position(|&byte| byte == b'\n') else {
            let open = rest.len() < MAX_HEADER - at && rest.iter().all(|&byte| is_text(byte));
            return if open { Prefix::Unfinished } else { Prefix::Foreign };
        };
        let line = &rest[..end];
        at += end + 1;
        if let Some(mac) = line.strip_prefix(b"--- ") {
            let whole = stanzas > 0 && mac.len() == MAC && mac.iter().all(|&byte| is_base64(byte));
            return if whole { Prefix::Header(at) } else { Prefix::Foreign };
        }
        if let Some(arguments) = line.strip_prefix(b"-> ") {
            stanzas += 1;
            if arguments.is_empty() || !arguments.iter().all(|&byte| is_text(byte)) {
                return Prefix::Foreign;
            }
        } else if stanzas == 0 || line.len() > 64 || !line.iter().all(|&byte| is_base64(byte)) {
            return Prefix::Foreign;
        }
    }
    Prefix::Foreign
}

fn is_text(byte: u8) -> bool {
    (0x20..0x7f).contains(&byte)
}

fn is_base64(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || byte == b'+' || byte == b'/'
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_needs_header_nonce_and_tag() {
        for payload in 0..40 {
            let mut file = SAMPLE_HEADER.as_bytes().to_vec();
            file.resize(file.len() + payload, 0);
            assert_eq!(is_file(&file), payload >= 32, "{payload}");
        }
    }

    #[test]
    fn every_beginning_of_a_header_may_become_one() {
        for length in 0..SAMPLE_HEADER.len() {
            assert_eq!(prefix(&SAMPLE_HEADER.as_bytes()[..length]), Prefix::Unfinished, "{length}");
        }
        assert_eq!(prefix(SAMPLE_HEADER.as_bytes()), Prefix::Header(SAMPLE_HEADER.len()));
    }

    #[test]
    fn other_bytes_are_no_header() {
        for text in [
            "hello, world",
            "age-encryption.org/v2\n",
            "age-encryption.org/v1\n--- gxhoSa5BciRDt8lOpYNcx4EYtKpS0CJ06F3ZwN82VaM\n",
            "age-encryption.org/v1\n-> \n",
            "age-encryption.org/v1\nAAAA\n",
            "age-encryption.org/v1\n-> X25519 a\n--- short\n",
            "age-encryption.org/v1\n-> X25519 a\nnot base64!\n",
            "age-encryption.org/v1\n-> X25519 \u{e9}\n",
        ] {
            assert_eq!(prefix(text.as_bytes()), Prefix::Foreign, "{text}");
        }
        let endless = format!("age-encryption.org/v1\n-> X25519 a\n{}", "AAAA\n".repeat(1000));
        assert_eq!(prefix(endless.as_bytes()), Prefix::Foreign);
        let one_line = format!("age-encryption.org/v1\n-> {}", "a".repeat(MAX_HEADER));
        assert_eq!(prefix(one_line.as_bytes()), Prefix::Foreign);
    }
}
