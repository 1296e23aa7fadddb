//! `lockbox check`: verifies an archive.
use lockbox::archive::{Archive, Finding, Lost};
use lockbox::keys;
use lockbox_host::{DAMAGED, Program, shown};
use serde_json::json;

use crate::exit::{self, Failure, Lockbox};
use crate::opening::ArchiveArgs;
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
    /// Print JSON
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(args: &Args) -> Result<(), Failure> {
    let path = &args.archive.archive;
    let (archive, repaired) = open(args)?;
    let bar = Bar::checking();
    let checked = archive.check(args.full, &mut |done, total| bar.checked(done, total));
    drop(bar);
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
    if report.findings.is_empty() {
        return Ok(());
    }
    for finding in &report.findings {
        output::complain(&format!("{finding}{}", exit::mending(finding.kind)));
    }
    let message = format!("{}: damaged archive: findings={}", shown(path), report.findings.len());
    Err(Failure::new(DAMAGED, message))
}

/// The archive, and what was written anew of its header.
fn open(args: &Args) -> Result<(Archive, Option<String>), Failure> {
    if !args.repair_header {
        return Ok((args.archive.read()?, None));
    }
    let path = &args.archive.archive;
    let key = args.archive.unlock_alone()?;
    let seen = args.archive.seen();
    let repaired = keys::repair_header(path, &key, &seen).map_err(|error| Lockbox::failure(path, error))?;
    if let Some(repaired) = repaired.as_ref().filter(|_| !args.json) {
        output::complain(&format!("{}: {repaired}", shown(path)));
    }
    Ok((args.archive.open_with(&key, true)?, repaired))
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
