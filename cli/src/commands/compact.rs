//! `lockbox compact` and `purge`: rewrite an archive without its free space, or erase that.
use std::path::Path;

use lockbox::Error;
use lockbox::archive::{Archive, CompactOptions, CompactStep};
use lockbox::fs::Compression;
use lockbox_host::remote::{self, ArchiveLocation};
use lockbox_host::{NO_SPACE, shown};
use serde_json::json;

use crate::exit::Failure;
use crate::interrupt::{self, Interrupt};
use crate::open_archive::{ArchiveArgs, WriterArgs, compression_levels};
use crate::output::Output;
use crate::progress::Bar;
use crate::secrets;
use crate::snapshot_client::Mounted;

const COPIED: &str = "copied and compared";

/// Rewrite an archive without its free space and put the new one in its place
#[derive(clap::Args)]
pub(crate) struct Args {
    #[command(flatten)]
    archive: ArchiveArgs,
    #[command(flatten)]
    writer: WriterArgs,
    /// Only tell how large the archive would be, about
    #[arg(long)]
    dry_run: bool,
    /// Go on although the file has further names (hard links), which will keep the old file
    #[arg(long)]
    break_links: bool,
    /// Compress all file data again: off, fast, default or best; without it, pages stay as they are
    #[arg(long, value_name = "LEVEL", value_parser = compression_levels(), hide_possible_values = true)]
    compress: Option<Compression>,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(args: &Args) -> Result<(), Failure> {
    let path = &args.archive.archive;
    let (key, place) = args.archive.unlock_alone(args.writer)?;
    // Not before: a prompt for the passphrase can be left as usual.
    let watch = Watch::start(args.archive.bar())?;
    let seen = args.archive.seen();
    let options =
        CompactOptions { dry_run: args.dry_run, break_links: args.break_links, compression: args.compress, seen };
    let done = Archive::compact(place.source(), &key, &options, &mut |step| watch.step(step));
    drop(watch);
    let report = done.map_err(|error| failure(place, error))?;
    let mut out = Output::new();
    if args.json {
        out.json(&json!({
            "dry_run": args.dry_run,
            "length_before": report.length_before,
            "disk_before": report.disk_before,
            "length_after": report.length_after,
            "disk_after": report.disk_after,
        }))?;
    } else {
        let after = if args.dry_run { "about " } else { "" };
        out.line(&format!(
            "{}: {} {} before, {after}{} after",
            shown(path),
            out.reader.size(report.disk_before),
            where_it_is(path),
            out.reader.size(report.disk_after)
        ))?;
    }
    out.finish()
}

/// Shows the progress of a new file, and after a signal stops before the file replaces the archive.
pub(crate) struct Watch {
    bar: Bar,
    interrupt: Interrupt,
}

impl Watch {
    pub(crate) fn start(bar: Bar) -> Result<Watch, Failure> {
        Ok(Watch { interrupt: Interrupt::watch()?, bar })
    }

    pub(crate) fn step(&self, step: CompactStep) -> lockbox::Result<()> {
        match step {
            // Copying and comparing read the same bytes, so each is half of the work.
            CompactStep::Copying { done, total } => self.bar.bytes(COPIED, done, 2 * total),
            CompactStep::Verifying { done, total } => self.bar.bytes(COPIED, total + done, 2 * total),
            _ => {}
        }
        self.interrupt.check()
    }
}

/// Returns the place of the counted bytes.
pub(crate) fn where_it_is(archive: &Path) -> &'static str {
    if remote::is_remote(archive) { "in the store" } else { "on the disk" }
}

pub(crate) fn failure(place: &ArchiveLocation, error: Error) -> Failure {
    let path = place.path();
    match error {
        Error::Interrupted(_) => interrupt::failure(&error, "the archive is unchanged; the same command starts over"),
        Error::NoSpace(_) if !place.is_remote() => Failure::new(
            NO_SPACE,
            format!(
                "no space left for the new file next to {}; the archive is unchanged, and 'lockbox compact --dry-run' shows how much is needed",
                shown(path)
            ),
        ),
        error => secrets::failure(place, error),
    }
}

/// Erase the data of deleted files in an archive now; the archive may be mounted, and named by its mount point
#[derive(clap::Args)]
pub(crate) struct PurgeArgs {
    #[command(flatten)]
    archive: ArchiveArgs,
    #[command(flatten)]
    writer: WriterArgs,
    /// First remove every snapshot, so that data that only they hold is erased too
    #[arg(long)]
    snapshots: bool,
}

pub(crate) fn purge(args: &PurgeArgs) -> Result<(), Failure> {
    if let Some(mounted) = Mounted::find(&args.archive)? {
        if args.snapshots {
            let ids: Vec<u64> = mounted.list(false)?.iter().map(|snapshot| snapshot.id).collect();
            mounted.remove(&ids)?;
        }
        return mounted.purge();
    }
    let archive = args.archive.write(args.writer)?;
    let all = &mut |all: &[lockbox::archive::Snapshot]| Ok(all.iter().map(|snapshot| snapshot.id).collect());
    let removed = if args.snapshots { archive.snapshot_manager().remove(all) } else { Ok(()) };
    let purged = removed.and_then(|()| archive.file_system().purge());
    // Closing erases the remaining space and truncates the file, also after purging failed
    // half-way.
    purged.and(archive.close()).map_err(|error| args.archive.failure(error))
}
