//! `lockbox passwd`: changes the passphrase of an archive.

use std::path::PathBuf;

use lockbox::archive::Archive;
use lockbox::storage::LockMode;

use crate::exit::Failure;
use crate::kdf::KdfArgs;
use crate::opening;
use crate::output::Output;
use crate::unlocking::UnlockArgs;

/// Change the passphrase of an archive that is not mounted
#[derive(clap::Args)]
pub(crate) struct Args {
    /// The archive file
    archive: PathBuf,
    #[command(flatten)]
    unlock: UnlockArgs,
    /// Read the new passphrase from FILE
    #[arg(long, value_name = "FILE")]
    new_passfile: Option<PathBuf>,
    #[command(flatten)]
    kdf: KdfArgs,
}

pub(crate) fn run(args: &Args) -> Result<(), Failure> {
    let path = &args.archive;
    let failed = |error| opening::failure(path, error);
    opening::probe(path, LockMode::Exclusive)?;
    let (old, new) = args.unlock.secrets_and_new(args.new_passfile.as_deref(), path)?;
    let kdf = args.kdf.cost()?;
    Archive::change_passphrase(path, &args.unlock.access(&old), &new, kdf).map_err(failed)?;
    let mut out = Output::new();
    out.line("The passphrase is changed. Older copies of the archive still open with the old one.")?;
    out.finish()
}
