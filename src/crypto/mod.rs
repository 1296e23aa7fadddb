//! AEAD, key derivation, key wrapping and types for secrets; independent of archives.
//!
//! Here are the types for secrets: keys, passphrases, key files, and recovery codes (specification
//! 3.6), zeroized on drop, without Debug and Clone; and random passphrases from a word list
//! (diceware).

pub mod aead;
pub mod identity;
pub mod kdf;
pub(crate) mod wrap;

#[cfg(any(test, debug_assertions))]
pub(crate) use identity::NoPrompts;
pub use identity::{Identities, Prompts};

use std::io::{self, Read};

use sha2::{Digest, Sha256};
use zeroize::{Zeroize, ZeroizeOnDrop, Zeroizing};

use crate::env::Environment;
use crate::error::{Error, Result};
use kdf::sha256;

/// 256-bit key.
#[derive(Zeroize, ZeroizeOnDrop)]
pub struct SecretKey([u8; 32]);

impl SecretKey {
    pub fn new(bytes: [u8; 32]) -> SecretKey {
        SecretKey(bytes)
    }

    pub(crate) fn bytes(&self) -> &[u8; 32] {
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
    pub(crate) const MIN_BYTES: u64 = 32;
    /// Maximum size in bytes: a larger file is a mistake, such as a device or the archive itself.
    pub(crate) const MAX_BYTES: u64 = 64 << 20;

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
            return Err(Error::invalid("the key file is one byte repeated: create one of 64 random bytes"));
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

const CODE_BYTES: usize = 16;
/// Groups that carry two bytes of the code each.
const CODE_VALUES: usize = CODE_BYTES / 2;
/// Number of groups; the last one is a checksum of the others.
const CODE_GROUPS: usize = CODE_VALUES + 1;
const CODE_DIGITS: usize = 6;
/// Factor of a group: a 16-bit number times 11. One wrong digit or two swapped neighbours never
/// give another multiple.
const CODE_FACTOR: u32 = 11;

/// Generated or correctly typed recovery code.
pub struct RecoveryCode(Zeroizing<[u8; CODE_BYTES]>);

impl RecoveryCode {
    /// Generates a code.
    ///
    /// # Errors
    /// `Io` when the system has no randomness.
    pub(crate) fn generate(environment: &dyn Environment) -> Result<RecoveryCode> {
        let mut bytes = Zeroizing::new([0; CODE_BYTES]);
        environment.fill_random(&mut *bytes)?;
        Ok(RecoveryCode(bytes))
    }

    /// Formats the code as nine groups of six digits separated by dashes.
    pub fn text(&self) -> Zeroizing<String> {
        let mut text = Zeroizing::new(String::with_capacity(CODE_GROUPS * (CODE_DIGITS + 1)));
        let check = self.check();
        let values = self.0.chunks_exact(2).map(|pair| u16::from_le_bytes([pair[0], pair[1]])).chain([check]);
        for (number, value) in values.enumerate() {
            if number > 0 {
                text.push('-');
            }
            let mut group = u32::from(value) * CODE_FACTOR;
            let mut digits = [b'0'; CODE_DIGITS];
            for digit in digits.iter_mut().rev() {
                *digit = b'0' + (group % 10) as u8;
                group /= 10;
            }
            digits.iter().for_each(|&digit| text.push(char::from(digit)));
        }
        text
    }

    /// Parses typed input: ignores spaces, dashes and line ends, reads O as 0, and I and l as 1.
    ///
    /// # Errors
    /// `Invalid` with the error and its group, without quoting the input.
    pub fn parse(typed: &[u8]) -> Result<RecoveryCode> {
        let digits = digits(typed)?;
        if digits.len() != CODE_GROUPS * CODE_DIGITS {
            return Err(Error::invalid(format!(
                "a recovery code has {} digits in {CODE_GROUPS} groups of {CODE_DIGITS}; this one has {}",
                CODE_GROUPS * CODE_DIGITS,
                digits.len()
            )));
        }
        let mut values = Zeroizing::new([0u16; CODE_GROUPS]);
        for (number, group) in digits.chunks_exact(CODE_DIGITS).enumerate() {
            let group = group.iter().fold(0, |all, digit| all * 10 + u32::from(*digit));
            let value = u16::try_from(group / CODE_FACTOR).ok().filter(|_| group % CODE_FACTOR == 0);
            let wrong = || Error::invalid(format!("group {} of the recovery code has a typing error", number + 1));
            values[number] = value.ok_or_else(wrong)?;
        }
        let mut bytes = Zeroizing::new([0; CODE_BYTES]);
        for (pair, value) in bytes.chunks_exact_mut(2).zip(values.iter()) {
            pair.copy_from_slice(&value.to_le_bytes());
        }
        let code = RecoveryCode(bytes);
        if code.check() != values[CODE_VALUES] {
            return Err(Error::invalid(
                "the groups of the recovery code do not match: check their order, and that all are from one code",
            ));
        }
        Ok(code)
    }

    /// Returns whether the input looks like a recovery code: nine groups of six digits with any
    /// separators.
    pub(crate) fn is_code_like(typed: &[u8]) -> bool {
        let digits = typed.iter().filter(|byte| byte.is_ascii_digit() || b"OoIl".contains(byte)).count();
        (50..=58).contains(&digits) && typed.iter().all(|byte| byte.is_ascii_digit() || b"OoIl- \t\r\n".contains(byte))
    }

    /// Returns the first 16 bits of a hash with its own label; only holders of the code can compute
    /// or see it.
    fn check(&self) -> u16 {
        let mut labelled = Zeroizing::new(b"lockbox recovery code".to_vec());
        labelled.reserve_exact(CODE_BYTES);
        labelled.extend_from_slice(&*self.0);
        let hash = Zeroizing::new(sha256(&labelled));
        u16::from_le_bytes([hash[0], hash[1]])
    }

    /// Returns the code followed by zeros, as key material.
    pub(crate) fn material(&self) -> SecretKey {
        let mut key = Zeroizing::new([0; 32]);
        key[..CODE_BYTES].copy_from_slice(&*self.0);
        SecretKey::new(*key)
    }
}

fn digits(typed: &[u8]) -> Result<Zeroizing<Vec<u8>>> {
    let text = std::str::from_utf8(typed).map_err(|_| Error::invalid("a recovery code consists of digits"))?;
    // Longer than any code with any spacing: allocated once, so that no copy is left in memory.
    let mut digits = Zeroizing::new(Vec::with_capacity(typed.len()));
    for typed in text.chars() {
        match typed {
            '0'..='9' => digits.push(typed as u8 - b'0'),
            'o' | 'O' => digits.push(0),
            'i' | 'I' | 'l' | 'L' => digits.push(1),
            // All kinds of dashes: office programs replace them.
            '-' | '_' | '.' | ',' | '\u{2010}'..='\u{2015}' | '\u{2212}' => {}
            space if space.is_whitespace() => {}
            _ => return Err(Error::invalid("a recovery code consists of digits")),
        }
    }
    Ok(digits)
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
        assert_eq!(digest, sha256(&bytes));
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

    #[test]
    fn a_code_is_recognised_by_its_look() {
        let code = ["012345"; 9];
        assert!(RecoveryCode::is_code_like(code.join("-").as_bytes()));
        assert!(RecoveryCode::is_code_like(code.join(" ").as_bytes()));
        assert!(RecoveryCode::is_code_like(format!("{}1234O", code[1..].join("")).as_bytes()));
        for other in ["", "correct horse", "0123456789", &"1".repeat(80), &format!("{}x", code.join("-"))] {
            assert!(!RecoveryCode::is_code_like(other.as_bytes()), "{other}");
        }
    }

    fn code() -> RecoveryCode {
        RecoveryCode::generate(&SeededEnvironment::new(1)).unwrap()
    }

    fn refusal(text: &str) -> String {
        RecoveryCode::parse(text.as_bytes()).err().map(|error| error.to_string()).unwrap_or_default()
    }

    #[test]
    fn a_formatted_code_parses_with_any_spacing() {
        let text = code().text();
        assert_eq!((text.len(), text.matches('-').count()), (62, 8));
        let same = |typed: &str| assert_eq!(*RecoveryCode::parse(typed.as_bytes()).unwrap().0, *code().0);
        same(&text);
        same(&text.replace('-', ""));
        same(&format!(" {}\r\n", text.replace('-', " \u{2013} ")));
        same(&text.replace('0', "O").replace('1', "l"));
        same(&text.replace('0', "o").replace('1', "I"));
    }

    #[test]
    fn every_wrong_digit_and_swapped_neighbour_names_its_group() {
        let text = code().text();
        for at in (0..text.len()).filter(|at| at % 7 != 6) {
            let named = format!("group {} of", at / 7 + 1);
            for other in "0123456789".chars().filter(|&other| other != char::from(text.as_bytes()[at])) {
                let mut wrong = text.to_string();
                wrong.replace_range(at..=at, &other.to_string());
                assert!(refusal(&wrong).contains(&named), "{at}");
            }
            let mut swapped = text.as_bytes().to_vec();
            if at % 7 < 5 && swapped[at] != swapped[at + 1] {
                swapped.swap(at, at + 1);
                assert!(refusal(std::str::from_utf8(&swapped).unwrap()).contains(&named), "{at}");
            }
        }
    }

    #[test]
    fn swapped_groups_missing_digits_and_other_text_are_refused_without_quoting() {
        let text = code().text();
        let mut groups: Vec<&str> = text.split('-').collect();
        groups.swap(0, 1);
        assert!(refusal(&groups.join("-")).contains("do not match"));
        assert!(refusal(&text[..61]).contains("this one has 53"));
        assert!(refusal("").contains("this one has 0"));
        assert_eq!(refusal("correct horse"), "invalid argument: a recovery code consists of digits");
        assert!(RecoveryCode::parse(&[0xff]).is_err());
        // 65,536 x 11 is a multiple, but not a valid group.
        assert!(refusal(&format!("720896{}", &text[6..])).contains("group 1"));
    }
}
