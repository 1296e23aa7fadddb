//! `lockbox purge`: erases all freed space now, also of a mounted archive.
use lockbox_host::Program;

use crate::exit::{Failure, Lockbox};
use crate::open_archive::{ArchiveArgs, WriterArgs};
use crate::snapshot_client::Mounted;

/// Erase what deleted files left in an archive, now; the archive may be mounted, and named by its mount point
#[derive(clap::Args)]
pub(crate) struct Args {
    #[command(flatten)]
    archive: ArchiveArgs,
    #[command(flatten)]
    writer: WriterArgs,
    /// First remove every snapshot, so that what only they show is erased too
    #[arg(long)]
    snapshots: bool,
}

pub(crate) fn run(args: &Args) -> Result<(), Failure> {
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
    purged.and(archive.close()).map_err(|error| Lockbox::failure(&args.archive.archive, error))
}
