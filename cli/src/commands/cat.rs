//! `lockbox cat`: writes files of an archive to standard output.
use std::ffi::OsString;

use lockbox::fs::FileSystem;
use lockbox_terminal::display;

use crate::exit::Failure;
use crate::open_archive::{ArchiveArgs, MomentArgs, regular_file};
use crate::output::Output;

/// Bytes read at once.
const PIECE: usize = 1 << 20;

/// Write files of an archive to standard output
#[derive(clap::Args)]
pub(crate) struct Args {
    #[command(flatten)]
    archive: ArchiveArgs,
    #[command(flatten)]
    moment: MomentArgs,
    /// Files of the archive, or each with the archive as ARCHIVE:PATH
    #[arg(value_name = "PATH")]
    paths: Vec<OsString>,
}

pub(crate) fn run(args: &Args) -> Result<(), Failure> {
    let (archive, paths) = args.archive.and_paths(&args.paths)?;
    if paths.is_empty() {
        return Err(Failure::usage("say which file of the archive: ARCHIVE PATH or ARCHIVE:PATH"));
    }
    let archive = archive.read_at(&args.moment)?;
    let mut out = Output::new();
    for path in &paths {
        copy(archive.file_system(), path, &mut out)?;
    }
    out.finish()
}

fn copy(fs: &FileSystem, path: &[u8], out: &mut Output) -> Result<(), Failure> {
    let attributes = regular_file(fs, path)?;
    let mut offset = 0;
    while offset < attributes.size {
        let piece = fs.read(attributes.ino, offset, PIECE).map_err(|error| Failure::of(display(path), &error))?;
        if piece.is_empty() {
            break;
        }
        out.bytes(&piece)?;
        offset += piece.len() as u64;
    }
    Ok(())
}
