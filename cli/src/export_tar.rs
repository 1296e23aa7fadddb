//! `lockbox export-tar`: writes files of an archive as a tar to standard output.
use std::ffi::OsString;
use std::io::{self, BufWriter, IsTerminal};
use std::os::unix::ffi::OsStrExt;

use lockbox::exchange;
use lockbox_host::Program;

use crate::exit::{Failure, Lockbox};
use crate::opening::{ArchiveArgs, MomentArgs};
use crate::output;
use crate::patterns::PatternArgs;
use crate::progress::Bar;

/// Write files and directories as a tar to standard output
#[derive(clap::Args)]
pub(crate) struct Args {
    #[command(flatten)]
    archive: ArchiveArgs,
    #[command(flatten)]
    moment: MomentArgs,
    /// What to write, with everything below it; everything by default
    #[arg(value_name = "PATH")]
    paths: Vec<OsString>,
    #[command(flatten)]
    patterns: PatternArgs,
}

pub(crate) fn run(args: &Args) -> Result<(), Failure> {
    let stdout = io::stdout();
    if stdout.is_terminal() {
        return Err(Failure::usage("a tar is not for a terminal: send it to a file or a program"));
    }
    let filter = args.patterns.filter()?;
    let archive = args.archive.read_at(&args.moment)?;
    let paths: Vec<Vec<u8>> = args.paths.iter().map(|path| path.as_bytes().to_vec()).collect();
    let mut out = BufWriter::with_capacity(256 << 10, stdout.lock());
    let bar = Bar::copying();
    let exported =
        exchange::export_tar(archive.file_system(), &paths, &filter, &mut out, &mut |progress| bar.copied(progress));
    drop(bar);
    let report = exported.map_err(|error| Lockbox::failure(&args.archive.archive, error))?;
    match report.sockets {
        0 => {}
        1 => output::complain("1 socket was left out, which a tar cannot hold"),
        count => output::complain(&format!("{count} sockets were left out, which a tar cannot hold")),
    }
    Ok(())
}
