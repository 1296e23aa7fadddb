//! `lockbox import-tar`: copies the members of a tar on standard input into an archive, all or
//! nothing.
use std::cell::Cell;
use std::ffi::OsString;
use std::fs::{File, Metadata};
use std::io::{self, BufReader, IsTerminal, Read, Seek};
use std::os::fd::AsFd;
use std::os::unix::ffi::OsStrExt;

use lockbox::Error;
use lockbox::exchange::{self, FileTotals, Progress, TarImportOptions};
use lockbox_host::Program;

use crate::exit::{Failure, Lockbox};
use crate::interrupt::{self, Interrupt};
use crate::open_archive::{ArchiveArgs, WriterArgs, creator};
use crate::output;

/// Bytes after the end mark that are read, so that the program that writes them does not fail: the
/// rest of a record, and some more.
const MAX_REST: u64 = 1 << 20;

/// Copy everything in a tar on standard input into an archive
#[derive(clap::Args)]
pub(crate) struct Args {
    #[command(flatten)]
    archive: ArchiveArgs,
    #[command(flatten)]
    writer: WriterArgs,
    /// Directory of the archive to copy into; made when it is missing
    #[arg(long, value_name = "DIR", default_value = "/")]
    to: OsString,
    /// Replace files of the archive that have the same name
    #[arg(long)]
    force: bool,
    /// Print a summary as JSON
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(args: &Args) -> Result<(), Failure> {
    let stdin = io::stdin();
    if stdin.is_terminal() {
        return Err(Failure::usage("a tar is expected on standard input"));
    }
    let (archive, interrupt) = args.archive.write_watched_with_input_taken(args.writer)?;
    let options = TarImportOptions { to: args.to.as_bytes().to_vec(), replace: args.force, creator: creator() };
    let tar = stdin.as_fd().try_clone_to_owned();
    let tar = tar.map_err(|error| Failure::host("cannot read standard input", &error))?;
    let mut tar = File::from(tar);
    let bar = args.archive.bar();
    if let Some(bytes) = rest_of(&mut tar) {
        bar.expect(FileTotals { files: 0, bytes });
    }
    let read = Cell::new(0);
    let mut input = BufReader::new(Watched { tar, interrupt: &interrupt, read: &read });
    let imported = exchange::import_tar(archive.file_system(), &mut input, &options, &mut |progress| {
        bar.copied("imported", &Progress { passed: FileTotals { files: 0, bytes: read.get() }, ..*progress });
        interrupt.check()
    });
    bar.wipe();
    if imported.is_ok() {
        // The rest of the input does not matter.
        let _ = io::copy(&mut input.take(MAX_REST), &mut io::sink());
    }
    // A refused tar was taken back, which is a change too.
    let closed = archive.close();
    let failed = |error| Lockbox::failure(&args.archive.archive, error);
    // The writer of the tar may have been interrupted at the same time; then the tar ends early.
    let interrupted = interrupt
        .check()
        .err()
        .filter(|_| matches!(imported, Err(Error::Interrupted(_) | Error::Io { .. } | Error::Invalid(_))));
    if let Some(error) = interrupted {
        closed.map_err(failed)?;
        let words = "nothing was imported, and what had arrived was taken back; the same command with all of the tar begins anew";
        return Err(interrupt::failure(&error, words));
    }
    let report = imported.map_err(|error| match error {
        Error::Exists => Failure::other(
            "nothing was imported: the archive has a .lockbox-import-tar in its root that no import left; rename or delete it",
        ),
        error => failed(error),
    })?;
    closed.map_err(failed)?;
    bar.done("imported", Some(report.copied.files), report.copied.bytes);
    output::complain_of_left(&report.skipped);
    if args.json {
        output::print_json(&output::summary(&report.copied, &report.skipped))?;
    }
    Ok(())
}

/// Returns the number of bytes left to read, where that is known.
fn rest_of(tar: &mut File) -> Option<u64> {
    let length = tar.metadata().ok().filter(Metadata::is_file)?.len();
    length.checked_sub(tar.stream_position().ok()?)
}

/// Reader of the tar that fails after a signal.
struct Watched<'a> {
    tar: File,
    interrupt: &'a Interrupt,
    /// Bytes read of it.
    read: &'a Cell<u64>,
}

impl Read for Watched<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.interrupt.readable(&self.tar)?;
        let length = self.tar.read(buffer)?;
        self.read.set(self.read.get() + length as u64);
        Ok(length)
    }
}
