//! `lockbox export-tar`: writes files of an archive as a tar to standard output.
use std::ffi::OsString;
use std::io::{self, BufWriter, IsTerminal};

use lockbox::exchange;
use lockbox_host::Program;

use crate::exit::{Failure, Lockbox};
use crate::open_archive::{ArchiveArgs, MomentArgs};
use crate::output;
use crate::paths::PatternArgs;

/// Write files and directories as a tar to standard output
#[derive(clap::Args)]
pub(crate) struct Args {
    #[command(flatten)]
    archive: ArchiveArgs,
    #[command(flatten)]
    moment: MomentArgs,
    /// What to write, with everything below it, or each with the archive as ARCHIVE:PATH; everything by default
    #[arg(value_name = "PATH")]
    paths: Vec<OsString>,
    #[command(flatten)]
    patterns: PatternArgs,
}

pub(crate) fn run(args: &Args) -> Result<(), Failure> {
    if io::stdout().is_terminal() {
        return Err(Failure::usage("a tar is not for a terminal: send it to a file or a program"));
    }
    let filter = args.patterns.filter()?;
    let (named, paths) = args.archive.and_paths(&args.paths)?;
    let (archive, interrupt) = named.read_watched(&args.moment)?;
    let mut out = BufWriter::with_capacity(256 << 10, output::Watched::new());
    let bar = named.bar();
    let words = || "what was written is no whole tar; the same command begins anew".to_owned();
    let at_once = interrupt.ends_at_once(&bar, words)?;
    let (fs, counted, left_out) = (archive.file_system().clone(), paths.clone(), filter.clone());
    bar.count(move |wanted| exchange::count_archive_files(&fs, &counted, &left_out, wanted));
    let exported = exchange::export_tar(archive.file_system(), &paths, &filter, &mut out, &mut |progress| {
        bar.copied("exported", progress);
    });
    drop(at_once);
    let failed = |error| out.get_ref().failure().unwrap_or_else(|| Lockbox::failure(&named.archive, error));
    let report = exported.map_err(failed)?;
    bar.done("exported", Some(report.copied.files), report.copied.bytes);
    match report.sockets {
        0 => {}
        1 => output::complain("1 socket was left out, which a tar cannot hold"),
        count => output::complain(&format!("{count} sockets were left out, which a tar cannot hold")),
    }
    Ok(())
}
