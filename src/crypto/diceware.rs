//! Generated passphrases: words of a list, chosen by chance.

use zeroize::Zeroizing;

use crate::env::Environment;
use crate::error::Result;

/// The long list of the Electronic Frontier Foundation (<https://www.eff.org/dice>, licence CC BY 3.0 US) without the numbers for dice: 7776
/// words that are easy to remember and to type, of which none begins like another whole one.
const LIST: &str = include_str!("words.txt");
const WORDS: usize = 7776;
/// 77 bits: a million cores, of which each guesses once a second, need three thousand million years.
const COUNT: usize = 6;
/// The longest word has nine letters.
const MOST_BYTES: usize = COUNT * (9 + 1);

/// Six words with spaces between.
///
/// # Errors
/// `Io` when the system has no randomness.
pub(crate) fn generate_passphrase(environment: &dyn Environment) -> Result<Zeroizing<String>> {
    // Allocated at once: a text that grows leaves copies behind.
    let mut text = Zeroizing::new(String::with_capacity(MOST_BYTES));
    for number in 0..COUNT {
        if number > 0 {
            text.push(' ');
        }
        text.extend(LIST.lines().nth(choose(environment)?));
    }
    Ok(text)
}

/// The number of a word.
fn choose(environment: &dyn Environment) -> Result<usize> {
    loop {
        let mut bytes = Zeroizing::new([0; 2]);
        environment.fill_random(&mut *bytes)?;
        // Thirteen bits, and again when they name no word: the rest of a division would favour some.
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
        // The chance that any is missed is one in ten thousand, and the seed says that none is.
        let chosen: BTreeSet<usize> = (0..18 * WORDS).map(|_| choose(&environment).unwrap()).collect();
        assert_eq!((chosen.len(), chosen.last()), (WORDS, Some(&(WORDS - 1))));
    }

    #[test]
    fn a_passphrase_is_six_words_and_never_the_same() {
        let environment = SeededEnvironment::new(2);
        let one = generate_passphrase(&environment).unwrap();
        assert_eq!(one.split(' ').filter(|word| LIST.lines().any(|other| other == *word)).count(), COUNT);
        assert!(one.len() <= MOST_BYTES);
        assert_ne!(*one, *generate_passphrase(&environment).unwrap());
    }
}
