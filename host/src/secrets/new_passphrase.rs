//! Prompts for a new passphrase, warns when it is weak, and generates one on request.

use std::path::Path;

use zxcvbn::zxcvbn;

use super::error::{Error, Result};
use super::{Bytes, is_yes, prompt};
use crate::shown;

/// Guesses below which a passphrase is weak, and zxcvbn's own bound for hashes that are slow. A guess takes a core and some hundred MiB of
/// memory for a second, so a machine with 64 cores and the memory for them needs five years for so many, and a hundred of them need three
/// weeks: more than most archives are worth to who has a copy. A person who fears more has a generated one, which nobody can try through.
const ENOUGH: u64 = 10_000_000_000;

/// How often a generated passphrase may be typed: it is new to who types it.
const TRIES: u32 = 3;

/// A passphrase of the archive at `path`, typed twice. With `advice` the person is told that one is weak, before it is typed again, and may take
/// it all the same; who types nothing gets one that is generated.
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

/// Shows a new passphrase and has it typed, so that it is known to have been read.
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

/// Whether a passphrase is good enough, or good enough for the person who typed it.
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

/// How many guesses find a passphrase of the archive at `path`, at a guess.
///
/// The library copies what it is given, in parts and in small letters, and wipes none of that. The copies lie where the passphrase itself lies
/// until its key is derived, in a program that ends seconds later, that leaves no core dump, that only root may look into, and that keeps its
/// memory out of swap where it may ([`crate::harden`]). What remains is that swap space without encryption may have them, as it may have the
/// buffers of the terminal: `lockbox doctor` warns of it. So the copies add nothing that an estimate of our own, a worse one, would be worth.
fn guesses(typed: &[u8], path: &Path) -> u64 {
    // What is no text counts by the character.
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
