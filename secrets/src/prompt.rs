//! Asks on the terminal, without showing what is typed.

use std::fs::{File, OpenOptions};
use std::io::{BufRead, BufReader, ErrorKind, Read, Write};

use zeroize::Zeroizing;

use crate::Bytes;
use crate::error::{Error, Result};

const TERMINAL: &str = "/dev/tty";
/// What a terminal passes on as one line.
const MOST_LINE: u64 = 4096;

pub(crate) fn ask(question: &str) -> Result<Bytes> {
    let typed = rpassword::prompt_password(lockbox_terminal::sentence(question)).map_err(|e| match e.kind() {
        ErrorKind::UnexpectedEof => {
            // The question stands there without an end of its line.
            let _ = OpenOptions::new().write(true).open(TERMINAL).and_then(|mut terminal| terminal.write_all(b"\n"));
            Error::source("nothing was typed")
        }
        _ => Error::host("cannot ask on the terminal", &e),
    })?;
    Ok(Zeroizing::new(typed.into_bytes()))
}

/// Whether there is a terminal to ask on, wherever standard input comes from.
pub(crate) fn has_terminal() -> bool {
    File::open(TERMINAL).is_ok()
}

/// A line with echo.
pub(crate) fn ask_openly(question: &str) -> Option<String> {
    let mut terminal = OpenOptions::new().read(true).write(true).open(TERMINAL).ok()?;
    terminal.write_all(lockbox_terminal::sentence(question).as_bytes()).ok()?;
    let mut line = String::new();
    BufReader::new(terminal.take(MOST_LINE)).read_line(&mut line).ok()?;
    Some(line.trim_end_matches(['\n', '\r']).to_owned())
}

/// For a passphrase to be set.
pub(crate) fn ask_twice(question: &str) -> Result<Bytes> {
    let first = ask(question)?;
    let second = ask("The same again: ")?;
    if *first != *second {
        return Err(Error::source("the two passphrases differ; nothing was changed"));
    }
    Ok(first)
}
