//! Plaintext of the sealed part of a capsule: name, size and digest of the content as one line of
//! JSON, followed by small content.
//!
//! The plaintext of the age file in a capsule is a JSON object, blanks, a line feed, and for inline
//! content the content. With the identity and `age` alone it can be read by `age -d | head -n 1`,
//! and small content by `age -d | tail -n +2`. The blanks pad the whole to a multiple of
//! [`PADDING_STEP`] bytes, so that a capsule does not reveal the length of a password in it.

use lockbox_share_protocol::capsule::MAX_CAPSULE;
use lockbox_share_protocol::token::Digest;
use serde::{Deserialize, Serialize};
use zeroize::Zeroizing;

use crate::error::{Error, Result};

/// The sealed part grows in steps of so many bytes.
pub const PADDING_STEP: usize = 512;
/// Room in a capsule for the header of the age file, which has a random part of up to about 300
/// bytes, its nonce and a tag.
pub(crate) const AGE_OVERHEAD: usize = 1024;
/// Content up to so many bytes goes into the capsule when name and padding leave room.
pub const MAX_INLINE: u64 = (MAX_CAPSULE - AGE_OVERHEAD) as u64;
/// Maximum length of the first line; bounds the bytes that a reader accepts before it has parsed
/// anything.
const MAX_LINE: usize = 7 * 1024;

/// Sealed description of the content, written by the sender.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Meta {
    /// The file's name at the sender; a receiver makes it safe first.
    pub name: String,
    /// Bytes of the content.
    pub size: u64,
    /// SHA-256 of the content.
    pub sha256: Digest,
    /// Content kind. Programs that do not know the word treat the content as a file.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    kind: Option<String>,
}

/// Content kind shown to the receiver.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ContentKind {
    /// A file.
    #[default]
    File,
    /// A text to be read at once.
    Text,
    /// A tar of one directory.
    Directory,
}

const KINDS: [(ContentKind, &str); 2] = [(ContentKind::Text, "text"), (ContentKind::Directory, "directory")];

impl Meta {
    /// Describes content.
    pub fn new(name: String, kind: ContentKind, size: u64, sha256: Digest) -> Meta {
        let word = KINDS.iter().find(|(known, _)| *known == kind).map(|(_, word)| (*word).to_owned());
        Meta { name, size, sha256, kind: word }
    }

    /// Returns the content kind.
    pub fn kind(&self) -> ContentKind {
        let word = self.kind.as_deref().unwrap_or_default();
        KINDS.iter().find(|(_, known)| *known == word).map(|(kind, _)| *kind).unwrap_or_default()
    }

    /// The plaintext of a capsule's sealed part.
    pub(crate) fn encode(&self, content: &[u8]) -> Zeroizing<Vec<u8>> {
        let line = self.line();
        let used = line.len() + 1 + content.len();
        let whole = used.next_multiple_of(PADDING_STEP);
        let mut plain = Zeroizing::new(Vec::with_capacity(whole));
        plain.extend_from_slice(&line);
        plain.resize(line.len() + whole - used, b' ');
        plain.push(b'\n');
        plain.extend_from_slice(content);
        plain
    }

    /// Bytes of the plaintext with a content of `size` bytes behind it.
    pub(crate) fn encoded_length(&self) -> usize {
        let size = usize::try_from(self.size).unwrap_or(usize::MAX / 2);
        (self.line().len() + 1 + size).next_multiple_of(PADDING_STEP)
    }

    fn line(&self) -> Zeroizing<Vec<u8>> {
        Zeroizing::new(serde_json::to_vec(self).expect("a text, a number and a digest are always JSON"))
    }

    /// Parses the plaintext of a sealed part; total. The bytes after the line are the inline
    /// content.
    pub(crate) fn decode(plain: &[u8]) -> Result<(Meta, &[u8])> {
        let end = plain.iter().take(MAX_LINE).position(|&byte| byte == b'\n');
        let end = end.ok_or_else(|| Error::Damaged("its description is too long".into()))?;
        let meta = serde_json::from_slice(&plain[..end])
            .map_err(|_| Error::Damaged("its description is malformed; it may be from a newer version".into()))?;
        Ok((meta, &plain[end + 1..]))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn meta(name: &str, size: u64) -> Meta {
        Meta::new(name.to_owned(), ContentKind::File, size, Digest::new([7; 32]))
    }

    /// Reads descriptions of earlier and later versions.
    #[test]
    fn kinds_are_words_that_older_and_newer_programs_pass_over() {
        let line = |kind| String::from_utf8(Meta { kind, ..meta("a", 1) }.line().to_vec()).unwrap();
        assert!(!line(None).contains("kind"));
        for (kind, word) in KINDS {
            let described = Meta::new("a".into(), kind, 1, Digest::new([7; 32]));
            assert!(line(described.kind.clone()).contains(&format!("\"kind\":\"{word}\"")));
            assert_eq!(described.kind(), kind);
        }
        let newer = line(Some("hologram".into()));
        assert_eq!(Meta::decode(format!("{newer}\n").as_bytes()).unwrap().0.kind(), ContentKind::File);
        let older = line(None);
        assert_eq!(Meta::decode(format!("{older}\n").as_bytes()).unwrap().0, meta("a", 1));
    }

    #[test]
    fn lengths_of_small_content_are_hidden() {
        let lengths = [0, 8, 12, 40].map(|length| meta("password", length as u64).encode(&vec![b'x'; length]).len());
        assert_eq!(lengths, [PADDING_STEP; 4]);
    }

    proptest! {
        #[test]
        fn what_is_written_is_read(name in "\\PC{0,300}", content in proptest::collection::vec(any::<u8>(), 0..2000)) {
            let meta = meta(&name, content.len() as u64);
            let plain = meta.encode(&content);
            prop_assert_eq!(plain.len() % PADDING_STEP, 0);
            prop_assert_eq!(Meta::decode(&plain).unwrap(), (meta, &content[..]));
        }

        #[test]
        fn no_input_makes_it_fall(plain in proptest::collection::vec(any::<u8>(), 0..600)) {
            let _ = Meta::decode(&plain);
        }
    }
}
