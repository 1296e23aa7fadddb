//! `lockbox backup`: copies a snapshot of an archive, mounted or not, into a file of its own or
//! into an object store; and directories of the host into an archive with a history.
mod directory;

use std::io::{self, IsTerminal, Write};
use std::net::Shutdown;
use std::os::fd::AsFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant, SystemTime};

use lockbox::Error;
use lockbox::archive::{ArchiveId, BackupDestination, BackupReport, BackupSource, BackupStep};
use lockbox::error::Refusal;
use lockbox::keys::{self, Fingerprint};
use lockbox::storage::{FileIdentity, FileStorage, Storage, serve_storage};
use lockbox_host::{IN_USE, Program, remote, shown};
use rustix::fs::{Mode, OFlags};
use serde_json::json;

use crate::commands::snapshot::KeepArgs;
use crate::exit::{self, Failure, Lockbox};
use crate::interrupt::{self, Interrupt};
use crate::metrics::{self, MetricsText, labels};
use crate::open_archive::{ArchiveArgs, CompressionArgs, begin};
use crate::output::{Output, Reader, rfc3339};
use crate::paths::PatternArgs;
use crate::progress::Bar;
use crate::secrets::SeenArgs;
use crate::snapshot_client::Mounted;

/// Copy an archive or a directory into a file or an object store, or update such a copy; each run with a directory makes a snapshot
#[derive(clap::Args)]
#[command(mut_arg("archive", |arg| {
    // A changed argument is moved behind the others.
    arg.index(1).value_name("SOURCE").help("The archive, by its file, its address or its mount point; or a directory of this host")
}))]
pub(crate) struct Args {
    #[command(flatten)]
    archive: ArchiveArgs,
    /// The file, or the address of a place for objects: s3://BUCKET/NAME (or gs://, az://) or file:///DIRECTORY; - for standard output. An existing backup must be
    /// one of the archive or directory, and receives the changes since
    #[arg(value_name = "DEST", index = 2)]
    destination: PathBuf,
    /// Go on although another machine seems to be writing to the backup; its uncommitted changes are lost
    #[arg(long)]
    take_over: bool,
    /// Read the backup back and compare it with the archive: all of it, or PERCENT of the file
    /// data, chosen at random
    #[arg(long, value_name = "PERCENT", num_args = 0..=1, require_equals = true, default_missing_value = "100")]
    #[arg(value_parser = clap::value_parser!(u8).range(1..=100))]
    verify: Option<u8>,
    /// After success write the time, duration and amount to FILE, in the text format of OpenMetrics
    #[arg(long, value_name = "FILE")]
    metrics: Option<PathBuf>,
    #[command(flatten)]
    patterns: PatternArgs,
    /// Do not descend into directories on other file systems
    #[arg(long)]
    one_file_system: bool,
    /// Go on when more than half of the destination would be deleted
    #[arg(long)]
    delete_most: bool,
    /// Go on when the directory is empty
    #[arg(long)]
    from_empty: bool,
    #[command(flatten)]
    compression: CompressionArgs,
    #[command(flatten)]
    keep: KeepArgs,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Bytes that go to standard output at once.
const PIECE: usize = 1 << 20;

/// Report of a backup, and the verified bytes of file data.
type Done = (BackupReport, Option<u64>);

/// Amounts of a complete backup.
struct Measured {
    copied_bytes: u64,
    /// Files in the backup, where they are counted.
    files: Option<u64>,
}

trait Source {
    fn fill(&self, place: &ExistingBackup) -> Result<Done, Failure>;
    /// Updates a backup incrementally; None when too much has changed for that.
    fn bring_up_to_date(&self, place: &ExistingBackup) -> Result<Option<Done>, Failure>;
}

/// Archive to back up, and the process that reads it.
struct Origin<'a> {
    archive: Option<(ArchiveId, Fingerprint)>,
    /// Its daemon; None when this process has opened it.
    mounted: Option<&'a Mounted>,
    interrupt: &'a Interrupt,
}

impl Origin<'_> {
    /// Returns whether no other user reads or writes it.
    fn is_ours(&self) -> bool {
        self.mounted.is_none_or(Mounted::is_ours)
    }
}

enum ExistingBackup {
    File(Arc<FileStorage>),
    Remote(Arc<dyn Storage>),
}

impl ExistingBackup {
    fn storage(&self) -> Arc<dyn Storage> {
        match self {
            ExistingBackup::File(file) => file.clone(),
            ExistingBackup::Remote(storage) => storage.clone(),
        }
    }
}

