//! Opens the archive for a command; runs cheap checks before prompting.
use std::cell::{Cell, OnceCell};
use std::ffi::OsString;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use clap::builder::{PossibleValuesParser, TypedValueParser};
use lockbox::Error;
use lockbox::archive::{Archive, OpenOptions};
use lockbox::crypto::Passphrase;
use lockbox::exchange::{Filter, ImportOptions, resolve};
use lockbox::fs::{Attributes, Compression, Creator, FileSystem, mode};
use lockbox::keys::{self, RollbackOptions, Secrets, UnlockedKey};
use lockbox::storage::{ArchiveSource, FileStorage, LockMode};
use lockbox_host::daemons::{self, Holder};
use lockbox_host::remote::{self, ArchiveLocation, Bucket, RemoteArgs};
use lockbox_host::secrets::{Cache, Sources};
use lockbox_host::{NO_ARCHIVE, NOT_ARCHIVE, Program, Spinner, code, located, mounts, shown};
use lockbox_terminal::display;
use nix::unistd::{getegid, geteuid};

use crate::exit::{Failure, Lockbox, mount_point};
use crate::interrupt::{self, Interrupt};
use crate::output;
use crate::paths::{Named, in_one_archive};
use crate::progress::Bar;
use crate::secrets::{LimitArgs, SeenArgs};

/// The archive and its unlocking options
#[derive(clap::Args, Default)]
pub(crate) struct ArchiveArgs {
    /// The archive: a file, or an address such as s3://BUCKET/NAME (or gs://, az://), file:///DIRECTORY or, for reading, https://HOST/NAME
    pub(crate) archive: PathBuf,
    #[command(flatten)]
    pub(crate) opening: OpeningArgs,
    /// Where it is, once that was asked for: what is at an address is opened once.
    #[arg(skip)]
    place: OnceCell<ArchiveLocation>,
    /// The same once this process writes there. It goes with this.
    #[arg(skip)]
    writing: OnceCell<ArchiveLocation>,
    #[arg(skip)]
    compression: Cell<Compression>,
    /// Standard input is data of the command, not the passphrase.
    #[arg(skip)]
    input_taken: Cell<bool>,
}

/// Compression of the copied data
#[derive(clap::Args, Clone, Copy)]
pub(crate) struct CompressionArgs {
    /// Compression of the copied data: off, fast, default or best
    #[arg(long = "compress", value_name = "LEVEL", value_parser = compression_levels(), hide_possible_values = true)]
    level: Option<Compression>,
}

impl CompressionArgs {
    pub(crate) fn is_given(self) -> bool {
        self.level.is_some()
    }
}

pub(crate) fn compression_levels() -> impl TypedValueParser<Value = Compression> {
    let named = |name: String| Compression::LEVELS.into_iter().find(|(known, _)| *known == name);
    PossibleValuesParser::new(Compression::LEVELS.map(|(name, _)| name))
        .map(move |name| named(name).expect("clap accepts known names only").1)
}

/// Other writers of the archive
#[derive(clap::Args, Clone, Copy, Default)]
pub(crate) struct WriterArgs {
    /// Go on although another machine seems to be writing to the archive at the address; its uncommitted changes are lost
    #[arg(long)]
    pub(crate) take_over: bool,
}

impl WriterArgs {
    /// Opens the remote archive as its writer.
    pub(crate) fn come(self, address: &Path, remote: &remote::RemoteOptions) -> Result<ArchiveLocation, Failure> {
        let place = ArchiveLocation::open_writable(address, remote, self.take_over);
        let place = place.map_err(|error| in_use_elsewhere(address, self.take_over, error))?;
        place.notice().into_iter().for_each(output::complain);
        Ok(place)
    }

    /// Errors: usage, when `--take-over` is given for an archive without remote writers.
    pub(crate) fn check(self, archive: &Path) -> Result<(), Failure> {
        match self.take_over && !remote::is_remote(archive) {
            true => Err(Failure::usage(
                "--take-over is for archives in object stores: only they can have a writer on another machine",
            )),
            false => Ok(()),
        }
    }
}

