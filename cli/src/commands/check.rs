//! `lockbox check` and `info`: verify an archive, and print its properties.
use lockbox::archive::{Archive, CheckReport, CheckStep, Finding, FindingKind, Lost, Severity};
use lockbox::keys;
use lockbox_host::{DAMAGED, remote, shown};
use lockbox_terminal::hex;
use serde_json::json;

use crate::exit::{self, Failure};
use crate::interrupt::Interrupt;
use crate::open_archive::{ArchiveArgs, SnapshotViewArgs, WriterArgs};
use crate::output::{self, Output, rfc3339};
use crate::progress::Bar;

/// Verify that an archive is sound
#[derive(clap::Args)]
pub(crate) struct Args {
    #[command(flatten)]
    archive: ArchiveArgs,
    /// Read and authenticate every page, not only the structure
    #[arg(long)]
    full: bool,
    /// First rewrite the copy of the header that is lost, altered or older than the other copy
    #[arg(long)]
    repair_header: bool,
    /// With --repair-header: go on although another machine seems to be writing to the archive at the address; its uncommitted changes are lost
    #[arg(long, requires = "repair_header")]
    take_over: bool,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(args: &Args) -> Result<(), Failure> {
    let path = &args.archive.archive;
    let (archive, interrupt, repaired) = open(args)?;
    let bar = args.archive.bar();
    let is_repaired = repaired.is_some();
    let words = move || {
        let changes = if is_repaired { "only the header was changed" } else { "nothing was changed" };
        format!("the check is incomplete, and {changes}; the same command starts over")
    };
    let at_once = interrupt.ends_at_once(&bar, words)?;
    let mut checked = archive.check(args.full, &mut |step| match step {
        CheckStep::Pages { done, total } => bar.bytes("checked", done, total),
        CheckStep::Tree { done, total } => bar.entries("looked at", done, total),
    });
    if let Ok(report) = &mut checked {
        compare_objects(args, report, &bar)?;
    }
    drop((at_once, bar));
    let report = checked.map_err(|error| args.archive.failure(error))?;
    let info = archive.info().map_err(|error| args.archive.failure(error))?;
    let mut out = Output::new();
    if args.json {
        out.json(&json!({
            "full": args.full,
            "sound": report.findings.is_empty(),
            "blocks": report.blocks,
            "inodes": report.inodes,
            "directories": report.directories,
            "bytes": report.bytes,
            "findings": report.findings.iter().map(as_json).collect::<Vec<_>>(),
            "notes": report.notes.iter().map(as_json).collect::<Vec<_>>(),
            "fallback": info.fallback,
            "header_repaired": repaired,
        }))?;
    } else if report.findings.is_empty() {
        let scope = if args.full { "every page" } else { "the structure" };
        let which = |_| format!(" as commit {} left it, but newer changes may be missing", info.generation.0);
        let which = info.fallback.map_or_else(String::new, which);
        out.line(&format!("{}: sound{which} ({scope} checked, {} files and directories)", shown(path), report.inodes))?;
    }
    out.finish()?;
    for note in &report.notes {
        output::complain(&format!("note: {note}{}", exit::mending(note.kind)));
    }
    if report.findings.is_empty() {
        return Ok(());
    }
    for finding in &report.findings {
        output::complain(&format!("{finding}{}", exit::mending(finding.kind)));
    }
    let message = format!("{}: damaged archive: findings={}", shown(path), report.findings.len());
    Err(Failure::new(DAMAGED, message))
}

/// Compares the objects of a store with the hashes that name them. The pages do not show these
/// faults.
fn compare_objects(args: &Args, report: &mut CheckReport, bar: &Bar) -> Result<(), Failure> {
    let remote = args.archive.remote();
    if !args.full || !remote::is_remote(&args.archive.archive) || remote.unsent {
        return Ok(());
    }
    let compared = args.archive.place()?.verify_objects(remote, &mut |done, total| {
        if total > 0 {
            bar.bytes("compared", done, total);
        }
        Ok(())
    });
    let compared = compared.map_err(|error| args.archive.failure(error))?;
    // All stored data was just read: without a loss these bytes belong to nothing.
    let is_lost = report.findings.iter().any(|finding| finding.severity == Severity::Lost);
    let severity = if is_lost { Severity::Wrong } else { Severity::Minor };
    let faults = compared.into_iter().flat_map(|examined| examined.faults);
    report.findings.extend(faults.map(|fault| Finding::new(FindingKind::Object, severity, fault)));
    Ok(())
}

/// Returns the archive, and the parts of its header that were rewritten.
fn open(args: &Args) -> Result<(Archive, Interrupt, Option<String>), Failure> {
    if !args.repair_header {
        let (archive, interrupt) = match args.full {
            true => args.archive.read_all_watched()?,
            false => args.archive.read_watched(&SnapshotViewArgs::default())?,
        };
        return Ok((archive, interrupt, None));
    }
    let (key, place) = args.archive.unlock_alone(WriterArgs { take_over: args.take_over })?;
    let repaired = keys::repair_header(place.source(), &key, &args.archive.seen());
    let repaired = repaired.map_err(|error| args.archive.failure(error))?;
    if let Some(repaired) = repaired.as_ref().filter(|_| !args.json) {
        output::complain(&format!("{}: {repaired}", shown(&args.archive.archive)));
    }
    let interrupt = Interrupt::watch()?;
    Ok((args.archive.read_with(&key)?, interrupt, repaired))
}

fn as_json(finding: &Finding) -> serde_json::Value {
    let lost = finding.lost.as_ref().map(|lost| match lost {
        Lost::Bytes { offset, length } => json!({"offset": offset, "length": length}),
        Lost::Inodes(first, last) => json!({"first_inode": first.0, "last_inode": last.0}),
    });
    let mut object = json!({
        "kind": finding.kind.name(),
        "severity": finding.severity.name(),
        "path": null,
        "inode": finding.inode.map(|ino| ino.0),
        "block": finding.block,
        "generation": finding.generation.map(|generation| generation.0),
        "lost": lost,
        "message": finding.to_string(),
    });
    if let Some(path) = &finding.path {
        output::put_name(&mut object, "path", path);
    }
    object
}

/// Show facts about an archive
#[derive(clap::Args)]
pub(crate) struct InfoArgs {
    #[command(flatten)]
    archive: ArchiveArgs,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

pub(crate) fn info(args: &InfoArgs) -> Result<(), Failure> {
    let archive = args.archive.read()?;
    let info = archive.info().map_err(|error| args.archive.failure(error))?;
    // The tree of snapshots alone may be damaged, on which `check` reports more.
    let manager = archive.snapshot_manager();
    let snapshots = manager.list().and_then(|all| match all.len() {
        0 => Ok((0, 0)),
        count => Ok((count, manager.held_bytes(&|_| true)?)),
    });
    let mut out = Output::new();
    let reader = out.reader;
    if args.json {
        let slots: Vec<_> =
            info.key_slots.iter().map(|&(n, kind)| json!({"slot": n, "kind": slot_kind(kind)})).collect();
        out.json(&json!({
            "archive_id": hex(&info.archive),
            "fingerprint": info.fingerprint.to_string(),
            "format_version": info.format_version,
            "generation": info.generation.0,
            "session": hex(&info.session),
            "committed": rfc3339(info.committed),
            "closed": info.closed,
            "log": info.log,
            "inodes": info.inodes,
            "file_bytes": info.file_bytes,
            "used_bytes": info.used_bytes,
            "key_slots": slots,
            "snapshots": snapshots.as_ref().ok().map(|(count, _)| count),
            "snapshots_held_bytes": snapshots.as_ref().ok().map(|(_, held)| held),
            "backup_of": info.backup_of.map(|(generation, time)| json!({"generation": generation.0, "time": rfc3339(time)})),
            "fallback": info.fallback,
        }))?;
    } else {
        let slots: Vec<_> = info.key_slots.iter().map(|&(n, kind)| format!("{n} {}", slot_kind(kind))).collect();
        for (name, value) in [
            ("Archive id", hex(&info.archive)),
            ("Fingerprint", info.fingerprint.to_string()),
            ("Format version", info.format_version.to_string()),
            ("Generation", info.generation.0.to_string()),
            ("Session", hex(&info.session)),
            ("Last commit", reader.time(info.committed)),
            ("Closed cleanly", yes(info.closed)),
            ("Log", yes(info.log)),
            ("Files and directories", info.inodes.to_string()),
            ("Size of the file", reader.size(info.file_bytes)),
            ("In use", reader.size(info.used_bytes)),
            ("Key slots", slots.join(", ")),
            (
                "Snapshots",
                match snapshots {
                    Ok((0, _)) => "0".to_owned(),
                    Ok((count, held)) => format!("{count}, {} held", reader.size(held)),
                    Err(error) => format!("not known: {error}"),
                },
            ),
        ] {
            out.line(&format!("{name:<22} {value}"))?;
        }
    }
    out.finish()
}

fn yes(is: bool) -> String {
    if is { "yes" } else { "no" }.to_owned()
}

/// Specification 3.1, field "kind of each key slot".
fn slot_kind(kind: u8) -> &'static str {
    match kind {
        1 | 17 => "passphrase",
        2 | 18 => "key file",
        3 | 19 => "recovery code",
        4 => "age recipient",
        _ => "unknown",
    }
}
