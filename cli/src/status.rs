//! `lockbox status`: tells which archives are mounted, by whom, and how their daemons fare.
use std::path::{Path, PathBuf};
use std::time::Duration;

use lockbox::control::{self, Status};
use lockbox::error::{CacheUse, Timestamp};
use lockbox_host::mounts::{self, Mounted};
use lockbox_host::{daemons, shown};
use nix::unistd::geteuid;
use serde_json::{Value, json};

use crate::exit::Failure;
use crate::output::{Output, rfc3339};
use crate::runtime::{self, Daemon};

/// What a daemon reads of its archive to tell what snapshots hold takes less, unless the host is in trouble, which must not hide the rest.
const HELD_TIMEOUT: Duration = Duration::from_secs(5);

/// Show the mounted archives of this user, for root those of all users
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Show this one only: the directory or the archive file
    #[arg(value_name = "DIR|ARCHIVE")]
    what: Option<PathBuf>,
    /// Print JSON, one object a line
    #[arg(long)]
    json: bool,
}

/// A mounted archive as this program sees it.
enum Found {
    /// Its daemon answered.
    Served(Box<Served>),
    /// In the kernel's table, but no daemon answered for it.
    Silent(Mounted),
}

struct Served {
    status: Status,
    /// Whether the mount is still in the tree, or detached until its last user is gone.
    attached: bool,
    /// Bytes that only snapshots show. None where the daemon does not know the question, or the host that it asks is slow.
    held: Option<u64>,
}

pub(crate) fn run(args: &Args) -> Result<(), Failure> {
    let found = match &args.what {
        Some(given) => vec![one(given)?],
        None => all()?,
    };
    let mut out = Output::new();
    for (number, found) in found.iter().enumerate() {
        if args.json {
            out.json(&as_json(found))?;
            continue;
        }
        if number > 0 {
            out.line("")?;
        }
        for (name, value) in lines(found) {
            out.line(&format!("{name:<18} {value}"))?;
        }
    }
    out.finish()?;
    found.iter().find_map(Found::silent).map_or(Ok(()), |mounted| Err(unanswered(mounted)))
}

fn unanswered(mounted: &Mounted) -> Failure {
    let point = shown(&mounted.point);
    let me = geteuid();
    match mounted.user.filter(|user| !me.is_root() && *user != me.as_raw()) {
        Some(user) => {
            let user = daemons::user_name(user);
            Failure::other(format!("{point} was mounted by user {user}: only {user} and root may ask its daemon"))
        }
        None => Failure::other(format!(
            "no daemon answers for {point}: it died, is stopped or runs elsewhere; 'lockbox umount {point}' tells which"
        )),
    }
}

fn one(given: &Path) -> Result<Found, Failure> {
    let what = runtime::canonical(given);
    if let Some(daemon) = runtime::find(&what, given)? {
        return Ok(Found::served(daemon, &mounts::all()));
    }
    let real = given.canonicalize().unwrap_or_else(|_| what.clone());
    // The name of an archive says something only of a mount of this user's own.
    let me = Some(geteuid().as_raw());
    let named = |mounted: &Mounted| {
        [&what, &real].into_iter().any(|path| *path == mounted.point || (mounted.user == me && *path == mounted.source))
    };
    let silent = mounts::all().into_iter().rfind(|mounted| mounted.is_archive() && named(mounted));
    silent.map(Found::Silent).ok_or_else(|| runtime::not_found(&what, given))
}

fn all() -> Result<Vec<Found>, Failure> {
    let table = mounts::all();
    let mut found: Vec<Found> = runtime::believed()?.into_iter().map(|daemon| Found::served(daemon, &table)).collect();
    let unanswered = |mounted: &Mounted| !found.iter().any(|other| other.point() == mounted.point);
    let silent: Vec<Found> = mounts::mine().into_iter().filter(unanswered).map(Found::Silent).collect();
    found.extend(silent);
    Ok(found)
}

impl Found {
    fn served((socket, status): Daemon, table: &[Mounted]) -> Found {
        let attached =
            table.iter().any(|mounted| mounted.is_archive() && mounted.point == Path::new(&status.mount_point));
        let held = status.snapshots.and_then(|count| match count {
            0 => Some(0),
            _ => control::held(&socket, status.uid, vec![(0, u64::MAX)], Some(HELD_TIMEOUT)).ok(),
        });
        Found::Served(Box::new(Served { status, attached, held }))
    }

    fn point(&self) -> &Path {
        match self {
            Found::Served(served) => Path::new(&served.status.mount_point),
            Found::Silent(mounted) => &mounted.point,
        }
    }

    fn silent(&self) -> Option<&Mounted> {
        match self {
            Found::Served(_) => None,
            Found::Silent(mounted) => Some(mounted),
        }
    }
}

