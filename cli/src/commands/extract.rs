//! `lockbox extract`: copies files of an archive out to the host.
use std::ffi::OsString;
use std::path::PathBuf;

use lockbox::Error;
use lockbox::archive::Archive;
use lockbox::exchange::{self, ExtractOptions, ExtractReport};
use lockbox_host::Program;

use crate::exit::{self, Failure, Lockbox};
use crate::interrupt::{self, Interrupt};
use crate::open_archive::{ArchiveArgs, MomentArgs};
use crate::output;
use crate::paths::PatternArgs;

/// Copy files and directories out of an archive
#[derive(clap::Args)]
pub(crate) struct Args {
    #[command(flatten)]
    archive: ArchiveArgs,
    #[command(flatten)]
    moment: MomentArgs,
    /// What to copy, or each with the archive as ARCHIVE:PATH; everything by default
    #[arg(value_name = "PATH")]
    paths: Vec<OsString>,
    /// Directory to copy into; made when it is missing
    #[arg(long, value_name = "DIR")]
    to: PathBuf,
    /// Replace files and empty directories that are in the way
    #[arg(long)]
    force: bool,
    /// Also make devices and keep set-user-ID, set-group-ID and sticky bits of files, capabilities
    /// and other attributes that give rights
    #[arg(long)]
    privileges: bool,
    #[command(flatten)]
    patterns: PatternArgs,
    /// Print a summary as JSON
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(args: &Args) -> Result<(), Failure> {
    let options = ExtractOptions {
        to: args.to.clone(),
        name: None,
        replace: args.force,
        filter: args.patterns.filter()?,
        privileges: args.privileges,
    };
    let (archive, paths) = args.archive.and_paths(&args.paths)?;
    let (opened, interrupt) = archive.read_watched(&args.moment)?;
    let report = copy_out(&archive, &opened, &interrupt, "extracted", &paths, &options)?;
    if args.json {
        let mut summary = output::summary(&report.copied, &report.skipped);
        summary["privileges_left"] = report.skipped.privileges.count.into();
        summary["problems"] = output::problems(&report.problems).into();
        output::print_json(&summary)?;
    }
    exit::of_problems(&report.problems).map_or(Ok(()), Err)
}

/// Copies files out of an archive, and reports the files that could not be copied. `verb`:
/// participle for the message.
pub(crate) fn copy_out(
    named: &ArchiveArgs,
    archive: &Archive,
    interrupt: &Interrupt,
    verb: &'static str,
    paths: &[Vec<u8>],
    options: &ExtractOptions,
) -> Result<ExtractReport, Failure> {
    let bar = named.bar();
    let (fs, counted, filter) = (archive.file_system().clone(), paths.to_vec(), options.filter.clone());
    bar.count(move |wanted| exchange::count_archive_files(&fs, &counted, &filter, wanted));
    let extracted = exchange::extract(archive.file_system(), paths, options, &mut |progress| {
        bar.copied(verb, progress);
        interrupt.check()
    });
    let report = extracted.map_err(|error| match error {
        Error::Interrupted(_) => {
            interrupt::failure(&error, &format!("nothing was {verb}; the same command begins anew"))
        }
        error => Lockbox::failure(&named.archive, error),
    })?;
    bar.done(verb, Some(report.copied.files), report.copied.bytes);
    output::complain_of(&report.problems);
    output::complain_of_left(&report.skipped);
    Ok(report)
}
