//! The person at the terminal, if there is one.

use std::io::{self, BufRead, IsTerminal, Write};

use lockbox_terminal::sentence;

/// Interactive user, or its absence.
pub(super) trait SetupDialog {
    /// Returns whether a user can answer questions.
    fn is_interactive(&self) -> bool;

    /// Asks until `check` accepts the answer; an empty answer means `usual`. Without a user,
    /// returns `usual`.
    ///
    /// # Errors
    /// When there is neither a user nor a default; the message names the option to set.
    fn ask(
        &mut self,
        question: &str,
        usual: Option<&str>,
        option: &str,
        check: &dyn Fn(&str) -> Result<(), String>,
    ) -> Result<String, String>;

    /// Asks for yes or no; `None` without a user.
    fn confirm(&mut self, question: &str) -> Option<bool>;

    /// One sentence or one file.
    fn print(&mut self, text: &str);
}

/// Standard input and output.
pub(super) struct Terminal {
    is_interactive: bool,
}

impl Terminal {
    pub(super) fn new() -> Terminal {
        Terminal { is_interactive: io::stdin().is_terminal() && io::stdout().is_terminal() }
    }

    fn answer(&mut self, question: &str) -> Result<String, String> {
        let failed = |error: io::Error| format!("cannot ask: {error}");
        let mut out = io::stdout().lock();
        write!(out, "{question}: ").and_then(|()| out.flush()).map_err(failed)?;
        let mut line = String::new();
        match io::stdin().lock().read_line(&mut line).map_err(failed)? {
            0 => Err("nobody answered; what was not asked about yet is as it was".into()),
            _ => Ok(line.trim().to_owned()),
        }
    }
}

impl SetupDialog for Terminal {
    fn is_interactive(&self) -> bool {
        self.is_interactive
    }

    fn ask(
        &mut self,
        question: &str,
        usual: Option<&str>,
        option: &str,
        check: &dyn Fn(&str) -> Result<(), String>,
    ) -> Result<String, String> {
        if !self.is_interactive {
            return usual.map(str::to_owned).ok_or_else(|| format!("{option} is needed where nobody can be asked"));
        }
        let question = usual.map_or_else(|| question.to_owned(), |usual| format!("{question} [{usual}]"));
        loop {
            let said = self.answer(&question)?;
            let said = if said.is_empty() { usual.unwrap_or_default().to_owned() } else { said };
            match check(&said) {
                Ok(()) => return Ok(said),
                Err(told) => self.print(&told),
            }
        }
    }

    fn confirm(&mut self, question: &str) -> Option<bool> {
        if !self.is_interactive {
            return None;
        }
        // Without an answer nothing is done.
        let said = self.answer(&format!("{question} [y, n]")).unwrap_or_default();
        Some(["y", "yes"].iter().any(|word| said.eq_ignore_ascii_case(word)))
    }

    #[allow(clippy::print_stdout)] // the result
    fn print(&mut self, text: &str) {
        text.lines().for_each(|line| println!("{}", sentence(line)));
    }
}
