//! `lockbox snapshot`: creates, lists, removes, compares and restores snapshots of an archive.
mod diff;
mod prune;
mod restore;

use std::collections::HashSet;
use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::time::SystemTime;

use ignore::gitignore::{Gitignore, GitignoreBuilder};
use lockbox::Error;
use lockbox::archive::{Snapshot, name_of_time};
use lockbox::error::{Refusal, Timestamp};
use lockbox_host::Program;
use lockbox_terminal::display;
use serde_json::{Value, json};

use crate::exit::{Failure, Lockbox};
use crate::open_archive::{ArchiveArgs, WriterArgs};
use crate::output::{Output, put_name, rfc3339};
use crate::snapshot_client::{self, Mounted, SnapshotBackend};

/// Keep moments of an archive, to read them later or bring them back; the archive may be mounted, and named by its mount point
#[derive(clap::Subcommand)]
pub(crate) enum Command {
    Create(CreateArgs),
    Ls(LsArgs),
    Rm(RmArgs),
    Prune(prune::Args),
    Diff(diff::Args),
    Restore(restore::Args),
}

/// Keep everything in an archive as it is now
#[derive(clap::Args)]
pub(crate) struct CreateArgs {
    #[command(flatten)]
    archive: ArchiveArgs,
    #[command(flatten)]
    writer: WriterArgs,
    /// Its name; by default the time in UTC, such as 2026-11-23T05-42-03Z
    name: Option<OsString>,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// List the snapshots of an archive, the oldest first, and what removing them gives back
#[derive(clap::Args)]
pub(crate) struct LsArgs {
    #[command(flatten)]
    archive: ArchiveArgs,
    /// Only these, by names or patterns, and what removing all of them together gives back
    #[arg(value_name = "NAME")]
    names: Vec<OsString>,
    /// Print JSON, one object a line
    #[arg(long)]
    json: bool,
}

/// Remove snapshots, and erase what only they show
#[derive(clap::Args)]
pub(crate) struct RmArgs {
    #[command(flatten)]
    archive: ArchiveArgs,
    #[command(flatten)]
    writer: WriterArgs,
    /// Names of snapshots, or patterns such as 'auto-2026-10-*' for what has no such name
    #[arg(required = true, value_name = "NAME")]
    names: Vec<OsString>,
    /// Remove nothing, and tell which ones would go and what that would give back
    #[arg(long)]
    dry_run: bool,
    /// Print JSON, one object a line
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(command: &Command) -> Result<(), Failure> {
    match command {
        Command::Create(args) => create(args),
        Command::Ls(args) => list(&args.archive, &args.names, args.json),
        Command::Rm(args) => rm(args),
        Command::Prune(args) => prune::run(args),
        Command::Diff(args) => diff::run(args),
        Command::Restore(args) => restore::run(args),
    }
}

fn create(args: &CreateArgs) -> Result<(), Failure> {
    let name = match &args.name {
        Some(name) => name.as_bytes().to_vec(),
        None => name_of_time(Timestamp::from_system(SystemTime::now())).into_bytes(),
    };
    match Mounted::find(&args.archive)? {
        Some(mounted) => mounted.create(&name)?,
        None => {
            let archive = args.archive.write(args.writer)?;
            let taken = archive.take_snapshot(&name).and(archive.close());
            taken.map_err(|error| Lockbox::failure(&args.archive.archive, error))?;
        }
    }
    let mut out = Output::new();
    if args.json {
        let mut object = json!({});
        put_name(&mut object, "name", &name);
        out.json(&object)?;
    } else {
        out.name(&name)?;
        out.bytes(b"\n")?;
    }
    out.finish()
}

/// Lists snapshots; with names, only the matching ones, and the space that they hold together.
fn list(archive: &ArchiveArgs, names: &[OsString], json: bool) -> Result<(), Failure> {
    let wanted = SnapshotSelector::new(names)?;
    let told = SnapshotBackend::of(archive)?;
    let all = told.list(true)?;
    let mut set = None;
    if !names.is_empty() {
        let ids = wanted.among(&all).map_err(|error| Lockbox::failure(&archive.archive, error))?;
        set = Some(ids.into_iter().collect::<HashSet<u64>>());
    }
    let mut out = Output::new();
    for snapshot in all.iter().filter(|one| set.as_ref().is_none_or(|set| set.contains(&one.id))) {
        if json { out.json(&json_of(snapshot))? } else { row(snapshot, &mut out)? }
    }
    if let Some(set) = &set {
        snapshot_client::together(set.len(), told.held(&all, set)?, json, &mut out)?;
    }
    out.finish()
}

fn row(snapshot: &Snapshot, out: &mut Output) -> Result<(), Failure> {
    let Snapshot { name, time, inodes, held_bytes, .. } = snapshot;
    let (inodes, held) = (format!("{inodes} inodes"), format!("{} held", out.reader.size(held_bytes.unwrap_or(0))));
    let time = out.reader.time(*time);
    out.line(&format!("{time}  {inodes:>16}  {held:>24}  {}", display(name)))
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
    if args.dry_run {
        return list(&args.archive, &args.names, args.json);
    }
    let failed = |error| Lockbox::failure(&args.archive.archive, error);
    let wanted = SnapshotSelector::new(&args.names)?;
    let mut gone = Vec::new();
    let mut among = |all: &[Snapshot]| -> lockbox::Result<Vec<u64>> {
        let ids = wanted.among(all)?;
        gone = all.iter().filter(|one| ids.contains(&one.id)).cloned().collect();
        Ok(ids)
    };
    match Mounted::find(&args.archive)? {
        Some(mounted) => mounted.remove(&among(&mounted.list(false)?).map_err(failed)?)?,
        None => snapshot_client::remove_from_file(&args.archive, args.writer, &mut among)?,
    }
    let mut out = Output::new();
    for snapshot in gone.iter().filter(|_| args.json) {
        out.json(&json_of(snapshot))?;
    }
    out.finish()
}

/// Names and patterns of the snapshots to remove, as they were given.
struct SnapshotSelector<'a>(Vec<(&'a [u8], Option<Gitignore>)>);

