//! Secret of a share: an age identity, and its spelling in the fragment of a link.
//!
//! The fragment is the part of the identity's usual spelling after `AGE-SECRET-KEY-1`, in small
//! letters: 52 letters of data and 6 of checksum, of an alphabet (Bech32) without capitals,
//! punctuation and look-alikes. Mail programs and telephones do not break it, and with the prefix
//! restored `age` reads it.

use std::str::FromStr;

use bech32::primitives::decode::CheckedHrpstring;
use bech32::{Bech32, Hrp};
use hkdf::Hkdf;
use lockbox_share_protocol::token::Auth;
use sha2::Sha256;
use zeroize::{Zeroize, ZeroizeOnDrop, Zeroizing};

use crate::error::{Error, Result};

/// Letters of a fragment.
pub const FRAGMENT_LETTERS: usize = 58;
/// Human-readable part of an age identity.
const PREFIX: &str = "age-secret-key-";
/// HKDF label of the proof that claims a share.
const AUTH_LABEL: &[u8] = b"lockbox.share/v1/auth";

/// X25519 secret key of a share: decrypts its content and derives the proof for a claim.
#[derive(Zeroize, ZeroizeOnDrop)]
pub struct Secret([u8; 32]);

impl Secret {
    /// A new secret.
    ///
    /// # Errors
    /// When the system has no randomness.
    pub fn generate() -> Result<Secret> {
        let mut secret = Secret([0; 32]);
        getrandom::fill(&mut secret.0).map_err(|_| Error::NoRandomness)?;
        Ok(secret)
    }

    /// Parses a fragment and repairs common damage: capitals, line breaks, punctuation around it,
    /// and look-alikes of letters that the alphabet leaves out.
    ///
    /// # Errors
    /// [`Error::DamagedLink`] when the checksum does not match.
    pub fn from_fragment(text: &str) -> Result<Secret> {
        let letters = letters(text);
        let full = Zeroizing::new(format!("{PREFIX}1{}", *letters));
        let decoded = CheckedHrpstring::new::<Bech32>(&full).map_err(|_| Error::DamagedLink)?;
        let mut secret = Secret([0; 32]);
        let mut count = 0;
        for byte in decoded.byte_iter() {
            *secret.0.get_mut(count).ok_or(Error::DamagedLink)? = byte;
            count += 1;
        }
        if count == secret.0.len() { Ok(secret) } else { Err(Error::DamagedLink) }
    }

    /// The fragment that spells this secret.
    pub fn fragment(&self) -> Zeroizing<String> {
        let full = self.to_bech32();
        Zeroizing::new(full[PREFIX.len() + 1..].to_owned())
    }

    /// `AGE-SECRET-KEY-1...`, a line of an identity file for `age -d -i`.
    pub fn identity_line(&self) -> Zeroizing<String> {
        Zeroizing::new(self.to_bech32().to_uppercase())
    }

    /// Derives the proof that the daemon requires for a claim. It reveals nothing about the secret.
    pub fn auth(&self) -> Auth {
        let mut auth = Zeroizing::new([0; Auth::LENGTH]);
        self.derive(AUTH_LABEL, &mut auth[..]);
        Auth::new(*auth)
    }

    /// Derives the name of this user's note about the link; it reveals neither the secret nor the
    /// proof.
    pub fn note_name(&self) -> String {
        let mut name = [0; 16];
        self.derive(b"lockbox.share/v1/note", &mut name);
        name.iter().map(|byte| format!("{byte:02x}")).collect()
    }

    /// The bytes 1 to 32.
    #[cfg(test)]
    pub(crate) fn sample() -> Secret {
        let mut bytes = [0; 32];
        bytes.iter_mut().zip(1..).for_each(|(byte, value)| *byte = value);
        Secret(bytes)
    }

    /// The key in the form of the crate that seals and opens.
    pub(crate) fn identity(&self) -> Result<age::x25519::Identity> {
        age::x25519::Identity::from_str(&self.identity_line()).map_err(|_| Error::DamagedLink)
    }

    fn to_bech32(&self) -> Zeroizing<String> {
        // Room for all of it: a text that grew would leave copies behind.
        let mut text = Zeroizing::new(String::with_capacity(PREFIX.len() + 1 + FRAGMENT_LETTERS));
        bech32::encode_lower_to_fmt::<Bech32, String>(&mut text, Hrp::parse_unchecked(PREFIX), &self.0)
            .expect("74 letters are fewer than the code allows, and writing to a text never fails");
        text
    }

