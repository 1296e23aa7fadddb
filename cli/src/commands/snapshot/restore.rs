//! `lockbox snapshot diff` and `restore`: compare snapshots, and bring files back from one.
use std::ffi::OsString;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::time::SystemTime;

use lockbox::Error;
use lockbox::archive::Archive;
use lockbox::error::Timestamp;
use lockbox::exchange::{OfflineNamespace, PathChange, PathChangeKind, Restore, compare};
use lockbox_host::Spinner;
use lockbox_host::control::PathDifference;
use lockbox_host::located::real_path;
use lockbox_terminal::display;
use serde_json::json;

use crate::exit::Failure;
use crate::interrupt::Interrupt;
use crate::open_archive::{ArchiveArgs, WriterArgs, creator};
use crate::output::{self, Output, put_name};
use crate::snapshot_client::Mounted;

/// Tell which paths differ between two snapshots, or between one and now
#[derive(clap::Args)]
pub(crate) struct DiffArgs {
    #[command(flatten)]
    archive: ArchiveArgs,
    /// The older snapshot
    #[arg(value_name = "A")]
    older: OsString,
    /// The newer snapshot; by default the current content
    #[arg(value_name = "B")]
    newer: Option<OsString>,
    /// Print JSON, one object a line
    #[arg(long)]
    json: bool,
}

pub(crate) fn diff(args: &DiffArgs) -> Result<(), Failure> {
    let failed = |error| args.archive.failure(error);
    let mut out = Output::new();
    let mut tell = |differing: &PathChange| {
        if args.json { json_of(differing, &mut out) } else { line(differing, &mut out) }
    };
    let newer = args.newer.as_ref().map(|name| name.as_bytes());
    if let Some(mounted) = Mounted::find(&args.archive)? {
        mounted.compare(args.older.as_bytes(), newer, &mut |found| {
            found.into_iter().try_for_each(|PathDifference { path, from, change, changed }| {
                let kind = PathChangeKind::of_name(&change, changed);
                let kind = kind.ok_or_else(|| Failure::other("the daemon reported an unknown kind of change"))?;
                tell(&PathChange { path: path.0, kind, from: from.map(|from| from.0) })
            })
        })?;
        return out.finish();
    }
    let archive = args.archive.read()?;
    let older = archive.snapshot_manager().snapshot_view(args.older.as_bytes()).map_err(failed)?;
    let newer = match newer {
        Some(name) => archive.snapshot_manager().snapshot_view(name).map_err(failed)?,
        None => archive.file_system().clone(),
    };
    let working = Spinner::at("Comparing...");
    let found = compare(&older, &newer, &mut |_| Ok(())).map_err(failed)?;
    drop(working);
    for differing in found {
        tell(&differing)?;
    }
    out.finish()
}

/// Prints one line, with any names escaped: `git status --porcelain` has the same letters.
fn line(differing: &PathChange, out: &mut Output) -> Result<(), Failure> {
    let letters = match differing.kind {
        PathChangeKind::Added => "A",
        PathChangeKind::Removed => "D",
        PathChangeKind::Changed => "M",
        PathChangeKind::TypeChanged => "T",
        PathChangeKind::Renamed { changed: false } => "R",
        PathChangeKind::Renamed { changed: true } => "RM",
    };
    let from = differing.from.as_ref().map_or_else(String::new, |from| format!("{} -> ", display(from)));
    out.line(&format!("{letters} {from}{}", display(shown(&differing.path))))
}

fn json_of(differing: &PathChange, out: &mut Output) -> Result<(), Failure> {
    let mut object = json!({ "change": differing.kind.name() });
    if let PathChangeKind::Renamed { changed } = differing.kind {
        object["changed"] = changed.into();
    }
    if let Some(from) = &differing.from {
        put_name(&mut object, "from", from);
    }
    put_name(&mut object, "path", shown(&differing.path));
    out.json(&object)
}

/// The root has no name.
fn shown(path: &[u8]) -> &[u8] {
    if path.is_empty() { b"/" } else { path }
}

const AT_WORK: &str = "Restoring...";

