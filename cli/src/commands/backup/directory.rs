//! `lockbox backup` of a directory: mirrors it into an archive of its own, in which each run that
//! was not interrupted is a snapshot.
//!
//! # Order of a run
//! 1. The brakes: an empty source, a destination that is missing although an archive was there, and
//!    deletions of more than half stop the run before it changes anything.
//! 2. The directory is copied into the live tree of the archive, over any number of commits.
//! 3. One commit makes the rest of the content durable together with the snapshot. So a run
//!    that is killed before changes no earlier snapshot; the next one continues with the live tree.
//! 4. Older snapshots are pruned, after 3 and only if every object was copied. Runs that miss
//!    something never push out the snapshots that have it: their snapshots are pruned apart.
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use lockbox::Error;
use lockbox::archive::{Archive, BackupStep, RetentionPolicy};
use lockbox::error::Timestamp;
use lockbox::exchange::{ImportOptions, ImportReport};
use lockbox::keys;
use lockbox_host::{remote, shown};
use lockbox_terminal::display;
use serde_json::json;

use super::{Args, Measured, verified_words};
use crate::commands::create;
use crate::commands::exchange::{Brakes, plan, summary};
use crate::exit::{self, Failure};
use crate::interrupt::{self, Interrupt};
use crate::open_archive::{ArchiveArgs, WriterArgs, import_options};
use crate::output::{self, Output, count, put_name, rfc3339};

const CONTINUES: &str =
    "this run has no snapshot, and the snapshots of earlier runs are complete; the same command continues";

/// Backs up the directory that the arguments name.
pub(super) fn run(args: &Args) -> Result<Measured, Failure> {
    let source = &args.archive.archive;
    if args.destination.as_os_str() == "-" {
        return Err(Failure::usage(
            "the backup of a directory is an archive with a history, not a stream; name a file or an address",
        ));
    }
    if contains(source, &args.destination) {
        return Err(super::inside(&args.destination, "directory"));
    }
    let filter = args.patterns.filter()?;
    let keep = args.keep.policy();
    let brakes = Brakes { delete_most: args.delete_most, from_empty: args.from_empty };
    if !brakes.from_empty && is_empty(source)? {
        return Err(Failure::other(format!(
            "nothing was changed: {} is empty; mount its file system, or use --from-empty if that is right",
            shown(source)
        )));
    }
    let named = args.archive.opening.of(args.destination.clone());
    named.set_compression(args.compression);
    let writer = WriterArgs { take_over: args.take_over };
    let passphrase = if create::is_free(&args.destination, named.remote())? {
        refuse_vanished(args, &named)?;
        Some(create::for_backup(&args.destination, &named, writer)?)
    } else {
        None
    };
    let (archive, key, interrupt) = named.write_keyed(writer, passphrase)?;
    let mut options = ImportOptions {
        // The directory itself; links below it are copied as links.
        follow: true,
        filter,
        one_file_system: args.one_file_system,
        ..import_options(Vec::new())
    };
    let sources = [source.clone()];
    if archive.is_backup() {
        // Not closed: that would be a commit, which takes the mark away.
        return Err(Failure::other(format!(
            "{} is the backup of an archive, and stays one; choose another place for the directory {}",
            shown(&args.destination),
            shown(source)
        )));
    }
    let archive = plan(brakes, &named, archive, &sources, &mut options)?;
    let bar = named.bar();
    let done = write(&named, archive, &interrupt, &sources, &options, &keep)?;
    let report = &done.report;
    let verified = match args.verify {
        None => None,
        Some(percent) => {
            // Opened again, so that nothing comes from the memory of the writer.
            let fresh = args.archive.opening.of(args.destination.clone());
            let read = fresh.read_with(&key)?.read_back(percent, &mut |step| {
                if let BackupStep::Verifying { done, total } = step {
                    bar.bytes("read", done, total);
                }
                interrupt.check()
            });
            bar.wipe();
            let kept = "the backup is complete, but not verified";
            Some(read.map_err(|error| fresh.failure_or_interrupted(error, kept))?)
        }
    };
    output::complain_of(&report.problems);
    match report.deletions_skipped {
        0 => {}
        count => output::complain(&format!(
            "not everything could be copied, so the snapshot still shows deleted entries: {count}"
        )),
    }
    output::complain_of_left(&report.skipped);
    if !report.problems.is_empty() && keep.has_rules() {
        output::complain("no snapshot was pruned, because not everything could be copied");
    }
    tell(args, &done, verified)?;
    exit::of_problems(&report.problems, exit::source_code)?;
    let files = report.copied.files + report.unchanged + report.updated;
    Ok(Measured { copied_bytes: report.copied.bytes, files: Some(files) })
}

