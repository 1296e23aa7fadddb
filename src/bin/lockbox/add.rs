//! `lockbox add`: copies files of the host into an archive.

use std::ffi::OsString;
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;

use lockbox::archive::ImportOptions;
use serde_json::json;

use crate::create::creator;
use crate::exit::Failure;
use crate::opening::{self, ArchiveArgs};
use crate::output::{self, Output};
use crate::progress::Bar;

/// Copy files and directories into an archive
#[derive(clap::Args)]
pub(crate) struct Args {
    #[command(flatten)]
    archive: ArchiveArgs,
    /// What to copy; directories with everything below them
    #[arg(required = true, value_name = "SRC")]
    sources: Vec<PathBuf>,
    /// Directory of the archive to copy into; made when it is missing
    #[arg(long, value_name = "PATH", default_value = "/")]
    to: OsString,
    /// Copy what a SRC that is a symbolic link points to
    #[arg(long)]
    follow: bool,
    /// Replace files of the archive that have the same name
    #[arg(long)]
    force: bool,
    /// Print a summary as JSON
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(args: &Args) -> Result<(), Failure> {
    let archive = args.archive.write()?;
    let options =
        ImportOptions { to: args.to.as_bytes().to_vec(), follow: args.follow, replace: args.force, creator: creator() };
    let bar = Bar::copying();
    let imported = archive.import(&args.sources, &options, &mut |progress| bar.copied(progress));
    drop(bar);
    // What was added before a failure is whole, so it is kept.
    let closed = archive.close();
    let failed = |error| opening::failure(&args.archive.archive, error);
    let report = imported.map_err(failed)?;
    closed.map_err(failed)?;
    output::complain_of(&report.problems);
    output::complain_of_attributes(&report.left);
    if args.json {
        let mut out = Output::new();
        out.json(&json!({
            "files": report.files,
            "directories": report.directories,
            "links": report.links,
            "symlinks": report.symlinks,
            "others": report.others,
            "bytes": report.bytes,
            "attributes_left": report.left.count,
            "problems": output::problems(&report.problems),
        }))?;
        out.finish()?;
    }
    Failure::of_problems(&report.problems).map_or(Ok(()), Err)
}
