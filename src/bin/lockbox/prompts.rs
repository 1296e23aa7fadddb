//! Asks the person at the terminal what plugins and protected identities want to know.

use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::sync::Arc;

use lockbox::crypto::{Passphrase, Prompts};

use crate::output;

/// The terminal of the program, if it has one.
struct Terminal;

/// What commands hand to the library.
pub(crate) fn terminal() -> Arc<dyn Prompts> {
    Arc::new(Terminal)
}

impl Prompts for Terminal {
    fn message(&self, text: &str) {
        output::complain(text);
    }

    fn confirm(&self, question: &str, yes: &str, no: Option<&str>) -> Option<bool> {
        let choice = no.map_or_else(|| format!("[y: {yes}, n]"), |no| format!("[y: {yes}, n: {no}]"));
        let answer = self.public(&format!("{question} {choice}"))?;
        Some(answer.trim().eq_ignore_ascii_case("y") || answer.trim().eq_ignore_ascii_case("yes"))
    }

    fn public(&self, question: &str) -> Option<String> {
        let mut terminal = File::options().read(true).write(true).open("/dev/tty").ok()?;
        write!(terminal, "{question} ").ok()?;
        let mut line = String::new();
        BufReader::new(terminal).read_line(&mut line).ok()?;
        Some(line.trim_end_matches(['\r', '\n']).to_owned())
    }

    fn secret(&self, question: &str) -> Option<Passphrase> {
        let typed = rpassword::prompt_password(format!("{} ", question.trim_end())).ok()?;
        Some(Passphrase::new(typed.into_bytes()))
    }
}
