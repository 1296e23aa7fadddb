//! Deserializes JSON strings with [`FromStr`].

use std::fmt::{Display, Formatter};
use std::marker::PhantomData;
use std::str::FromStr;

use serde::{Deserializer, de};

/// Serde visitor that parses a string with [`FromStr`]; the text describes the expected value.
struct FromStrVisitor<T>(&'static str, PhantomData<T>);

impl<T: FromStr<Err: Display>> de::Visitor<'_> for FromStrVisitor<T> {
    type Value = T;

    fn expecting(&self, f: &mut Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.0)
    }

    fn visit_str<E: de::Error>(self, text: &str) -> Result<T, E> {
        // The message must not repeat the text, which may be a secret with a slip.
        text.parse().map_err(E::custom)
    }
}

pub(crate) fn deserialize_text<'de, D: Deserializer<'de>, T>(
    deserializer: D,
    expected: &'static str,
) -> Result<T, D::Error>
where
    T: FromStr<Err: Display>,
{
    deserializer.deserialize_str(FromStrVisitor(expected, PhantomData))
}
