//! `lockbox umount`: unmounts an archive and returns when all data is on the medium and the daemon
//! has exited.
use std::cell::Cell;
use std::fs;
use std::io::{self, IsTerminal};
use std::ops::ControlFlow;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::thread::{self, sleep};
use std::time::{Duration, Instant};

use lockbox_host::control::{self, Request, Response, Status};
use lockbox_host::located::{self, in_time};
use lockbox_host::mounts::{self, Mounted, PinnedMount};
use lockbox_host::secrets::desktop;
use lockbox_host::{IN_USE, OTHER, daemons, shown};
use lockbox_terminal::{advice, quantity};
use nix::errno::Errno;
use nix::unistd::geteuid;

use crate::busy;
use crate::exit::Failure;
use crate::output;
use crate::runtime::{self, Daemon};

/// The daemon answers when the archive is closed; the rest of its exit takes moments.
const EXIT_DEADLINE: Duration = Duration::from_secs(30);
/// A daemon without users to wait for mostly closes its archive in less.
const TELL_ELSEWHERE: Duration = Duration::from_secs(1);
/// Between two attempts at a busy mount.
const AGAIN: Duration = Duration::from_millis(200);
const POLL: Duration = Duration::from_millis(5);
/// Remedies for a busy mount, at a terminal and in a window: the latter has no command line.
const AT_TERMINAL: &str = "end that use, or use 'lockbox umount' with --wait, --lazy or --force";
const AT_DESKTOP: &str = "end that use, and unmount it again";

/// Unmount an archive; returns when its last commit is durable
#[derive(clap::Args, Default)]
pub(crate) struct Args {
    /// The directory or the archive file
    #[arg(value_name = "DIR|ARCHIVE", required_unless_present = "all")]
    what: Option<PathBuf>,
    /// Unmount all archives of this user, or of all users for root; busy ones are named and stay
    #[arg(long, conflicts_with = "what")]
    all: bool,
    /// Take a busy mount out of the directory tree now and return; it ends when its last file is closed
    #[arg(long)]
    lazy: bool,
    /// Wait until a busy mount is not used any more, for TIME at most: a number and s, m, h or d; without it for ever
    #[arg(long, value_name = "TIME", num_args = 0..=1, require_equals = true, conflicts_with = "lazy", value_parser = time)]
    wait: Option<Option<Duration>>,
    /// End a busy mount within seconds: open files fail, and this machine keeps unsent data
    #[arg(long, conflicts_with_all = ["all", "lazy", "wait"])]
    force: bool,
    /// End it although the archive's file was removed or replaced, which loses all that only the
    /// mount still has
    #[arg(long, conflicts_with_all = ["all", "wait"])]
    abandon: bool,
    /// Tell in a window why it cannot be unmounted
    #[arg(long)]
    desktop: bool,
    /// Where no daemon can be asked, unmount all the same, as umount(8) would without this program
    #[arg(skip)]
    plainly: bool,
}

impl Args {
    pub(crate) fn of(what: PathBuf, lazy: bool) -> Args {
        Args { what: Some(what), lazy, ..Args::default() }
    }
}

/// The same under the name that umount(8) calls, with the options that it passes.
#[derive(clap::Parser)]
#[command(name = "umount.lockbox", version)]
struct Umount8 {
    /// The directory
    #[arg(value_name = "DIR")]
    what: PathBuf,
    /// Take a busy mount out of the directory tree now and end it when its last file is closed
    #[arg(short)]
    lazy: bool,
    #[arg(short = 'f', hide = true)]
    force: bool,
    #[arg(short = 'n', hide = true)]
    no_table: bool,
    #[arg(short = 'r', hide = true)]
    read_only: bool,
    #[arg(short = 'v', hide = true)]
    verbose: bool,
    #[arg(short = 't', hide = true)]
    file_system_type: Option<String>,
    #[arg(short = 'N', hide = true)]
    namespace: Option<PathBuf>,
}

/// Parses the arguments of umount(8) into the equivalent command.
pub(crate) fn parse_as_umount_8() -> Result<crate::Command, clap::Error> {
    let given = <Umount8 as clap::Parser>::try_parse()?;
    if let Some(namespace) = &given.namespace {
        return Err(clap::Error::raw(
            clap::error::ErrorKind::InvalidValue,
            format!(
                "an archive cannot be unmounted in another namespace with -N: run the command inside of it, with nsenter --mount={}\n",
                namespace.display()
            ),
        ));
    }
    Ok(crate::Command::Umount(Args { plainly: true, ..Args::of(given.what, given.lazy) }))
}

