//! `lockbox rm`: removes files and directories of an archive.
use std::ffi::OsString;

use lockbox::exchange::{remove, resolve};
use lockbox::format::ROOT_INO;
use lockbox_terminal::display;

use crate::exit::Failure;
use crate::open_archive::{OpeningArgs, WriterArgs};
use crate::paths::in_one_archive;

/// Remove files and directories of an archive
#[derive(clap::Args)]
pub(crate) struct Args {
    #[command(flatten)]
    opening: OpeningArgs,
    #[command(flatten)]
    writer: WriterArgs,
    /// What to remove, all of one archive
    #[arg(required = true, value_name = "ARCHIVE:PATH")]
    paths: Vec<OsString>,
    /// Remove directories with everything below them
    #[arg(short)]
    recursive: bool,
}

pub(crate) fn run(args: &Args) -> Result<(), Failure> {
    let (archive, paths) = in_one_archive(&args.paths)?;
    let archive = args.opening.of(archive);
    archive.change(args.writer, |fs| {
        for path in paths.iter().filter(|_| !args.recursive) {
            if resolve(fs, path).is_ok_and(|found| found.is_directory() && found.ino != ROOT_INO) {
                let path = display(path);
                return Err(lockbox::Error::Invalid(format!(
                    "{path} is a directory; use -r to remove it with all in it"
                )));
            }
        }
        remove(fs, &paths).map(drop)
    })
}