/// Returns the archive at a path of this host. A mount point is refused before it is opened: a
/// daemon that is stopped would never answer. Later errors do not show which file was missing, so
/// the archive is looked for here.
pub(crate) fn of_host(archive: &Path) -> Result<ArchiveLocation, Failure> {
    if let Some(mounted) = located::root_at(archive, &mounts::all()) {
        return Err(mount_point(archive, mounted, NOT_ARCHIVE));
    }
    match archive.metadata() {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            Err(Failure::new(NO_ARCHIVE, format!("cannot open {}: {error}", shown(archive))))
        }
        _ => Ok(ArchiveLocation::file(archive)),
    }
}

/// Returns the location of an archive, to read its keys.
pub(crate) fn place(archive: &Path, remote: &RemoteArgs) -> Result<ArchiveLocation, Failure> {
    match remote::is_remote(archive) {
        true => ArchiveLocation::open(archive, &remote.remote).map_err(|error| Lockbox::failure(archive, error)),
        false => of_host(archive),
    }
}

/// Returns the location of an archive, to change its keys; fails when it is in use.
pub(crate) fn place_to_change(
    archive: &Path,
    remote: &RemoteArgs,
    writer: WriterArgs,
) -> Result<ArchiveLocation, Failure> {
    let place = place_to_restore(archive, remote, writer)?;
    match place.is_remote() {
        true => Ok(place),
        false => probe(archive, LockMode::Exclusive).map(|()| place),
    }
}

/// Like [`place_to_change`], for an archive that may have lost its header.
pub(crate) fn place_to_restore(
    archive: &Path,
    remote: &RemoteArgs,
    writer: WriterArgs,
) -> Result<ArchiveLocation, Failure> {
    writer.check(archive)?;
    match remote::is_remote(archive) {
        true => writer.come(archive, &remote.remote),
        false => of_host(archive),
    }
}

/// Opens an address, which may have no archive yet, as its writer. `is_ours`: no other party
/// creates names in its directory.
pub(crate) fn begin(
    address: &Path,
    remote: &remote::RemoteOptions,
    take_over: bool,
    is_ours: bool,
) -> Result<Bucket, Failure> {
    let bucket = remote::write(address, remote, take_over, is_ours);
    let bucket = bucket.map_err(|error| in_use_elsewhere(address, take_over, error))?;
    bucket.notice().into_iter().for_each(output::complain);
    Ok(bucket)
}

/// Returns the failure of becoming the writer; names the mount of this user that holds the archive.
fn in_use_elsewhere(address: &Path, takes_over: bool, error: Error) -> Failure {
    // Read-only mounts do not block.
    let serves_for_writing = || matches!(daemons::holder(address), Holder::Serves(status) if !status.read_only);
    match &error {
        Error::InUse(_) if serves_for_writing() => Lockbox::failure(address, error),
        _ => in_the_way(address, takes_over, &error),
    }
}

/// Returns the failure of becoming the writer, without looking for mounts.
pub(crate) fn in_the_way(address: &Path, takes_over: bool, error: &Error) -> Failure {
    match error {
        Error::InUse(why) if !takes_over => {
            Failure::new(code(error), why).advised("; --take-over goes on in its place")
        }
        _ => Failure::at(address, error),
    }
}

/// Unlocking options of any archive
#[derive(clap::Args, Clone, Default)]
pub(crate) struct OpeningArgs {
    #[command(flatten)]
    pub(crate) sources: Sources,
    #[command(flatten)]
    cache: Cache,
    #[command(flatten)]
    limit: LimitArgs,
    #[command(flatten)]
    seen: SeenArgs,
    #[command(flatten)]
    remote: RemoteArgs,
}

impl OpeningArgs {
    pub(crate) fn of(&self, archive: PathBuf) -> ArchiveArgs {
        ArchiveArgs { archive, opening: self.clone(), ..ArchiveArgs::default() }
    }
}

/// Snapshot to read
#[derive(clap::Args, Default)]
pub(crate) struct SnapshotViewArgs {
    /// Read the content of this snapshot, not the current content
    #[arg(long, value_name = "NAME")]
    snapshot: Option<OsString>,
}

