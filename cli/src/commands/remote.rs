//! `lockbox remote` and `cache`: object stores, pending uploads and the local cache, without a key.
use std::path::PathBuf;

use lockbox::error::Timestamp;
use lockbox_host::remote::{self, RemoteArgs};
use lockbox_host::{DAMAGED, code, shown};
use lockbox_terminal::display;
use serde_json::{Value, json};

use crate::exit::Failure;
use crate::interrupt::Interrupt;
use crate::open_archive::in_the_way;
use crate::output::{self, Output, Reader, count, rfc3339};
use crate::progress::Bar;

/// End of the year 9999, since a server's value is shown as a time.
const LAST_TIME: u64 = 253_402_300_799;

/// List, check and clean archives in object stores, without a key
#[derive(clap::Subcommand)]
pub(crate) enum Command {
    Ls(LsArgs),
    Check(CheckArgs),
    Collect(CollectArgs),
    Unsent(UnsentArgs),
}

/// List the archives in a bucket, or below a name or directory: size, when it was written last, state, address
#[derive(clap::Args)]
pub(crate) struct LsArgs {
    /// s3://BUCKET, s3://BUCKET/NAME (or gs://, az://) or file:///DIRECTORY
    #[arg(value_name = "ADDRESS")]
    place: PathBuf,
    #[command(flatten)]
    remote: RemoteArgs,
    /// Print JSON, one object a line
    #[arg(long)]
    json: bool,
}