fn time(text: &str) -> Result<Duration, String> {
    quantity::time(text).ok_or_else(|| "a number and s, m, h or d, such as 30s".into())
}

pub(crate) fn run(args: &Args) -> Result<(), Failure> {
    unmount(args).inspect_err(|failure| {
        if args.desktop {
            desktop::tell(&failure.message.replace(AT_TERMINAL, AT_DESKTOP));
        }
    })
}

fn unmount(args: &Args) -> Result<(), Failure> {
    let is_untold = io::stderr().is_terminal();
    match (&args.what, args.wait) {
        (Some(given), None) => one(args, given, true),
        (None, None) => all(args, true),
        (Some(given), Some(limit)) => {
            let place = runtime::canonical(given);
            let table = mounts::all();
            let served = runtime::find(&place, given)?;
            let mounted = match &served {
                Some((_, status)) => daemons::mount_of(status, &table),
                None => located::root_at(given, &table),
            };
            let mut tried = false;
            waited(limit, is_untold, |named| {
                let is_there = |was: &Mounted| mounts::all().iter().any(|now| now.numbers() == was.numbers());
                if tried && !mounted.is_some_and(is_there) {
                    return gone(mounted.map_or(&place, |mounted| &mounted.point), given);
                }
                tried = true;
                one(args, given, named)
            })
        }
        (None, Some(limit)) => waited(limit, is_untold, |named| all(args, named)),
    }
}

/// Returns the result when another program removed the mount. Its daemon is not asked again: that
/// would cut off the remaining users.
fn gone(point: &Path, given: &Path) -> Result<(), Failure> {
    match runtime::find(point, given)? {
        Some(_) => Err(Failure::new(IN_USE, format!("{} was detached, and its archive is still in use", shown(point)))),
        None => Ok(()),
    }
}

/// Retries while the mount is busy. No event reports the last user's exit, so the mount is polled;
/// a refused request changes nothing. An attempt is passed whether its message with the users of
/// the mount will be shown, for which all processes are scanned.
fn waited(
    limit: Option<Duration>,
    mut is_untold: bool,
    mut attempt: impl FnMut(bool) -> Result<(), Failure>,
) -> Result<(), Failure> {
    let start = Instant::now();
    loop {
        let left = limit.map(|limit| limit.saturating_sub(start.elapsed()));
        let is_last = left.is_some_and(|left| left.is_zero());
        let failure = match attempt(is_untold || is_last) {
            Err(failure) if failure.code == IN_USE && !is_last => failure,
            done => return done,
        };
        if is_untold {
            output::complain(&format!("waiting: {}", failure.message));
            is_untold = false;
        }
        sleep(left.map_or(AGAIN, |left| left.min(AGAIN)));
    }
}

fn one(args: &Args, given: &Path, named: bool) -> Result<(), Failure> {
    let what = runtime::canonical(given);
    match runtime::find(&what, given)? {
        Some((socket, status)) => stop(args, &socket, &status, named),
        None => match located::root_at(given, &mounts::all()) {
            Some(mounted) => clear(args, mounted),
            None => Err(runtime::not_found(&what, given)),
        },
    }
}

