//! Waits for the previous daemon to release the archive lock.
//!
//! The lock is polled: a thread that blocks on it in the kernel could not be cancelled, and would
//! hold the file and take the lock while the daemon opens the archive. The wait depends on the
//! holder:
//!
//! - A daemon that serves a mount is not awaited.
//! - A daemon that reports that it is closing the archive gets the time that closing takes.
//! - Any other holder gets a few seconds: a command that just started runs longer than a user waits
//!   at a prompt.

use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use lockbox::archive::Archive;
use lockbox::control::Status;
use lockbox_host::daemons::{self, Holder, holder};
use lockbox_host::mounts::{self, Mounted};
use lockbox_host::{IN_USE, shown};

use crate::exit::Failure;

const SHORT_WAIT: Duration = Duration::from_secs(3);
/// Limit for a closing daemon: the last commit takes seconds, erasing deleted data may take more.
const CLOSING_WAIT: Duration = Duration::from_secs(30);
/// Polling interval.
const POLL: Duration = Duration::from_millis(5);

/// Returns when the archive is free, or after the limit; opening it then reports the holder. Before
/// it waits it calls `print_message`.
///
/// # Errors
/// Fails if a daemon of this user has the archive mounted.
pub fn wait_until_free(archive: &Path, read_only: bool, print_message: impl Fn(&str)) -> Result<(), Failure> {
    // An error of the check is reported when the archive is opened.
    let mut free = || Archive::is_free(archive, read_only).unwrap_or(true);
    wait_with(&|| holder(archive), &mut free, print_message)
}

fn wait_with(
    holder: &dyn Fn() -> Holder,
    free: &mut dyn FnMut() -> bool,
    print_message: impl Fn(&str),
) -> Result<(), Failure> {
    let found = holder();
    if let Holder::Serves(status) = &found
        && (is_mounted(status, &mounts::all()) || daemons::is_out_of_sight(status))
    {
        return Err(in_use_failure(status));
    }
    if !free() {
        print_message("the archive is still held, as by the daemon of its former mount: waiting for its end");
        wait_free(free, SHORT_WAIT, CLOSING_WAIT, || matches!(holder(), Holder::Closes));
    } else if matches!(found, Holder::Nobody) {
        return Ok(());
    }
    // The next daemon reuses the previous one's socket path; after releasing the lock a daemon
    // removes the socket almost at once.
    poll_until(SHORT_WAIT, &mut || !matches!(holder(), Holder::Closes));
    Ok(())
}

/// Waits until the archive is free: up to `moment`, and up to `closing` if the holder then reports
/// that it is closing the archive.
fn wait_free(free: &mut dyn FnMut() -> bool, moment: Duration, closing: Duration, closes: impl Fn() -> bool) {
    if !poll_until(moment, free) && closes() {
        poll_until(closing, free);
    }
}

/// Polls `condition` until it holds or `limit` has passed, and returns whether it holds.
fn poll_until(limit: Duration, condition: &mut dyn FnMut() -> bool) -> bool {
    let start = Instant::now();
    loop {
        if condition() {
            return true;
        }
        if start.elapsed() >= limit {
            return false;
        }
        thread::sleep(POLL);
    }
}

/// Checks the mount table: a daemon reports that it serves until it notices that its mount is gone.
fn is_mounted(status: &Status, table: &[Mounted]) -> bool {
    daemons::mount_of(status, table).is_some()
}

/// Returns the failure to report if a daemon of this user serves the archive.
pub fn holder_failure(archive: &Path) -> Option<Failure> {
    match holder(archive) {
        Holder::Serves(status) => Some(in_use_failure(&status)),
        Holder::Closes | Holder::Nobody => None,
    }
}

fn in_use_failure(status: &Status) -> Failure {
    let Status { pid, uid, .. } = status;
    let user = daemons::user_name(*uid);
    let place = match daemons::is_out_of_sight(status) && !is_mounted(status, &mounts::all()) {
        true => "in another namespace, as by 'lockbox exec',",
        false => &format!("at {}", shown(&status.mount_point_path())),
    };
    Failure::new(IN_USE, format!("the archive is already mounted {place} by process {pid} (user {user})"))
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    #[test]
    fn a_closing_daemon_is_awaited_longer_than_other_holders() {
        let (moment, ever) = (Duration::from_millis(1), Duration::from_secs(600));
        let asked = Cell::new(0);
        let closes = |answer| {
            let asked = &asked;
            move || {
                asked.set(asked.get() + 1);
                answer
            }
        };
        wait_free(&mut || false, moment, ever, closes(false));
        assert_eq!(asked.get(), 1, "it holds the archive for long");
        // Free at the second query.
        wait_free(&mut || asked.get() == 2, moment, ever, closes(true));
        assert_eq!(asked.get(), 2);
        wait_free(&mut || true, ever, ever, closes(true));
        assert_eq!(asked.get(), 2, "a free archive needs no question");
    }

    #[test]
    fn a_free_archive_needs_at_most_two_queries() {
        for (first, most) in [(true, 1), (false, 2)] {
            let asked = Cell::new(0);
            let holder = || {
                asked.set(asked.get() + 1);
                if first || asked.get() > 1 { Holder::Nobody } else { Holder::Closes }
            };
            assert!(wait_with(&holder, &mut || true, |_| panic!("nothing is waited for")).is_ok());
            assert_eq!(asked.get(), most, "first of nobody: {first}");
        }
    }

    #[test]
    fn a_mount_of_another_namespace_is_not_waited_for() {
        let serves = |mount_namespace| {
            let status = Status { mount_namespace, mount_point: "/no/mount".into(), ..Status::default() };
            wait_with(&|| Holder::Serves(Box::new(status.clone())), &mut || true, |_| {})
        };
        let refused = serves(daemons::mount_namespace() + 1).unwrap_err();
        assert!(
            refused.message.contains("mounted in another namespace, as by 'lockbox exec', by process 0"),
            "{refused}"
        );
        for former in [0, daemons::mount_namespace()] {
            assert!(serves(former).is_ok(), "it was taken away");
        }
    }

    #[test]
    fn only_what_the_kernel_still_shows_is_mounted() {
        let status = Status { mount_point: "/mnt/a".into(), ..Status::default() };
        let shown = |file_system: &str, point: &str| {
            [mounts::parse(format!("1 0 0:7 / {point} rw - {file_system} a.lbx rw").as_bytes()).unwrap()]
        };
        assert!(is_mounted(&status, &shown(mounts::TYPE, "/mnt/a")));
        assert!(!is_mounted(&status, &shown(mounts::TYPE, "/mnt/b")));
        assert!(!is_mounted(&status, &shown("tmpfs", "/mnt/a")));
        assert!(!is_mounted(&status, &[]));
    }
}