/// A snapshot, the copy that it shows, and the names of the snapshots that were pruned.
struct Written {
    report: ImportReport,
    snapshot: Vec<u8>,
    time: Timestamp,
    removed: Vec<Vec<u8>>,
}

/// Copies, takes the snapshot, prunes and closes.
fn write(
    named: &ArchiveArgs,
    archive: Archive,
    interrupt: &Interrupt,
    sources: &[PathBuf],
    options: &ImportOptions,
    keep: &RetentionPolicy,
) -> Result<Written, Failure> {
    let bar = named.bar();
    let (counted, how) = (sources.to_vec(), options.clone());
    bar.count(move |wanted| lockbox::exchange::count_host_files(&counted, &how, wanted));
    let copied =
        lockbox::exchange::import(archive.file_system(), archive.identity(), sources, options, &mut |progress| {
            bar.copied("backed up", progress);
            interrupt.check()
        });
    bar.wipe();
    let taken = copied.and_then(|report| {
        interrupt.check()?;
        let time = Timestamp::from_system(SystemTime::now());
        let snapshot = archive.snapshot_manager().create_backup(time, report.problems.is_empty())?;
        Ok(Written { report, snapshot, time, removed: Vec::new() })
    });
    let pruned = match &taken {
        Ok(done) if done.report.problems.is_empty() && keep.has_rules() => {
            archive.snapshot_manager().prune_backups(keep).and_then(|removed| {
                archive.finish_removals(&mut || interrupt.check())?;
                Ok(removed)
            })
        }
        _ => Ok(Vec::new()),
    };
    // What was copied is complete, and stays for the next run.
    let closed = named.close(archive);
    let mut done = match taken {
        Err(error @ Error::Interrupted(_)) => {
            closed?;
            return Err(interrupt::failure(&error, CONTINUES));
        }
        taken => taken.map_err(|error| named.failure(error))?,
    };
    closed?;
    let words = format!("snapshot {} is complete; the next run prunes", display(&done.snapshot));
    done.removed = pruned.map_err(|error| named.failure_or_interrupted(error, &words))?;
    Ok(done)
}

/// Returns whether a destination on this host, existing or not, is within the directory: each run
/// would have to contain itself.
fn contains(source: &Path, destination: &Path) -> bool {
    let destination = match remote::is_remote(destination) {
        true => remote::directory(destination),
        false => Some(destination.to_owned()),
    };
    let Some(destination) = destination else { return false };
    let real = |path: &Path| path.canonicalize().ok();
    // Parents that are missing are made under the nearest one that is not.
    let absolute = std::path::absolute(&destination).unwrap_or(destination);
    let there = absolute.ancestors().find_map(real);
    real(source).zip(there).is_some_and(|(source, there)| there.starts_with(source))
}

fn is_empty(source: &Path) -> Result<bool, Failure> {
    let cannot = |error| Failure::host(format!("cannot read {}", shown(source)), &error);
    Ok(source.read_dir().map_err(cannot)?.next().is_none())
}

/// Refuses to make an archive in place of one that this user remembers: its disk is not mounted,
/// or it was removed.
fn refuse_vanished(args: &Args, named: &ArchiveArgs) -> Result<(), Failure> {
    let seen = named.seen();
    if seen.accept_other || !keys::is_known_place(&seen) {
        return Ok(());
    }
    Err(Failure::other(format!(
        "{} is missing, although an archive was there: connect its disk or find it; --accept-other begins a new one",
        shown(&args.destination)
    )))
}

fn tell(args: &Args, done: &Written, verified: Option<u64>) -> Result<(), Failure> {
    let Written { report, snapshot, time, removed } = done;
    let mut out = Output::new();
    if args.json {
        let mut object = summary(report, true);
        object["time"] = json!(rfc3339(*time));
        object["copied_bytes"] = json!(report.copied.bytes);
        object["verified"] = json!(verified.is_some());
        object["verified_bytes"] = json!(verified);
        object["removed_snapshots"] = removed.iter().map(|name| String::from_utf8_lossy(name)).collect();
        put_name(&mut object, "snapshot", snapshot);
        out.json(&object)?;
        return out.finish();
    }
    let ImportReport { copied, unchanged, updated, deleted, .. } = report;
    let removed = match removed.len() {
        0 => String::new(),
        1 => "; 1 snapshot pruned".to_owned(),
        count => format!("; {count} snapshots pruned"),
    };
    out.line(&format!(
        "{}: {} of {}; {} copied ({}), {} unchanged, {deleted} deleted{removed}{}",
        shown(&args.destination),
        display(snapshot),
        shown(&args.archive.archive),
        count(copied.files, "file"),
        out.reader.size(copied.bytes),
        unchanged + updated,
        verified_words(args.verify, verified, out.reader),
    ))?;
    out.finish()
}