/// Ends every mount of this user, for root of all users. Failures are reported for each mount, and
/// the others still end. All end concurrently, so that a slow or hostile daemon delays no other
/// mount. The parser refuses `--abandon` and `--force` with `--all`, and `--lazy` with `--wait`.
fn all(args: &Args, named: bool) -> Result<(), Failure> {
    let daemons = runtime::believed()?;
    let table = mounts::mine();
    let mut left = table.clone();
    let mut jobs: Vec<Job> = Vec::new();
    for (socket, status) in daemons {
        let served = daemons::mount_of(&status, &table).map(Mounted::numbers);
        let of_it = |mounted: &Mounted| served.is_some_and(|served| served.device == mounted.device);
        let (its, others): (Vec<_>, Vec<_>) = left.into_iter().partition(of_it);
        // Binds of it go before, as its daemon ends with the last of its mounts.
        let binds = its.into_iter().filter(|mounted| Some(mounted.numbers()) != served).collect();
        jobs.push(Job { clear: binds, stop: Some((socket, status)) });
        left = others;
    }
    // The topmost mount at a point goes first.
    for mounted in left.into_iter().rev() {
        let same = |job: &&mut Job| job.stop.is_none() && job.clear.iter().any(|other| other.point == mounted.point);
        match jobs.iter_mut().find(same) {
            Some(job) => job.clear.push(mounted),
            None => jobs.push(Job { clear: vec![mounted], stop: None }),
        }
    }
    let failures: Vec<Failure> = thread::scope(|scope| {
        let running: Vec<_> = jobs.iter().map(|job| scope.spawn(|| job.run(args, named))).collect();
        running
            .into_iter()
            .flat_map(|job| job.join().unwrap_or_else(|_| vec![Failure::other("could not unmount")]))
            .collect()
    });
    together(failures)
}

/// Joins all failures in one sentence: a window shows no more than one.
fn together(mut failures: Vec<Failure>) -> Result<(), Failure> {
    match failures.len() {
        0 => Ok(()),
        1 => Err(failures.remove(0)),
        count => {
            let worst = failures.iter().map(|failure| failure.code).max().unwrap_or(OTHER);
            let why: Vec<_> = failures.into_iter().map(|failure| failure.message).collect();
            Err(Failure::new(worst, format!("{count} archives are still mounted: {}", why.join("; "))))
        }
    }
}

/// Steps that run one after the other.
struct Job {
    clear: Vec<Mounted>,
    stop: Option<Daemon>,
}

impl Job {
    fn run(&self, args: &Args, named: bool) -> Vec<Failure> {
        let cleared = self.clear.iter().filter_map(|mounted| clear(args, mounted).err());
        let stopped = self.stop.iter().filter_map(|(socket, status)| stop(args, socket, status, named).err());
        cleared.chain(stopped).collect()
    }
}

/// Sends the daemon the order to end its mount. Once it is gone here the daemon waits for mounts of
/// it in other namespaces: after a while the processes there are listed.
fn ask_to_stop(args: &Args, socket: &Path, status: &Status, before: Option<&Mounted>) -> lockbox::Result<Response> {
    let Args { lazy, abandon, force, .. } = *args;
    let (start, is_told) = (Instant::now(), Cell::new(lazy));
    let tell = || {
        if let Some(before) = before.filter(|_| !is_told.get() && start.elapsed() > TELL_ELSEWHERE) {
            is_told.set(true);
            let processes = busy::users_in_other_namespaces(before.device, status.mount_namespace);
            if !processes.is_empty() {
                let at = shown(&before.point);
                output::complain(&format!(
                    "waiting: {at} is also mounted in another namespace: {}",
                    processes.join(", ")
                ));
            }
        }
        Ok(())
    };
    control::exchange_messages(socket, status.uid, &Request::Stop { lazy, abandon, force }, &tell, &mut |response| {
        Ok(ControlFlow::Break(response))
    })
}

