//! What is durable when.

use std::fs::{self, File};
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::{FileExt, PermissionsExt, symlink};
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use nix::libc::{EINTR, O_DIRECT, O_DSYNC, O_SYNC, SIGINT, SYS_fsync};
use rustix::process::{Pid, PidfdFlags, Signal, kill_process, pidfd_open};

use crate::support::{
    Map, Mount, StopGuard, await_readable, awaited, awaited_within, create, noise, open_with, read_at,
};

/// When fsync(2) or fdatasync(2) returns, content, size and attributes of the file are durable, and so is its name,
/// however new its directory is: they survive the death of the daemon and the loss of power.
#[test]
fn fsync_is_durable() {
    let mut mount = Mount::new();
    for number in 0..4 {
        fs::create_dir_all(mount.path(&format!("new{number}/deep"))).unwrap();
        let mut file = create(mount.path(&format!("new{number}/deep/file")));
        file.write_all(&noise(number, 300_000)).unwrap();
        if number % 2 == 0 {
            file.sync_all().unwrap()
        } else {
            file.sync_data().unwrap()
        }
        mount.crash();
    }
    for number in 0..4 {
        assert!(fs::read(mount.path(&format!("new{number}/deep/file"))).unwrap() == noise(number, 300_000));
    }
    mount.check();
}

/// A mount whose copy in another namespace is in use ends by force when the time of `stop_timeout` has passed. The
/// archive is closed then as after any other end, and is free when `lockbox umount` returns.
#[test]
fn an_end_by_force_closes_the_archive() {
    let mut mount = Mount::with("stop_timeout=1");
    fs::write(mount.path("file"), noise(1, 300_000)).unwrap();
    let mut command = Command::new("unshare");
    command.args(["--mount", "--propagation", "private", "sh", "-c", "echo; exec cat"]);
    let mut holder = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    BufReader::new(holder.stdout.take().unwrap()).read_line(&mut String::new()).unwrap();
    mount.unmount();
    assert!(mount.open_archive(true).info().unwrap().closed);
    drop(holder.stdin.take());
    assert!(holder.wait().unwrap().success());
    mount.mount();
    assert!(fs::read(mount.path("file")).unwrap() == noise(1, 300_000));
    mount.check();
}

/// One commit makes all earlier requests to the daemon durable, of any file: when fsync(2) of one file returns, names
/// that were made, moved or removed before are durable too. fsync(2) of a directory does the same.
#[test]
fn a_commit_covers_the_whole_archive() {
    let mut mount = Mount::new();
    for name in ["moved", "removed"] {
        fs::create_dir(mount.path(name)).unwrap();
    }
    File::open(mount.root()).unwrap().sync_all().unwrap();
    mount.crash();
    fs::rename(mount.path("moved"), mount.path("there")).unwrap();
    fs::remove_dir(mount.path("removed")).unwrap();
    fs::write(mount.path("closed"), "closed").unwrap();
    create(mount.path("synced")).sync_all().unwrap();
    mount.crash();
    let mut names: Vec<_> = fs::read_dir(mount.root()).unwrap().map(|e| e.unwrap().file_name()).collect();
    names.sort();
    assert_eq!(names, ["closed", "synced", "there"]);
    assert_eq!(fs::read_to_string(mount.path("closed")).unwrap(), "closed");
}

/// After a crash the archive has its state at one moment, no earlier than the last fsync(2) that returned: a later
/// change is never there without an earlier one. This holds for changes that reached the daemon. Data that was neither
/// synced nor closed may still be in the kernel's cache and is then missing, although a later change of a name is
/// there.
#[test]
fn a_crash_leaves_one_moment() {
    let mut mount = Mount::new();
    let (made, synced) = (AtomicUsize::new(0), AtomicUsize::new(0));
    for _ in 0..3 {
        // Relative to the current number, so that the writer has opened the root before the kill.
        let (root, goal) = (mount.root(), made.load(Ordering::SeqCst) + 200);
        let stop = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let _stopped = StopGuard(&stop);
            let writer = scope.spawn(|| {
                let directory = File::open(&root).unwrap();
                for number in made.load(Ordering::SeqCst).. {
                    let is_made = symlink("target", root.join(format!("{number:06}"))).is_ok();
                    if stop.load(Ordering::SeqCst) || !is_made {
                        return;
                    }
                    made.store(number + 1, Ordering::SeqCst);
                    if number % 10 == 0 && directory.sync_all().is_ok() {
                        synced.store(number + 1, Ordering::SeqCst);
                    }
                }
            });
            while made.load(Ordering::SeqCst) < goal && !writer.is_finished() {
                std::thread::yield_now();
            }
            assert!(made.load(Ordering::SeqCst) >= goal, "the writer failed before the daemon was killed");
            mount.kill();
        });
        mount.mount();
        let mut names: Vec<_> = fs::read_dir(mount.root()).unwrap().map(|e| e.unwrap().file_name()).collect();
        names.sort();
        assert!(names.len() >= synced.load(Ordering::SeqCst));
        for (number, name) in names.iter().enumerate() {
            assert_eq!(name.to_str().unwrap(), format!("{number:06}"), "a gap");
        }
        made.store(names.len(), Ordering::SeqCst);
    }
    mount.check();
}