/// Check that all objects of the newest state of an archive exist and have the right length
#[derive(clap::Args)]
pub(crate) struct CheckArgs {
    /// s3://BUCKET/NAME (or gs://, az://) or file:///DIRECTORY
    #[arg(value_name = "ADDRESS")]
    address: PathBuf,
    #[command(flatten)]
    remote: RemoteArgs,
    /// Read all of them, and compare them with the hashes that they are named by
    #[arg(long)]
    full: bool,
    /// Show no signs of work
    #[arg(long, short)]
    quiet: bool,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Remove objects unneeded for the grace period (a day), and find unreferenced ones
#[derive(clap::Args)]
pub(crate) struct CollectArgs {
    /// s3://BUCKET/NAME (or gs://, az://) or file:///DIRECTORY
    #[arg(value_name = "ADDRESS")]
    address: PathBuf,
    #[command(flatten)]
    remote: RemoteArgs,
    /// Go on in the place of another writer that is there, or ended without saying so
    #[arg(long)]
    take_over: bool,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// List data that mounts of this machine wrote and no store has yet: size, when it was written, address, and state
#[derive(clap::Args)]
pub(crate) struct UnsentArgs {
    /// Discard the unsent data of the archive at this address
    #[arg(long, value_name = "ADDRESS")]
    forget: Option<PathBuf>,
    /// Print JSON, one object a line
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(command: &Command) -> Result<(), Failure> {
    match command {
        Command::Ls(args) => ls(args),
        Command::Check(args) => check(args),
        Command::Collect(args) => collect(args),
        Command::Unsent(args) => unsent(args),
    }
}

fn unsent(args: &UnsentArgs) -> Result<(), Failure> {
    let found = match &args.forget {
        None => remote::unsent().map_err(|error| Failure::of("unsent data", &error))?,
        Some(address) => {
            let gone = remote::forget_unsent(address).map_err(|error| Failure::at(address, &error))?;
            if gone.is_empty() {
                return Err(Failure::other(format!("no unsent data of {} on this machine", shown(address))));
            }
            gone
        }
    };
    let mut out = Output::new();
    for unsent in found {
        let time = Timestamp::from_system(unsent.time);
        let state = match (args.forget.is_some(), unsent.refused, unsent.used) {
            (true, ..) => "gone",
            (_, true, _) => "superseded by another writer",
            (_, _, true) => "a mount sends it when the store answers",
            (_, _, false) => "the next writer here sends it",
        };
        if args.json {
            out.json(&json!({
                "address": unsent.address,
                "file": unsent.file,
                "bytes": unsent.bytes,
                "written": rfc3339(time),
                "refused": unsent.refused,
                "in_use": unsent.used,
            }))?;
            continue;
        }
        let address = display(unsent.address.as_bytes()).to_string();
        out.line(&row(out.reader, Some(unsent.bytes), Some(time), &address, state))?;
    }
    out.finish()
}

fn ls(args: &LsArgs) -> Result<(), Failure> {
    let found = remote::archives(&args.place, &args.remote.remote, &mut |_, _| Ok(()));
    let found = found.map_err(|error| Failure::at(&args.place, &error))?;
    let mut out = Output::new();
    let mut wrong: Option<u8> = None;
    for stored in found {
        let address = stored.address;
        let time = stored.time.map(|time| Timestamp { seconds: time.min(LAST_TIME) as i64, nanos: 0 });
        let error = stored.newest.as_ref().err().map(|error| {
            wrong = wrong.or(Some(code(error)));
            Failure::sentence(error)
        });
        let newest = stored.newest.ok().flatten();
        if args.json {
            let newest = newest.as_ref();
            out.json(&json!({
                "address": address,
                "objects": stored.amount.objects,
                "bytes": stored.amount.bytes,
                "stored": time.map(rfc3339),
                "record": newest.map(|newest| newest.number),
                "length": newest.map(|newest| newest.length),
                "writer": newest.and_then(|newest| newest.writer.clone()),
                "error": error,
            }))?;
            continue;
        }
        let state = match (&error, &newest) {
            (Some(error), _) => error.clone(),
            (None, None) => "nothing was written yet".to_owned(),
            (None, Some(newest)) => match &newest.writer {
                Some(host) => format!("record {}, the writer on {host} has not signed off", newest.number),
                None => format!("record {}", newest.number),
            },
        };
        let bytes = (stored.amount.objects > 0).then_some(stored.amount.bytes);
        out.line(&row(out.reader, bytes, time, &address, &state))?;
    }
    out.finish()?;
    match wrong {
        None => Ok(()),
        Some(code) => Err(Failure::new(code, "not all of these can be read; see above")),
    }
}

fn check(args: &CheckArgs) -> Result<(), Failure> {
    let bar = Bar::new(args.quiet);
    let interrupt = Interrupt::watch()?;
    let at_once = interrupt.ends_at_once(&bar, || "nothing was changed".to_owned())?;
    let examined = remote::examine(&args.address, &args.remote.remote, args.full, &mut |done, total| {
        if total > 0 {
            bar.bytes("read", done, total);
        }
        Ok(())
    });
    drop(at_once);
    bar.wipe();
    let examined = examined.map_err(|error| Failure::at(&args.address, &error))?;
    let mut out = Output::new();
    if args.json {
        out.json(&json!({
            "full": args.full,
            "sound": examined.faults.is_empty(),
            "record": examined.number,
            "needed": pair(examined.needed.objects, examined.needed.bytes),
            "dead": pair(examined.dead.objects, examined.dead.bytes),
            "unnamed": pair(examined.unnamed.objects, examined.unnamed.bytes),
            "records": pair(examined.records.objects, examined.records.bytes),
            "bytes_read": examined.read,
            "findings": examined.faults,
        }))?;
    } else {
        for fault in &examined.faults {
            out.line(fault)?;
        }
        for (what, amount) in [
            ("needed", &examined.needed),
            ("dead, to be removed", &examined.dead),
            ("unreferenced", &examined.unnamed),
            ("records that stay", &examined.records),
        ] {
            let bytes = out.reader.size(amount.bytes);
            out.line(&format!("{:>14}  {bytes:>20}  {what}", count(amount.objects, "object")))?;
        }
    }
    out.finish()?;
    match examined.faults.len() {
        0 => Ok(()),
        1 => Err(Failure::new(DAMAGED, "1 missing or corrupt object (listed above)")),
        count => Err(Failure::new(DAMAGED, format!("{count} missing or corrupt objects (listed above)"))),
    }
}

fn collect(args: &CollectArgs) -> Result<(), Failure> {
    let collected = remote::collect(&args.address, &args.remote.remote, args.take_over);
    let collected = collected.map_err(|error| in_the_way(&args.address, args.take_over, &error))?;
    collected.notice.iter().for_each(|notice| output::complain(notice));
    let mut out = Output::new();
    if args.json {
        out.json(&json!({"removed": collected.removed, "found": collected.found, "waiting": collected.waiting}))?;
    } else {
        out.line(&format!(
            "{} removed, {} found unreferenced, {} to be removed after the grace period",
            count(collected.removed, "object"),
            count(collected.found, "object"),
            count(collected.waiting, "object")
        ))?;
    }
    out.finish()
}

/// Returns a row about an archive: size, time, address and state; dashes for missing values.
fn row(reader: Reader, bytes: Option<u64>, time: Option<Timestamp>, address: &str, state: &str) -> String {
    let width = reader.time(Timestamp::default()).len();
    let none = || "-".to_owned();
    let (size, time) =
        (bytes.map_or_else(none, |bytes| reader.size(bytes)), time.map_or_else(none, |at| reader.time(at)));
    format!("{size:>20}  {time:<width$}  {address}  ({state})")
}

fn pair(objects: u64, bytes: u64) -> Value {
    json!({"objects": objects, "bytes": bytes})
}

/// List or clear the local cache of remote archives
#[derive(clap::Subcommand)]
pub(crate) enum CacheCommand {
    Ls(CacheLsArgs),
    Clear(ClearArgs),
}

/// List the cached archives, one a line: size, when it was used last, address
#[derive(clap::Args)]
pub(crate) struct CacheLsArgs {
    /// Print JSON, one object a line
    #[arg(long)]
    json: bool,
}

/// Clear the cache of all archives, or of some; a mount that uses it continues
#[derive(clap::Args)]
pub(crate) struct ClearArgs {
    /// Only of these
    #[arg(value_name = "ADDRESS")]
    addresses: Vec<PathBuf>,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

pub(crate) fn cache(command: &CacheCommand) -> Result<(), Failure> {
    match command {
        CacheCommand::Ls(args) => list_cache(args),
        CacheCommand::Clear(args) => clear(args),
    }
}

fn list_cache(args: &CacheLsArgs) -> Result<(), Failure> {
    let mut out = Output::new();
    for kept in remote::kept()? {
        let used = Timestamp::from_system(kept.used);
        if args.json {
            out.json(&json!({
                "address": kept.address,
                "file": kept.file,
                "bytes": kept.bytes,
                "most_bytes": kept.most,
                "used": rfc3339(used),
            }))?;
        } else {
            let (size, used) = (out.reader.size(kept.bytes), out.reader.time(used));
            let address = kept.address.unwrap_or_else(|| format!("({}, address unknown)", kept.file));
            out.line(&format!("{size:>17}  {used}  {address}"))?;
        }
    }
    out.finish()
}

fn clear(args: &ClearArgs) -> Result<(), Failure> {
    let removed = remote::remove_kept((!args.addresses.is_empty()).then_some(&args.addresses))?;
    let bytes: u64 = removed.iter().map(|(kept, _)| kept.bytes).sum();
    let used = removed.iter().filter(|(_, is_used)| *is_used).count();
    if args.json {
        return output::print_json(&json!({"removed": removed.len(), "bytes": bytes, "in_use": used}));
    }
    let mut out = Output::new();
    match removed.len() {
        0 => out.line("Nothing was cached.")?,
        1 => out.line(&format!("Cleared the cache of 1 archive: {}.", out.reader.size(bytes)))?,
        count => out.line(&format!("Cleared the cache of {count} archives: {}.", out.reader.size(bytes)))?,
    }
    match used {
        0 => {}
        1 => out.line("1 of them is in use; its space is freed when that ends.")?,
        count => out.line(&format!("{count} of them are in use; their space is freed when that ends."))?,
    }
    out.finish()
}
