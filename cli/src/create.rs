//! `lockbox create`: makes an empty archive.
use std::path::PathBuf;

use lockbox::Error;
use lockbox::archive::{Archive, CreateOptions};
use lockbox::fs::Creator;
use lockbox_host::secrets::PassphraseSources;
use lockbox_host::shown;
use nix::unistd::{getegid, geteuid};

use crate::exit::Failure;
use crate::kdf::KdfArgs;
use crate::secrets;

/// Create an empty archive
#[derive(clap::Args)]
pub(crate) struct Args {
    /// The archive file, which must not exist
    archive: PathBuf,
    #[command(flatten)]
    sources: PassphraseSources,
    #[command(flatten)]
    kdf: KdfArgs,
}

pub(crate) fn run(args: &Args) -> Result<(), Failure> {
    let path = &args.archive;
    let exists = || Failure::other(format!("{} exists already; it was left as it is", shown(path)));
    // Before the passphrase is asked for; the creation itself refuses an existing file too.
    if path.symlink_metadata().is_ok() {
        return Err(exists());
    }
    let passphrase = secrets::to_set(&args.sources, path)?;
    let options = CreateOptions { kdf: args.kdf.cost()?, creator: creator() };
    Archive::create(path, &passphrase, &options).map_err(|error| match error {
        Error::Exists => exists(),
        error => Failure::at(path, &error),
    })
}

/// Whoever runs the program owns what it makes.
pub(crate) fn creator() -> Creator {
    Creator { uid: geteuid().as_raw(), gid: getegid().as_raw(), umask: None }
}
