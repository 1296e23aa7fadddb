//! Capsule: a small typed message with the sealed part of a share; the daemon accepts no other
//! format.
//!
//! ```text
//! offset  bytes
//!      0      4  "lbxs"
//!      4      1  version, 1
//!      5      1  type: 1 the content is inside, 2 the content is in the spool
//!      6      2  S, length of the sealed part, little-endian
//!      8      8  type 2 only: bytes of the ciphertext in the spool, little-endian, at least 1
//!     16     32  type 2 only: SHA-256 of that ciphertext
//!      .      S  the sealed part: an age v1 file
//! ```
//!
//! Nothing follows. The total is at most 8 KiB. The plaintext of the sealed part (name, size, small
//! content) is defined by the clients. The header tells an age v1 file from others, without a key.

use std::str::FromStr;

use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::token::{self, Digest};

/// Maximum capsule size in bytes: a store keeps it in the record, without a file of its own.
pub const MAX_CAPSULE: usize = 8 * 1024;

const MAGIC: &[u8; 4] = b"lbxs";
const VERSION: u8 = 1;
const INLINE: u8 = 1;
const SPOOLED: u8 = 2;
const SHORT_HEAD: usize = 8;
const LONG_HEAD: usize = 48;

/// Content location: inline or uploaded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ContentLocation {
    /// Content in the sealed part of the capsule.
    Inline,
    /// Content in the spool, as one age v1 file.
    Spooled {
        /// Bytes of that file.
        size: u64,
        /// SHA-256 of that file.
        digest: Digest,
    },
}

/// Bytes that are well formed as a capsule of a known type and version.
#[derive(Clone, PartialEq, Eq)]
pub struct Capsule {
    bytes: Vec<u8>,
    content: ContentLocation,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CapsuleError {
    #[error("the capsule has more than {MAX_CAPSULE} bytes")]
    TooLong,
    #[error("the bytes are not a capsule")]
    Foreign,
    #[error("version {0} of the capsule is not known")]
    Version(u8),
    #[error("type {0} of the capsule is not known")]
    Type(u8),
    /// Lengths do not add up, or an empty file is announced.
    #[error("the lengths in the capsule are wrong")]
    Lengths,
    #[error("the sealed part of the capsule is not an age v1 file")]
    NotSealed,
}

impl Capsule {
    /// Encodes a capsule. `sealed` is an age v1 file.
    ///
    /// # Errors
    /// When the result would not be a capsule: too long, not sealed, or an empty file in the spool.
    pub fn new(content: ContentLocation, sealed: &[u8]) -> Result<Capsule, CapsuleError> {
        let length = u16::try_from(sealed.len()).map_err(|_| CapsuleError::TooLong)?;
        let kind = if content == ContentLocation::Inline { INLINE } else { SPOOLED };
        let mut bytes = Vec::with_capacity(LONG_HEAD + sealed.len());
        bytes.extend_from_slice(MAGIC);
        bytes.extend_from_slice(&[VERSION, kind]);
        bytes.extend_from_slice(&length.to_le_bytes());
        if let ContentLocation::Spooled { size, digest } = content {
            bytes.extend_from_slice(&size.to_le_bytes());
            bytes.extend_from_slice(digest.as_bytes());
        }
        bytes.extend_from_slice(sealed);
        Capsule::decode(bytes)
    }

    /// Accepts bytes that are well formed; total.
    ///
    /// # Errors
    /// Everything else.
    pub fn decode(bytes: Vec<u8>) -> Result<Capsule, CapsuleError> {
        if bytes.len() > MAX_CAPSULE {
            return Err(CapsuleError::TooLong);
        }
        let (head, rest) = bytes.split_first_chunk::<SHORT_HEAD>().ok_or(CapsuleError::Foreign)?;
        if !head.starts_with(MAGIC) {
            return Err(CapsuleError::Foreign);
        }
        if head[4] != VERSION {
            return Err(CapsuleError::Version(head[4]));
        }
        let (content, sealed) = match head[5] {
            INLINE => (ContentLocation::Inline, rest),
            SPOOLED => {
                let (size, rest) = rest.split_first_chunk::<8>().ok_or(CapsuleError::Lengths)?;
                let (digest, rest) = rest.split_first_chunk::<32>().ok_or(CapsuleError::Lengths)?;
                let size = u64::from_le_bytes(*size);
                if size == 0 {
                    return Err(CapsuleError::Lengths);
                }
                (ContentLocation::Spooled { size, digest: Digest::new(*digest) }, rest)
            }
            other => return Err(CapsuleError::Type(other)),
        };
        if sealed.len() != usize::from(u16::from_le_bytes([head[6], head[7]])) {
            return Err(CapsuleError::Lengths);
        }
        if !is_age_file(sealed) {
            return Err(CapsuleError::NotSealed);
        }
        Ok(Capsule { bytes, content })
    }

    pub fn content(&self) -> ContentLocation {
        self.content
    }

