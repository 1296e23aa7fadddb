//! `lockbox create`: makes an empty archive.
use std::path::{Path, PathBuf};

use lockbox::Error;
use lockbox::archive::{Archive, CreateOptions};
use lockbox::crypto::{Passphrase, RecoveryCode};
use lockbox::keys::{self, KeyAccess, NewKey, Secrets, SeenOptions};
use lockbox::storage::ArchiveSource;
use lockbox_host::remote::{self, ArchiveLocation, Bucket, RemoteArgs};
use lockbox_host::secrets::PassphraseSources;
use lockbox_host::{Spinner, shown};

use crate::commands::key;
use crate::exit::Failure;
use crate::open_archive::{WriterArgs, creator};
use crate::output;
use crate::secrets::{self, KdfArgs, SeenArgs};

/// Create an empty archive
#[derive(clap::Args)]
pub(crate) struct Args {
    /// The archive: a file, which must not exist, or the address of a place for one: s3://BUCKET/NAME (or gs://, az://) or file:///DIRECTORY
    archive: PathBuf,
    #[command(flatten)]
    sources: PassphraseSources,
    #[command(flatten)]
    remote: RemoteArgs,
    #[command(flatten)]
    writer: WriterArgs,
    /// Make a passphrase of six words and print it, once
    #[arg(long, conflicts_with_all = ["passfile", "passfd", "passcommand", "credential", "ask_password"])]
    generate_passphrase: bool,
    /// Make a recovery code too and print it, once
    #[arg(long)]
    generate_recovery_code: bool,
    #[command(flatten)]
    kdf: KdfArgs,
}

pub(crate) fn run(args: &Args) -> Result<(), Failure> {
    let path = &args.archive;
    args.writer.check(path)?;
    // Checked before the passphrase prompt; the creation itself refuses an existing archive too.
    let bucket = match remote::is_remote(path) {
        true => Some(come(args)?),
        false if path.symlink_metadata().is_ok() => return Err(exists(path)),
        false => None,
    };
    let passphrase = match args.generate_passphrase {
        true => {
            let words = keys::new_passphrase()?;
            // Printed before the archive exists: an archive whose passphrase could not be shown
            // would be lost.
            output::print(&words)?;
            Passphrase::new(words.as_bytes().to_vec())
        }
        false => secrets::to_set(&args.sources, path)?,
    };
    let sees = args.sources.advises();
    let is_file = bucket.is_none();
    let options = CreateOptions { kdf: args.kdf.cost(sees)?, creator: creator() };
    let code = match bucket {
        None => make_file(args, passphrase, &options)?,
        Some(bucket) => make_elsewhere(args, bucket, passphrase, &options)?,
    };
    if let Some((slot, code)) = &code {
        key::print_recovery_code(path, *slot, code)?;
    }
    if sees {
        let name = shown(path);
        if args.generate_recovery_code {
            output::show("If you lose the passphrase and the recovery code, the files are lost.");
        } else {
            output::show("If you lose the passphrase, the files are lost.");
            output::show(&format!("For a second way in, print a recovery code: lockbox key recovery {name}"));
        }
        if is_file {
            // Without a suffix there is no default name for a mount point in the same directory.
            let directory = if path.extension().is_some() { "" } else { " DIRECTORY" };
            output::show(&format!("Use it as a folder: lockbox mount {name}{directory}"));
            output::show("Deleted files are erased; -o snapshots=hourly:24,daily:7 keeps versions.");
        } else {
            output::show(&format!("Put files into it: lockbox add {name} FILE"));
        }
    }
    Ok(())
}

fn exists(path: &Path) -> Failure {
    Failure::other(format!("{} exists already and was not changed", shown(path)))
}

/// Opens a place without an archive as a writer.
fn come(args: &Args) -> Result<Bucket, Failure> {
    let (path, remote) = (&args.archive, &args.remote.remote);
    remote::check_writable(path).map_err(|error| Failure::at(path, &error))?;
    match ArchiveLocation::at(path, remote) {
        Ok(_) => return Err(exists(path)),
        // The place is empty, or an earlier writer has not committed anything.
        Err(Error::NotArchive(_)) => {}
        Err(Error::Io { source, .. }) if source.kind() == std::io::ErrorKind::NotFound => {}
        Err(error) => return Err(Failure::at(path, &error)),
    }
    let mut bucket = args.writer.begin(path, remote)?;
    match bucket.open_existing() {
        Ok(None) => Ok(bucket),
        Ok(Some(_)) => Err(exists(path)),
        Err(error) => Err(Failure::at(path, &error)),
    }
}

type Code = Option<(u8, RecoveryCode)>;

fn make_file(args: &Args, passphrase: Passphrase, options: &CreateOptions) -> Result<Code, Failure> {
    let path = &args.archive;
    let working = Spinner::deriving(args.sources.advises());
    Archive::create_seen(path, &passphrase, options, &seen(args)).map_err(|error| match error {
        Error::Exists => exists(path),
        error => Failure::at(path, &error),
    })?;
    drop(working);
    let code =
        args.generate_recovery_code.then(|| add_recovery_code(args, ArchiveSource::File(path), passphrase)).transpose();
    code.inspect_err(|_| {
        output::complain("the archive was created without a recovery code: 'lockbox key recovery' adds one");
    })
}

/// One commit makes all of it visible.
fn make_elsewhere(
    args: &Args,
    mut bucket: Bucket,
    passphrase: Passphrase,
    options: &CreateOptions,
) -> Result<Code, Failure> {
    let failed = |error: Error| Failure::at(&args.archive, &error);
    let storage = bucket.create_empty().map_err(failed)?;
    let working = Spinner::deriving(args.sources.advises());
    let created = Archive::create_in_seen(&storage, &passphrase, options, &seen(args)).map_err(failed)?;
    drop(working);
    let code =
        args.generate_recovery_code.then(|| add_recovery_code(args, ArchiveSource::Storage(&storage), passphrase));
    let code = code.transpose()?;
    bucket.publish().map_err(failed)?;
    created.remember();
    Ok(code)
}

/// Options of the user's memory for the place.
fn seen(args: &Args) -> SeenOptions {
    SeenArgs::default().options(&args.archive)
}

fn add_recovery_code(
    args: &Args,
    site: ArchiveSource<'_>,
    passphrase: Passphrase,
) -> Result<(u8, RecoveryCode), Failure> {
    let _working = Spinner::deriving(args.sources.advises());
    let code = keys::new_recovery_code()?;
    let secrets = Secrets::from(passphrase);
    let limits = lockbox_host::unlock_limits(None);
    // The archive was just created, so remembered state of the place does not apply.
    let access = KeyAccess { secrets: &secrets, limits, seen: SeenOptions { places: Vec::new(), ..seen(args) } };
    let slot = keys::add(site, &access, &NewKey::RecoveryCode(&code), "");
    slot.map(|slot| (slot, code)).map_err(|error| Failure::at(&args.archive, &error))
}
