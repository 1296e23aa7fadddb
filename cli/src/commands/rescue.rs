//! `lockbox rescue`: copies intact data out of a damaged archive.
use std::ffi::OsString;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use lockbox::Error;
use lockbox::rescue::{
    self, LaterCommits, RescueOptions, RescueProgress, RescueReport, RescueState, RescuedObject, SnapshotCondition,
};
use lockbox_host::{DAMAGED, code, shown};
use lockbox_terminal::display;
use serde_json::json;

use crate::exit::{self, Failure};
use crate::interrupt::{self, Interrupt};
use crate::open_archive::ArchiveArgs;
use crate::output::{self, Output};

/// Copy intact files out of a damaged archive
#[derive(clap::Args)]
pub(crate) struct Args {
    #[command(flatten)]
    archive: ArchiveArgs,
    /// Directory to copy into; made when it is missing, refused when it is not empty
    #[arg(long, value_name = "DIR")]
    to: PathBuf,
    /// Copy the content of this snapshot, not the current content
    #[arg(long, value_name = "NAME")]
    snapshot: Option<OsString>,
    /// Also write the remains of incomplete files, to DIR/partial
    #[arg(long)]
    partial: bool,
    /// Also make devices and keep set-user-ID, set-group-ID and sticky bits of files, capabilities
    /// and other attributes that give rights
    #[arg(long)]
    privileges: bool,
    /// Print one JSON object for each file, and one summary
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(args: &Args) -> Result<(), Failure> {
    let (key, place) = args.archive.unlock_damaged()?;
    let snapshot = args.snapshot.as_ref().map(|name| name.as_bytes().to_vec());
    let options = RescueOptions { to: args.to.clone(), partial: args.partial, privileges: args.privileges, snapshot };
    let interrupt = Interrupt::watch()?;
    let mut out = Output::new();
    let mut failed = None;
    let bar = args.archive.bar();
    let rescued = rescue::rescue(
        place.source(),
        &key,
        &options,
        &mut |item| {
            // A failure of the list does not stop the rescue of files.
            let told = if args.json { out.json(&as_json(item)) } else { tell(&mut out, item) };
            failed = failed.take().or(told.err());
            Ok(())
        },
        &mut |progress| {
            match progress {
                RescueProgress::Scanning(done, total) => bar.bytes("searched", *done, *total),
                RescueProgress::Writing(progress, objects) => {
                    bar.expect(*objects);
                    bar.copied("rescued", progress);
                }
            }
            interrupt.check()
        },
    );
    drop(bar);
    let report = rescued.map_err(|error| match error {
        Error::Interrupted(_) if is_empty(&args.to) => {
            interrupt::failure(&error, "nothing was rescued yet; the same command starts over")
        }
        Error::Interrupted(_) => {
            let to = shown(&args.to);
            let kept = format!("everything rescued so far is complete and stays in {to}");
            interrupt::failure(&error, &format!("{kept}; to start over, remove {to} or name another directory"))
        }
        error => args.archive.failure(error),
    })?;
    if args.json {
        out.json(&summary_json(&report))?;
    } else {
        tell_snapshots(&mut out, &report, args.snapshot.is_some())?;
        out.line(&summary(&report, args.snapshot.is_some()))?;
    }
    out.finish()?;
    output::complain_of_left(&report.skipped);
    output::complain_of(&report.problems);
    if let Some(failure) = failed {
        return Err(failure);
    }
    if report.complete() {
        return Ok(());
    }
    // A full host takes precedence: on another one more can be rescued.
    let code = exit::gravest(&report.problems, code).unwrap_or(DAMAGED).max(DAMAGED);
    Err(Failure::new(
        code,
        format!(
            "{}: some files could not be rescued, or may not be the newest; see the list",
            shown(&args.archive.archive)
        ),
    ))
}

/// Returns whether the directory is empty or missing.
fn is_empty(directory: &Path) -> bool {
    std::fs::read_dir(directory).map_or(true, |mut entries| entries.next().is_none())
}

fn word(state: RescueState) -> &'static str {
    match state {
        RescueState::Whole => "whole",
        RescueState::Partial => "partial",
        RescueState::Lost => "lost",
    }
}

fn tell(out: &mut Output, item: &RescuedObject<'_>) -> Result<(), Failure> {
    let path = if item.path.is_empty() { "." } else { &display(item.path) };
    let mut line = format!("{:<8} {path}", word(item.state));
    if item.older {
        line.push_str(&format!(
            " (as of generation {}; a newer version is damaged: {})",
            item.generation.0, item.reason
        ));
    } else if item.unproved {
        line.push_str(&format!(
            " (as of generation {}; no remaining data shows whether there was a newer version)",
            item.generation.0
        ));
    } else if !item.reason.is_empty() {
        line.push_str(&format!(" (inode {}: {})", item.ino.0, item.reason));
    }
    out.line(&line)
}

