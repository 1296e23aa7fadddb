//! `lockbox mv`: moves and renames files and directories within an archive.
use std::ffi::OsString;

use lockbox::exchange::{CopyDestination, rename};

use crate::exit::Failure;
use crate::open_archive::{OpeningArgs, WriterArgs};
use crate::paths::in_one_archive;

/// Move or rename files and directories within an archive
#[derive(clap::Args)]
pub(crate) struct Args {
    #[command(flatten)]
    opening: OpeningArgs,
    #[command(flatten)]
    writer: WriterArgs,
    /// What to move, and last where to: into a directory that is there, or one of them to a new name
    #[arg(required = true, num_args = 2.., value_name = "ARCHIVE:PATH")]
    paths: Vec<OsString>,
    /// Replace files that are in the way
    #[arg(long)]
    force: bool,
}

pub(crate) fn run(args: &Args) -> Result<(), Failure> {
    let (archive, mut paths) = in_one_archive(&args.paths)?;
    let target = paths.pop().unwrap_or_default();
    args.opening.of(archive).change(args.writer, |fs| {
        let to = CopyDestination::of(fs, &target, paths.len() > 1)?;
        rename(fs, &paths, &to, args.force)
    })
}