/// close(2) passes the kernel's cached data of the file to the daemon. So a file that was written, closed and then
/// renamed over another one is never found empty or in part after a crash: the name shows the old content or the new
/// one, even when the program did not call fsync(2).
#[test]
fn replacing_by_rename_is_safe_without_fsync() {
    let mut mount = Mount::new();
    fs::write(mount.path("name"), noise(0, 300_000)).unwrap();
    for round in 1..=4 {
        let done = AtomicUsize::new(0);
        let (temporary, name) = (mount.path("name.new"), mount.path("name"));
        let other = create(mount.path("other"));
        other.sync_all().unwrap();
        let stop = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let _stopped = StopGuard(&stop);
            let writer = scope.spawn(|| {
                for version in 0.. {
                    let is_replaced =
                        fs::write(&temporary, noise(version, 300_000)).is_ok() && fs::rename(&temporary, &name).is_ok();
                    if stop.load(Ordering::SeqCst) || !is_replaced {
                        return;
                    }
                    let _ = other.set_len(version).and_then(|()| other.sync_all());
                    done.fetch_add(1, Ordering::SeqCst);
                }
            });
            while done.load(Ordering::SeqCst) < 5 * round && !writer.is_finished() {
                std::thread::yield_now();
            }
            assert!(done.load(Ordering::SeqCst) >= 5 * round, "the writer failed before the daemon was killed");
            mount.kill();
        });
        drop(other);
        mount.mount();
        let found = fs::read(mount.path("name")).unwrap();
        let last = done.load(Ordering::SeqCst) as u64;
        assert!((0..=last).rev().any(|version| found == noise(version, 300_000)), "{} bytes", found.len());
    }
    mount.check();
}

/// A write(2) to a file that was opened with O_SYNC or O_DSYNC is durable when it returns, also with O_DIRECT.
#[test]
fn synchronous_writes_are_durable() {
    let mut mount = Mount::new();
    for (number, flags) in [O_SYNC, O_DSYNC, O_DSYNC | O_DIRECT].into_iter().enumerate() {
        let name = format!("file{number}");
        create(mount.path(&name));
        let file = open_with(mount.path(&name), flags).unwrap();
        file.write_all_at(&noise(7, 8192), 4096).unwrap();
        mount.crash();
        assert!(fs::read(mount.path(&name)).unwrap()[4096..] == noise(7, 8192));
    }
}

/// A change through a shared memory map is durable when msync(2) with MS_SYNC returns.
#[test]
fn msync_is_durable() {
    let mut mount = Mount::new();
    let file = create(mount.path("file"));
    file.set_len(100_000).unwrap();
    let map = Map::new(&file, 100_000);
    for at in (0..100_000).step_by(1000) {
        map.set(at, 0xA5);
    }
    map.sync();
    mount.kill();
    drop((map, file));
    mount.mount();
    let found = fs::read(mount.path("file")).unwrap();
    assert!(found.len() == 100_000 && (0..100_000).all(|at| found[at] == if at % 1000 == 0 { 0xA5 } else { 0 }));
}

