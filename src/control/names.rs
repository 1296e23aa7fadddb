//! Names and paths in messages. They are bytes and travel as hexadecimal digits: lossless, and never longer than twice their length, whatever is in them.

use serde::{Deserialize, Serialize};

use super::MAX_TEXT;

/// The longest name of a snapshot, in bytes.
pub(super) const MAX_NAME: usize = 255;
/// The longest path, in bytes: two of them and a little more are a line. The kernel takes 4096.
const MAX_PATH: usize = 12 << 10;

/// A snapshot's name.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Name(pub Vec<u8>);

/// A path from the root of what is mounted, without a slash at its beginning.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct TreePath(pub Vec<u8>);

/// A path of the host that is not UTF-8.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct PathBytes(pub Vec<u8>);

impl TreePath {
    /// Whether it can be sent.
    pub fn fits(&self) -> bool {
        self.0.len() <= MAX_PATH
    }
}

/// Sends the bytes of a type as digits, and takes back at most so many.
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

as_digits!(Name: MAX_NAME, TreePath: MAX_PATH, PathBytes: MAX_TEXT);

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
