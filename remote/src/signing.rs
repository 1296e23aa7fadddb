//! What signatures of several clouds are made of.

use std::time::Duration;

use hmac::{Hmac, KeyInit, Mac};
use sha2::Sha256;

/// A header of a request.
pub(crate) type Header = (&'static str, String);

/// How long a signature can be used: more than a clock may be wrong on both sides together.
pub(crate) const SIGNED_FOR: Duration = Duration::from_secs(900);

pub(crate) fn mac(key: &[u8], text: &str) -> Vec<u8> {
    let mut mac = <Hmac<Sha256> as KeyInit>::new_from_slice(key).expect("any length is a key");
    mac.update(text.as_bytes());
    mac.finalize().into_bytes().to_vec()
}

/// All but letters, digits, `-._~` and what is in `kept` as `%XX` (RFC 3986).
pub(crate) fn encoded(text: &str, kept: &str) -> String {
    let mut encoded = String::with_capacity(text.len());
    for byte in text.bytes() {
        match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'.' | b'_' | b'~' => encoded.push(byte.into()),
            _ if kept.as_bytes().contains(&byte) => encoded.push(byte.into()),
            _ => encoded.push_str(&format!("%{byte:02X}")),
        }
    }
    encoded
}