    /// The age v1 file inside.
    pub fn sealed(&self) -> &[u8] {
        let head = if self.content == ContentLocation::Inline { SHORT_HEAD } else { LONG_HEAD };
        &self.bytes[head..]
    }

    pub fn as_bytes(&self) -> &[u8] {
        &self.bytes
    }

    pub fn into_bytes(self) -> Vec<u8> {
        self.bytes
    }
}

impl std::fmt::Debug for Capsule {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Capsule({:?}, {} bytes)", self.content, self.bytes.len())
    }
}

impl Serialize for Capsule {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&URL_SAFE_NO_PAD.encode(&self.bytes))
    }
}

impl FromStr for Capsule {
    type Err = CapsuleError;

    fn from_str(text: &str) -> Result<Capsule, CapsuleError> {
        if text.len() > MAX_CAPSULE.div_ceil(3) * 4 {
            return Err(CapsuleError::TooLong);
        }
        Capsule::decode(URL_SAFE_NO_PAD.decode(text).map_err(|_| CapsuleError::Foreign)?)
    }
}

impl<'de> Deserialize<'de> for Capsule {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Capsule, D::Error> {
        token::deserialize_text(deserializer, "a capsule in base64url")
    }
}

/// First line of every age v1 file.
const INTRODUCTION: &[u8] = b"age-encryption.org/v1\n";
/// Maximum header in bytes: an X25519 stanza and a random one that may be added take about 300.
pub const MAX_AGE_HEADER: usize = 4096;
/// base64 of the 32-byte MAC, without padding.
const MAC: usize = 43;
/// The nonce of the payload and the tag of its last part.
const LEAST_PAYLOAD: usize = 16 + 16;

/// Header of a file that `age -r` wrote; measurements and tests make sealed files of it.
pub const SAMPLE_AGE_HEADER: &str = "age-encryption.org/v1\n\
    -> X25519 SVrzdFfkPxf0LPHOUGB1gNb9E5Vr8EUDa9kxk04iQ0o\n\
    0OrTkKHpE7klNLd0k+9Uam5hkQkzMxaqKcIPRIO1sNE\n\
    --- gxhoSa5BciRDt8lOpYNcx4EYtKpS0CJ06F3ZwN82VaM\n";

/// Result of parsing the first bytes of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AgePrefix {
    /// A whole header of so many bytes.
    Header(usize),
    /// Begins as a header does and goes on behind the prefix.
    Unfinished,
    /// No age v1 file begins so.
    Foreign,
}

/// Returns whether `bytes` have the structure of a complete age v1 file; checked without a key.
pub(crate) fn is_age_file(bytes: &[u8]) -> bool {
    matches!(age_prefix(bytes), AgePrefix::Header(length) if bytes.len() - length >= LEAST_PAYLOAD)
}

