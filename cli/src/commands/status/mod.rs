//! `lockbox status`: lists mounted archives, their users and the state of their daemons.
mod health;

use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use lockbox::error::{CacheStats, Timestamp};
use lockbox_host::control::{self, RequestStats, Status};
use lockbox_host::mounts::{self, Mounted};
use lockbox_host::{daemons, located, shown};
use nix::unistd::geteuid;
use serde_json::{Value, json};

use crate::busy::{self, User};
use crate::exit::Failure;
use crate::output::{Output, Reader, count, put_name, rfc3339};
use crate::runtime::{self, Daemon, serves};

/// Deadline for the space that snapshots hold. The daemon reads its archive for less time than
/// this, unless the host is in trouble, which must not hide the rest.
const HELD_TIMEOUT: Duration = Duration::from_secs(5);

/// Show the mounted archives of this user, or of all users for root
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Show this one only: the directory or the archive file
    #[arg(value_name = "DIR|ARCHIVE")]
    what: Option<PathBuf>,
    /// Show all details of each, with the state of its daemon, instead of a line
    #[arg(long)]
    all: bool,
    /// Print JSON, one object a line, always with everything
    #[arg(long)]
    json: bool,
    /// Print one line for a monitoring system, and end with 0 (healthy), 1 (warning) or 2
    /// (critical)
    #[arg(long, conflicts_with_all = ["all", "json"])]
    check: bool,
    /// Print metrics in the text format of OpenMetrics
    #[arg(long, conflicts_with_all = ["all", "json", "check"])]
    metrics: bool,
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
    /// True if the mount is still in the tree, false if it is detached until its last user is gone.
    attached: bool,
    /// The processes that use it, as far as this user may see them.
    users: Vec<User>,
    /// Bytes held by snapshots alone. None if not requested, if the daemon does not support the
    /// request, or if its host is slow.
    held: Option<u64>,
}

pub(crate) fn run(args: &Args) -> Result<(), Failure> {
    if args.check {
        return health::check(args.what.as_deref());
    }
    let whole = args.all || args.json;
    let found = find(args.what.as_deref(), whole)?;
    let mut out = Output::new();
    if args.metrics {
        out.bytes(health::metrics(&found).as_bytes())?;
    } else if args.json {
        found.iter().try_for_each(|found| out.json(&as_json(found)))?;
    } else if args.all {
        for (number, found) in found.iter().enumerate() {
            if number > 0 {
                out.line("")?;
            }
            for (name, value) in lines(found, out.reader) {
                out.line(&format!("{name:<18} {value}"))?;
            }
        }
    } else {
        let rows: Vec<[String; 3]> = found.iter().map(|found| row(found, out.reader)).collect();
        let width = |column: usize| rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0);
        let [points, archives] = [0, 1].map(width);
        for [point, archive, state] in &rows {
            out.line(&format!("{point:<points$}  {archive:<archives$}  {state}"))?;
        }
    }
    out.finish()?;
    for found in &found {
        if let Found::Silent(mounted) = found {
            return Err(runtime::unanswered(mounted));
        }
    }
    match found.iter().any(Found::has_latched) {
        // The lines say why.
        true => Err(Failure::other("")),
        false => Ok(()),
    }
}

/// Returns the named mount, or all. `whole`: include values that take the daemon some time.
fn find(what: Option<&Path>, whole: bool) -> Result<Vec<Found>, Failure> {
    what.map_or_else(|| all(whole), |given| one(given, whole).map(|found| vec![found]))
}

fn one(given: &Path, whole: bool) -> Result<Found, Failure> {
    let what = runtime::canonical(given);
    if let Some(daemon) = runtime::find(&what, given)? {
        return Ok(Found::served(daemon, &mounts::all(), whole));
    }
    let table = mounts::all();
    let daemons = runtime::believed()?;
    let server_of = |mounted: &Mounted| daemons.iter().find(|(_, status)| serves(status, mounted, &table));
    let root = located::root_at(given, &table);
    if let Some(daemon) = root.and_then(server_of) {
        return Ok(Found::served(daemon.clone(), &table, whole));
    }
    // The name of an archive identifies only a mount of this user's own for which no daemon
    // answers.
    let me = Some(geteuid().as_raw());
    let named = |mounted: &&Mounted| mounted.is_archive() && mounted.user == me && mounted.source == what;
    let silent = root.or_else(|| table.iter().rfind(named).filter(|mounted| server_of(mounted).is_none()));
    silent.cloned().map(Found::Silent).ok_or_else(|| runtime::not_found(&what, given))
}