fn as_json(found: &Found) -> Value {
    let Served { status, attached, held } = match found {
        Found::Served(served) => &**served,
        Found::Silent(mounted) => {
            return json!({
                "state": "silent",
                "mount_point": mounted.point.to_string_lossy(),
                "archive": mounted.source.to_string_lossy(),
                "user": mounted.user.map(daemons::user_name),
                "uid": mounted.user,
            });
        }
    };
    json!({
        "state": if *attached { "mounted" } else { "detached" },
        "mount_point": status.mount_point,
        "archive": status.archive,
        "archive_id": status.archive_id,
        "pid": status.pid,
        "user": daemons::user_name(status.uid),
        "uid": status.uid,
        "options": status.options,
        "read_only": status.read_only,
        "since": moment(status.since),
        "generation": status.generation,
        "commits": status.commits,
        "dirty_bytes": status.dirty_bytes,
        "open_files": status.open_files,
        "open_directories": status.open_directories,
        "caches": status.caches,
        "log": status.log,
        "memory_bytes": status.memory_bytes,
        "memory_limit": status.memory_limit,
        "peak_resident_bytes": status.peak_resident_bytes,
        "file_bytes": status.file_bytes,
        "used_bytes": status.used_bytes,
        "snapshots": status.snapshots,
        "snapshots_held_bytes": held,
        "newest_snapshot": status.newest_snapshot.map(moment),
        "snapshot_schedule": status.schedule.as_ref().map(|schedule| json!({
            "rules": schedule.rules,
            "next": moment(schedule.next),
            "failure": schedule.failure,
        })),
        "latched": status.latched,
        "fallback": status.fallback,
    })
}

fn moment(seconds: i64) -> String {
    rfc3339(Timestamp { seconds, nanos: 0 })
}

fn utc(seconds: i64) -> String {
    format!("{} UTC", Timestamp { seconds, nanos: 0 }.utc())
}

fn count_of(number: u64, one: &str, more: &str) -> String {
    format!("{number} {}", if number == 1 { one } else { more })
}

fn lines(found: &Found) -> Vec<(&'static str, String)> {
    let Served { status, attached, held } = match found {
        Found::Served(served) => &**served,
        Found::Silent(mounted) => {
            let user = mounted.user.map_or_else(|| "unknown".to_owned(), daemons::user_name);
            return vec![
                ("Mount point", shown(&mounted.point)),
                ("Archive", shown(&mounted.source)),
                ("Held by", format!("no daemon that answers (mounted by user {user})")),
            ];
        }
    };
    let detached = if *attached { "" } else { " (detached, served until its last user is gone)" };
    let caches = &status.caches;
    let mut lines = vec![
        ("Mount point", format!("{}{detached}", shown(Path::new(&status.mount_point)))),
        ("Archive", shown(Path::new(&status.archive))),
        ("Archive id", status.archive_id.clone()),
        ("Held by", format!("process {} (user {})", status.pid, daemons::user_name(status.uid))),
        ("Mounted since", utc(status.since)),
        ("Options", status.options.clone()),
        ("Generation", format!("{}, {}", status.generation, count(status.commits, "commit"))),
        ("Not yet durable", size(status.dirty_bytes)),
        (
            "Log",
            format!(
                "{}, {}; {} in use",
                count_of(status.log.entries, "entry", "entries"),
                size(status.log.bytes),
                size(status.log.used_bytes)
            ),
        ),
        (
            "Open",
            format!(
                "{}, {}",
                count(status.open_files, "file"),
                count_of(status.open_directories, "directory", "directories")
            ),
        ),
        ("Cache of data", cache(&caches.cells)),
        ("Cache of heads", cache(&caches.heads)),
        ("Cache of nodes", cache(&caches.nodes)),
        (
            "Memory",
            format!(
                "{} of {}; {} resident at most",
                size(status.memory_bytes),
                size(status.memory_limit),
                size(status.peak_resident_bytes)
            ),
        ),
        (
            "Archive's file",
            match (status.file_bytes, status.used_bytes) {
                (Some(file), Some(used)) => format!("{}, {} in use", size(file), size(used)),
                _ => "being changed".to_owned(),
            },
        ),
    ];
    lines.extend(status.snapshots.map(|count| {
        let newest =
            status.newest_snapshot.map_or_else(String::new, |newest| format!(", the newest of {}", utc(newest)));
        let held = held.filter(|_| count > 0).map_or_else(String::new, |held| format!(", {} held", size(held)));
        ("Snapshots", format!("{count}{newest}{held}"))
    }));
    if let Some(schedule) = &status.schedule {
        let next = format!("{}; the next with the first change after {}", schedule.rules, utc(schedule.next));
        lines.push(("Snapshot schedule", next));
        lines.extend(schedule.failure.clone().map(|failure| ("Snapshot failed", failure)));
    }
    lines.extend(status.latched.clone().map(|reason| ("Read-only because", reason)));
    lines.extend(status.fallback.clone().map(|sentence| ("When mounted", sentence)));
    lines
}

fn cache(cache: &CacheUse) -> String {
    format!("{}, {} hits, {} misses", size(cache.bytes), cache.hits, cache.misses)
}

fn count(number: u64, thing: &str) -> String {
    format!("{number} {thing}{}", if number == 1 { "" } else { "s" })
}

/// Bytes with a unit in which they have at least two digits.
fn size(bytes: u64) -> String {
    match bytes {
        0..10_240 => format!("{bytes} bytes"),
        10_240..10_485_760 => format!("{} KiB", bytes >> 10),
        _ => format!("{} MiB", bytes >> 20),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_shown_in_the_unit_that_fits() {
        for (bytes, text) in [(0, "0 bytes"), (10_239, "10239 bytes"), (20 << 10, "20 KiB"), (256 << 20, "256 MiB")] {
            assert_eq!(size(bytes), text);
        }
    }
}
