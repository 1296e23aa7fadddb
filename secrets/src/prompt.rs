//! Asks on the terminal, without showing what is typed.

use zeroize::Zeroizing;

use crate::Bytes;
use crate::error::{Error, Result};

pub(crate) fn ask(question: &str) -> Result<Bytes> {
    let typed = rpassword::prompt_password(question).map_err(|e| Error::host("cannot ask for the passphrase", &e))?;
    Ok(Zeroizing::new(typed.into_bytes()))
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