/// `named`: the processes that use a busy mount are listed.
fn stop(args: &Args, socket: &Path, status: &Status, named: bool) -> Result<(), Failure> {
    let table = mounts::all();
    let before = daemons::mount_of(status, &table).cloned();
    let point = &before.as_ref().map_or_else(|| status.mount_point_path(), |mounted| mounted.point.clone());
    let theirs = status.uid != geteuid().as_raw();
    // Looked up before: the users of a detached mount cannot be found.
    let users = before.as_ref().filter(|_| args.lazy).and_then(busy::by_whom);
    let of_its_user = |error: &lockbox::Error| {
        let user = daemons::user_name(status.uid);
        Failure::other(format!("{} (user {user}): {}", shown(point), Failure::sentence(error)))
    };
    match ask_to_stop(args, socket, status, before.as_ref()).map_err(|error| of_its_user(&error))? {
        Response::Done if args.force => {
            output::complain(&format!(
                "{} is unmounted; {} has all that was written to it",
                shown(point),
                shown(&status.archive_path())
            ));
        }
        Response::Done => {}
        Response::Unsent { bytes } => output::complain(&format!(
            "{}: its store does not answer, and {} of the last writes are kept on this machine; the next mount here, or 'lockbox remote collect', sends them, and 'lockbox remote unsent' lists them",
            shown(&status.archive_path()),
            quantity::readable(bytes)
        )),
        Response::Detached if is_left(theirs, before.as_ref()) => {
            return Err(Failure::other(format!("{}: its daemon reported it as detached, but it is not", shown(point))));
        }
        Response::Detached => {
            if !theirs {
                forget(point);
            }
            let users = users.map(|users| format!(" ({users})")).unwrap_or_default();
            output::complain(&format!(
                "{} is detached; its archive stays open until its last user is gone{users}, and 'lockbox status' lists it as long",
                shown(point)
            ));
            return Ok(());
        }
        Response::Busy { message } => {
            let why = before.as_ref().filter(|_| named).and_then(busy::by_whom).unwrap_or(message);
            return Err(Failure::new(IN_USE, format!("{} is busy: {why}; {AT_TERMINAL}", shown(point))));
        }
        other => return Err(Failure::other(format!("{}: {}", shown(point), other.failure_message()))),
    }
    let start = Instant::now();
    while runs(status.pid) {
        if start.elapsed() > EXIT_DEADLINE {
            return Err(Failure::other(format!(
                "{}: the archive is closed, but process {} does not end",
                shown(point),
                status.pid
            )));
        }
        sleep(POLL);
    }
    if is_left(theirs, before.as_ref()) {
        return Err(Failure::other(format!("{}: its daemon has ended, but it is still mounted", shown(point))));
    }
    if !theirs {
        forget(point);
    }
    Ok(())
}

/// Returns whether the mount still exists although another user's daemon denies it.
fn is_left(theirs: bool, before: Option<&Mounted>) -> bool {
    theirs && before.is_some_and(|before| mounts::all().iter().any(|now| now.numbers() == before.numbers()))
}

/// Removes the mount from the table in which umount(8) finds this program; only root's mounts are
/// in it.
fn forget(point: &Path) {
    let registered = || fs::read_to_string("/run/mount/utab").is_ok_and(|table| table.contains("helper=lockbox"));
    // If another mount is there now, its line in the table must stay.
    if !geteuid().is_root() || mounts::at(point).is_ok_and(|at| at.is_some()) || !registered() {
        return;
    }
    let mut forgetting = Command::new("umount");
    forgetting.args(["--fake", "--internal-only", "--"]).arg(point);
    // On failure the table keeps a line about a mount that is gone, which umount(8) skips.
    let _ = forgetting.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).status();
}

/// Returns whether the process exists and is not just waiting to be reaped.
fn runs(pid: u32) -> bool {
    let Ok(stat) = fs::read_to_string(format!("/proc/{pid}/stat")) else { return false };
    // The name before the state may hold anything, so the last bracket counts.
    !matches!(stat.rsplit(')').next().map(str::trim_start), Some(rest) if rest.starts_with(['Z', 'X']))
}

/// Unmounts a mount whose daemon died, one of several mounts of an archive, or, on request, one
/// that does not answer.
fn clear(args: &Args, mounted: &Mounted) -> Result<(), Failure> {
    let Args { lazy, plainly, .. } = *args;
    let at = shown(&mounted.point);
    let held = reach(mounted)?;
    let root = geteuid().is_root();
    let twin = mounts::twin(&mounts::all(), mounted).cloned();
    let probed = Arc::clone(&held);
    // None: it does not answer.
    let is_dead = in_time(move || probed.is_dead());
    let (lazily, notice) = match (is_dead, &twin) {
        (Some(true), _) => (true, format!("cleared the mount at {at}: its daemon had died")),
        (None, None) if lazy => {
            (true, format!("detached {at}; the process that serves it does not answer and still holds the archive"))
        }
        (None, None) => {
            return Err(Failure::other(format!(
                "{at} does not answer: the process that serves it is stopped or stuck; continue it, or end it with \
                 kill -9 (changes that were not durable are lost), then unmount again; --lazy detaches the directory now"
            )));
        }
        (_, Some(_)) | (Some(false), None) if root && (plainly || twin.is_some()) => (lazy, String::new()),
        (_, Some(other)) => {
            let end = advice("lockbox umount", other.point.as_os_str().as_bytes());
            return Err(Failure::other(format!(
                "{at} is a bind mount of {}; only root can unmount it separately ({end} unmounts both)",
                shown(&other.point)
            )));
        }
        (Some(false), None) => {
            return Err(Failure::other(format!("{at} is served by a program of another user")));
        }
    };
    take_away(mounted, held, lazily)?;
    match (notice.as_str(), mounts::twin(&mounts::all(), mounted)) {
        ("", Some(other)) => {
            output::complain(&format!("unmounted {at}; the archive is still mounted at {}", shown(&other.point)));
        }
        ("", None) if twin.is_none() => {
            output::complain(&format!("unmounted {at}, but its daemon is unreachable and may still be writing"));
        }
        ("", None) => {}
        (notice, _) => output::complain(notice),
    }
    Ok(())
}

