//! Diceware: random passphrases from a word list.

use zeroize::Zeroizing;

use crate::env::Environment;
use crate::error::Result;

/// Long word list of the Electronic Frontier Foundation (<https://www.eff.org/dice>, licence CC BY
/// 3.0 US) without dice numbers: 7776 words that are easy to remember and to type, none of which is
/// a prefix of another.
const LIST: &str = include_str!("words.txt");
const WORDS: usize = 7776;
/// Words of a passphrase: 77 bits. A million cores with one guess per second each need three
/// thousand million years.
const COUNT: usize = 6;
/// Maximum length in bytes; the longest word has nine letters.
const MAX_BYTES: usize = COUNT * (9 + 1);

/// Generates six words separated by spaces.
///
/// # Errors
/// `Io` when the system has no randomness.
pub(crate) fn generate_passphrase(environment: &dyn Environment) -> Result<Zeroizing<String>> {
    // Allocated once: growing would leave copies in memory.
    let mut text = Zeroizing::new(String::with_capacity(MAX_BYTES));
    for number in 0..COUNT {
        if number > 0 {
            text.push(' ');
        }
        text.extend(LIST.lines().nth(choose_word(environment)?));
    }
    Ok(text)
}

/// Returns a random word number.
fn choose_word(environment: &dyn Environment) -> Result<usize> {
    loop {
        let mut bytes = Zeroizing::new([0; 2]);
        environment.fill_random(&mut *bytes)?;
        // Rejection sampling of thirteen bits: a modulo would favour some words.
        let number = usize::from(u16::from_le_bytes(*bytes)) % WORDS.next_power_of_two();
        if number < WORDS {
            return Ok(number);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use crate::env::SeededEnvironment;

    #[test]
    fn the_list_has_its_words_and_each_of_them_is_chosen() {
        let list: BTreeSet<&str> = LIST.lines().collect();
        assert_eq!((list.len(), LIST.lines().count()), (WORDS, WORDS));
        assert!(
            list.iter()
                .all(|word| (3..=9).contains(&word.len()) && word.bytes().all(|b| b.is_ascii_lowercase() || b == b'-'))
        );
        let environment = SeededEnvironment::new(1);
        // The probability of missing any word is one in ten thousand, and with this seed none is
        // missed.
        let chosen: BTreeSet<usize> = (0..18 * WORDS).map(|_| choose_word(&environment).unwrap()).collect();
        assert_eq!((chosen.len(), chosen.last()), (WORDS, Some(&(WORDS - 1))));
    }

    #[test]
    fn a_passphrase_is_six_words_and_never_the_same() {
        let environment = SeededEnvironment::new(2);
        let one = generate_passphrase(&environment).unwrap();
        assert_eq!(one.split(' ').filter(|word| LIST.lines().any(|other| other == *word)).count(), COUNT);
        assert!(one.len() <= MAX_BYTES);
        assert_ne!(*one, *generate_passphrase(&environment).unwrap());
    }
}
