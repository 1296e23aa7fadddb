//! The public name of a share: one digit that routes to a server, and random digits.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::token;

/// Random digits that a handle has at least and at most.
pub const RANDOM_DIGITS: std::ops::RangeInclusive<u32> = 6..=12;

/// A routing digit and 6 to 12 random digits, which names a share and opens nothing.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Handle {
    routing: u8,
    digits: u32,
    /// Below 10^digits.
    number: u64,
}

/// Error of an invalid handle.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a handle has 7 to 13 digits and nothing else")]
pub struct HandleError;

impl Handle {
    /// The handle with `number` as its random digits, or None when a part is out of range.
    pub fn new(routing: u8, digits: u32, number: u64) -> Option<Handle> {
        (routing < 10 && RANDOM_DIGITS.contains(&digits) && number < 10u64.pow(digits)).then_some(Handle {
            routing,
            digits,
            number,
        })
    }

    /// The random digits as a number.
    pub fn number(self) -> u64 {
        self.number
    }
}

impl fmt::Display for Handle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}{:0width$}", self.routing, self.number, width = self.digits as usize)
    }
}

/// A handle is looked for with its proof, so its name is kept out of logs.
impl fmt::Debug for Handle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Handle(..)")
    }
}

impl FromStr for Handle {
    type Err = HandleError;

    fn from_str(text: &str) -> Result<Handle, HandleError> {
        let digits = text.len().checked_sub(1).and_then(|n| u32::try_from(n).ok()).ok_or(HandleError)?;
        if !RANDOM_DIGITS.contains(&digits) || !text.bytes().all(|b| b.is_ascii_digit()) {
            return Err(HandleError);
        }
        let number = text[1..].parse().map_err(|_| HandleError)?;
        Handle::new(text.as_bytes()[0] - b'0', digits, number).ok_or(HandleError)
    }
}

impl Serialize for Handle {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Handle {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Handle, D::Error> {
        token::deserialize_text(deserializer, "a handle of 7 to 13 digits as a text")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn handles_are_written_as_they_are_read() {
        for text in ["1482719382210", "0000000", "9999999999999", "7000001"] {
            assert_eq!(text.parse::<Handle>().map(|h| h.to_string()).as_deref(), Ok(text));
        }
    }

    #[test]
    fn everything_else_is_refused() {
        for text in ["", "1", "123456", "12345678901234", "+123456", "12345 7", "1234567a", "\u{0661}234567"] {
            assert_eq!(text.parse::<Handle>(), Err(HandleError), "{text}");
        }
        assert_eq!(Handle::new(10, 6, 0), None);
        assert_eq!(Handle::new(0, 5, 0), None);
        assert_eq!(Handle::new(0, 6, 1_000_000), None);
    }

    #[test]
    fn a_handle_is_not_shown_by_debug() {
        let handle: Handle = "1482719382210".parse().unwrap_or_else(|e| panic!("{e}"));
        assert!(!format!("{handle:?}").contains("1482"));
    }
}
