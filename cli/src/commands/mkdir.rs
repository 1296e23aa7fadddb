//! `lockbox mkdir`: makes directories in an archive.
use std::ffi::OsString;

use lockbox::exchange::make_directories;

use crate::exit::Failure;
use crate::open_archive::{OpeningArgs, WriterArgs, creator};
use crate::paths::in_one_archive;

/// Make directories in an archive
#[derive(clap::Args)]
pub(crate) struct Args {
    #[command(flatten)]
    opening: OpeningArgs,
    #[command(flatten)]
    writer: WriterArgs,
    /// The directories, all of one archive
    #[arg(required = true, value_name = "ARCHIVE:PATH")]
    paths: Vec<OsString>,
    /// Make what is missing above them too, and leave one that is there as it is
    #[arg(short)]
    parents: bool,
}

pub(crate) fn run(args: &Args) -> Result<(), Failure> {
    let (archive, paths) = in_one_archive(&args.paths)?;
    args.opening.of(archive).change(args.writer, |fs| make_directories(fs, &paths, args.parents, creator()))
}