/// With `sync=periodic`, the default, everything is collected from the kernel's cache every 5 seconds and committed a
/// second later: a crash costs at most the last 7 seconds and the time of one flush and commit, also of files that are open.
#[test]
fn the_periodic_commit_bounds_the_loss() {
    const SIZE: u64 = 1 << 20;
    // The kernel writes back by itself what is 30 seconds old, so only what arrives sooner was collected. On a machine that is too slow for that a
    // new file is tried.
    const COLLECTED: Duration = Duration::from_secs(20);
    // The window in real time is that of unit tests and of `loss_windows_of_sync_periodic` in tests/mount.
    let mut mount = Mount::with_fast_clock();
    let held = |mount: &Mount| {
        let status = mount.status();
        status.used_bytes.map_or(0, |used| used + status.dirty_bytes)
    };
    let mut files = Vec::new();
    let arrived = (0..10).find(|number| {
        files.push(create(mount.path(&format!("file{number}"))));
        let mut before = 0;
        assert!(awaited(|| {
            before = held(&mount);
            before > 0
        }));
        files.last_mut().unwrap().write_all(&noise(*number, SIZE as usize)).unwrap();
        awaited_within(COLLECTED, || held(&mount) >= before + SIZE)
    });
    let number = arrived.expect("nothing was collected");
    // A commit that is under way may have begun before; the second from now on has everything. A name that changes gives the clock something to commit.
    let last = mount.status().generation + 2;
    let committed = awaited(|| {
        let _ = fs::create_dir(mount.path("changed")).or_else(|_| fs::remove_dir(mount.path("changed")));
        mount.status().generation >= last
    });
    assert!(committed, "nothing was committed");
    mount.crash();
    assert!(fs::read(mount.path(&format!("file{number}"))).unwrap() == noise(number, SIZE as usize));
    drop(files);
}

/// With `sync=always`, besides, every close(2) of a written file and every change of a name or an attribute is durable when
/// it returns.
#[test]
fn sync_always_makes_names_and_closes_durable() {
    let mut mount = Mount::with("sync=always");
    fs::create_dir(mount.path("directory")).unwrap();
    mount.crash();
    fs::write(mount.path("directory/file"), noise(1, 100_000)).unwrap();
    mount.crash();
    fs::rename(mount.path("directory/file"), mount.path("file")).unwrap();
    fs::remove_dir(mount.path("directory")).unwrap();
    mount.crash();
    fs::set_permissions(mount.path("file"), fs::Permissions::from_mode(0o640)).unwrap();
    mount.crash();
    assert_eq!(fs::metadata(mount.path("file")).unwrap().permissions().mode() & 0o777, 0o640);
    assert!(fs::read(mount.path("file")).unwrap() == noise(1, 100_000));
    assert!(!mount.path("directory").exists());
}

/// With `sync=never`, fsync(2) returns at once and promises nothing: a crash costs everything since the mount. The
/// remaining content is consistent, and an orderly unmount saves everything.
#[test]
fn sync_never_promises_nothing_but_an_orderly_end() {
    let mut mount = Mount::with("sync=never");
    fs::write(mount.path("kept"), noise(1, 100_000)).unwrap();
    mount.remount();
    let mut file = create(mount.path("lost"));
    file.write_all(&noise(2, 100_000)).unwrap();
    file.sync_all().unwrap();
    mount.crash();
    assert!(!mount.path("lost").exists());
    assert!(fs::read(mount.path("kept")).unwrap() == noise(1, 100_000));
    mount.check();
}

/// sync(2) and syncfs(2) hand the kernel's pages to the daemon, but no request of theirs reaches a FUSE daemon, so they
/// make nothing durable. Use fsync(2), or leave it to the periodic commit.
#[test]
fn syncfs_commits_nothing() {
    let mount = Mount::new();
    let root = File::open(mount.root()).unwrap();
    let durable = || {
        let status = mount.status();
        status.generation + status.log.entries
    };
    // The first change of a session makes a commit of its own.
    fs::create_dir(mount.path("first")).unwrap();
    let _stopped = mount.stop_clock();
    let before = durable();
    fs::create_dir(mount.path("second")).unwrap();
    rustix::fs::syncfs(&root).unwrap();
    assert_eq!(durable(), before, "syncfs commits");
    fs::create_dir(mount.path("last")).unwrap();
    root.sync_all().unwrap();
    assert!(durable() > before);
}