    /// HKDF-SHA-256 without a salt: the secret is uniform. X25519 and HKDF may share it, because
    /// neither's output tells the other's.
    fn derive(&self, label: &[u8], output: &mut [u8]) {
        Hkdf::<Sha256>::new(None, &self.0).expand(label, output).expect("32 bytes are fewer than 255 times 32");
    }
}

/// Returns the letters of a fragment, without surrounding characters.
fn letters(text: &str) -> Zeroizing<String> {
    let mut letters = Zeroizing::new(String::with_capacity(text.len()));
    for letter in text.chars().flat_map(char::to_lowercase).filter(char::is_ascii_alphanumeric) {
        letters.push(match letter {
            'o' => '0',
            'i' | '1' => 'l',
            other => other,
        });
    }
    // An identity in full, in which the 1 was just made an l.
    if let Some(rest) = letters.strip_prefix("agesecretkeyl") {
        return Zeroizing::new(rest.chars().take(FRAGMENT_LETTERS).collect());
    }
    letters.truncate(FRAGMENT_LETTERS);
    letters
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// The alphabet of Bech32, in the order of its values.
    const ALPHABET: &str = "qpzry9x8gf2tvdw0s3jn54khce6mua7l";
    const FRAGMENT: &str = "qypqxpq9qcrsszg2pvxq6rs0zqg3yyc5z5tpwxqergd3c8g7rusqgpqyee";

    #[test]
    fn a_fragment_is_an_age_identity_without_its_prefix() {
        let secret = Secret::sample();
        assert_eq!(*secret.fragment(), FRAGMENT);
        assert_eq!(*secret.identity_line(), format!("AGE-SECRET-KEY-1{}", FRAGMENT.to_uppercase()));
        assert!(secret.identity().is_ok());
    }

    /// The page derives the same, and its test names the same values.
    #[test]
    fn the_proof_is_derived_as_documented() {
        assert_eq!(*Secret::sample().auth().to_text(), "VmnHhOnvChivN_gYLC5tAQxVR6mKuxoCjtiZZUyu3f8");
    }

    #[test]
    fn what_mail_programs_and_telephones_do_is_undone() {
        for damage in [
            FRAGMENT.to_uppercase(),
            format!("Q{}", &FRAGMENT[1..]),
            format!(" {FRAGMENT}. "),
            format!("{FRAGMENT}>,"),
            format!("{}=\r\n{}", &FRAGMENT[..20], &FRAGMENT[20..]),
            format!("{}\u{200b}{}\u{ad}{}", &FRAGMENT[..7], &FRAGMENT[7..9], &FRAGMENT[9..]),
            FRAGMENT.replace('0', "O").replace('l', "I"),
            format!("{FRAGMENT}&utm_source=mail"),
            format!("{FRAGMENT} Greetings, Ann"),
            format!("AGE-SECRET-KEY-1{}", FRAGMENT.to_uppercase()),
        ] {
            assert_eq!(Secret::from_fragment(&damage).map(|s| s.0).ok(), Some(Secret::sample().0), "{damage}");
        }
    }

    proptest! {
        #[test]
        fn every_secret_is_read_as_it_is_spelled(bytes in any::<[u8; 32]>()) {
            let spelled = Secret(bytes).fragment();
            prop_assert_eq!(spelled.len(), FRAGMENT_LETTERS);
            prop_assert_eq!(Secret::from_fragment(&spelled).unwrap().0, bytes);
        }

        /// The code tells up to four wrong letters.
        #[test]
        fn wrong_letters_are_noticed(
            bytes in any::<[u8; 32]>(), places in proptest::collection::btree_map(0..FRAGMENT_LETTERS, 1usize..32, 1..=4),
        ) {
            let mut spelled = Secret(bytes).fragment().as_bytes().to_vec();
            for (place, step) in places {
                let value = ALPHABET.find(char::from(spelled[place])).unwrap();
                spelled[place] = ALPHABET.as_bytes()[(value + step) % 32];
            }
            prop_assert!(Secret::from_fragment(std::str::from_utf8(&spelled).unwrap()).is_err());
        }

        #[test]
        fn a_cut_fragment_is_noticed(bytes in any::<[u8; 32]>(), length in 0..FRAGMENT_LETTERS) {
            prop_assert!(Secret::from_fragment(&Secret(bytes).fragment()[..length]).is_err());
        }

        #[test]
        fn no_text_makes_it_fall(text in "\\PC{0,100}") {
            let _ = Secret::from_fragment(&text);
        }
    }
}
