//! Plaintext of the sealed part of a capsule: name, size and digest of the content as one line of
//! JSON, followed by small content; and names of received files, which are made safe: a sender must
//! not choose the directory or the terminal output.
//!
//! The plaintext of the age file in a capsule is a JSON object, blanks, a line feed, and for inline
//! content the content. With the identity and `age` alone it can be read by `age -d | head -n 1`,
//! and small content by `age -d | tail -n +2`. The blanks pad the whole to a multiple of
//! [`PADDING_STEP`] bytes, so that a capsule does not reveal the length of a password in it.

use lockbox_share_protocol::capsule::MAX_CAPSULE;
use lockbox_share_protocol::token::Digest;
use serde::{Deserialize, Serialize};
use zeroize::Zeroizing;

use crate::{Error, Result};

/// The sealed part grows in steps of so many bytes.
pub(crate) const PADDING_STEP: usize = 512;
/// Room in a capsule for the header of the age file, which has a random part of up to about 300
/// bytes, its nonce and a tag.
pub(crate) const AGE_OVERHEAD: usize = 1024;
/// Content up to so many bytes goes into the capsule when name and padding leave room.
pub(crate) const MAX_INLINE: u64 = (MAX_CAPSULE - AGE_OVERHEAD) as u64;
/// Maximum length of the first line, which a reader accepts before it has parsed anything.
const MAX_LINE: usize = 7 * 1024;

/// Sealed description of the content, written by the sender.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Meta {
    /// The file's name at the sender; a receiver makes it safe first.
    pub name: String,
    /// Bytes of the content.
    pub size: u64,
    pub sha256: Digest,
    /// Content kind. Programs that do not know the word treat the content as a file.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    kind: Option<String>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ContentKind {
    #[default]
    File,
    /// A text to be read at once.
    Text,
    /// A tar of one directory.
    Directory,
}

const KINDS: [(ContentKind, &str); 2] = [(ContentKind::Text, "text"), (ContentKind::Directory, "directory")];

impl Meta {
    pub fn new(name: String, kind: ContentKind, size: u64, sha256: Digest) -> Meta {
        let word = KINDS.iter().find(|(known, _)| *known == kind).map(|(_, word)| (*word).to_owned());
        Meta { name, size, sha256, kind: word }
    }

    pub fn kind(&self) -> ContentKind {
        let word = self.kind.as_deref().unwrap_or_default();
        KINDS.iter().find(|(_, known)| *known == word).map(|(kind, _)| *kind).unwrap_or_default()
    }

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

    /// Parses the plaintext of a sealed part; total. Returns the inline content, too.
    pub(crate) fn decode(plain: &[u8]) -> Result<(Meta, &[u8])> {
        let end = plain.iter().take(MAX_LINE).position(|&byte| byte == b'\n');
        let end = end.ok_or_else(|| Error::Damaged("its description is too long".into()))?;
        let meta = serde_json::from_slice(&plain[..end])
            .map_err(|_| Error::Damaged("its description is malformed; it may be from a newer version".into()))?;
        Ok((meta, &plain[end + 1..]))
    }
}

/// Maximum length of a name in bytes; Linux allows 255, and the temporary file's name needs some.
pub const MAX_NAME: usize = 200;
const UNNAMED: &str = "received";

/// One path component without control characters, separators, text direction marks, leading dots
/// and dashes, and trailing dots and blanks; at most [`MAX_NAME`] bytes, with its ending kept.
/// Total.
pub fn safe_name(name: &str) -> String {
    let last = name.rsplit(['/', '\\']).find(|part| !part.trim_matches(['.', ' ']).is_empty()).unwrap_or_default();
    let shown: String = last.chars().map(|c| if is_harmful(c) { '_' } else { c }).collect();
    let trimmed = shown.trim_end_matches(['.', ' ']).trim_start();
    // A hidden file could be the settings of a program, and a dash is an option of the next one.
    let visible = match trimmed.chars().next() {
        None => UNNAMED.to_owned(),
        Some('.' | '-' | '~') => format!("_{}", &trimmed[1..]),
        Some(_) => trimmed.to_owned(),
    };
    shortened(&visible)
}

fn is_harmful(c: char) -> bool {
    c.is_control()
        // Marks that turn the direction of text, and invisible letters: "fdp.exe" could be shown as
        // "exe.pdf".
        || matches!(c, '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{206f}' | '\u{feff}' | '\u{61c}' | '\u{fffd}')
        || matches!(c, ':' | '*' | '?' | '"' | '<' | '>' | '|')
}

fn shortened(name: &str) -> String {
    if name.len() <= MAX_NAME {
        return name.to_owned();
    }
    let ending = match name.rfind('.') {
        Some(dot) if name.len() - dot <= 16 => &name[dot..],
        _ => "",
    };
    let mut end = MAX_NAME - ending.len();
    while !name.is_char_boundary(end) {
        end -= 1;
    }
    format!("{}{ending}", name[..end].trim_end_matches(['.', ' ']))
}

/// `report (2).pdf` for `report.pdf`: how a second file of the same name is called.
pub(crate) fn numbered_name(name: &str, number: u32) -> String {
    match name.rfind('.') {
        Some(dot) if dot > 0 => format!("{} ({number}){}", &name[..dot], &name[dot..]),
        _ => format!("{name} ({number})"),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

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

    #[test]
    fn names_lose_what_could_harm() {
        for (name, expected) in [
            ("report.pdf", "report.pdf"),
            ("Bericht über Öl.pdf", "Bericht über Öl.pdf"),
            ("../../etc/passwd", "passwd"),
            ("/etc/", "etc"),
            ("C:\\autoexec.bat", "autoexec.bat"),
            ("..", "received"),
            ("", "received"),
            ("/", "received"),
            (" . ", "received"),
            (".bashrc", "_bashrc"),
            ("-rf", "_rf"),
            ("~", "_"),
            ("a\nb\u{1b}[31m\0", "a_b_[31m_"),
            ("invoice\u{202e}fdp.exe", "invoice_fdp.exe"),
            ("photo. ", "photo"),
        ] {
            assert_eq!(safe_name(name), expected, "{name:?}");
        }
    }

    #[test]
    fn long_names_keep_their_ending() {
        let safe = safe_name(&format!("{}.tar.gz", "ä".repeat(200)));
        assert!(safe.len() <= MAX_NAME && safe.ends_with("ä.gz"), "{safe}");
    }

    #[test]
    fn a_second_file_has_a_number() {
        assert_eq!(numbered_name("report.pdf", 2), "report (2).pdf");
        assert_eq!(numbered_name("Makefile", 3), "Makefile (3)");
    }

    proptest! {
        #[test]
        fn every_name_becomes_one_visible_component(name in any::<String>()) {
            let safe = safe_name(&name);
            prop_assert!(!safe.is_empty() && safe.len() <= MAX_NAME);
            prop_assert!(!safe.starts_with(['.', '-']) && !safe.contains(['/', '\0']) && !safe.chars().any(char::is_control));
            prop_assert_eq!(super::safe_name(&safe), safe);
        }
    }
}