/// Restore files and directories from a snapshot
#[derive(clap::Args)]
pub(crate) struct RestoreSnapshotArgs {
    #[command(flatten)]
    archive: ArchiveArgs,
    #[command(flatten)]
    writer: WriterArgs,
    /// The snapshot
    name: OsString,
    /// Files and directories in it; by default everything, and files that it does not have are removed
    #[arg(value_name = "PATH")]
    paths: Vec<OsString>,
    /// Put them into this directory of the archive, where nothing is replaced
    #[arg(long, value_name = "DIR")]
    to: Option<OsString>,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

pub(crate) fn restore(args: &RestoreSnapshotArgs) -> Result<(), Failure> {
    // It would stand for the root: of a variable that is not set everything that is newer would go.
    if args.paths.iter().any(|path| path.is_empty()) {
        return Err(Failure::usage("a path is empty; without any path everything is restored"));
    }
    let mut before = None;
    let restored = match Mounted::find(&args.archive)? {
        Some(mounted) => {
            let interrupt = Interrupt::watch()?;
            let paths = args.paths.iter().map(|path| in_mount(args, &mounted, Path::new(path))).collect();
            let to = args.to.as_ref().map(|to| to.as_bytes());
            let _working = Spinner::at(AT_WORK);
            mounted.restore(args.name.as_bytes(), paths, to, &mut before, &|| interrupt.check())
        }
        None => {
            let (archive, interrupt) = args.archive.write_watched(args.writer)?;
            let restored = restore_file(args, &archive, &mut before, &mut || interrupt.check());
            // The snapshot before an earlier restore may have been removed. What this leaves is freed
            // by a later session.
            if restored.is_ok() && args.to.is_none() {
                match archive.finish_removals(&mut || interrupt.check()) {
                    Ok(()) | Err(Error::Interrupted(_)) => {}
                    Err(error) => output::complain(&format!("cannot free a removed snapshot yet: {error}")),
                }
            }
            let closed = archive.close();
            // An interrupted archive is closed too, and a failure to close takes precedence.
            let restored = match restored {
                Err(error @ Error::Interrupted(_)) => closed.and(Err(error)),
                restored => restored.and(closed),
            };
            restored.map_err(|error| args.archive.failure(error))
        }
    };
    let mut out = Output::new();
    match &before {
        Some(name) if args.json => {
            let mut object = json!({});
            put_name(&mut object, "before", name);
            out.json(&object)?;
        }
        Some(name) => out.line(&display(name))?,
        None if args.json && restored.is_ok() => out.json(&json!({ "before": null }))?,
        None => {}
    }
    out.finish()?;
    restored.map_err(|failure| match failure.code {
        // That of a signal.
        code @ 129.. => Failure::new(
            code,
            "interrupted; each path is unchanged or restored, and the same command restores the rest",
        ),
        _ => failure,
    })
}

/// Returns the path in the archive. A path below the mount point that the command names, as a shell
/// completes it, counts without that, unless the snapshot has the whole path.
fn in_mount(args: &RestoreSnapshotArgs, mounted: &Mounted, path: &Path) -> Vec<u8> {
    let snapshot = mounted.mount_point().join(".snapshots").join(&args.name);
    let has = |path: &Path| real_path(&snapshot.join(path)).is_ok();
    let whole = path.strip_prefix("/").unwrap_or(path);
    let path = match path.strip_prefix(&args.archive.archive) {
        Ok(below) if !below.as_os_str().is_empty() && has(below) && !has(whole) => below,
        _ => path,
    };
    path.as_os_str().as_bytes().to_vec()
}

/// `before` gets the name of the snapshot that is taken of the paths to be replaced.
fn restore_file(
    args: &RestoreSnapshotArgs,
    archive: &Archive,
    before: &mut Option<Vec<u8>>,
    go_on: &mut dyn FnMut() -> Result<(), Error>,
) -> Result<(), Error> {
    let _working = Spinner::at(AT_WORK);
    let snapshot = archive.snapshot_manager().snapshot_view(args.name.as_bytes())?;
    let paths: Vec<Vec<u8>> = args.paths.iter().map(|path| path.as_bytes().to_vec()).collect();
    let to = args.to.as_ref().map(|to| to.as_bytes());
    let mut names = OfflineNamespace(archive.file_system(), creator());
    let restore = Restore::prepare(archive.file_system(), &snapshot, &paths, to, &mut names)?;
    // With --to nothing is replaced.
    if to.is_none() {
        *before = Some(
            archive
                .snapshot_manager()
                .create_before_restore(args.name.as_bytes(), Timestamp::from_system(SystemTime::now()))?,
        );
    }
    restore.run(go_on).map(drop)
}