/// Looks at the beginning of a file; total.
pub fn age_prefix(bytes: &[u8]) -> AgePrefix {
    let known = bytes.len().min(INTRODUCTION.len());
    if bytes[..known] != INTRODUCTION[..known] {
        return AgePrefix::Foreign;
    }
    let mut at = INTRODUCTION.len();
    let mut stanzas = 0;
    while at < MAX_AGE_HEADER {
        let rest = &bytes[at.min(bytes.len())..];
        let Some(end) = rest.iter().take(MAX_AGE_HEADER - at).position(|&byte| byte == b'\n') else {
            let open = rest.len() < MAX_AGE_HEADER - at && rest.iter().all(|&byte| is_text(byte));
            return if open { AgePrefix::Unfinished } else { AgePrefix::Foreign };
        };
        let line = &rest[..end];
        at += end + 1;
        if let Some(mac) = line.strip_prefix(b"--- ") {
            let whole = stanzas > 0 && mac.len() == MAC && mac.iter().all(|&byte| is_base64(byte));
            return if whole { AgePrefix::Header(at) } else { AgePrefix::Foreign };
        }
        if let Some(arguments) = line.strip_prefix(b"-> ") {
            stanzas += 1;
            if arguments.is_empty() || !arguments.iter().all(|&byte| is_text(byte)) {
                return AgePrefix::Foreign;
            }
        } else if stanzas == 0 || line.len() > 64 || !line.iter().all(|&byte| is_base64(byte)) {
            return AgePrefix::Foreign;
        }
    }
    AgePrefix::Foreign
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
    use proptest::prelude::*;

    fn sealed(payload: usize) -> Vec<u8> {
        let mut file = SAMPLE_AGE_HEADER.as_bytes().to_vec();
        file.resize(file.len() + payload, 0x5a);
        file
    }

    fn spooled() -> ContentLocation {
        ContentLocation::Spooled { size: 1 << 40, digest: Digest::new([9; 32]) }
    }

    #[test]
    fn capsules_are_read_as_they_are_written() {
        for content in [ContentLocation::Inline, spooled()] {
            let capsule = Capsule::new(content, &sealed(100)).unwrap();
            assert_eq!(capsule.content(), content);
            assert_eq!(capsule.sealed(), sealed(100));
            let json = serde_json::to_string(&capsule).unwrap();
            assert_eq!(serde_json::from_str::<Capsule>(&json).unwrap(), capsule);
        }
    }

    #[test]
    fn the_layout_is_the_documented_one() {
        let bytes = Capsule::new(spooled(), &sealed(32)).unwrap().into_bytes();
        let length = u16::try_from(sealed(32).len()).unwrap().to_le_bytes();
        assert_eq!(bytes[..8], [b'l', b'b', b'x', b's', 1, 2, length[0], length[1]]);
        assert_eq!(bytes[8..16], (1u64 << 40).to_le_bytes());
        assert_eq!(bytes[16..48], [9; 32]);
        assert_eq!(bytes[48..], sealed(32));
    }

    #[test]
    fn each_fault_is_told_apart() {
        let good = Capsule::new(spooled(), &sealed(32)).unwrap().into_bytes();
        let with = |at: usize, value: u8| {
            let mut bytes = good.clone();
            bytes[at] = value;
            Capsule::decode(bytes).unwrap_err()
        };
        assert_eq!(with(0, b'L'), CapsuleError::Foreign);
        assert_eq!(with(4, 2), CapsuleError::Version(2));
        assert_eq!(with(5, 3), CapsuleError::Type(3));
        assert_eq!(with(5, 1), CapsuleError::Lengths);
        assert_eq!(with(6, good[6] ^ 1), CapsuleError::Lengths);
        assert_eq!(with(48, b'A'), CapsuleError::NotSealed);
        assert_eq!(Capsule::decode(good[..good.len() - 1].to_vec()), Err(CapsuleError::Lengths));
        assert_eq!(Capsule::decode(vec![0; MAX_CAPSULE + 1]), Err(CapsuleError::TooLong));
        assert_eq!(Capsule::new(ContentLocation::Inline, &sealed(MAX_CAPSULE)), Err(CapsuleError::TooLong));
        assert_eq!(Capsule::new(ContentLocation::Inline, b"attack at dawn"), Err(CapsuleError::NotSealed));
        let empty = ContentLocation::Spooled { size: 0, digest: Digest::new([0; 32]) };
        assert_eq!(Capsule::new(empty, &sealed(32)), Err(CapsuleError::Lengths));
    }

    #[test]
    fn the_longest_capsule_has_eight_kibibytes() {
        let room = MAX_CAPSULE - SHORT_HEAD - SAMPLE_AGE_HEADER.len();
        assert_eq!(Capsule::new(ContentLocation::Inline, &sealed(room)).unwrap().as_bytes().len(), MAX_CAPSULE);
        assert_eq!(Capsule::new(ContentLocation::Inline, &sealed(room + 1)), Err(CapsuleError::TooLong));
    }

    proptest! {
        #[test]
        fn every_input_is_refused_or_means_itself(
            start in any::<bool>(), bytes in proptest::collection::vec(any::<u8>(), 0..400), cut in 0usize..400, flip in 0usize..400,
        ) {
            let mut input = if start { Capsule::new(spooled(), &sealed(64)).unwrap().into_bytes() } else { bytes };
            input.truncate(cut);
            if let Some(byte) = input.get_mut(flip) {
                *byte ^= 0x41;
            }
            if let Ok(capsule) = Capsule::decode(input.clone()) {
                let again = Capsule::new(capsule.content(), capsule.sealed()).unwrap();
                prop_assert_eq!(again.as_bytes(), &input[..]);
            }
        }
    }

    #[test]
    fn a_file_needs_header_nonce_and_tag() {
        for payload in 0..40 {
            let mut file = SAMPLE_AGE_HEADER.as_bytes().to_vec();
            file.resize(file.len() + payload, 0);
            assert_eq!(is_age_file(&file), payload >= 32, "{payload}");
        }
    }

    #[test]
    fn every_beginning_of_a_header_may_become_one() {
        for length in 0..SAMPLE_AGE_HEADER.len() {
            assert_eq!(age_prefix(&SAMPLE_AGE_HEADER.as_bytes()[..length]), AgePrefix::Unfinished, "{length}");
        }
        assert_eq!(age_prefix(SAMPLE_AGE_HEADER.as_bytes()), AgePrefix::Header(SAMPLE_AGE_HEADER.len()));
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
            assert_eq!(age_prefix(text.as_bytes()), AgePrefix::Foreign, "{text}");
        }
        let endless = format!("age-encryption.org/v1\n-> X25519 a\n{}", "AAAA\n".repeat(1000));
        assert_eq!(age_prefix(endless.as_bytes()), AgePrefix::Foreign);
        let one_line = format!("age-encryption.org/v1\n-> {}", "a".repeat(MAX_AGE_HEADER));
        assert_eq!(age_prefix(one_line.as_bytes()), AgePrefix::Foreign);
    }
}
