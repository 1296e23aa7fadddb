//! Recovery codes: 128 random bits as digits, in groups that each detect typing errors
//! (specification 3.6).

use zeroize::Zeroizing;

use super::kdf::sha256;
use super::secret::SecretKey;
use crate::env::Environment;
use crate::error::{Error, Result};

/// Length of a code in bytes.
const BYTES: usize = 16;
/// Groups that carry two bytes of the code each.
const VALUES: usize = BYTES / 2;
/// Number of groups; the last one is a checksum of the others.
const GROUPS: usize = VALUES + 1;
const DIGITS: usize = 6;
/// Factor of a group: a 16-bit number times 11. One wrong digit or two swapped neighbours never
/// give another multiple.
const FACTOR: u32 = 11;

/// Generated or correctly typed recovery code.
pub struct RecoveryCode(Zeroizing<[u8; BYTES]>);

impl RecoveryCode {
    /// Generates a code.
    ///
    /// # Errors
    /// `Io` when the system has no randomness.
    pub fn generate(environment: &dyn Environment) -> Result<RecoveryCode> {
        let mut bytes = Zeroizing::new([0; BYTES]);
        environment.fill_random(&mut *bytes)?;
        Ok(RecoveryCode(bytes))
    }

    /// Formats the code as nine groups of six digits separated by dashes.
    pub fn text(&self) -> Zeroizing<String> {
        let mut text = Zeroizing::new(String::with_capacity(GROUPS * (DIGITS + 1)));
        let check = self.check();
        let values = self.0.chunks_exact(2).map(|pair| u16::from_le_bytes([pair[0], pair[1]])).chain([check]);
        for (number, value) in values.enumerate() {
            if number > 0 {
                text.push('-');
            }
            let mut group = u32::from(value) * FACTOR;
            let mut digits = [b'0'; DIGITS];
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
        if digits.len() != GROUPS * DIGITS {
            return Err(Error::invalid(format!(
                "a recovery code has {} digits in {GROUPS} groups of {DIGITS}: {} were given",
                GROUPS * DIGITS,
                digits.len()
            )));
        }
        let mut values = Zeroizing::new([0u16; GROUPS]);
        for (number, group) in digits.chunks_exact(DIGITS).enumerate() {
            let group = group.iter().fold(0, |all, digit| all * 10 + u32::from(*digit));
            let value = u16::try_from(group / FACTOR).ok().filter(|_| group % FACTOR == 0);
            let wrong = || Error::invalid(format!("group {} of the recovery code has a typing error", number + 1));
            values[number] = value.ok_or_else(wrong)?;
        }
        let mut bytes = Zeroizing::new([0; BYTES]);
        for (pair, value) in bytes.chunks_exact_mut(2).zip(values.iter()) {
            pair.copy_from_slice(&value.to_le_bytes());
        }
        let code = RecoveryCode(bytes);
        if code.check() != values[VALUES] {
            return Err(Error::invalid(
                "the groups of the recovery code do not belong together: were some swapped, or taken from two codes?",
            ));
        }
        Ok(code)
    }

    /// Returns whether the input looks like a recovery code: nine groups of six digits with any
    /// separators.
    pub fn is_code_like(typed: &[u8]) -> bool {
        let digits = typed.iter().filter(|byte| byte.is_ascii_digit() || b"OoIl".contains(byte)).count();
        (50..=58).contains(&digits) && typed.iter().all(|byte| byte.is_ascii_digit() || b"OoIl- \t\r\n".contains(byte))
    }

    /// Returns the first 16 bits of a hash with its own label; only holders of the code can compute
    /// or see it.
    fn check(&self) -> u16 {
        let mut labelled = Zeroizing::new(b"lockbox recovery code".to_vec());
        labelled.reserve_exact(BYTES);
        labelled.extend_from_slice(&*self.0);
        let hash = Zeroizing::new(sha256(&labelled));
        u16::from_le_bytes([hash[0], hash[1]])
    }

    /// Returns the code followed by zeros, as key material.
    pub(crate) fn material(&self) -> SecretKey {
        let mut key = Zeroizing::new([0; 32]);
        key[..BYTES].copy_from_slice(&*self.0);
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
    use super::*;

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
    use crate::env::SeededEnvironment;

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
        assert!(refusal(&groups.join("-")).contains("do not belong together"));
        assert!(refusal(&text[..61]).contains("53 were given"));
        assert!(refusal("").contains("0 were given"));
        assert_eq!(refusal("correct horse"), "invalid argument: a recovery code consists of digits");
        assert!(RecoveryCode::parse(&[0xff]).is_err());
        // 65,536 x 11 is a multiple, but not a valid group.
        assert!(refusal(&format!("720896{}", &text[6..])).contains("group 1"));
    }
}
