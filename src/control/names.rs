//! Names and paths in messages: bytes, encoded as hexadecimal digits. The encoding is lossless and
//! at most twice as long.

use serde::{Deserialize, Serialize};

use super::MAX_TEXT;

/// Longest name of a snapshot, in bytes.
pub(super) const MAX_NAME: usize = 255;
/// Longest path, in bytes: two of them and the rest of a message fit into a line. The kernel's
/// limit is 4096.
const MAX_PATH: usize = 12 << 10;

/// Name of a snapshot.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct SnapshotName(pub Vec<u8>);

/// Path relative to the root of the mount, without a leading slash.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct TreePath(pub Vec<u8>);

/// Path of the host that is not UTF-8.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct PathBytes(pub Vec<u8>);

impl TreePath {
    /// Returns whether the path is short enough to be sent.
    pub fn fits(&self) -> bool {
        self.0.len() <= MAX_PATH
    }
}

/// Implements the hexadecimal conversions of a type, with its maximum length in bytes.
macro_rules! as_digits {
    ($($type:ident: $most:expr),+) => { $(
        impl From<$type> for String {
            fn from(sent: $type) -> String {
                digits(&sent.0)
            }
        }

        impl TryFrom<String> for $type {
            type Error = &'static str;

            fn try_from(digits: String) -> Result<$type, &'static str> {
                bytes(&digits, $most).map($type)
            }
        }
    )+ };
}

as_digits!(SnapshotName: MAX_NAME, TreePath: MAX_PATH, PathBytes: MAX_TEXT);

fn digits(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn bytes(digits: &str, most: usize) -> Result<Vec<u8>, &'static str> {
    if digits.len() > 2 * most || !digits.len().is_multiple_of(2) {
        return Err("a name of such a length does not exist");
    }
    let digit = |byte: &u8| char::from(*byte).to_digit(16).map(|digit| digit as u8);
    let bytes = digits.as_bytes().chunks_exact(2).map(|pair| Some(digit(&pair[0])? << 4 | digit(&pair[1])?));
    bytes.collect::<Option<Vec<u8>>>().ok_or("a name is hexadecimal digits")
}
