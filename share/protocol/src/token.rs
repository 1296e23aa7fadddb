//! Handles of shares, written as digits, and ids, tokens and proofs of fixed length, written as
//! base64url without padding.

use std::fmt::{self, Display};
use std::marker::PhantomData;
use std::str::FromStr;

use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use serde::{Deserialize, Deserializer, Serialize, Serializer, de};
use sha2::{Digest as _, Sha256};
use subtle::ConstantTimeEq;
use zeroize::{Zeroize, ZeroizeOnDrop, Zeroizing};

/// Random digits that a handle has at least and at most.
pub(crate) const RANDOM_DIGITS: std::ops::RangeInclusive<u32> = 6..=12;

/// A routing digit and 6 to 12 random digits, which names a share and opens nothing.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Handle {
    routing: u8,
    digits: u32,
    /// Below 10^digits.
    number: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a handle has 7 to 13 digits and nothing else")]
pub struct HandleError;

impl Handle {
    /// The handle with `number` as its random digits, or None when a part is out of range.
    pub fn new(routing: u8, digits: u32, number: u64) -> Option<Handle> {
        let is_valid = routing < 10 && RANDOM_DIGITS.contains(&digits) && number < 10u64.pow(digits);
        is_valid.then_some(Handle { routing, digits, number })
    }

    /// The random digits as a number.
    pub fn number(self) -> u64 {
        self.number
    }
}

impl Display for Handle {
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
        deserialize_text(deserializer, "a handle of 7 to 13 digits as a text")
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("not {bytes} bytes in base64url without padding")]
pub struct TokenError {
    pub bytes: usize,
}

/// Decodes exactly N bytes; total for any text.
fn decode<const N: usize>(text: &str) -> Result<Zeroizing<[u8; N]>, TokenError> {
    let mut bytes = Zeroizing::new([0; N]);
    match URL_SAFE_NO_PAD.decode_slice(text, &mut bytes[..]) {
        Ok(written) if written == N => Ok(bytes),
        _ => Err(TokenError { bytes: N }),
    }
}

/// `$name` as a text, from a text, and both ways as JSON text.
macro_rules! as_text {
    ($name:ident, $length:expr) => {
        impl $name {
            pub const LENGTH: usize = $length;

            /// Wraps bytes that came from the system's randomness, a derivation or a record.
            pub const fn new(bytes: [u8; $length]) -> $name {
                $name(bytes)
            }

            pub fn as_bytes(&self) -> &[u8; $length] {
                &self.0
            }

            /// base64url without padding. The text of a secret is wiped when it is dropped.
            pub fn to_text(&self) -> Zeroizing<String> {
                Zeroizing::new(URL_SAFE_NO_PAD.encode(self.0))
            }
        }

        impl FromStr for $name {
            type Err = TokenError;

            fn from_str(text: &str) -> Result<$name, TokenError> {
                decode::<$length>(text).map(|bytes| $name(*bytes))
            }
        }

        impl Serialize for $name {
            fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                serializer.serialize_str(&self.to_text())
            }
        }

        impl<'de> Deserialize<'de> for $name {
            fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<$name, D::Error> {
                deserialize_text(deserializer, concat!($length, " bytes in base64url"))
            }
        }
    };
}

/// Known to one side only, or proves something: never shown, wiped when dropped.
macro_rules! secret {
    ($(#[$doc:meta])* $name:ident, $length:expr) => {
        $(#[$doc])*
        #[derive(Zeroize, ZeroizeOnDrop)]
        pub struct $name([u8; $length]);

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(concat!(stringify!($name), "(..)"))
            }
        }

        impl PartialEq for $name {
            /// Takes the same time wherever the two differ.
            fn eq(&self, other: &$name) -> bool {
                self.0[..].ct_eq(&other.0[..]).into()
            }
        }

        impl Eq for $name {}

        as_text!($name, $length);
    };
}

/// May be stored and shown.
macro_rules! public {
    ($(#[$doc:meta])* $name:ident, $length:expr) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub struct $name([u8; $length]);

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, concat!(stringify!($name), "({})"), *self.to_text())
            }
        }

        impl Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.to_text())
            }
        }

        as_text!($name, $length);
    };
}

secret! {
    /// Proof of a claimant: derived from the link's secret by the client, not stored by the daemon.
    Auth, 32
}

