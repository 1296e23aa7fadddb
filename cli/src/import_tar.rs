//! `lockbox import-tar`: copies the members of a tar on standard input into an archive, all or nothing.
use std::ffi::OsString;
use std::io::{self, IsTerminal, Read};
use std::os::unix::ffi::OsStrExt;

use lockbox::Error;
use lockbox::exchange::{self, TarImportOptions};
use lockbox_host::Program;

use crate::create::creator;
use crate::exit::{Failure, Lockbox};
use crate::opening::ArchiveArgs;
use crate::output;
use crate::progress::Bar;

/// What may follow the end mark and is read, so that the program that writes it does not fail: the rest of a record, and then some.
const MAX_REST: u64 = 1 << 20;

/// Copy everything in a tar on standard input into an archive
#[derive(clap::Args)]
pub(crate) struct Args {
    #[command(flatten)]
    archive: ArchiveArgs,
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
    let archive = args.archive.write_with_input_taken()?;
    let options = TarImportOptions { to: args.to.as_bytes().to_vec(), replace: args.force, creator: creator() };
    let mut input = stdin.lock();
    let bar = Bar::copying();
    let imported =
        exchange::import_tar(archive.file_system(), &mut input, &options, &mut |progress| bar.copied(progress));
    drop(bar);
    if imported.is_ok() {
        // Whoever writes has nothing more to say that matters.
        let _ = io::copy(&mut input.take(MAX_REST), &mut io::sink());
    }
    // A refused tar was taken back, which is a change too.
    let closed = archive.close();
    let failed = |error| Lockbox::failure(&args.archive.archive, error);
    let report = imported.map_err(|error| match error {
        Error::Exists => Failure::other(
            "nothing was imported: the archive has a .lockbox-import-tar in its root that no import left; rename or delete it",
        ),
        error => failed(error),
    })?;
    closed.map_err(failed)?;
    output::complain_of_left(&report.left);
    if args.json {
        output::print_json(&output::summary(&report.copied, &report.left))?;
    }
    Ok(())
}