/// `lockbox umount`, SIGTERM and SIGINT lose nothing in any profile. When `lockbox umount` returns, or the process of the
/// daemon has ended, the archive is closed and may be copied.
#[test]
fn orderly_ends_lose_nothing() {
    let mut mount = Mount::with("sync=never");
    for (name, signal) in [("term", Some(Signal::TERM)), ("int", Some(Signal::INT)), ("umount", None)] {
        fs::write(mount.path(name), noise(3, 200_000)).unwrap();
        match signal {
            None => mount.unmount(),
            Some(signal) => {
                let pid = Pid::from_raw(mount.status().pid as i32).unwrap();
                let handle = pidfd_open(pid, PidfdFlags::empty()).unwrap();
                kill_process(pid, signal).unwrap();
                await_readable(&handle);
            }
        }
        let copy = mount.outside("copy");
        fs::copy(mount.archive(), &copy).unwrap();
        fs::rename(&copy, mount.archive()).unwrap();
        mount.mount();
        assert!(fs::read(mount.path(name)).unwrap() == noise(3, 200_000));
    }
    mount.check();
}

/// A program that waits in fsync(2) or fdatasync(2) for a store that is unreachable or refuses can be interrupted: after
/// a second, a signal that ends the program or that it handles makes the call fail with EINTR. The commit goes on, so
/// its data may become durable, and the next fsync(2) waits again. A program that has no number in the PID namespace of
/// the daemon waits on.
#[test]
fn a_wait_for_a_store_can_be_interrupted() {
    const SCRIPT: &str = "import ctypes, os, signal, sys
libc = ctypes.CDLL(None, use_errno=True)
signal.signal(signal.SIGUSR1, lambda *_: None)
file = os.open(sys.argv[1], os.O_RDWR)
for _ in range(2):
    print(libc.fsync(file), ctypes.get_errno(), flush=True)
";
    let mut mount = Mount::in_store();
    // The first change of a mount waits until the store has a record of it.
    fs::write(mount.path("file"), "").unwrap();
    mount.refuse_commits(true);
    // The kernel has one fsync of a file at a time.
    for name in ["file", "other"] {
        fs::write(mount.path(name), noise(6, 100_000)).unwrap();
    }
    let start = |program: &str, arguments: &[&str], name: &str| {
        let mut command = Command::new(program);
        command.args(arguments).arg(mount.path(name)).stdout(Stdio::piped()).spawn().unwrap()
    };
    let (mut handles, mut ends) = (start("python3", &["-c", SCRIPT], "file"), start("sync", &[], "other"));
    let send = |program: &Child, signal| {
        let syscall = format!("/proc/{}/syscall", program.id());
        let is_in_fsync = || fs::read_to_string(&syscall).is_ok_and(|call| call.starts_with(&format!("{SYS_fsync} ")));
        assert!(awaited(is_in_fsync));
        kill_process(Pid::from_raw(program.id() as i32).unwrap(), signal).unwrap();
    };
    let mut lines = BufReader::new(handles.stdout.take().unwrap()).lines();
    send(&handles, Signal::USR1);
    assert_eq!(lines.next().unwrap().unwrap(), format!("-1 {EINTR}"));
    send(&ends, Signal::INT);
    let mut ended = None;
    assert!(awaited(|| {
        ended = ends.try_wait().unwrap();
        ended.is_some()
    }));
    assert_eq!(ended.unwrap().signal(), Some(SIGINT));
    assert!(handles.try_wait().unwrap().is_none(), "the next fsync promised something");
    mount.refuse_commits(false);
    assert!(lines.next().unwrap().unwrap().starts_with("0 "));
    assert!(handles.wait().unwrap().success());
    mount.crash();
    assert!(fs::read(mount.path("file")).unwrap() == noise(6, 100_000));
}

/// An idle mount becomes quiet: some seconds after the last change all changes are committed, deleted content is
/// erased, and the daemon no longer writes to the file of the archive.
#[test]
fn an_idle_mount_comes_to_rest() {
    let mut mount = Mount::with_fast_clock();
    let file = create(mount.path("kept"));
    file.write_all_at(&noise(4, 300_000), 0).unwrap();
    fs::write(mount.path("deleted"), noise(5, 3_000_000)).unwrap();
    fs::remove_file(mount.path("deleted")).unwrap();
    let look = || (mount.status().generation, fs::metadata(mount.archive()).unwrap().modified().unwrap());
    let is_quiet = (0..10).any(|_| {
        let before = look();
        mount.await_looks();
        look() == before
    });
    assert!(is_quiet, "the archive is written to all the time");
    mount.crash();
    assert!(read_at(&create(mount.path("kept")), 0, 300_000) == noise(4, 300_000));
    assert!(!mount.path("deleted").exists());
    drop(file);
}