pub(crate) fn run(args: &Args) -> Result<(), Failure> {
    let began = Instant::now();
    let measured = back_up(args)?;
    let Some(file) = &args.metrics else { return Ok(()) };
    metrics::replace_file(file, metrics_text(args, &measured, began.elapsed()).as_bytes()).map_err(|error| {
        Failure::host(format!("the backup is complete; cannot write its metrics to {}", shown(file)), &error)
    })
}

/// Metrics of the last successful backup. The file stays as it is when a backup fails, so its time
/// tells how old the backup is.
fn metrics_text(args: &Args, measured: &Measured, took: Duration) -> String {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    let source = args.archive.archive.as_os_str().as_bytes();
    let of = labels(&[("source", source), ("destination", args.destination.as_os_str().as_bytes())]);
    let mut text = MetricsText::default();
    text.gauge(
        "lockbox_backup_last_success_timestamp_seconds",
        "End of the last successful backup, in seconds since 1970.",
        [(of.clone(), now.as_secs())],
    );
    text.gauge("lockbox_backup_duration_seconds", "Duration of that backup.", [(of.clone(), took.as_secs_f64())]);
    let bytes = [(of.clone(), measured.copied_bytes)];
    text.gauge("lockbox_backup_copied_bytes", "File data that it copied.", bytes);
    text.gauge("lockbox_backup_files", "Files in that backup.", measured.files.map(|files| (of, files)));
    text.finish()
}

fn back_up(args: &Args) -> Result<Measured, Failure> {
    let to_output = args.destination.as_os_str() == "-";
    if to_output && (args.json || io::stdout().is_terminal()) {
        return Err(Failure::usage(
            "cannot write a backup to a terminal, or to standard output with --json; name a file, or send it into a pipe",
        ));
    }
    if args.take_over && !remote::is_remote(&args.destination) {
        return Err(Failure::usage(
            "--take-over is for backups in object stores: only they can have a writer on another machine",
        ));
    }
    let path = &args.archive.archive;
    let mounted = Mounted::find_any(path)?;
    if mounted.is_none() && path.is_dir() {
        return directory::run(args);
    }
    refuse_directory_options(args)?;
    if let Some(mounted) = &mounted {
        let interrupt = &Interrupt::watch()?;
        let archive = mounted.archive_id().ok().zip(mounted.fingerprint());
        let origin = Origin { archive, mounted: Some(mounted), interrupt };
        return copy(args, &origin, &OnlineBackup { mounted, interrupt, args });
    }
    let identity = |path: &Path| rustix::fs::stat(path).ok().map(|file| FileIdentity::from(&file));
    if !to_output && identity(path).is_some_and(|archive| identity(&args.destination) == Some(archive)) {
        return Err(Failure::usage(format!("{} is the archive itself", shown(&args.destination))));
    }
    let (archive, interrupt) = args.archive.read_for_backup()?;
    let source = archive.backups().pin().map_err(|error| args.archive.failure(error))?;
    let info = archive.info().map_err(|error| args.archive.failure(error))?;
    let interrupt = &interrupt;
    let origin = Origin { archive: Some((info.archive, info.fingerprint)), mounted: None, interrupt };
    copy(args, &origin, &OfflineBackup { source, interrupt, bar: args.archive.bar(), args })
}

/// Options for directories would have no effect on the backup of an archive.
fn refuse_directory_options(args: &Args) -> Result<(), Failure> {
    let archive = shown(&args.archive.archive);
    if args.keep.policy().has_rules() {
        return Err(Failure::usage(format!(
            "the backup of an archive shows one state, and --keep-* is for directories; keep states of {archive} in itself with 'lockbox snapshot'"
        )));
    }
    let given = [
        (args.one_file_system, "--one-file-system"),
        (args.delete_most, "--delete-most"),
        (args.from_empty, "--from-empty"),
        (!args.patterns.is_empty(), "--exclude"),
        (args.compression.is_given(), "--compress"),
    ];
    let Some((_, option)) = given.iter().find(|(is_given, _)| *is_given) else { return Ok(()) };
    Err(Failure::usage(format!("{option} is for directories; {archive} is an archive, and is backed up whole")))
}

fn copy(args: &Args, origin: &Origin, source: &dyn Source) -> Result<Measured, Failure> {
    if args.destination.as_os_str() == "-" {
        let beside = BackupDestination::temporary()?;
        let (BackupReport { copied_bytes, .. }, _) = source.fill(&ExistingBackup::File(beside.file()))?;
        put(&*beside.without_name()?, origin.interrupt, &args.archive.bar())?;
        return Ok(Measured { copied_bytes, files: None });
    }
    if remote::is_remote(&args.destination) {
        return back_up_elsewhere(args, origin, source);
    }
    let failed = |error| match error {
        error @ Error::Refused(_) => failure(args, error),
        error => Lockbox::failure(&args.destination, error),
    };
    let destination = BackupDestination::open(&args.destination, origin.is_ours()).map_err(failed)?;
    let brought = destination.existing().map(|file| ExistingBackup::File(file.clone()));
    let brought = brought.map(|place| source.bring_up_to_date(&place)).transpose()?.flatten();
    let done = match brought {
        Some(done) => {
            destination.check().map_err(failed)?;
            done
        }
        None => {
            let beside = destination.create_new().map_err(failed)?;
            let done = source.fill(&ExistingBackup::File(beside.file()))?;
            destination.take(beside).map_err(failed)?;
            remember(args, origin);
            done
        }
    };
    tell(args, &done)
}