impl ArchiveArgs {
    /// Returns the archive alone, and the paths in it: those after it, or its own and theirs when
    /// each is `ARCHIVE:PATH`.
    pub(crate) fn and_paths<'p>(
        &'p self,
        paths: impl IntoIterator<Item = &'p OsString>,
    ) -> Result<(ArchiveArgs, Vec<Vec<u8>>), Failure> {
        let first = self.archive.as_os_str();
        let (archive, paths) = match Named::of(first)? {
            Named::Whole(archive) => (archive, paths.into_iter().map(|path| path.as_bytes().to_vec()).collect()),
            Named::Within { .. } => {
                in_one_archive(std::iter::once(first).chain(paths.into_iter().map(OsString::as_os_str)))?
            }
        };
        Ok((self.opening.of(archive), paths))
    }

    pub(crate) fn read(&self) -> Result<Archive, Failure> {
        self.read_at(&SnapshotViewArgs::default())
    }

    pub(crate) fn read_at(&self, view: &SnapshotViewArgs) -> Result<Archive, Failure> {
        self.probe(None)?;
        self.open_at(&self.unlock()?, None, view)
    }

    /// Opens for reading and watches for signals, for commands that roll back when interrupted.
    pub(crate) fn read_watched(&self, view: &SnapshotViewArgs) -> Result<(Archive, Interrupt), Failure> {
        let (key, interrupt) = self.unlock_watched(None, Interrupt::watch)?;
        Ok((self.open_at(&key, None, view)?, interrupt))
    }

    /// Like [`Self::read_watched`], for a check of all bytes.
    pub(crate) fn read_all_watched(&self) -> Result<(Archive, Interrupt), Failure> {
        self.place_of(|| ArchiveLocation::open_for_check(&self.archive, self.remote()))?;
        self.read_watched(&SnapshotViewArgs::default())
    }

    /// Opens for writing and watches for signals, for commands that leave the rest to a later one.
    pub(crate) fn write_watched(&self, writer: WriterArgs) -> Result<(Archive, Interrupt), Failure> {
        self.write_beside(writer, Interrupt::watch)
    }

    fn unlock_watched<W>(
        &self,
        writer: Option<WriterArgs>,
        watch: impl FnOnce() -> Result<W, Failure>,
    ) -> Result<(UnlockedKey, W), Failure> {
        self.probe(writer)?;
        let key = self.unlock()?;
        Ok((key, watch()?))
    }

    /// Leaves standard input to the command as data: it is not read for the passphrase.
    pub(crate) fn take_input(&self) {
        self.input_taken.set(true);
    }

    /// Opens for writing, for a command that watches for signals itself.
    pub(crate) fn write_beside<W>(
        &self,
        writer: WriterArgs,
        watch: impl FnOnce() -> Result<W, Failure>,
    ) -> Result<(Archive, W), Failure> {
        let (key, watch) = self.unlock_watched(Some(writer), watch)?;
        Ok((self.open_at(&key, Some(writer), &SnapshotViewArgs::default())?, watch))
    }

    /// Opens for writing, and watches for signals; returns the key too. `new`: passphrase of an
    /// archive that was just created.
    pub(crate) fn write_keyed(
        &self,
        writer: WriterArgs,
        new: Option<Passphrase>,
    ) -> Result<(Archive, UnlockedKey, Interrupt), Failure> {
        self.probe(Some(writer))?;
        let key = match new {
            None => self.unlock()?,
            Some(passphrase) => {
                let _working = Spinner::deriving(self.opening.sources.passphrase.advises());
                let opened =
                    keys::unlock_with(self.source()?, &Secrets::from(passphrase), &self.opening.limit.limits());
                opened.map_err(|error| self.failure(error))?
            }
        };
        let interrupt = Interrupt::watch()?;
        Ok((self.open_at(&key, Some(writer), &SnapshotViewArgs::default())?, key, interrupt))
    }

    /// Compresses new data as `args` say, once the archive is opened.
    pub(crate) fn set_compression(&self, args: CompressionArgs) {
        self.compression.set(args.level.unwrap_or_default());
    }

    /// Opens the archive for backups: one that was not closed is repaired first.
    pub(crate) fn read_for_backup(&self) -> Result<(Archive, Interrupt), Failure> {
        let (key, interrupt) = self.unlock_watched(None, Interrupt::watch)?;
        let opened = Archive::open_for_backup(self.source()?, &key, &self.seen());
        Ok((self.with_notices(opened)?, interrupt))
    }

    pub(crate) fn bar(&self) -> Bar {
        Bar::new(self.opening.sources.passphrase.quiet)
    }

    /// Returns the server options of the archive and of other addresses on the command line.
    pub(crate) fn remote(&self) -> &remote::RemoteOptions {
        &self.opening.remote.remote
    }

    pub(crate) fn write(&self, writer: WriterArgs) -> Result<Archive, Failure> {
        self.write_beside(writer, || Ok(())).map(|(archive, ())| archive)
    }

    pub(crate) fn close(&self, archive: Archive) -> Result<(), Failure> {
        archive.close().map_err(|error| self.failure(error))
    }

    pub(crate) fn failure(&self, error: Error) -> Failure {
        Lockbox::failure(&self.archive, error)
    }

    /// Returns the failure; that of an interrupted command has the words `kept` about its state.
    pub(crate) fn failure_or_interrupted(&self, error: Error, kept: &str) -> Failure {
        match error {
            Error::Interrupted(_) => interrupt::failure(&error, kept),
            error => self.failure(error),
        }
    }

    /// Makes one durable change. An archive that is not closed stays as it was, unless the change
    /// was so large that a part had to be made durable before.
    pub(crate) fn change<T>(
        &self,
        writer: WriterArgs,
        change: impl FnOnce(&FileSystem) -> lockbox::Result<T>,
    ) -> Result<T, Failure> {
        let archive = self.write(writer)?;
        let changed = change(archive.file_system()).map_err(|error| self.failure(error))?;
        self.close(archive).map(|()| changed)
    }

    pub(crate) fn unlock_damaged(&self) -> Result<(UnlockedKey, &ArchiveLocation), Failure> {
        let path = &self.archive;
        let place = self.place_of(|| ArchiveLocation::open_damaged(path, self.remote()))?;
        if !place.is_remote() {
            FileStorage::open(path, LockMode::Shared).map_err(|error| self.failure(error))?;
        }
        let limits = self.opening.limit.limits();
        let key = lockbox_host::unlock_damaged(place.source(), path, &self.opening.sources, &limits)?;
        keys::check_place(&key, &self.seen()).map_err(|error| self.failure(error))?;
        Ok((key, place))
    }

    /// Unlocks the archive as its only writer; returns the key and the location.
    pub(crate) fn unlock_alone(&self, writer: WriterArgs) -> Result<(UnlockedKey, &ArchiveLocation), Failure> {
        self.probe(Some(writer))?;
        let key = self.unlock()?;
        self.come(writer)?;
        Ok((key, self.place()?))
    }

    /// Returns the key that the keyring caches, or the one that the secrets open.
    fn unlock(&self) -> Result<UnlockedKey, Failure> {
        let mut sources = self.opening.sources.clone();
        sources.passphrase.input_taken |= self.input_taken.get();
        let OpeningArgs { cache, limit, .. } = &self.opening;
        let (key, refused) = lockbox_host::unlock(self.source()?, &self.archive, &sources, cache, &limit.limits())?;
        refused.iter().for_each(|sentence| output::complain(sentence));
        Ok(key)
    }

    /// Returns the rollback options, for commands that open the archive themselves.
    pub(crate) fn seen(&self) -> RollbackOptions {
        let seen = self.opening.seen.options(&self.archive);
        // Data that no store has need not be found again.
        let is_unsent = self.remote().unsent && remote::is_remote(&self.archive);
        RollbackOptions { directory: seen.directory.filter(|_| !is_unsent), ..seen }
    }

    pub(crate) fn read_with(&self, key: &UnlockedKey) -> Result<Archive, Failure> {
        self.open_at(key, None, &SnapshotViewArgs::default())
    }

    fn open_at(
        &self,
        key: &UnlockedKey,
        writer: Option<WriterArgs>,
        view: &SnapshotViewArgs,
    ) -> Result<Archive, Failure> {
        if let Some(writer) = writer {
            self.come(writer)?;
        }
        let site = self.source()?;
        let options =
            OpenOptions { read_only: writer.is_none(), compression: self.compression.get(), ..OpenOptions::default() };
        let seen = self.seen();
        let archive = match &view.snapshot {
            None => Archive::open_seen(site, key, &options, &seen),
            Some(name) => Archive::open_snapshot(site, key, &options, &seen, name.as_bytes()),
        };
        self.with_notices(archive)
    }

    fn source(&self) -> Result<ArchiveSource<'_>, Failure> {
        self.place().map(ArchiveLocation::source)
    }

    pub(crate) fn place(&self) -> Result<&ArchiveLocation, Failure> {
        self.place_of(|| ArchiveLocation::open(&self.archive, self.remote()))
    }

    /// Returns the location that is open already, or calls `open` for an address.
    fn place_of(&self, open: impl FnOnce() -> lockbox::Result<ArchiveLocation>) -> Result<&ArchiveLocation, Failure> {
        if let Some(place) = self.writing.get().or_else(|| self.place.get()) {
            return Ok(place);
        }
        let place = match remote::is_remote(&self.archive) {
            true => open().map_err(|error| self.failure(error))?,
            false => of_host(&self.archive)?,
        };
        Ok(self.place.get_or_init(|| place))
    }

    /// Becomes the writer of a remote archive; a local one is locked when it is opened.
    fn come(&self, writer: WriterArgs) -> Result<(), Failure> {
        if self.writing.get().is_none() && remote::is_remote(&self.archive) {
            let place = writer.come(&self.archive, self.remote())?;
            self.writing.get_or_init(|| place);
        }
        Ok(())
    }

    /// Fails early when the archive does not exist, or when it is in use.
    fn probe(&self, writer: Option<WriterArgs>) -> Result<(), Failure> {
        if let Some(writer) = writer {
            writer.check(&self.archive)?;
            // A writer takes over with the right key, and not before.
            if !writer.take_over {
                self.come(writer)?;
            }
        }
        match self.source()? {
            ArchiveSource::File(path) => {
                probe(path, if writer.is_some() { LockMode::Exclusive } else { LockMode::Shared })
            }
            site => keys::identify(site).map(drop).map_err(|error| self.failure(error)),
        }
    }

    fn with_notices(&self, opened: lockbox::Result<Archive>) -> Result<Archive, Failure> {
        let archive = opened.map_err(|error| self.failure(error))?;
        let info = archive.info().map_err(|error| self.failure(error))?;
        for sentence in info.notices() {
            output::complain(&format!("{}: {sentence}", shown(&self.archive)));
        }
        Ok(archive)
    }
}