fn as_json(item: &RescuedObject<'_>) -> serde_json::Value {
    let mut object = json!({
        "state": word(item.state),
        "inode": item.ino.0,
        "generation": item.generation.0,
        "older": item.older,
        "unproved": item.unproved,
        "reason": item.reason,
    });
    output::put_name(&mut object, "path", item.path);
    object
}

/// `rescued`: a snapshot was rescued.
fn tell_snapshots(out: &mut Output, report: &RescueReport, rescued: bool) -> Result<(), Failure> {
    for SnapshotCondition { name, time, state, reason, .. } in &report.snapshots {
        let mut line = format!("{:<8} snapshot {} of {}", word(*state), display(name), out.reader.time(*time));
        if !reason.is_empty() {
            line.push_str(&format!(" ({})", display(reason.as_bytes())));
        }
        out.line(&line)?;
    }
    if let Some(reason) = &report.snapshots_lost {
        out.line(&format!("not all snapshots are known: {}", display(reason.as_bytes())))?;
    }
    match (report.snapshots_proved, report.snapshots.is_empty()) {
        (true, true) => {}
        (true, false) if rescued => {}
        (true, false) => {
            out.line("snapshots are not copied unless --snapshot names one; of these only the index was read")?
        }
        (false, true) => out.line("no remaining data proves that there were no snapshots")?,
        (false, false) => {
            out.line("the newest list of snapshots may be lost: some may have been removed since, and others taken")?;
        }
    }
    Ok(())
}

fn summary(report: &RescueReport, of_snapshot: bool) -> String {
    format!(
        "{} files, {} directories, {} links and special files whole ({} in an older version, {} perhaps in one, {} in unnamed); \
         {} partial, {} lost; newest generation {}: {}",
        report.files,
        report.directories,
        report.others + report.links,
        report.older,
        report.unproved,
        report.unnamed,
        report.partial,
        report.lost,
        report.newest.0,
        if of_snapshot { verdict_of_snapshot(report) } else { verdict(report) }
    )
}

fn verdict(report: &RescueReport) -> &'static str {
    match report.later {
        LaterCommits::Seen => "data of a newer one remains, which was lost or never committed",
        _ if report.entries_lost => "a later log entry is lost, and with it the last durable changes",
        _ if !report.index_whole => "part of its index is lost, so newer versions and whole files may be missing",
        _ if !report.complete() => "not complete",
        LaterCommits::Never => "complete, and no newer one was committed",
        LaterCommits::Possible => "complete; newer ones may have been lost without a trace",
    }
}

fn verdict_of_snapshot(report: &RescueReport) -> &'static str {
    match report.complete() {
        true => "complete",
        false if !report.index_whole => "part of its index is lost, so whole files may be missing",
        false => "not complete",
    }
}

fn later_word(later: LaterCommits) -> &'static str {
    match later {
        LaterCommits::Never => "none",
        LaterCommits::Possible => "possible",
        LaterCommits::Seen => "seen",
    }
}

fn snapshot_json(snapshot: &SnapshotCondition) -> serde_json::Value {
    let mut object = json!({
        "time": output::rfc3339(snapshot.time),
        "generation": snapshot.generation.0,
        "state": word(snapshot.state),
        "reason": snapshot.reason,
    });
    output::put_name(&mut object, "name", &snapshot.name);
    object
}

fn summary_json(report: &RescueReport) -> serde_json::Value {
    json!({
        "summary": {
            "complete": report.complete(),
            "files": report.files,
            "directories": report.directories,
            "links": report.links,
            "others": report.others,
            "bytes": report.bytes,
            "older": report.older,
            "unproved": report.unproved,
            "index_whole": report.index_whole,
            "log_entries": report.entries,
            "log_entry_lost": report.entries_lost,
            "snapshots": report.snapshots.iter().map(snapshot_json).collect::<Vec<_>>(),
            "snapshots_proved": report.snapshots_proved,
            "snapshots_lost": report.snapshots_lost,
            "newer_commits": later_word(report.later),
            "unnamed": report.unnamed,
            "partial": report.partial,
            "lost": report.lost,
            "pages": report.pages,
            "unreadable_blocks": report.unreadable_blocks,
            "newest_generation": report.newest.0,
            "attributes_left": report.skipped.attributes.count,
            "privileges_left": report.skipped.privileges.count,
            "problems": output::problems(&report.problems),
        }
    })
}