/// One commit makes all of it visible, so a remote backup needs no temporary file.
fn back_up_elsewhere(args: &Args, origin: &Origin, source: &dyn Source) -> Result<Measured, Failure> {
    let failed = |error| Failure::at(&args.destination, &error);
    if let (Some(mounted), Some(directory)) = (origin.mounted, remote::directory(&args.destination))
        && lies_inside(mounted, &directory)
    {
        return Err(inside(&args.destination, "archive"));
    }
    let mut bucket = begin(&args.destination, args.archive.remote(), args.take_over, origin.is_ours())?;
    let there = bucket.open_existing().map_err(failed)?.map(ExistingBackup::Remote);
    let brought = there.map(|place| source.bring_up_to_date(&place)).transpose()?.flatten();
    let done = match brought {
        Some(done) => done,
        None => source.fill(&ExistingBackup::Remote(bucket.create_empty().map_err(failed)?))?,
    };
    bucket.publish().map_err(failed)?;
    remember(args, origin);
    tell(args, &done)
}

/// Remembers the new archive at the place. The user's own command replaced any other archive there.
fn remember(args: &Args, origin: &Origin) {
    if let Some((archive, fingerprint)) = origin.archive {
        keys::remember_place(&SeenArgs::default().options(&args.destination), archive, fingerprint);
    }
}

/// Returns whether a directory, existing or to be created, lies in the archive: each backup would
/// have to contain itself.
fn lies_inside(mounted: &Mounted, directory: &Path) -> bool {
    // The object is not opened for reading: a FIFO would block.
    let open = |path: &Path| rustix::fs::open(path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty()).ok();
    let there = open(directory).or_else(|| directory.parent().and_then(open));
    there.is_some_and(|there| mounted.holds(there))
}

fn inside(destination: &Path, source: &str) -> Failure {
    Failure::usage(format!("{} lies in the {source} that is to be backed up", shown(destination)))
}

/// Returns the end of a sentence about a backup.
fn verified_words(percent: Option<u8>, bytes: Option<u64>, reader: Reader) -> String {
    match (percent, bytes) {
        (None, _) => String::new(),
        (Some(percent), Some(bytes)) if percent < 100 => {
            format!(", and {} of it verified ({percent}%, chosen at random)", reader.size(bytes))
        }
        (Some(_), _) => ", and verified".to_owned(),
    }
}

fn tell(args: &Args, done: &Done) -> Result<Measured, Failure> {
    let (BackupReport { time, generation, whole, copied_bytes }, verified) = *done;
    let mut out = Output::new();
    if args.json {
        out.json(&json!({
            "time": rfc3339(time), "generation": generation.0, "whole": whole, "copied_bytes": copied_bytes,
            "verified": args.verify.is_some(), "verified_bytes": verified,
        }))?;
    } else {
        let scope = if whole { "everything was" } else { "only the changes were" };
        let verified = verified_words(args.verify, verified, out.reader);
        out.line(&format!(
            "{}: the archive as it was on {} (commit {}); {scope} copied, {} of file data{verified}",
            shown(&args.destination),
            out.reader.time(time),
            generation.0,
            out.reader.size(copied_bytes)
        ))?;
    }
    out.finish()?;
    Ok(Measured { copied_bytes, files: None })
}

/// Writes a file that has no name to standard output.
fn put(file: &FileStorage, interrupt: &Interrupt, bar: &Bar) -> Result<(), Failure> {
    let words = || "the output is not a complete archive; the same command starts over".to_owned();
    let at_once = interrupt.ends_at_once(bar, words)?;
    let (mut at, end) = (0, file.len()?);
    let mut out = io::stdout().lock();
    let mut piece = vec![0; PIECE];
    while at < end {
        let length = (end - at).min(PIECE as u64) as usize;
        file.read_at(at, &mut piece[..length])?;
        out.write_all(&piece[..length]).map_err(|e| exit::of_output(&e))?;
        at += length as u64;
        bar.bytes("written", at, end);
    }
    out.flush().map_err(|e| exit::of_output(&e))?;
    drop(at_once);
    bar.done("written", None, end);
    Ok(())
}

