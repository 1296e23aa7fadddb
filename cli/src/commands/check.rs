//! `lockbox check`: verifies an archive.
use lockbox::archive::{Archive, CheckReport, CheckStep, Finding, FindingKind, Lost, Severity};
use lockbox::keys;
use lockbox_host::{DAMAGED, Program, remote, shown};
use serde_json::json;

use crate::exit::{self, Failure, Lockbox};
use crate::interrupt::Interrupt;
use crate::open_archive::{ArchiveArgs, MomentArgs, WriterArgs};
use crate::output::{self, Output};
use crate::progress::Bar;

/// Verify that an archive is sound
#[derive(clap::Args)]
pub(crate) struct Args {
    #[command(flatten)]
    archive: ArchiveArgs,
    /// Read and authenticate every page, not only the structure
    #[arg(long)]
    full: bool,
    /// First write the copy of the header anew that is lost, altered or older than the other one
    #[arg(long)]
    repair_header: bool,
    /// With --repair-header: go on although another machine seems to be writing to the archive at the address; what that has not committed is lost to it
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
        let what = if is_repaired { "nothing but the header was changed" } else { "nothing was changed" };
        format!("nothing is known of what was not checked yet, and {what}; the same command begins anew")
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
    let report = checked.map_err(|error| Lockbox::failure(path, error))?;
    let info = archive.info().map_err(|error| Lockbox::failure(path, error))?;
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
        let what = if args.full { "every page" } else { "the structure" };
        let which = |_| format!(" as commit {} left it, but newer changes may be missing", info.generation.0);
        let which = info.fallback.map_or_else(String::new, which);
        out.line(&format!("{}: sound{which} ({what} checked, {} files and directories)", shown(path), report.inodes))?;
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
    let (path, remote) = (&args.archive.archive, args.archive.remote());
    if !args.full || !remote::is_remote(path) || remote.is_unsent() {
        return Ok(());
    }
    let compared = remote::compare(path, remote, &mut |done, total| {
        if total > 0 {
            bar.bytes("compared", done, total);
        }
        Ok(())
    });
    let compared = compared.map_err(|error| Lockbox::failure(path, error))?;
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
        let (archive, interrupt) = args.archive.read_watched(&MomentArgs::default())?;
        return Ok((archive, interrupt, None));
    }
    let path = &args.archive.archive;
    let (key, place) = args.archive.unlock_alone(WriterArgs::taking_over(args.take_over))?;
    let seen = args.archive.seen();
    let repaired = keys::repair_header(place.site(), &key, &seen).map_err(|error| Lockbox::failure(path, error))?;
    if let Some(repaired) = repaired.as_ref().filter(|_| !args.json) {
        output::complain(&format!("{}: {repaired}", shown(path)));
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
