//! `lockbox snapshot diff`: lists changes since a snapshot.
use std::ffi::OsString;
use std::os::unix::ffi::OsStrExt;

use lockbox::control::PathDifference;
use lockbox::exchange::{PathChange, PathChangeKind, compare};
use lockbox_host::{Program, Spinner};
use lockbox_terminal::display;
use serde_json::json;

use crate::exit::{Failure, Lockbox};
use crate::open_archive::ArchiveArgs;
use crate::output::{Output, put_name};
use crate::snapshot_client::Mounted;

/// Tell which paths differ between two snapshots, or between one and now
#[derive(clap::Args)]
pub(crate) struct Args {
    #[command(flatten)]
    archive: ArchiveArgs,
    /// The older snapshot
    #[arg(value_name = "A")]
    older: OsString,
    /// The newer snapshot; by default what is there now
    #[arg(value_name = "B")]
    newer: Option<OsString>,
    /// Print JSON, one object a line
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(args: &Args) -> Result<(), Failure> {
    let failed = |error| Lockbox::failure(&args.archive.archive, error);
    let mut out = Output::new();
    let mut tell = |differing: &PathChange| {
        if args.json { json_of(differing, &mut out) } else { line(differing, &mut out) }
    };
    let newer = args.newer.as_ref().map(|name| name.as_bytes());
    if let Some(mounted) = Mounted::find(&args.archive)? {
        mounted.compare(args.older.as_bytes(), newer, &mut |found| {
            found.into_iter().try_for_each(|PathDifference { path, from, change, changed }| {
                let kind = PathChangeKind::of_name(&change, changed);
                let kind =
                    kind.ok_or_else(|| Failure::other("the daemon tells of a change that this program does not know"))?;
                tell(&PathChange { path: path.0, kind, from: from.map(|from| from.0) })
            })
        })?;
        return out.finish();
    }
    let archive = args.archive.read()?;
    let older = archive.snapshot_view(args.older.as_bytes()).map_err(failed)?;
    let newer = match newer {
        Some(name) => archive.snapshot_view(name).map_err(failed)?,
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
