//! `lockbox snapshot`: creates, lists, removes, compares and restores snapshots of an archive.
mod restore;

use std::collections::HashSet;
use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::time::SystemTime;

use ignore::gitignore::{Gitignore, GitignoreBuilder};
use lockbox::Error;
use lockbox::archive::{RetentionPolicy, RetentionRule, Snapshot, name_of_time};
use lockbox::error::{Refusal, Timestamp};
use lockbox_terminal::display;
use serde_json::{Value, json};

use crate::exit::Failure;
use crate::open_archive::{ArchiveArgs, WriterArgs};
use crate::output::{Output, put_name, rfc3339};
use crate::snapshot_client::{self, Mounted, SnapshotBackend};

/// Create, list, compare, restore and remove snapshots; the archive may be mounted, and named by its mount point
#[derive(clap::Subcommand)]
pub(crate) enum Command {
    Create(CreateArgs),
    Ls(LsArgs),
    Rm(RmArgs),
    Prune(PruneArgs),
    Diff(restore::DiffArgs),
    Restore(restore::RestoreSnapshotArgs),
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

/// List the snapshots of an archive, the oldest first, and the space that removing them frees
#[derive(clap::Args)]
pub(crate) struct LsArgs {
    #[command(flatten)]
    archive: ArchiveArgs,
    /// Only these, by names or patterns, and the space that removing all of them together frees
    #[arg(value_name = "NAME")]
    names: Vec<OsString>,
    /// Print JSON, one object a line
    #[arg(long)]
    json: bool,
}

/// Remove snapshots, and erase the data that only they hold
#[derive(clap::Args)]
pub(crate) struct RmArgs {
    #[command(flatten)]
    archive: ArchiveArgs,
    #[command(flatten)]
    writer: WriterArgs,
    /// Names of snapshots, or patterns such as 'auto-2026-10-*' if no snapshot has that name
    #[arg(required = true, value_name = "NAME")]
    names: Vec<OsString>,
    /// Remove nothing, and list the snapshots that would be removed and the space that would be freed
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
        Command::Prune(args) => prune(args),
        Command::Diff(args) => restore::diff(args),
        Command::Restore(args) => restore::restore(args),
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
            let taken = archive.snapshot_manager().create(&name).and(archive.close());
            taken.map_err(|error| args.archive.failure(error))?;
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
    let set: Option<HashSet<u64>> = match names {
        [] => None,
        _ => Some(wanted.among(&all).map_err(|error| archive.failure(error))?.into_iter().collect()),
    };
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
    let wanted = SnapshotSelector::new(&args.names)?;
    let mut gone = Vec::new();
    let mut among = |all: &[Snapshot]| -> lockbox::Result<Vec<u64>> {
        let ids = wanted.among(all)?;
        gone = all.iter().filter(|one| ids.contains(&one.id)).cloned().collect();
        Ok(ids)
    };
    match Mounted::find(&args.archive)? {
        Some(mounted) => {
            let ids = among(&mounted.list(false)?).map_err(|error| args.archive.failure(error))?;
            mounted.remove(&ids)?;
        }
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
            let wrong = |_| Failure::usage(format!("'{}' is not a pattern", display(name.as_bytes())));
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

/// Attempts while other programs remove snapshots of the same mount.
const ATTEMPTS: usize = 10;

/// Remove snapshots, but for the newest ones and one for each of the last hours, days, weeks, months or years that have any
#[derive(clap::Args)]
#[command(override_usage = "lockbox snapshot prune [OPTIONS] --keep-daily <N>... <ARCHIVE>")]
#[command(group = clap::ArgGroup::new("required").required(true).multiple(true).args(KeepArgs::NAMES))]
pub(crate) struct PruneArgs {
    #[command(flatten)]
    archive: ArchiveArgs,
    #[command(flatten)]
    writer: WriterArgs,
    #[command(flatten)]
    keep: KeepArgs,
    /// Remove nothing, and list the snapshots that would be kept and removed and the space that would be freed
    #[arg(long)]
    dry_run: bool,
    /// Print JSON, one object a line
    #[arg(long)]
    json: bool,
}

/// Retention rules; a snapshot that any of them keeps stays
#[derive(clap::Args)]
pub(crate) struct KeepArgs {
    /// Keep the newest N
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    keep_last: Option<u32>,
    /// Keep the newest of each of the last N hours that have any
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    keep_hourly: Option<u32>,
    /// The same of days, in UTC
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    keep_daily: Option<u32>,
    /// The same of weeks, which begin on Monday
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    keep_weekly: Option<u32>,
    /// The same of months
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    keep_monthly: Option<u32>,
    /// The same of years
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    keep_yearly: Option<u32>,
}

impl KeepArgs {
    const NAMES: [&'static str; 6] =
        ["keep_last", "keep_hourly", "keep_daily", "keep_weekly", "keep_monthly", "keep_yearly"];

    pub(crate) fn policy(&self) -> RetentionPolicy {
        let counts = [
            (RetentionRule::Last, self.keep_last),
            (RetentionRule::Hourly, self.keep_hourly),
            (RetentionRule::Daily, self.keep_daily),
            (RetentionRule::Weekly, self.keep_weekly),
            (RetentionRule::Monthly, self.keep_monthly),
            (RetentionRule::Yearly, self.keep_yearly),
        ];
        counts.into_iter().fold(RetentionPolicy::default(), |keep, (rule, count)| keep.with(rule, count.unwrap_or(0)))
    }
}

/// Every snapshot, and which rules keep it.
type Plan = Vec<(Snapshot, Vec<RetentionRule>)>;

fn prune(args: &PruneArgs) -> Result<(), Failure> {
    let keep = args.keep.policy();
    let mut out = Output::new();
    if args.dry_run {
        let told = SnapshotBackend::of(&args.archive)?;
        let all = told.list(false)?;
        let plan = plan(all.clone(), &keep);
        let gone: HashSet<u64> = gone(&plan).into_iter().collect();
        tell(&plan, args.json, &mut out)?;
        snapshot_client::together(gone.len(), told.held(&all, &gone)?, args.json, &mut out)?;
        return out.finish();
    }
    let mut planned = Plan::new();
    match Mounted::find(&args.archive)? {
        Some(mounted) => planned = of_mounted(&mounted, &keep)?,
        None => snapshot_client::remove_from_file(&args.archive, args.writer, &mut |all| {
            planned = plan(all.to_vec(), &keep);
            Ok(gone(&planned))
        })?,
    }
    tell(&planned, args.json, &mut out)?;
    out.finish()
}

fn tell(plan: &Plan, json: bool, out: &mut Output) -> Result<(), Failure> {
    for (snapshot, rules) in plan {
        let words: Vec<&str> = rules.iter().map(|rule| rule.word()).collect();
        if json {
            let mut object = json!({ "time": rfc3339(snapshot.time), "kept": !rules.is_empty(), "kept_by": words });
            put_name(&mut object, "name", &snapshot.name);
            out.json(&object)?;
            continue;
        }
        let (action, why) = match words[..] {
            [] => ("remove", String::new()),
            _ => ("keep", format!("  ({})", words.join(", "))),
        };
        let time = out.reader.time(snapshot.time);
        out.line(&format!("{action:<6}  {time}  {}{why}", display(&snapshot.name)))?;
    }
    Ok(())
}

fn plan(all: Vec<Snapshot>, keep: &RetentionPolicy) -> Plan {
    let times: Vec<Timestamp> = all.iter().map(|snapshot| snapshot.time).collect();
    let kept = keep.kept_by(&times);
    all.into_iter().zip(kept).collect()
}

fn gone(plan: &Plan) -> Vec<u64> {
    plan.iter().filter(|(_, rules)| rules.is_empty()).map(|(snapshot, _)| snapshot.id).collect()
}

/// Prunes the snapshots of a mount. Two concurrent prunes would each rely on snapshots that the
/// other one removes. So nothing is removed when a listed snapshot is gone: the rules are applied
/// again.
fn of_mounted(mounted: &Mounted, keep: &RetentionPolicy) -> Result<Plan, Failure> {
    for _ in 0..ATTEMPTS {
        let plan = plan(mounted.list(false)?, keep);
        let all: Vec<Snapshot> = plan.iter().map(|(snapshot, _)| snapshot.clone()).collect();
        if mounted.remove_among(&gone(&plan), &all)? {
            return Ok(plan);
        }
    }
    Err(Failure::other("other programs keep removing snapshots of this mount; nothing more was removed"))
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