/// Pins the mount at its path, on which every directory may belong to another user's file system.
fn reach(mounted: &Mounted) -> Result<Arc<PinnedMount>, Failure> {
    let at = shown(&mounted.point);
    let found = mounted.clone();
    match in_time(move || PinnedMount::of(&found)) {
        Some(Ok(Some(held))) => Ok(Arc::new(held)),
        Some(Ok(None)) => {
            Err(Failure::other(format!("{at} is no longer the mount that was found there; left unchanged")))
        }
        Some(Err(error)) => Err(Failure::host(format!("cannot reach the mount at {at}"), &error)),
        None => {
            Err(Failure::other(format!("cannot reach the mount at {at}: a file system on its path does not answer")))
        }
    }
}

fn take_away(mounted: &Mounted, held: Arc<PinnedMount>, lazily: bool) -> Result<(), Failure> {
    let at = shown(&mounted.point);
    let cannot = |why: &str| Failure::other(format!("cannot unmount {at}: {why}"));
    if geteuid().is_root() {
        let taken = match Arc::try_unwrap(held) {
            Ok(held) if !lazily => held.unmount(),
            Ok(held) => held.detach(),
            // A thread waits for the daemon with it.
            Err(held) if lazily => held.detach(),
            Err(_) => Err(Errno::EBUSY),
        };
        return taken.map_err(|errno| match errno {
            Errno::EBUSY => {
                let why = busy::by_whom(mounted).map(|why| format!(": {why}")).unwrap_or_default();
                Failure::new(IN_USE, format!("{at} is busy{why}"))
            }
            errno => cannot(errno.desc()),
        });
    }
    match Command::new("fusermount3").arg("-uz").arg("--").arg(&mounted.point).status() {
        Ok(status) if status.success() => Ok(()),
        Ok(status) => Err(cannot(&format!("fusermount3: {status}"))),
        Err(error) => Err(cannot(&format!("fusermount3: {error}"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_runs_until_it_is_gone() {
        assert!(runs(std::process::id()));
        assert!(!runs(u32::MAX));
    }

    #[test]
    fn of_several_mounts_each_is_named_with_its_reason() {
        let told = |messages: &[(u8, &str)]| {
            let failures = messages.iter().map(|&(code, message)| Failure::new(code, message)).collect();
            together(failures).map_err(|failure| (failure.code, failure.message))
        };
        assert_eq!(told(&[]), Ok(()));
        assert_eq!(told(&[(IN_USE, "/a is busy: x")]), Err((IN_USE, "/a is busy: x".into())));
        assert_eq!(
            told(&[(OTHER, "/b is stuck"), (IN_USE, "/a is busy: x")]),
            Err((IN_USE, "2 archives are still mounted: /b is stuck; /a is busy: x".into()))
        );
    }

    #[test]
    fn who_waits_looks_for_users_when_somebody_reads_of_them() {
        let asked = |limit, is_untold, last| {
            let mut asked = Vec::new();
            let ended = waited(limit, is_untold, |named| {
                asked.push(named);
                if asked.len() < last { Err(Failure::new(IN_USE, "busy")) } else { Ok(()) }
            });
            (asked, ended.map_err(|failure| failure.code))
        };
        for is_untold in [false, true] {
            assert_eq!(asked(None, is_untold, 3), (vec![is_untold, false, false], Ok(())));
            assert_eq!(asked(Some(Duration::ZERO), is_untold, 3), (vec![true], Err(IN_USE)));
        }
    }
}