secret! {
    /// Random token of an owner: authorizes info, watch, revoke and rearm of the owner's shares.
    OwnerToken, 32
}

secret! {
    /// Given to the one claimant of a share with ciphertext in the spool, for its downloads.
    LeaseToken, 16
}

secret! {
    /// Given for ciphertext that was uploaded and belongs to no share yet.
    UploadToken, 16
}

secret! {
    /// Random number of a claimant: the same claim within a minute gets the same reply.
    ClaimId, 16
}

public! {
    /// SHA-256 of an [`Auth`] or an [`OwnerToken`], stored by the daemon instead of it.
    Verifier, 32
}

public! {
    /// SHA-256 of a ciphertext.
    Digest, 32
}

impl Auth {
    /// Returns the hash by which the daemon recognises this proof.
    pub fn verifier(&self) -> Verifier {
        Verifier(Sha256::digest(self.0).into())
    }
}

impl Verifier {
    /// Returns whether both are of the same proof; takes the same time wherever they differ.
    pub fn accepts(&self, other: &Verifier) -> bool {
        self.0[..].ct_eq(&other.0[..]).into()
    }
}

impl OwnerToken {
    /// Returns the hash by which the daemon recognises this owner.
    pub fn verifier(&self) -> Verifier {
        Verifier(Sha256::digest(self.0).into())
    }
}

/// Serde visitor that parses a string with [`FromStr`]; the text describes the expected value.
struct FromStrVisitor<T>(&'static str, PhantomData<T>);

impl<T: FromStr<Err: Display>> de::Visitor<'_> for FromStrVisitor<T> {
    type Value = T;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.0)
    }

    fn visit_str<E: de::Error>(self, text: &str) -> Result<T, E> {
        // The message must not repeat the text, which may be a secret with a slip.
        text.parse().map_err(E::custom)
    }
}

pub(crate) fn deserialize_text<'de, D: Deserializer<'de>, T: FromStr<Err: Display>>(
    deserializer: D,
    expected: &'static str,
) -> Result<T, D::Error> {
    deserializer.deserialize_str(FromStrVisitor(expected, PhantomData))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn texts_are_read_as_they_are_written(bytes in any::<[u8; 32]>()) {
            let auth = Auth::new(bytes);
            prop_assert_eq!(auth.to_text().len(), 43);
            prop_assert!(auth.to_text().parse::<Auth>() == Ok(Auth::new(bytes)));
            let json = serde_json::to_string(&auth).unwrap();
            prop_assert!(serde_json::from_str::<Auth>(&json).unwrap() == auth);
        }

        #[test]
        fn any_other_text_is_refused(text in "\\PC{0,60}") {
            if let Ok(id) = text.parse::<LeaseToken>() {
                prop_assert!(*id.to_text() == text);
            }
        }
    }

    #[test]
    fn lengths_and_stray_bits_are_refused() {
        let id = LeaseToken::new([255; 16]).to_text().to_string();
        assert_eq!(id, "_____________________w");
        // The last letter carries four bits that stand for nothing.
        assert!(id.replace('w', "x").parse::<LeaseToken>().is_err());
        assert!(format!("{id}==").parse::<LeaseToken>().is_err());
        assert!(id[1..].parse::<LeaseToken>().is_err());
        assert!(id.parse::<Auth>().is_err());
    }

    #[test]
    fn secrets_are_not_shown() {
        let auth = Auth::new([b'A'; 32]);
        assert_eq!(format!("{auth:?}"), "Auth(..)");
        let error = serde_json::from_str::<Auth>("\"QUFBQQ\"").unwrap_err();
        assert!(!error.to_string().contains("QUFB"), "{error}");
    }

    #[test]
    fn the_verifier_is_the_hash_of_the_proof() {
        let expected: [u8; 32] = Sha256::digest([7; 32]).into();
        assert_eq!(Auth::new([7; 32]).verifier().as_bytes(), &expected);
        assert!(Verifier::new(expected).accepts(&Auth::new([7; 32]).verifier()));
        assert!(!Verifier::new(expected).accepts(&Auth::new([8; 32]).verifier()));
        assert_eq!(OwnerToken::new([7; 32]).verifier().as_bytes(), &expected);
    }

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