/// Names the object that failed.
fn failure(args: &Args, error: Error) -> Failure {
    match error {
        Error::Interrupted(_) if args.destination.as_os_str() == "-" => {
            interrupt::failure(&error, "nothing was written; the same command starts over")
        }
        Error::Interrupted(_) => {
            interrupt::failure(&error, "the backup is unchanged, or up to date; the same command continues")
        }
        Error::Refused(Refusal::Destination { .. } | Refusal::DamagedBackup { .. } | Refusal::FailedBackup { .. }) => {
            Failure::of(shown(&args.destination), &error)
        }
        Error::NoSpace(_) => Lockbox::failure(&args.destination, error),
        error => args.archive.failure(error),
    }
}

/// An archive that is open here.
struct OfflineBackup<'a> {
    source: BackupSource,
    interrupt: &'a Interrupt,
    bar: Bar,
    args: &'a Args,
}

impl OfflineBackup<'_> {
    fn step(&self, step: BackupStep) -> lockbox::Result<()> {
        match step {
            BackupStep::Copying { done, total } => self.bar.bytes("copied", done, total),
            BackupStep::Verifying { done, total } => self.bar.bytes("compared", done, total),
        }
        self.interrupt.check()
    }

    fn verified(&self, file: &Arc<dyn Storage>, done: BackupReport) -> lockbox::Result<Done> {
        let verify = |percent| self.source.verify(file, percent, &mut |step| self.step(step));
        let verified = self.args.verify.map(verify).transpose()?;
        self.bar.wipe();
        Ok((done, verified))
    }
}

impl Source for OfflineBackup<'_> {
    fn fill(&self, place: &ExistingBackup) -> Result<Done, Failure> {
        let file = place.storage();
        let filled = self.source.fill(&file, &mut |step| self.step(step));
        filled.and_then(|done| self.verified(&file, done)).map_err(|error| failure(self.args, error))
    }

    fn bring_up_to_date(&self, place: &ExistingBackup) -> Result<Option<Done>, Failure> {
        let file = place.storage();
        let brought = self.source.bring_up_to_date(&file, &mut |step| self.step(step));
        let verified = brought.and_then(|done| done.map(|done| self.verified(&file, done)).transpose());
        verified.map_err(|error| failure(self.args, error))
    }
}

/// An archive that a daemon has open: that reads it, and writes into the file that it is given.
struct OnlineBackup<'a> {
    mounted: &'a Mounted,
    interrupt: &'a Interrupt,
    args: &'a Args,
}

impl OnlineBackup<'_> {
    /// Another user's daemon may be any program: it gets only an archive with its id, and only such
    /// an archive gets a name.
    fn check(&self, place: &ExistingBackup) -> Result<(), Failure> {
        let checked = BackupDestination::check_archive(&*place.storage(), &self.mounted.archive_id()?);
        checked.map_err(|error| failure(self.args, error))
    }

    fn ask(&self, place: &ExistingBackup, whole: bool) -> Result<Option<Done>, Failure> {
        match place {
            ExistingBackup::File(file) if self.mounted.holds(&**file) => Err(inside(&self.args.destination, "archive")),
            ExistingBackup::File(file) => self.ask_for(&**file, whole),
            // The daemon reaches no network: this process writes for it.
            ExistingBackup::Remote(storage) => {
                let cannot = |error| Failure::other(format!("cannot create a socket pair: {error}"));
                let (ours, theirs) = UnixStream::pair().map_err(cannot)?;
                let end = ours.try_clone().map_err(cannot)?;
                thread::scope(|scope| {
                    scope.spawn(|| serve_storage(&**storage, ours));
                    let asked = self.ask_for(&theirs, whole);
                    // The daemon may still hold its end: nothing is lent to it any more.
                    let _ = end.shutdown(Shutdown::Both);
                    asked
                })
            }
        }
    }

    fn ask_for(&self, place: impl AsFd, whole: bool) -> Result<Option<Done>, Failure> {
        let go_on = || self.interrupt.check();
        let done = self.mounted.back_up(place, whole, self.args.verify, &self.args.destination, &go_on);
        done.or_else(|other| go_on().map_err(|error| failure(self.args, error)).and(Err(other)))
    }
}

impl Source for OnlineBackup<'_> {
    fn fill(&self, place: &ExistingBackup) -> Result<Done, Failure> {
        let nothing = || Failure::new(IN_USE, "the daemon did not make a backup");
        let done = self.ask(place, true)?.ok_or_else(nothing)?;
        self.check(place).map(|()| done)
    }

    fn bring_up_to_date(&self, place: &ExistingBackup) -> Result<Option<Done>, Failure> {
        self.check(place)?;
        self.ask(place, false)
    }
}