/// The kernel's table is read before and after asking: a mount that begins or ends in between is
/// not taken for one without a daemon.
fn all(whole: bool) -> Result<Vec<Found>, Failure> {
    let before = mounts::mine();
    let daemons = runtime::believed()?;
    let table = mounts::all();
    let is_answered = |mounted: &Mounted| daemons.iter().any(|(_, status)| serves(status, mounted, &table));
    let is_left = |mounted: &Mounted| table.iter().any(|now| now.numbers() == mounted.numbers());
    let silent: Vec<Mounted> = before.into_iter().filter(|mounted| is_left(mounted) && !is_answered(mounted)).collect();
    let served = daemons.into_iter().map(|daemon| Found::served(daemon, &table, whole));
    Ok(served.chain(silent.into_iter().map(Found::Silent)).collect())
}

impl Found {
    fn served((socket, status): Daemon, table: &[Mounted], whole: bool) -> Found {
        let mount = daemons::mount_of(&status, table);
        let users = mount.map(busy::users).unwrap_or_default();
        let held = status.snapshots.filter(|_| whole).and_then(|count| match count {
            0 => Some(0),
            _ => control::query_held_bytes(&socket, status.uid, vec![(0, u64::MAX)], Some(HELD_TIMEOUT)).ok(),
        });
        Found::Served(Box::new(Served { status, attached: mount.is_some(), users, held }))
    }

    fn point(&self) -> PathBuf {
        match self {
            Found::Served(served) => served.status.mount_point_path(),
            Found::Silent(mounted) => mounted.point.clone(),
        }
    }

    fn archive(&self) -> PathBuf {
        match self {
            Found::Served(served) => served.status.archive_path(),
            Found::Silent(mounted) => mounted.source.clone(),
        }
    }

    /// Returns whether a failure has made the mount read-only.
    fn has_latched(&self) -> bool {
        matches!(self, Found::Served(served) if served.status.latched.is_some())
    }
}

fn as_json(found: &Found) -> Value {
    let mut object = match found {
        Found::Served(served) => served_json(served),
        Found::Silent(mounted) => json!({
            "state": "silent",
            "user": mounted.user.map(daemons::user_name),
            "uid": mounted.user,
        }),
    };
    put_name(&mut object, "mount_point", found.point().as_os_str().as_bytes());
    put_name(&mut object, "archive", found.archive().as_os_str().as_bytes());
    object
}

fn served_json(Served { status, attached, users, held }: &Served) -> Value {
    json!({
        "state": if *attached { "mounted" } else if daemons::is_out_of_sight(status) { "elsewhere" } else { "detached" },
        "archive_id": status.archive_id,
        "fingerprint": status.fingerprint,
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
        "users": users.iter().map(as_user).collect::<Vec<_>>(),
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
        "remote": status.remote.as_ref().map(|remote| json!({
            "reads": remote.reads,
            "lists": remote.lists,
            "bytes": remote.bytes,
            "memory_hits": remote.memory_hits,
            "disk_hits": remote.disk_hits,
            "offline_since": remote.offline_since.map(moment),
            "unsent": remote.unsent,
            "refused_since": remote.refused_since.map(moment),
            "refusal": remote.refusal,
        })),
        "follows": status.follows.as_ref().map(|follows| json!({
            "committed": moment(follows.committed),
            "failure": follows.failure,
        })),
    })
}

fn as_user(user: &User) -> Value {
    let mut object = json!({"pid": user.pid, "kind": user.kind.name()});
    put_name(&mut object, "name", user.name.as_bytes());
    put_name(&mut object, "path", user.path.as_os_str().as_bytes());
    object
}

fn moment(seconds: i64) -> String {
    rfc3339(Timestamp { seconds, nanos: 0 })
}

/// Returns the kind and state of a mount, after its place and its archive.
fn row(found: &Found, reader: Reader) -> [String; 3] {
    let state = match found {
        Found::Served(served) => state(served, reader),
        Found::Silent(mounted) => {
            let user = mounted.user.filter(|user| *user != geteuid().as_raw());
            let user = user.map_or_else(String::new, |user| format!(", user {}", daemons::user_name(user)));
            format!("no daemon answers{user}")
        }
    };
    [shown(&found.point()), shown(&found.archive()), state]
}

