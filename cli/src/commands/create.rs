//! `lockbox create`: makes an empty archive.
//!
//! With `--desktop` every question is asked before the archive is made, so a window that is closed
//! leaves nothing. With `--open` the mount point is checked before too: an archive that could not
//! be opened by a double click is not made.
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use lockbox::Error;
use lockbox::archive::{Archive, CreateOptions};
use lockbox::crypto::{Passphrase, RecoveryCode};
use lockbox::keys::{self, KeyAccess, NewKey, RollbackOptions, Secrets};
use lockbox::storage::ArchiveSource;
use lockbox_host::proc::CoreLimit;
use lockbox_host::remote::{self, ArchiveLocation, Bucket, RemoteArgs};
use lockbox_host::secrets::{PassphraseSources, desktop};
use lockbox_host::{Spinner, shown};

use crate::commands::{key, mount};
use crate::exit::Failure;
use crate::open_archive::{ArchiveArgs, WriterArgs, begin, creator};
use crate::output;
use crate::secrets::{KdfArgs, SeenArgs};

/// Create an empty archive
#[derive(clap::Args, Default)]
pub(crate) struct Args {
    /// The archive: a file, which must not exist, or the address of a place for one: s3://BUCKET/NAME (or gs://, az://) or file:///DIRECTORY
    #[arg(required_unless_present = "desktop")]
    archive: Option<PathBuf>,
    /// Ask for the passphrase in windows, with zenity, kdialog or pinentry, and without ARCHIVE for
    /// its file
    #[arg(long, conflicts_with_all = ["generate_passphrase", "generate_recovery_code"])]
    desktop: bool,
    /// Mount the archive and show it in the file manager
    #[arg(long, requires = "desktop")]
    open: bool,
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

/// Extension of a file that was chosen in a window without one.
const EXTENSION: &str = ".lbx";

pub(crate) fn run(args: &Args, cores: CoreLimit) -> Result<(), Failure> {
    let (path, passphrase) = ask_and_create(args).inspect_err(|failure| {
        if args.desktop && !failure.message.is_empty() {
            desktop::tell(&failure.message);
        }
    })?;
    if args.open { mount::open_new(&path, &passphrase, args.sources.quiet, cores) } else { Ok(()) }
}

/// Returns the archive and its passphrase.
fn ask_and_create(args: &Args) -> Result<(PathBuf, Passphrase), Failure> {
    let path = match &args.archive {
        Some(path) => path.clone(),
        None => with_extension(desktop::ask_new_file("new encrypted archive", &format!("Archive{EXTENSION}"))?),
    };
    let passphrase = create(args, &path)?;
    if args.sources.advises() && !args.open {
        tell_use(&path);
    }
    Ok((path, passphrase))
}

/// Shows how to put files into a new archive.
fn tell_use(path: &Path) {
    let name = shown(path);
    if remote::is_remote(path) {
        output::show(&format!("Put files into it: lockbox add {name} FILE"));
    } else {
        // Without a suffix there is no default name for a mount point in the same directory.
        let directory = if path.extension().is_some() { "" } else { " DIRECTORY" };
        output::show(&format!("Use it as a folder: lockbox mount {name}{directory}"));
        output::show("Deleted files are erased; -o snapshots=hourly:24,daily:7 keeps versions.");
    }
}

/// Adds the extension to a name without one. Text with a space is not an extension, as in
/// `Letters to Dr. Smith`.
fn with_extension(path: PathBuf) -> PathBuf {
    let is_extension = |text: &OsStr| !text.is_empty() && !text.as_bytes().contains(&b' ');
    if path.extension().is_some_and(is_extension) {
        return path;
    }
    let mut path = path.into_os_string();
    path.push(EXTENSION);
    path.into()
}

/// Creates the archive of a first backup with the secrets that open it later; returns its
/// passphrase.
pub(crate) fn for_backup(path: &Path, opening: &ArchiveArgs, writer: WriterArgs) -> Result<Passphrase, Failure> {
    let sources = &opening.opening.sources;
    if sources.names_file() {
        return Err(Failure::usage(format!(
            "{} does not exist, and a new archive begins with a passphrase; make it with 'lockbox create' and 'lockbox key add'",
            shown(path)
        )));
    }
    let args = Args {
        archive: Some(path.to_owned()),
        sources: sources.passphrase.clone(),
        remote: RemoteArgs { remote: opening.remote().clone() },
        writer,
        ..Args::default()
    };
    create(&args, path)
}

fn create(args: &Args, path: &Path) -> Result<Passphrase, Failure> {
    args.writer.check(path)?;
    // Checked before the passphrase prompt; the creation itself refuses an existing archive too.
    let is_file = !remote::is_remote(path);
    if is_file && path.symlink_metadata().is_ok() {
        return Err(exists(path));
    }
    if args.open {
        mount::check_new(path)?;
    }
    let bucket = if is_file { None } else { Some(come(args, path)?) };
    let sources = PassphraseSources { desktop: args.desktop, ..args.sources.clone() };
    let passphrase = match args.generate_passphrase {
        true => {
            let words = keys::new_passphrase()?;
            // Printed before the archive exists: an archive whose passphrase could not be shown
            // would be lost.
            output::print(&words)?;
            Passphrase::new(words.as_bytes().to_vec())
        }
        false => sources.new_passphrase(path)?.into(),
    };
    let sees = args.sources.advises();
    let options = CreateOptions { kdf: args.kdf.cost(sees)?, creator: creator() };
    let code = match bucket {
        None => make_file(args, path, &passphrase, &options)?,
        Some(bucket) => make_elsewhere(args, path, bucket, &passphrase, &options)?,
    };
    if let Some((slot, code)) = &code {
        key::print_recovery_code(path, *slot, code)?;
    }
    if sees && !args.open {
        let name = shown(path);
        if args.generate_recovery_code {
            output::show("If you lose the passphrase and the recovery code, the files are lost.");
        } else {
            output::show("If you lose the passphrase, the files are lost.");
            output::show(&format!("For a second way in, print a recovery code: lockbox key recovery {name}"));
        }
    }
    Ok(passphrase)
}

fn exists(path: &Path) -> Failure {
    Failure::other(format!("{} already exists and was not changed", shown(path)))
}

/// Returns whether there is no archive yet: no file of this name or, at an address, no commit.
pub(crate) fn is_free(path: &Path, remote: &remote::RemoteOptions) -> Result<bool, Failure> {
    if !remote::is_remote(path) {
        return Ok(path.symlink_metadata().is_err());
    }
    remote::check_writable(path).map_err(|error| Failure::at(path, &error))?;
    match ArchiveLocation::open(path, remote) {
        Ok(_) => Ok(false),
        // The place is empty, or an earlier writer has not committed anything.
        Err(Error::NotArchive(_)) => Ok(true),
        Err(Error::Io { source, .. }) if source.kind() == std::io::ErrorKind::NotFound => Ok(true),
        Err(error) => Err(Failure::at(path, &error)),
    }
}

fn come(args: &Args, path: &Path) -> Result<Bucket, Failure> {
    let remote = &args.remote.remote;
    if !is_free(path, remote)? {
        return Err(exists(path));
    }
    let mut bucket = begin(path, remote, args.writer.take_over, true)?;
    match bucket.open_existing() {
        Ok(None) => Ok(bucket),
        Ok(Some(_)) => Err(exists(path)),
        Err(error) => Err(Failure::at(path, &error)),
    }
}

type Code = Option<(u8, RecoveryCode)>;

fn make_file(args: &Args, path: &Path, passphrase: &Passphrase, options: &CreateOptions) -> Result<Code, Failure> {
    let working = Spinner::deriving(args.sources.advises());
    Archive::create_seen(path, passphrase, options, &seen(path)).map_err(|error| match error {
        Error::Exists => exists(path),
        error => Failure::at(path, &error),
    })?;
    drop(working);
    add_recovery_code(args, path, ArchiveSource::File(path), passphrase).inspect_err(|_| {
        output::complain("the archive was created without a recovery code: 'lockbox key recovery' adds one");
    })
}

/// One commit makes all of it visible.
fn make_elsewhere(
    args: &Args,
    path: &Path,
    mut bucket: Bucket,
    passphrase: &Passphrase,
    options: &CreateOptions,
) -> Result<Code, Failure> {
    let failed = |error: Error| Failure::at(path, &error);
    let storage = bucket.create_empty().map_err(failed)?;
    let working = Spinner::deriving(args.sources.advises());
    let created = Archive::create_in(&storage, passphrase, options, &seen(path)).map_err(failed)?;
    drop(working);
    let code = add_recovery_code(args, path, ArchiveSource::Storage(&storage), passphrase)?;
    bucket.publish().map_err(failed)?;
    created.remember();
    Ok(code)
}

fn seen(path: &Path) -> RollbackOptions {
    SeenArgs::default().options(path)
}

fn add_recovery_code(
    args: &Args,
    path: &Path,
    site: ArchiveSource<'_>,
    passphrase: &Passphrase,
) -> Result<Code, Failure> {
    if !args.generate_recovery_code {
        return Ok(None);
    }
    let _working = Spinner::deriving(args.sources.advises());
    let code = keys::new_recovery_code()?;
    let secrets = Secrets::from(Passphrase::new(passphrase.bytes().to_vec()));
    let limits = lockbox_host::unlock_limits(None);
    // The archive was just created, so remembered state of the place does not apply.
    let access = KeyAccess { secrets: &secrets, limits, seen: RollbackOptions { places: Vec::new(), ..seen(path) } };
    let slot = keys::add(site, &access, &NewKey::RecoveryCode(&code), "");
    slot.map(|slot| Some((slot, code))).map_err(|error| Failure::at(path, &error))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_without_an_extension_gets_one() {
        for (chosen, made) in [
            ("/a/Taxes", "/a/Taxes.lbx"),
            ("/a/Taxes.lbx", "/a/Taxes.lbx"),
            ("/a/Taxes.img", "/a/Taxes.img"),
            ("/a.b/Taxes", "/a.b/Taxes.lbx"),
            ("/a/.taxes", "/a/.taxes.lbx"),
            ("/a/Letters to Dr. Smith", "/a/Letters to Dr. Smith.lbx"),
            ("/a/x.", "/a/x..lbx"),
            ("/a/-x\n", "/a/-x\n.lbx"),
        ] {
            assert_eq!(with_extension(chosen.into()), Path::new(made));
        }
    }
}
