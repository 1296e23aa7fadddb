//! Prompts for a new passphrase, warns when it is weak, and generates one on request.

use std::path::Path;

use zxcvbn::zxcvbn;

use super::error::{Error, Result};
use super::{Bytes, is_yes, prompt};
use crate::shown;

/// Guesses below which a passphrase is weak, and zxcvbn's own bound for slow hashes.
///
/// A guess takes a core and some hundred MiB of memory for a second. A machine with 64 cores and
/// enough memory needs five years for this many, and a hundred such machines need three weeks: more
/// than most archives are worth to an attacker with a copy. Users with stronger attackers have a
/// generated passphrase, which cannot be found by trying.
const ENOUGH: u64 = 10_000_000_000;

/// Number of tries for a generated passphrase: it is new to its user.
const TRIES: u32 = 3;

/// Reads a new passphrase of the archive at `path`, typed twice. With `advice` a weak one is
/// reported before it is typed again, and may be taken nevertheless; an empty one is replaced by a
/// generated one.
///
/// # Errors
/// Without a terminal, and when the two differ.
pub(crate) fn choose(path: &Path, advice: bool) -> Result<Bytes> {
    let name = shown(path);
    if !advice {
        return prompt::again(prompt::ask(&format!("New passphrase of {name}: "))?);
    }
    loop {
        let typed = prompt::ask(&format!("New passphrase of {name} (Enter for a generated one): "))?;
        if typed.is_empty() {
            return generated();
        }
        if is_wanted(guesses(&typed, path)) {
            return prompt::again(typed);
        }
    }
}

/// Shows a new passphrase and prompts for it, which proves that it was read.
fn generated() -> Result<Bytes> {
    let words = lockbox::keys::new_passphrase().map_err(|error| Error::source(error.to_string()))?;
    for text in ["Write this passphrase down; it is not shown again:\n\n    ", &words, "\n\n"] {
        prompt::show(text)?;
    }
    let mut question = "Type it: ";
    for _ in 0..TRIES {
        let typed = prompt::ask(question)?;
        if **typed == *words.as_bytes() {
            return Ok(typed);
        }
        question = "That is another one. Type it as it stands there: ";
    }
    Err(Error::source("what was typed is not the generated passphrase; nothing was changed"))
}

/// Returns whether a passphrase is strong enough, or its user takes it nevertheless.
fn is_wanted(guesses: u64) -> bool {
    let weak = |many| format!("This passphrase is weak: {many} guesses find it. Use it anyway? [y/N] ");
    let question = match guesses {
        ENOUGH.. => return true,
        1_000_000_000.. => weak("some billion"),
        1_000_000.. => weak("some million"),
        1_000.. => weak("some thousand"),
        _ => weak("a few"),
    };
    prompt::ask_openly(&question).is_some_and(|answer| is_yes(&answer))
}

/// Estimates the number of guesses that find a passphrase of the archive at `path`.
///
/// The library copies its input, in parts and in lower case, and does not wipe the copies. They lie
/// in the same memory as the passphrase until its key is derived. The program ends seconds later,
/// leaves no core dump, may be inspected by root alone, and keeps its memory out of swap where it
/// may ([`crate::harden`]).
///
/// The remaining risk is unencrypted swap space, which may hold the copies as it may hold the
/// buffers of the terminal: `lockbox doctor` warns of it. So a weaker estimate of our own would not
/// be safer.
fn guesses(typed: &[u8], path: &Path) -> u64 {
    // Bytes that are not text count by the character.
    let typed = zeroize::Zeroizing::new(String::from_utf8_lossy(typed).into_owned());
    let name = path.file_stem().unwrap_or_default().to_string_lossy();
    zxcvbn(&typed, &[&name]).guesses()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_guessers_try_first_is_weak_and_what_was_thrown_with_dice_is_not() {
        let guesses = |typed: &str| guesses(typed.as_bytes(), Path::new("Tax records.lbx"));
        for weak in [
            "password",
            "P@ssw0rd1",
            "hunter2",
            "tax records",
            "Tax Records",
            "qwertyuiop",
            "19840512",
            "aaaaaaaaaaaa",
            " ",
            "é",
        ] {
            assert!((1..ENOUGH).contains(&guesses(weak)), "{weak}: {}", guesses(weak));
        }
        for strong in
            ["mural stardust acid pluck", "correct horse battery staple", "vK8#qLw2x!Zp", "Grüße aus Übersee an Ölaf 7"]
        {
            assert!(guesses(strong) >= ENOUGH, "{strong}: {}", guesses(strong));
        }
    }

    #[test]
    fn any_bytes_are_estimated() {
        for odd in
            [&b"\xff\xfe\x00\x80"[..], "\u{200e}日本語\u{1f469}".as_bytes(), &[b'1'; 4000], "ß".repeat(2000).as_bytes()]
        {
            assert!(guesses(odd, Path::new("/")) > 0);
        }
    }
}
