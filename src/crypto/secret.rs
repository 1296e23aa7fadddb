//! Types for secrets: keys, passphrases and key files. Zeroized on drop, without Debug and Clone.
//! Random passphrases from a word list (diceware).

use std::io::{self, Read};

use sha2::{Digest, Sha256};
use zeroize::{Zeroize, ZeroizeOnDrop, Zeroizing};

use crate::env::Environment;
use crate::error::{Error, Result};

/// 256-bit key.
#[derive(Zeroize, ZeroizeOnDrop)]
pub struct SecretKey([u8; 32]);

impl SecretKey {
    pub fn new(bytes: [u8; 32]) -> SecretKey {
        SecretKey(bytes)
    }

    pub fn bytes(&self) -> &[u8; 32] {
        &self.0
    }
}

/// Passphrase as typed, without the line end.
pub struct Passphrase(Zeroizing<Vec<u8>>);

impl Passphrase {
    pub fn new(bytes: Vec<u8>) -> Passphrase {
        Passphrase(Zeroizing::new(bytes))
    }

    pub fn bytes(&self) -> &[u8] {
        &self.0
    }
}

impl From<Zeroizing<Vec<u8>>> for Passphrase {
    fn from(bytes: Zeroizing<Vec<u8>>) -> Passphrase {
        Passphrase(bytes)
    }
}

/// Secret of a key-file slot: the SHA-256 of the whole file.
pub struct KeyFile(SecretKey);

impl KeyFile {
    /// Minimum size in bytes: a key file alone is derived without stretching, so it must be
    /// unguessable.
    pub const MIN_BYTES: u64 = 32;
    /// Maximum size in bytes: a larger file is a mistake, such as a device or the archive itself.
    pub const MAX_BYTES: u64 = 64 << 20;

    /// Reads and hashes the source to its end.
    ///
    /// # Errors
    /// `Invalid` for fewer than [`KeyFile::MIN_BYTES`] or more than [`KeyFile::MAX_BYTES`] bytes
    /// and for one byte repeated, `Io` of the source.
    pub fn read(mut source: impl Read) -> Result<KeyFile> {
        let mut hash = Sha256::new();
        let mut buffer = Zeroizing::new(vec![0; 64 << 10]);
        let (mut length, mut first, mut varied) = (0u64, None, false);
        loop {
            let part = match source.read(&mut buffer) {
                Ok(0) => break,
                Ok(count) => &buffer[..count],
                Err(e) if e.kind() == io::ErrorKind::Interrupted => continue,
                Err(e) => return Err(Error::io("cannot read the key file", e)),
            };
            length += part.len() as u64;
            if length > KeyFile::MAX_BYTES {
                return Err(Error::invalid("the key file is too large: at most 64 MiB"));
            }
            let first = *first.get_or_insert(part[0]);
            varied |= part.iter().any(|&byte| byte != first);
            hash.update(part);
        }
        if length < KeyFile::MIN_BYTES {
            return Err(Error::invalid(format!(
                "the key file is too short: bytes={length} least={}",
                KeyFile::MIN_BYTES
            )));
        }
        if !varied {
            return Err(Error::invalid("the key file is one byte repeated: make one of 64 random bytes"));
        }
        Ok(KeyFile(SecretKey::new(hash.finalize().into())))
    }

    pub(crate) fn digest(&self) -> &SecretKey {
        &self.0
    }
}

/// Long word list of the Electronic Frontier Foundation (<https://www.eff.org/dice>, licence CC BY
/// 3.0 US) without dice numbers: 7776 words that are easy to remember and to type, none of which is
/// a prefix of another.
const DICEWARE_LIST: &str = include_str!("words.txt");
const DICEWARE_WORDS: usize = 7776;
/// Words of a passphrase: 77 bits. A million cores with one guess per second each need three
/// thousand million years.
const PASSPHRASE_WORDS: usize = 6;
/// Maximum length in bytes; the longest word has nine letters.
const MAX_PASSPHRASE_BYTES: usize = PASSPHRASE_WORDS * (9 + 1);

/// Generates six words separated by spaces. Errors: `Io` when the system has no randomness.
pub(crate) fn generate_passphrase(environment: &dyn Environment) -> Result<Zeroizing<String>> {
    // Allocated once: growing would leave copies in memory.
    let mut text = Zeroizing::new(String::with_capacity(MAX_PASSPHRASE_BYTES));
    for number in 0..PASSPHRASE_WORDS {
        if number > 0 {
            text.push(' ');
        }
        text.extend(DICEWARE_LIST.lines().nth(choose_word(environment)?));
    }
    Ok(text)
}

fn choose_word(environment: &dyn Environment) -> Result<usize> {
    loop {
        let mut bytes = Zeroizing::new([0; 2]);
        environment.fill_random(&mut *bytes)?;
        // Rejection sampling of thirteen bits: a modulo would favour some words.
        let number = usize::from(u16::from_le_bytes(*bytes)) % DICEWARE_WORDS.next_power_of_two();
        if number < DICEWARE_WORDS {
            return Ok(number);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use crate::env::SeededEnvironment;

    fn read(bytes: &[u8]) -> Result<KeyFile> {
        KeyFile::read(bytes)
    }

    #[test]
    fn the_whole_file_counts() {
        let mut bytes: Vec<u8> = (0..200_000u32).map(|i| i as u8).collect();
        let digest = *read(&bytes).unwrap().digest().bytes();
        assert_eq!(digest, super::super::kdf::sha256(&bytes));
        *bytes.last_mut().unwrap() ^= 1;
        assert_ne!(*read(&bytes).unwrap().digest().bytes(), digest);
    }

    #[test]
    fn guessable_and_mistaken_files_are_refused() {
        let refusal = |result: Result<KeyFile>| result.err().unwrap().to_string();
        assert!(refusal(read(b"")).contains("too short"));
        assert!(refusal(read(&[0, 1].repeat(15))).contains("too short"));
        assert!(read(&[0, 1].repeat(16)).is_ok());
        assert!(refusal(read(&[7; 100_000])).contains("one byte repeated"));
        assert!(refusal(KeyFile::read(io::repeat(7))).contains("too large"));
    }

    #[test]
    fn the_list_has_its_words_and_each_of_them_is_chosen() {
        let list: BTreeSet<&str> = DICEWARE_LIST.lines().collect();
        assert_eq!((list.len(), DICEWARE_LIST.lines().count()), (DICEWARE_WORDS, DICEWARE_WORDS));
        assert!(
            list.iter()
                .all(|word| (3..=9).contains(&word.len()) && word.bytes().all(|b| b.is_ascii_lowercase() || b == b'-'))
        );
        let environment = SeededEnvironment::new(1);
        // The probability of missing any word is one in ten thousand, and with this seed none is
        // missed.
        let chosen: BTreeSet<usize> = (0..18 * DICEWARE_WORDS).map(|_| choose_word(&environment).unwrap()).collect();
        assert_eq!((chosen.len(), chosen.last()), (DICEWARE_WORDS, Some(&(DICEWARE_WORDS - 1))));
    }

    #[test]
    fn a_passphrase_is_six_words_and_never_the_same() {
        let environment = SeededEnvironment::new(2);
        let one = generate_passphrase(&environment).unwrap();
        assert_eq!(
            one.split(' ').filter(|word| DICEWARE_LIST.lines().any(|other| other == *word)).count(),
            PASSPHRASE_WORDS
        );
        assert!(one.len() <= MAX_PASSPHRASE_BYTES);
        assert_ne!(*one, *generate_passphrase(&environment).unwrap());
    }
}
