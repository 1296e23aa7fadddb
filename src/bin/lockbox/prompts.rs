//! Asks the person at the terminal what plugins and protected identities want to know.

use std::sync::Arc;

use lockbox::crypto::{Passphrase, Prompts};
use lockbox_secrets::{Sources, ask_openly, confirm_openly};

use crate::output;

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
        confirm_openly(question, yes, no)
    }

    fn public(&self, question: &str) -> Option<String> {
        ask_openly(&format!("{question} "))
    }

    fn secret(&self, question: &str) -> Option<Passphrase> {
        self.0.answer(&format!("{} ", question.trim_end())).map(Passphrase::from)
    }
}
