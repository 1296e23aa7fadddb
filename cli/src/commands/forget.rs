//! `lockbox forget`: removes keys of archives from the keyring.
use std::path::PathBuf;

use lockbox::keys;
use lockbox_host::secrets::Keyring;
use lockbox_host::{Program, shown};

use crate::exit::{Failure, Lockbox};
use crate::output::Output;

/// Drop the keys of archives from the kernel's keyring
#[derive(clap::Args)]
pub(crate) struct Args {
    /// The archive files
    #[arg(value_name = "ARCHIVE", required_unless_present = "all")]
    archives: Vec<PathBuf>,
    /// Drop the keys of all archives of this user
    #[arg(long, conflicts_with = "archives")]
    all: bool,
}

pub(crate) fn run(args: &Args) -> Result<(), Failure> {
    let keyring = Keyring::open()?;
    let mut out = Output::new();
    if args.all {
        match keyring.forget_all()? {
            1 => out.line("1 key is forgotten.")?,
            count => out.line(&format!("{count} keys are forgotten."))?,
        }
    }
    for path in &args.archives {
        let archive = keys::identify(path).map_err(|error| Lockbox::failure(path, error))?;
        let outcome = if keyring.forget(&archive)? { "is forgotten" } else { "was not kept" };
        out.line(&format!("The key of {} {outcome}.", shown(path)))?;
    }
    out.finish()
}