fn state(served: &Served, reader: Reader) -> String {
    let Served { status, attached, users, .. } = served;
    let is_remote = !attached && daemons::is_out_of_sight(status);
    let mut state = String::from(if *attached || is_remote { "mounted" } else { "detached" });
    if status.read_only && status.latched.is_none() {
        state += " read-only";
    }
    if is_remote {
        state += " in another namespace, as by 'lockbox exec'";
    }
    if !users.is_empty() || status.open_files + status.open_directories > 0 {
        state += ", busy";
    }
    if status.dirty_bytes > 0 {
        state += &format!(", {} not yet durable", reader.size(status.dirty_bytes));
    }
    if status.uid != geteuid().as_raw() {
        state += &format!(", user {}", daemons::user_name(status.uid));
    }
    let time = |seconds| reader.time(Timestamp { seconds, nanos: 0 });
    if let Some(since) = status.remote.as_ref().and_then(|remote| remote.offline_since) {
        state += &format!(", its server does not answer since {}", time(since));
    }
    if let Some((since, why)) = status.remote.as_ref().and_then(refusal) {
        state += &format!("; store refuses since {}: {why}", time(since));
    }
    let stays = status.follows.as_ref().and_then(|follows| follows.failure.as_ref());
    let snapshot = status.schedule.as_ref().and_then(|schedule| schedule.failure.as_ref());
    let troubles = [
        ("read-only because", status.latched.as_ref()),
        ("when mounted:", status.fallback.as_ref()),
        ("snapshot failed:", snapshot),
        ("shows an earlier state because", stays),
    ];
    for (what, why) in troubles {
        state.extend(why.map(|why| format!("; {what} {why}")));
    }
    state
}

/// Returns the time since which the store refuses requests, and its reason.
fn refusal(remote: &RequestStats) -> Option<(i64, &str)> {
    remote.refused_since.zip(remote.refusal.as_deref())
}

fn count_of(number: u64, one: &str, more: &str) -> String {
    format!("{number} {}", if number == 1 { one } else { more })
}

