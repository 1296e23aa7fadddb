//! Asks the person at the terminal what plugins and protected identities want to know.

use std::sync::Arc;

use lockbox::crypto::{Passphrase, Prompts};
use lockbox_secrets::{Sources, ask_openly};

use crate::{output, secrets};

struct Asker(Sources);

/// What commands hand to the library.
pub(crate) fn terminal() -> Arc<dyn Prompts> {
    Arc::new(Asker(Sources::default()))
}

/// The same, where what the command line names is a passphrase for identities as well.
pub(crate) fn asking(sources: &Sources) -> Arc<dyn Prompts> {
    Arc::new(Asker(sources.clone()))
}

impl Prompts for Asker {
    fn message(&self, text: &str) {
        output::complain(text);
    }

    fn confirm(&self, question: &str, yes: &str, no: Option<&str>) -> Option<bool> {
        let choice = no.map_or_else(|| format!("[y: {yes}, n]"), |no| format!("[y: {yes}, n: {no}]"));
        let answer = ask_openly(&format!("{question} {choice} "))?;
        Some(["y", "yes"].iter().any(|word| answer.trim().eq_ignore_ascii_case(word)))
    }

    fn public(&self, question: &str) -> Option<String> {
        ask_openly(&format!("{question} "))
    }

    fn secret(&self, question: &str) -> Option<Passphrase> {
        self.0.answer(&format!("{} ", question.trim_end())).map(secrets::typed)
    }
}
