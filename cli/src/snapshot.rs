//! `lockbox snapshot`: keeps moments of an archive, lists and removes them.
use std::ffi::OsString;
use std::os::unix::ffi::OsStrExt;
use std::time::SystemTime;

use lockbox::Error;
use lockbox::archive::Snapshot;
use lockbox::error::Timestamp;
use lockbox_host::{Program, code};
use lockbox_terminal::display;
use serde_json::{Value, json};

use crate::exit::{Failure, Lockbox};
use crate::opening::ArchiveArgs;
use crate::output::{Output, put_name, rfc3339};

/// Keep moments of an archive, to read them later
#[derive(clap::Subcommand)]
pub(crate) enum Command {
    Create(CreateArgs),
    Ls(LsArgs),
    Rm(RmArgs),
}

/// Keep everything in an archive as it is now
#[derive(clap::Args)]
pub(crate) struct CreateArgs {
    #[command(flatten)]
    archive: ArchiveArgs,
    /// Its name; by default the time in UTC, such as 2026-11-23T05-42-03Z
    name: Option<OsString>,
}

/// List the snapshots of an archive, the oldest first
#[derive(clap::Args)]
pub(crate) struct LsArgs {
    #[command(flatten)]
    archive: ArchiveArgs,
    /// Print JSON, one object a line
    #[arg(long)]
    json: bool,
}

/// Remove snapshots, and erase what only they show
#[derive(clap::Args)]
pub(crate) struct RmArgs {
    #[command(flatten)]
    archive: ArchiveArgs,
    /// Names of snapshots
    #[arg(required = true, value_name = "NAME")]
    names: Vec<OsString>,
}

pub(crate) fn run(command: &Command) -> Result<(), Failure> {
    match command {
        Command::Create(args) => create(args),
        Command::Ls(args) => ls(args),
        Command::Rm(args) => rm(args),
    }
}

fn create(args: &CreateArgs) -> Result<(), Failure> {
    let failed = |error| Lockbox::failure(&args.archive.archive, error);
    let archive = args.archive.write()?;
    let name = match &args.name {
        Some(name) => name.as_bytes().to_vec(),
        None => name_of(Timestamp::from_system(SystemTime::now())).into_bytes(),
    };
    archive.take_snapshot(&name).and(archive.close()).map_err(failed)?;
    let mut out = Output::new();
    out.name(&name)?;
    out.bytes(b"\n")?;
    out.finish()
}

/// `2026-11-23T05-42-03Z`: as a file may be called everywhere.
fn name_of(time: Timestamp) -> String {
    format!("{}Z", time.utc().replace(' ', "T").replace(':', "-"))
}

fn ls(args: &LsArgs) -> Result<(), Failure> {
    let failed = |error| Lockbox::failure(&args.archive.archive, error);
    let snapshots = args.archive.read()?.snapshots().map_err(failed)?;
    let mut out = Output::new();
    for snapshot in &snapshots {
        if args.json { out.json(&json_of(snapshot))? } else { row(snapshot, &mut out)? }
    }
    out.finish()
}

fn row(snapshot: &Snapshot, out: &mut Output) -> Result<(), Failure> {
    let Snapshot { name, time, inodes, held_bytes } = snapshot;
    let (inodes, held) = (format!("{inodes} inodes"), format!("{held_bytes} bytes held"));
    out.line(&format!("{} UTC  {inodes:>16}  {held:>24}  {}", time.utc(), display(name)))
}

fn json_of(snapshot: &Snapshot) -> Value {
    let mut object = json!({
        "time": rfc3339(snapshot.time),
        "inodes": snapshot.inodes,
        "held_bytes": snapshot.held_bytes,
    });
    put_name(&mut object, "name", &snapshot.name);
    object
}

fn rm(args: &RmArgs) -> Result<(), Failure> {
    let failed = |error| Lockbox::failure(&args.archive.archive, error);
    let names: Vec<Vec<u8>> = args.names.iter().map(|name| name.as_bytes().to_vec()).collect();
    let (archive, interrupt) = args.archive.write_watched()?;
    let removed = archive.remove_snapshots(&names, &mut || interrupt.check());
    // Closing erases what was freed.
    let closed = archive.close();
    match removed {
        Err(error @ Error::Interrupted(_)) => {
            closed.map_err(failed)?;
            let sentence = "interrupted; the snapshots are removed, and the next mount or 'lockbox purge' frees the rest of what they held";
            Err(Failure::new(code(&error), sentence))
        }
        removed => removed.and(closed).map_err(failed),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_by_default_is_a_time_without_colons() {
        assert_eq!(name_of(Timestamp { seconds: 1, nanos: 5 }), "1970-01-01T00-00-01Z");
    }
}
