//! `lockbox umount`: ends a mount and returns when everything is on the medium and the daemon has gone.

use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::mpsc;
use std::thread::{self, sleep};
use std::time::{Duration, Instant};

use lockbox::control::{self, Request, Response, Status};
use nix::mount::{MntFlags, umount2};
use nix::unistd::geteuid;

use crate::exit::{self, Failure, shown};
use crate::mounts;
use crate::output;
use crate::runtime;

/// The daemon answers when the archive is closed; what it does after that takes moments.
const EXIT_DEADLINE: Duration = Duration::from_secs(30);
/// A stopped or stuck daemon leaves every call on its mount waiting for ever; one that lives answers at once.
const ANSWER_DEADLINE: Duration = Duration::from_secs(10);
const POLL: Duration = Duration::from_millis(5);

/// Unmount an archive; returns when its last commit is durable
#[derive(clap::Args)]
pub(crate) struct Args {
    /// The directory or the archive file
    #[arg(value_name = "DIR|ARCHIVE", required_unless_present = "all")]
    what: Option<PathBuf>,
    /// Unmount all archives of this user, for root those of all users; what is busy is named and stays
    #[arg(long, conflicts_with = "what")]
    all: bool,
    /// Take a busy mount out of the directory tree now and end it when its last file is closed
    #[arg(long)]
    lazy: bool,
    /// Where no daemon can be asked, unmount all the same, as umount(8) would without this program
    #[arg(skip)]
    plainly: bool,
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

/// What umount(8) wants done, as the command that does it.
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
    Ok(crate::Command::Umount(Args { what: Some(given.what), all: false, lazy: given.lazy, plainly: true }))
}

pub(crate) fn run(args: &Args) -> Result<(), Failure> {
    let Some(given) = &args.what else { return all(args.lazy) };
    let what = runtime::canonical(given);
    match runtime::find(&what, given)? {
        Some((socket, status)) => stop(&socket, &status, args.lazy),
        None => clear(&what, args.lazy, args.plainly),
    }
}

/// Ends every mount of this user, for root of all users: each that cannot be ended is named, and the others go.
fn all(lazy: bool) -> Result<(), Failure> {
    let mut failures = Vec::new();
    let mut asked = Vec::new();
    for (socket, status) in runtime::believed()? {
        failures.extend(stop(&socket, &status, lazy).err());
        asked.push(PathBuf::from(status.mount_point));
    }
    for left in mounts::mine() {
        if !asked.contains(&left.point) {
            failures.extend(clear(&left.point, lazy, false).err());
        }
    }
    match failures.len() {
        0 => Ok(()),
        1 => Err(failures.remove(0)),
        count => {
            for failure in &failures {
                output::complain(&failure.message);
            }
            let worst = failures.iter().map(|failure| failure.code).max().unwrap_or(exit::OTHER);
            Err(Failure::new(worst, format!("{count} archives are still mounted")))
        }
    }
}

fn stop(socket: &Path, status: &Status, lazy: bool) -> Result<(), Failure> {
    match control::ask(socket, &Request::Stop { lazy })? {
        Response::Done => {}
        Response::Busy { message } => {
            return Err(Failure::new(
                exit::IN_USE,
                format!(
                    "{} is busy: {message}; close what is open there, or use 'lockbox umount --lazy'",
                    status.mount_point
                ),
            ));
        }
        Response::Failed { message } => return Err(Failure::other(format!("{}: {message}", status.mount_point))),
        Response::Status(_) => return Err(Failure::other("the daemon gave an answer that was not asked for")),
    }
    let start = Instant::now();
    while runs(status.pid) {
        if start.elapsed() > EXIT_DEADLINE {
            return Err(Failure::other(format!("the archive is closed, but process {} does not end", status.pid)));
        }
        sleep(POLL);
    }
    forget(Path::new(&status.mount_point));
    Ok(())
}

/// Takes the mount out of the table in which umount(8) finds this program; only root's mounts are in it.
fn forget(point: &Path) {
    let registered = || fs::read_to_string("/run/mount/utab").is_ok_and(|table| table.contains("helper=lockbox"));
    // Of what else may be mounted there now the table is to be left alone.
    if !geteuid().is_root() || mounts::at(point).is_some() || !registered() {
        return;
    }
    let mut forgetting = Command::new("umount");
    forgetting.args(["--fake", "--internal-only", "--"]).arg(point);
    // What stays there is a line about a mount that is gone, which umount(8) passes over.
    let _ = forgetting.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).status();
}

/// Whether the process is there and not just waiting to be reaped.
fn runs(pid: u32) -> bool {
    let Ok(stat) = fs::read_to_string(format!("/proc/{pid}/stat")) else { return false };
    // The name before the state may hold anything, so the last bracket counts.
    !matches!(stat.rsplit(')').next().map(str::trim_start), Some(rest) if rest.starts_with(['Z', 'X']))
}

/// Takes away a mount of ours whose daemon died, or, when that is wanted, one that does not answer.
fn clear(point: &Path, lazy: bool, plainly: bool) -> Result<(), Failure> {
    if !mounts::at(point).is_some_and(|mounted| mounted.is_archive()) {
        return Err(Failure::other(format!("{} is neither a mounted archive nor its mount point", shown(point))));
    }
    let at = shown(point);
    let notice = match probe(point) {
        Probe::Dead => format!("cleared the mount at {at}, whose daemon had died"),
        Probe::Silent if lazy => {
            format!("detached {at}; the process that serves it does not answer and still holds the archive")
        }
        Probe::Silent => {
            return Err(Failure::other(format!(
                "{at} does not answer: the process that serves it is stopped or stuck; continue it, or end it with \
                 kill -9 (what was not durable is lost), then unmount again; --lazy takes the directory away now"
            )));
        }
        Probe::Serves if plainly && geteuid().is_root() => {
            let flags = if lazy { MntFlags::MNT_DETACH } else { MntFlags::empty() };
            umount2(point, flags).map_err(|errno| Failure::other(format!("cannot unmount {at}: {}", errno.desc())))?;
            output::complain(&format!("unmounted {at}, but its daemon could not be asked and may still be writing"));
            return Ok(());
        }
        Probe::Serves => return Err(Failure::other(format!("{at} is served by a program of another user"))),
    };
    detach(point)?;
    output::complain(&notice);
    Ok(())
}

enum Probe {
    Dead,
    Silent,
    Serves,
}

/// Asks in a thread of its own, as nothing else can end the waiting for a daemon that was stopped.
fn probe(point: &Path) -> Probe {
    let (sender, receiver) = mpsc::channel();
    let point = point.to_owned();
    thread::spawn(move || {
        // ENOTCONN: nobody serves it; ECONNABORTED: not since the question. The attributes may still be cached, a new handle cannot be.
        let dead = fs::read_dir(point)
            .is_err_and(|e| matches!(e.kind(), ErrorKind::NotConnected | ErrorKind::ConnectionAborted));
        let _ = sender.send(dead);
    });
    match receiver.recv_timeout(ANSWER_DEADLINE) {
        Ok(true) => Probe::Dead,
        Ok(false) => Probe::Serves,
        Err(_) => Probe::Silent,
    }
}

fn detach(point: &Path) -> Result<(), Failure> {
    let cannot = |why: &str| Failure::other(format!("cannot take away the mount at {}: {why}", shown(point)));
    if geteuid().is_root() {
        return umount2(point, MntFlags::MNT_DETACH).map_err(|errno| cannot(errno.desc()));
    }
    match Command::new("fusermount3").arg("-uz").arg("--").arg(point).status() {
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
}