fn lines(found: &Found, reader: Reader) -> Vec<(&'static str, String)> {
    let Served { status, attached, users, held } = match found {
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
    let size = |bytes| reader.size(bytes);
    let time = |seconds| reader.time(Timestamp { seconds, nanos: 0 });
    let cache =
        |CacheStats { bytes, hits, misses }: CacheStats| format!("{}, {hits} hits, {misses} misses", size(bytes));
    let detached = match *attached {
        true => "",
        false if daemons::is_out_of_sight(status) => " (in another mount namespace, as by 'lockbox exec')",
        false => " (detached, served until its last user is gone)",
    };
    let caches = &status.caches;
    let entries = count_of(status.log.entries, "entry", "entries");
    let directories = count_of(status.open_directories, "directory", "directories");
    let mut lines = vec![
        ("Mount point", format!("{}{detached}", shown(&status.mount_point_path()))),
        ("Archive", shown(&status.archive_path())),
        ("Archive id", status.archive_id.clone()),
        ("Held by", format!("process {} (user {})", status.pid, daemons::user_name(status.uid))),
        ("Mounted since", time(status.since)),
        ("Options", status.options.clone()),
        ("Generation", format!("{}, {}", status.generation, count(status.commits, "commit"))),
        ("Not yet durable", size(status.dirty_bytes)),
        ("Log", format!("{entries}, {}; {} in use", size(status.log.bytes), size(status.log.used_bytes))),
        ("Open", format!("{}, {directories}", count(status.open_files, "file"))),
    ];
    lines.extend(users.iter().map(|user| ("Used by", user.to_string())));
    let (memory, peak) = (size(status.memory_bytes), size(status.peak_resident_bytes));
    lines.extend([
        ("Cache of data", cache(caches.cells)),
        ("Cache of heads", cache(caches.heads)),
        ("Cache of nodes", cache(caches.nodes)),
        ("Memory", format!("{memory} of {}; {peak} resident at most", size(status.memory_limit))),
        (
            "Archive's file",
            match (status.file_bytes, status.used_bytes) {
                (Some(file), Some(used)) => format!("{}, {} in use", size(file), size(used)),
                _ => "being changed".to_owned(),
            },
        ),
    ]);
    lines.extend(status.snapshots.map(|count| {
        let newest =
            status.newest_snapshot.map_or_else(String::new, |newest| format!(", the newest of {}", time(newest)));
        let held = held.filter(|_| count > 0).map_or_else(String::new, |held| format!(", {} held", size(held)));
        ("Snapshots", format!("{count}{newest}{held}"))
    }));
    if let Some(schedule) = &status.schedule {
        let next = format!("{}; the next with the first change after {}", schedule.rules, time(schedule.next));
        lines.push(("Snapshot schedule", next));
        lines.extend(schedule.failure.clone().map(|failure| ("Snapshot failed", failure)));
    }
    if let Some(remote) = &status.remote {
        let asked =
            format!("{}, {}, {} came", count(remote.reads, "read"), count(remote.lists, "list"), size(remote.bytes));
        lines.push(("Server was asked", asked));
        lines.push((
            "Not asked",
            format!("{} in memory, {} on disk", count(remote.memory_hits, "piece"), remote.disk_hits),
        ));
        lines.extend(remote.offline_since.map(|since| ("No answer since", time(since))));
        lines.extend(refusal(remote).map(|(since, why)| ("Store refuses", format!("since {}: {why}", time(since)))));
        lines.extend((remote.unsent > 0).then(|| ("Kept here, not sent", size(remote.unsent))));
    }
    if let Some(follows) = &status.follows {
        lines.push(("Follows, and shows", format!("the commit of {}", time(follows.committed))));
        lines.extend(follows.failure.clone().map(|failure| ("Stays because", failure)));
    }
    lines.extend(status.latched.clone().map(|reason| ("Read-only because", reason)));
    lines.extend(status.fallback.clone().map(|sentence| ("When mounted", sentence)));
    lines
}

#[cfg(test)]
mod tests {
    use lockbox_host::control::ScheduleStatus;

    use super::*;

    #[test]
    fn a_line_has_what_is_to_be_known_at_once() {
        let uid = geteuid().as_raw();
        let said = |status: Status, attached: bool| {
            state(&Served { status, attached, users: Vec::new(), held: None }, Reader::Person)
        };
        let mine = || Status { uid, ..Status::default() };
        assert_eq!(said(mine(), true), "mounted");
        assert_eq!(said(Status { read_only: true, open_directories: 1, ..mine() }, true), "mounted read-only, busy");
        let unsaved = Status { dirty_bytes: 20 << 10, open_files: 2, uid: uid + 70_000, ..mine() };
        assert_eq!(said(unsaved, false), format!("detached, busy, 20 KiB not yet durable, user {}", uid + 70_000));
        let elsewhere =
            Status { mount_namespace: daemons::mount_namespace() + 1, read_only: true, open_files: 1, ..mine() };
        assert_eq!(
            said(elsewhere.clone(), false),
            "mounted read-only in another namespace, as by 'lockbox exec', busy"
        );
        assert_eq!(said(elsewhere, true), "mounted read-only, busy", "seen here all the same");
        let schedule = Some(ScheduleStatus { failure: Some("no space".into()), ..ScheduleStatus::default() });
        let latched = Status { read_only: true, latched: Some("a write failed".into()), schedule, ..mine() };
        assert_eq!(said(latched.clone(), true), "mounted; read-only because a write failed; snapshot failed: no space");
        let found = |status| Found::Served(Box::new(Served { status, attached: true, users: Vec::new(), held: None }));
        assert!(found(latched).has_latched());
        assert!(!found(Status { read_only: true, ..mine() }).has_latched(), "as it was mounted");
        let away = Some(RequestStats { offline_since: Some(0), ..RequestStats::default() });
        let remote = Status { remote: away, read_only: true, ..mine() };
        assert!(said(remote, true).starts_with("mounted read-only, its server does not answer since 1970-01-01 "));
        let full =
            RequestStats { refused_since: Some(0), refusal: Some("quota exceeded".into()), ..RequestStats::default() };
        let remote = Status { remote: Some(full), ..mine() };
        let line = said(remote.clone(), true);
        assert!(
            line.starts_with("mounted; store refuses since 1970-01-01 ") && line.ends_with(": quota exceeded"),
            "{line}"
        );
        let served = Served { status: remote, attached: true, users: Vec::new(), held: None };
        let found = Found::Served(Box::new(served));
        let object = &as_json(&found)["remote"];
        assert_eq!(object["refusal"], "quota exceeded");
        assert!(object["refused_since"].as_str().is_some_and(|since| since.starts_with("1970-01-01T00:00:00")));
        let (_, shown) = lines(&found, Reader::Program).into_iter().find(|(name, _)| *name == "Store refuses").unwrap();
        assert!(shown.ends_with(": quota exceeded"), "{shown}");
        let fallback = Status { fallback: Some("commit 7 is incomplete".into()), ..mine() };
        assert_eq!(said(fallback, true), "mounted; when mounted: commit 7 is incomplete");
    }

    #[test]
    fn who_uses_a_mount_makes_it_busy_without_an_open_file() {
        let status = Status { uid: geteuid().as_raw(), ..Status::default() };
        let user = User { pid: 7, name: "sh".into(), kind: busy::Kind::WorkingDirectory, path: "/mnt".into() };
        let served = Served { status, attached: true, users: vec![user], held: None };
        assert_eq!(state(&served, Reader::Program), "mounted, busy");
    }
}