pub(crate) fn regular_file(fs: &FileSystem, path: &[u8]) -> Result<Attributes, Failure> {
    let failed = |error| Failure::of(display(path), &error);
    let attributes = resolve(fs, path).map_err(failed)?;
    match attributes.mode & mode::TYPE {
        mode::REGULAR => Ok(attributes),
        mode::DIRECTORY => Err(failed(Error::IsDirectory)),
        _ => Err(Failure::other(format!("{}: not a regular file", display(path)))),
    }
}

/// Passes the content of a regular file to `take`, in pieces of at most `most` bytes.
pub(crate) fn read_file(
    fs: &FileSystem,
    path: &[u8],
    most: usize,
    take: &mut dyn FnMut(&[u8]) -> Result<(), Failure>,
) -> Result<(), Failure> {
    let attributes = regular_file(fs, path)?;
    let (mut offset, mut piece) = (0, Vec::new());
    while offset < attributes.size {
        let length = fs.read_into(attributes.ino, offset, most, &mut piece);
        let length = length.map_err(|error| Failure::of(display(path), &error))?;
        if length == 0 {
            break;
        }
        take(&piece[..length])?;
        offset += length as u64;
    }
    Ok(())
}

/// Fails early when `path` is not an archive or is in use.
pub(crate) fn probe(path: &Path, mode: LockMode) -> Result<(), Failure> {
    keys::identify(path).map_err(|error| Lockbox::failure(path, error))?;
    FileStorage::open(path, mode).map(drop).map_err(|error| Lockbox::failure(path, error))
}

/// Returns the options of a copy into the directory `to` of an archive that replaces and leaves out
/// nothing.
pub(crate) fn import_options(to: Vec<u8>) -> ImportOptions {
    ImportOptions {
        to,
        name: None,
        follow: false,
        replace: false,
        creator: creator(),
        filter: Filter::default(),
        one_file_system: false,
        mirror: None,
    }
}

/// Owner of new entries: the user that runs the program.
pub(crate) fn creator() -> Creator {
    Creator { uid: geteuid().as_raw(), gid: getegid().as_raw(), umask: None }
}
