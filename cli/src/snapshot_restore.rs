//! `lockbox snapshot restore`: brings back what a snapshot shows.
use std::ffi::OsString;
use std::os::unix::ffi::OsStrExt;

use lockbox::Error;
use lockbox::archive::Archive;
use lockbox::error::Refusal;
use lockbox::exchange::Restore;
use lockbox_host::{Program, code};
use lockbox_terminal::display;

use crate::exit::{Failure, Lockbox};
use crate::moments::Mounted;
use crate::opening::ArchiveArgs;
use crate::output::Output;

/// Bring back what a snapshot shows
#[derive(clap::Args)]
pub(crate) struct Args {
    #[command(flatten)]
    archive: ArchiveArgs,
    /// The snapshot
    name: OsString,
    /// Files and directories in it; by default everything, and what else there is now goes
    #[arg(value_name = "PATH")]
    paths: Vec<OsString>,
    /// Put them into this directory of the archive, where nothing is replaced
    #[arg(long, value_name = "DIR")]
    to: Option<OsString>,
}

/// `now` is the time as a part of a name.
pub(crate) fn run(args: &Args, now: &str) -> Result<(), Failure> {
    let failed = |error| Lockbox::failure(&args.archive.archive, error);
    Mounted::refuse(&args.archive, "snapshot restore")?;
    let (archive, interrupt) = args.archive.write_watched()?;
    let mut before = None;
    let restored = restore(args, now, &archive, &mut before, &mut || interrupt.check());
    let closed = archive.close();
    if let Some(name) = &before {
        let mut out = Output::new();
        out.line(&display(name))?;
        out.finish()?;
    }
    match restored {
        Err(error @ Error::Interrupted(_)) => {
            closed.map_err(failed)?;
            let sentence = "interrupted; each path is as it was or as the snapshot shows it, and the same command brings back the rest";
            Err(Failure::new(code(&error), sentence))
        }
        restored => restored.and(closed).map_err(failed),
    }
}

/// `before` gets the name of the snapshot that is taken of what may be replaced.
fn restore(
    args: &Args,
    now: &str,
    archive: &Archive,
    before: &mut Option<Vec<u8>>,
    go_on: &mut dyn FnMut() -> Result<(), Error>,
) -> Result<(), Error> {
    let moment = archive.moment(args.name.as_bytes())?;
    let paths: Vec<Vec<u8>> = args.paths.iter().map(|path| path.as_bytes().to_vec()).collect();
    let to = args.to.as_ref().map(|to| to.as_bytes());
    let restore = Restore::prepare(archive.file_system(), &moment, &paths, to)?;
    // With --to nothing is replaced.
    if to.is_none() {
        *before = Some(keep_what_is_there(archive, now)?);
    }
    restore.run(go_on).map(drop)
}

/// Takes a snapshot under a name that is free, and answers that.
fn keep_what_is_there(archive: &Archive, now: &str) -> Result<Vec<u8>, Error> {
    let name = format!("before-restore-{now}");
    for number in 1u64.. {
        let name = if number == 1 { name.clone() } else { format!("{name}-{number}") }.into_bytes();
        match archive.take_snapshot(&name) {
            // Another restore within the same second.
            Err(Error::Refused(Refusal::SnapshotExists { .. })) => {}
            taken => return taken.map(|()| name),
        }
    }
    Err(Error::Exists)
}
