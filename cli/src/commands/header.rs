//! `lockbox header`: backs up an archive's header to another file, and restores it.
use std::io::{self, Read};
use std::path::PathBuf;

use lockbox::keys::{self, Restored};
use lockbox::storage::HostEntry;
use lockbox_host::remote::RemoteArgs;
use lockbox_host::shown;

use crate::exit::Failure;
use crate::open_archive::{self, WriterArgs};
use crate::output;
use crate::secrets::{self, UnlockArgs};

/// Back up and restore the header of an archive, which holds the keys
#[derive(clap::Subcommand)]
pub(crate) enum Command {
    Backup(BackupArgs),
    Restore(Box<RestoreArgs>),
}

/// Copy the header, which holds the keys, to a new file
#[derive(clap::Args)]
pub(crate) struct BackupArgs {
    /// The archive: a file, or an address
    archive: PathBuf,
    /// The copy, which must not exist
    file: PathBuf,
    #[command(flatten)]
    remote: RemoteArgs,
}

/// Put a header back that was backed up
#[derive(clap::Args)]
pub(crate) struct RestoreArgs {
    /// The archive: a file, or an address
    archive: PathBuf,
    /// The copy of its header
    file: PathBuf,
    #[command(flatten)]
    unlock: UnlockArgs,
    #[command(flatten)]
    remote: RemoteArgs,
    #[command(flatten)]
    writer: WriterArgs,
}

/// More than a header has.
const MOST: u64 = 1 << 20;

pub(crate) fn run(command: &Command) -> Result<(), Failure> {
    match command {
        Command::Backup(args) => backup(args),
        Command::Restore(args) => restore(args),
    }
}

fn backup(args: &BackupArgs) -> Result<(), Failure> {
    let place = open_archive::place(&args.archive, &args.remote)?;
    let bytes = keys::backup_header(place.site()).map_err(|error| secrets::failure(&place, error))?;
    let failed = |e: io::Error| match e.kind() {
        io::ErrorKind::AlreadyExists => {
            Failure::other(format!("{} exists already; it was left as it is: choose another name", shown(&args.file)))
        }
        _ => Failure::host(format!("cannot write {}", shown(&args.file)), &e),
    };
    HostEntry::of(&args.file).and_then(|entry| entry.write_new(&bytes)).map_err(failed)?;
    output::print(
        "The backup opens with the keys of today, also after they were changed or removed: keep it as safe as the archive, and make a new \
         one after each change of the keys.",
    )
}

fn restore(args: &RestoreArgs) -> Result<(), Failure> {
    let failed = |e: io::Error| Failure::host(format!("cannot read {}", shown(&args.file)), &e);
    let mut bytes = Vec::new();
    std::fs::File::open(&args.file).and_then(|file| file.take(MOST).read_to_end(&mut bytes)).map_err(failed)?;
    let place = open_archive::place_to_restore(&args.archive, &args.remote, args.writer)?;
    let Restored { backup, known } =
        args.unlock.with_access(&place, |access| keys::restore_header(place.site(), &bytes, access))?;
    secrets::forget_kept(place.site());
    output::print(match backup < known {
        true => "The header is restored. Keys that were removed or changed since the backup open the archive again.",
        false => "The header is restored.",
    })
}
