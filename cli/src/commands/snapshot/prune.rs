//! `lockbox snapshot prune`: removes all snapshots that no rule keeps.
use std::collections::HashSet;

use lockbox::archive::{RetentionPolicy, RetentionRule, Snapshot};
use lockbox::error::Timestamp;
use lockbox_terminal::display;
use serde_json::{Value, json};

use crate::exit::Failure;
use crate::open_archive::{ArchiveArgs, WriterArgs};
use crate::output::{Output, put_name, rfc3339};
use crate::snapshot_client::{self, Mounted, SnapshotBackend};

/// Attempts while other programs remove snapshots of the same mount.
const ATTEMPTS: usize = 10;

/// Remove snapshots, but for the newest ones and one for each of the last hours, days, weeks, months or years that have any
#[derive(clap::Args)]
pub(crate) struct Args {
    #[command(flatten)]
    archive: ArchiveArgs,
    #[command(flatten)]
    writer: WriterArgs,
    #[command(flatten)]
    rules: Rules,
    /// Tell what would be kept and removed and what that would give back, and remove nothing
    #[arg(long)]
    dry_run: bool,
    /// Print JSON, one object a line
    #[arg(long)]
    json: bool,
}

/// What is kept; what any of them keeps stays
#[derive(clap::Args)]
#[group(required = true, multiple = true)]
struct Rules {
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

impl Rules {
    fn keep(&self) -> RetentionPolicy {
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

pub(crate) fn run(args: &Args) -> Result<(), Failure> {
    let keep = args.rules.keep();
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
    let plan = match Mounted::find(&args.archive)? {
        Some(mounted) => of_mounted(&mounted, &keep)?,
        None => of_file(args, &keep)?,
    };
    tell(&plan, args.json, &mut out)?;
    out.finish()
}

fn tell(plan: &Plan, json: bool, out: &mut Output) -> Result<(), Failure> {
    for (snapshot, rules) in plan {
        if json { out.json(&json_of(snapshot, rules))? } else { row(snapshot, rules, out)? }
    }
    Ok(())
}

fn plan(all: Vec<Snapshot>, keep: &RetentionPolicy) -> Plan {
    let times: Vec<Timestamp> = all.iter().map(|snapshot| snapshot.time).collect();
    let kept = keep.kept_by(&times);
    all.into_iter().zip(kept).collect()
}

/// Returns the ids of the snapshots that no rule keeps.
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

fn of_file(args: &Args, keep: &RetentionPolicy) -> Result<Plan, Failure> {
    let mut planned = Plan::new();
    snapshot_client::remove_from_file(&args.archive, args.writer, &mut |all| {
        planned = plan(all.to_vec(), keep);
        Ok(gone(&planned))
    })?;
    Ok(planned)
}

fn words(rules: &[RetentionRule]) -> Vec<&'static str> {
    rules.iter().map(|rule| rule.word()).collect()
}

fn row(snapshot: &Snapshot, rules: &[RetentionRule], out: &mut Output) -> Result<(), Failure> {
    let name = display(&snapshot.name);
    let what = if rules.is_empty() { "remove" } else { "keep" };
    let why = if rules.is_empty() { String::new() } else { format!("  ({})", words(rules).join(", ")) };
    let time = out.reader.time(snapshot.time);
    out.line(&format!("{what:<6}  {time}  {name}{why}"))
}

fn json_of(snapshot: &Snapshot, rules: &[RetentionRule]) -> Value {
    let mut object = json!({
        "time": rfc3339(snapshot.time),
        "kept": !rules.is_empty(),
        "kept_by": words(rules),
    });
    put_name(&mut object, "name", &snapshot.name);
    object
}