impl SnapshotSelector<'_> {
    fn new(names: &[OsString]) -> Result<SnapshotSelector<'_>, Failure> {
        let pattern = |name: &OsStr| {
            let Some(text) = name.to_str().filter(|text| text.contains(['*', '?', '['])) else { return Ok(None) };
            let wrong = |_| Failure::usage(format!("'{}' is no pattern", display(name.as_bytes())));
            let mut rules = GitignoreBuilder::new("/");
            // Anchored at the beginning of the name, with any first character.
            rules.add_line(None, &format!("/{text}")).map_err(wrong)?;
            rules.build().map(Some).map_err(wrong)
        };
        Ok(SnapshotSelector(
            names.iter().map(|name| Ok((name.as_bytes(), pattern(name)?))).collect::<Result<_, Failure>>()?,
        ))
    }

    /// Returns the ids of all selected snapshots: the one with the name, or else those that the
    /// pattern matches.
    fn among(&self, all: &[Snapshot]) -> lockbox::Result<Vec<u64>> {
        let mut ids = Vec::new();
        for (name, pattern) in &self.0 {
            let before = ids.len();
            ids.extend(all.iter().filter(|one| one.name == *name).map(|one| one.id));
            if let Some(pattern) = pattern.as_ref().filter(|_| ids.len() == before) {
                let matches =
                    |one: &&Snapshot| pattern.matched(Path::new(OsStr::from_bytes(&one.name)), false).is_ignore();
                ids.extend(all.iter().filter(matches).map(|one| one.id));
            }
            if ids.len() == before {
                return Err(Error::Refused(Refusal::NoSnapshot { name: display(name) }));
            }
        }
        Ok(ids)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_goes_before_a_pattern_and_each_has_to_mean_something() {
        let names: [&[u8]; 5] = [b"auto-1", b"auto-2", b"auto-*", b"monday", b"auto-\xff"];
        let all: Vec<Snapshot> = (1..)
            .zip(names)
            .map(|(id, name)| Snapshot {
                id,
                name: name.to_vec(),
                time: Timestamp::default(),
                inodes: 1,
                held_bytes: None,
            })
            .collect();
        let meant = |given: &[&str]| {
            let given: Vec<OsString> = given.iter().map(OsString::from).collect();
            SnapshotSelector::new(&given).unwrap_or_else(|failure| panic!("{failure}")).among(&all)
        };
        assert_eq!(meant(&["auto-*"]).unwrap(), [3], "it has that name");
        assert_eq!(meant(&["auto-?"]).unwrap(), [1, 2, 3, 5]);
        assert_eq!(meant(&["*day", "auto-[2-9]"]).unwrap(), [4, 2]);
        assert!(meant(&["day*"]).is_err() && meant(&["monday", "tuesday"]).is_err() && meant(&["!monday*"]).is_err());
        assert!(SnapshotSelector::new(&["a[z-a]".into()]).is_err());
    }
}
