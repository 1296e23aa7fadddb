//! A fresh archive, mounted by the built program for one test and gone when the test ends, however it ends.

use std::fs::{self, File, OpenOptions};
use std::io::{self, BufRead, BufReader};
use std::ops::ControlFlow;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use lockbox::archive::{Archive, CreateOptions, KdfCost};
use lockbox::crypto::Passphrase;
use lockbox::fs::{Creator, FileSystem};
use lockbox::keys;
use lockbox_host::control::{self, ActionResult, Request, Response, SnapshotName, Status};
use lockbox_host::daemons;
use lockbox_host::remote::{self, RemoteOptions};
use nix::libc;
use nix::mount::{MntFlags, umount2};
use nix::sys::mman::{self, MapFlags, MsFlags, ProtFlags};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::fs::{CWD, RenameFlags, renameat_with};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, Signal, kill_process, pidfd_open};
use tempfile::TempDir;

const PASSPHRASE: &str = "a passphrase of the tests";

/// How long anything is awaited: it ends a hang and measures nothing, so a loaded machine does not reach it.
const PATIENCE: Duration = Duration::from_secs(120);

/// Exit code of a mount whose archive is locked.
const IN_USE: i32 = 13;

/// One archive and its mount.
pub(crate) struct Mount {
    scratch: TempDir,
    options: String,
    mounted: bool,
    in_store: bool,
    clock_speed: u32,
}

impl Mount {
    pub(crate) fn new() -> Mount {
        Mount::with("")
    }

    /// With mount options, separated by commas.
    pub(crate) fn with(options: &str) -> Mount {
        let scratch = tempfile::Builder::new().prefix("lockbox-semantics.").tempdir().unwrap();
        Mount::at(scratch, options)
    }

    /// In a directory of the test's.
    pub(crate) fn at(scratch: TempDir, options: &str) -> Mount {
        Mount::made(scratch, options, false, 1)
    }

    /// With a daemon whose clock runs at ten times the speed (`clock_speed` of fuse/src/ticker.rs).
    pub(crate) fn with_fast_clock() -> Mount {
        Mount::made(tempfile::Builder::new().prefix("lockbox-semantics.").tempdir().unwrap(), "", false, 10)
    }

    /// Of an archive in a store, which is a directory.
    pub(crate) fn in_store() -> Mount {
        Mount::made(tempfile::Builder::new().prefix("lockbox-semantics.").tempdir().unwrap(), "", true, 1)
    }

    fn made(scratch: TempDir, options: &str, in_store: bool, clock_speed: u32) -> Mount {
        assert!(rustix::process::geteuid().is_root(), "the tests of real mounts need root");
        assert!(Path::new("/dev/fuse").exists(), "/dev/fuse is missing, and the tests of real mounts need it");
        let mut made = Mount { scratch, options: options.to_owned(), mounted: false, in_store, clock_speed };
        fs::create_dir(made.root()).unwrap();
        fs::create_dir(made.runtime()).unwrap();
        fs::write(made.passfile(), PASSPHRASE).unwrap();
        fs::set_permissions(made.passfile(), fs::Permissions::from_mode(0o600)).unwrap();
        let passphrase = Passphrase::new(PASSPHRASE.as_bytes().to_vec());
        // What a passphrase costs is not what these tests are about.
        let kdf = KdfCost { memory_kib: 1024, passes: 1, lanes: 1 };
        let create = CreateOptions { kdf, creator: Creator { uid: 0, gid: 0, umask: None } };
        if in_store {
            let mut bucket = remote::write(&made.archive(), &RemoteOptions::default(), false, true).unwrap();
            Archive::create_in(
                &bucket.create_empty().unwrap(),
                &passphrase,
                &create,
                &keys::RollbackOptions::default(),
            )
            .unwrap();
            bucket.publish().unwrap();
        } else {
            Archive::create(&made.archive(), &passphrase, &create).unwrap();
        }
        made.mount();
        made
    }

    /// Path, or address.
    pub(crate) fn archive(&self) -> PathBuf {
        match self.in_store {
            true => format!("file://{}", self.store().display()).into(),
            false => self.scratch.path().join("box.lbx"),
        }
    }

    fn store(&self) -> PathBuf {
        self.scratch.path().join("store")
    }

    /// Has the store refuse commits, or take them again.
    pub(crate) fn refuse_commits(&self, refuses: bool) {
        let mut parts = fs::read_dir(self.store()).unwrap().map(|part| part.unwrap().path());
        let log = parts.find(|part| part.is_dir()).unwrap().join("log");
        let away = log.with_extension("away");
        if refuses {
            File::create(&away).unwrap();
        }
        // In one step, because the daemon creates a missing directory at once.
        renameat_with(CWD, &log, CWD, &away, RenameFlags::EXCHANGE).unwrap();
        if !refuses {
            fs::remove_file(&away).unwrap();
        }
    }

    pub(crate) fn root(&self) -> PathBuf {
        self.scratch.path().join("box")
    }

    /// A path below the mount point.
    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.root().join(name)
    }

    /// A path beside the mount, on the host.
    pub(crate) fn outside(&self, name: &str) -> PathBuf {
        self.scratch.path().join(name)
    }

    fn runtime(&self) -> PathBuf {
        self.scratch.path().join("run")
    }

    fn passfile(&self) -> PathBuf {
        self.scratch.path().join("passphrase")
    }

    fn log(&self) -> PathBuf {
        self.scratch.path().join("log")
    }

    pub(crate) fn mount(&mut self) {
        let mut options = format!("passfile={},log={}", self.passfile().display(), self.log().display());
        if !self.options.is_empty() {
            options = format!("{options},{}", self.options);
        }
        let attempt = || {
            Command::new(env!("CARGO_BIN_EXE_mount-lockbox"))
                .args(["-o", &options])
                .arg(self.archive())
                .arg(self.root())
                .env("XDG_RUNTIME_DIR", self.runtime())
                .env("XDG_CACHE_HOME", self.runtime())
                .env("XDG_STATE_HOME", self.runtime())
                .env("LOCKBOX_TEST_CLOCK", self.clock_speed.to_string())
                .stdin(Stdio::null())
                .output()
                .unwrap()
        };
        // A program that another test starts has the archive that was just made, and its lock, until its exec.
        let mut output = attempt();
        awaited(|| {
            let is_free = output.status.code() != Some(IN_USE);
            if !is_free {
                output = attempt();
            }
            is_free
        });
        assert!(output.status.success(), "mounting failed: {}", String::from_utf8_lossy(&output.stderr));
        self.mounted = true;
    }

    /// The daemon's, and its user.
    fn socket(&self) -> io::Result<(PathBuf, u32)> {
        let name = daemons::socket_name(&self.archive())?;
        Ok((control::socket_path(&self.runtime(), &name), nix::unistd::geteuid().as_raw()))
    }

    fn ask(&self, request: &Request) -> io::Result<Response> {
        let (socket, owner) = self.socket()?;
        control::send_request(&socket, owner, request).map_err(io::Error::other)
    }

    pub(crate) fn status(&self) -> Status {
        match self.ask(&Request::Status).unwrap() {
            Response::Status(status) => *status,
            other => panic!("{other:?}"),
        }
    }

    /// The orderly end: returns when the archive is closed.
    pub(crate) fn unmount(&mut self) {
        // A program that another test starts has all our descriptors for the moment before its exec.
        let ended = awaited(|| match self.ask(&Request::Stop { lazy: false, abandon: false, force: false }).unwrap() {
            Response::Done => true,
            Response::Busy { .. } => false,
            other => panic!("{other:?}"),
        });
        assert!(ended, "the mount stays busy");
        self.mounted = false;
    }

    /// Opens the archive of an ended mount. Its lock is free once the stop was answered.
    pub(crate) fn open_archive(&self, read_only: bool) -> Archive {
        let key = keys::unlock(&self.archive(), &Passphrase::new(PASSPHRASE.as_bytes().to_vec())).unwrap();
        let options = lockbox::archive::OpenOptions { read_only, ..Default::default() };
        Archive::open(&self.archive(), &key, &options).unwrap()
    }

    pub(crate) fn remount(&mut self) {
        self.unmount();
        self.mount();
    }

    pub(crate) fn remount_with(&mut self, options: &str) {
        self.options = options.to_owned();
        self.remount();
    }

    /// Unmounts, keeps what is there under the name, and mounts again.
    pub(crate) fn take_snapshot(&mut self, name: &str) {
        self.unmount();
        let archive = self.open_archive(false);
        archive.snapshot_manager().create(name.as_bytes()).unwrap();
        archive.close().unwrap();
        self.mount();
    }

    /// Brings back all that a snapshot shows, as a client does that is told so; `renames` is called with the paths of each rename before it.
    pub(crate) fn restore(&self, name: &str, renames: &mut dyn FnMut(&str, &str)) {
        let (socket, owner) = self.socket().unwrap();
        let request =
            Request::SnapshotRestore { name: SnapshotName(name.as_bytes().to_vec()), paths: Vec::new(), to: None };
        let end = control::exchange_messages(&socket, owner, &request, &|| Ok(()), &mut |response| {
            let Response::Rename { from, to, exchange } = response else {
                let kept = matches!(response, Response::Kept { .. });
                return Ok(if kept { ControlFlow::Continue(None) } else { ControlFlow::Break(response) });
            };
            let [from, to] = [from, to].map(|path| String::from_utf8(path.0).unwrap());
            renames(&from, &to);
            let flags = if exchange { RenameFlags::EXCHANGE } else { RenameFlags::NOREPLACE };
            let done = renameat_with(CWD, self.path(&from), CWD, self.path(&to), flags);
            Ok(ControlFlow::Continue(Some(ActionResult { errno: done.err().map(Errno::raw_os_error) })))
        });
        assert!(matches!(end, Ok(Response::Done)), "{end:?}");
    }

    /// Unmounts, damages the first block for which the archive then answers `is_meant`, and mounts again with the options.
    pub(crate) fn damage(&mut self, options: &str, is_meant: &dyn Fn(&FileSystem) -> bool) {
        self.unmount();
        let archive = self.open_archive(true);
        let file = OpenOptions::new().read(true).write(true).open(self.archive()).unwrap();
        let blocks = file.metadata().unwrap().len() / 4096;
        let found = (0..blocks).map(|block| block * 4096 + 2000).find(|at| {
            let before = read_at(&file, *at, 1);
            file.write_all_at(&[!before[0]], *at).unwrap();
            archive.file_system().forget_plaintext();
            let found = is_meant(archive.file_system());
            if !found {
                file.write_all_at(&before, *at).unwrap();
            }
            found
        });
        assert!(found.is_some(), "none of {blocks} blocks is the one");
        drop(archive);
        self.options = options.to_owned();
        self.mount();
    }

    /// The thread of the daemon that looks once a second whether there is something to flush, to commit or to erase.
    fn clock(&self) -> PathBuf {
        let directory = format!("/proc/{}/task", self.status().pid);
        let mut clock = None;
        // The daemon starts the thread after it has reported that it is ready.
        awaited(|| {
            let mut tasks = fs::read_dir(&directory).unwrap().map(|task| task.unwrap().path());
            clock = tasks.find(|task| fs::read_to_string(task.join("comm")).is_ok_and(|name| name == "ticker\n"));
            clock.is_some()
        });
        clock.expect("the daemon has no clock")
    }

    /// Has nothing happen that no request asks for.
    pub(crate) fn stop_clock(&self) -> StoppedClock {
        let mut program = Command::new("python3")
            .arg(concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/mount/clock.py"))
            .arg(self.status().pid.to_string())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut told = String::new();
        BufReader::new(program.stdout.take().unwrap()).read_line(&mut told).unwrap();
        assert_eq!(told, "stopped\n");
        StoppedClock(program)
    }

    /// Returns when all that the clock does now and then had its turn. It looks once a second and is awake for nothing else, flushes every fifth time
    /// and commits with the next one. Where it waits for others in between it counts more than once, so these are three rounds or two.
    pub(crate) fn await_looks(&self) {
        let status = self.clock().join("status");
        let looks = || -> u64 {
            let text = fs::read_to_string(&status).unwrap();
            text.lines().find_map(|line| line.strip_prefix("voluntary_ctxt_switches:")).unwrap().trim().parse().unwrap()
        };
        let goal = looks() + 21;
        assert!(awaited(|| looks() >= goal), "the clock stands still");
    }

    /// Ends the daemon as `kill -9` does, and mounts what it left.
    pub(crate) fn crash(&mut self) {
        self.kill();
        self.mount();
    }

    pub(crate) fn kill(&mut self) {
        let pid = Pid::from_raw(self.status().pid as i32).unwrap();
        let handle = pidfd_open(pid, PidfdFlags::empty()).unwrap();
        kill_process(pid, Signal::KILL).unwrap();
        await_readable(handle.as_fd());
    }

    /// Lets the kernel forget what it holds of the mount and does not use.
    pub(crate) fn drop_caches(&self) {
        // The kernel may still want to store times of files that are deleted already, and report that it could not.
        let _ = rustix::fs::syncfs(File::open(self.root()).unwrap());
        fs::write("/proc/sys/vm/drop_caches", "3").unwrap();
    }

    /// Closes the archive and proves that every page of it is sound.
    pub(crate) fn check(&mut self) {
        if self.mounted {
            self.unmount();
        }
        let report = self.open_archive(true).check(true, &mut |_| {}).unwrap();
        assert!(report.findings.is_empty(), "{:?}", report.findings);
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        if !self.mounted {
            return;
        }
        if std::thread::panicking() {
            eprintln!("log of the daemon:\n{}", fs::read_to_string(self.log()).unwrap_or_default());
        }
        // Whatever state the test left: the polite way, else by force.
        if matches!(self.ask(&Request::Stop { lazy: false, abandon: false, force: false }), Ok(Response::Done)) {
            return;
        }
        let _ = umount2(&self.root(), MntFlags::MNT_DETACH);
        if let Ok(Response::Status(status)) = self.ask(&Request::Status)
            && let Some(pid) = Pid::from_raw(status.pid as i32)
        {
            let _ = kill_process(pid, Signal::KILL);
        }
    }
}

/// Waits until it is so, for what follows by itself. The daemon hears of a close a moment after close(2), for one.
pub(crate) fn awaited(is_so: impl FnMut() -> bool) -> bool {
    awaited_within(PATIENCE, is_so)
}

pub(crate) fn awaited_within(limit: Duration, mut is_so: impl FnMut() -> bool) -> bool {
    let begun = Instant::now();
    while !is_so() {
        if begun.elapsed() > limit {
            return false;
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    true
}

/// Sets a flag when it is dropped, also by a panic. Without it a scope would wait forever for threads that run until
/// the flag is set.
pub(crate) struct StopGuard<'a>(pub(crate) &'a AtomicBool);

impl Drop for StopGuard<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::SeqCst);
    }
}

/// The clock of a mount, which stands still until this is dropped.
pub(crate) struct StoppedClock(Child);

impl Drop for StoppedClock {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Waits until a descriptor has something to say.
pub(crate) fn await_readable(descriptor: impl AsFd) {
    let mut polled = [PollFd::new(&descriptor, PollFlags::IN)];
    while poll(&mut polled, None).map_or_else(|e| e == rustix::io::Errno::INTR, |n| n == 0) {}
}

pub(crate) fn create(path: impl AsRef<Path>) -> File {
    OpenOptions::new().read(true).write(true).create(true).truncate(false).open(path).unwrap()
}

pub(crate) fn open_with(path: impl AsRef<Path>, flags: i32) -> io::Result<File> {
    use std::os::unix::fs::OpenOptionsExt;
    OpenOptions::new().read(true).write(true).custom_flags(flags).open(path)
}

/// The number of an error, to compare with libc's.
pub(crate) fn code<T>(result: Result<T, impl Into<io::Error>>) -> i32 {
    match result {
        Ok(_) => 0,
        Err(error) => error.into().raw_os_error().unwrap_or(-1),
    }
}

/// Bytes that do not compress, the same for the same seed.
pub(crate) fn noise(seed: u64, length: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state
    };
    let mut bytes = Vec::with_capacity(length + 8);
    while bytes.len() < length {
        bytes.extend_from_slice(&next().to_le_bytes());
    }
    bytes.truncate(length);
    bytes
}

pub(crate) fn read_at(file: &File, offset: u64, length: usize) -> Vec<u8> {
    let mut bytes = vec![0; length];
    file.read_exact_at(&mut bytes, offset).unwrap();
    bytes
}

/// Runs a Python program with the given arguments and standard input; a second process where one is needed.
pub(crate) fn python(program: &str, arguments: &[&Path]) -> Child {
    Command::new("python3")
        .arg("-c")
        .arg(program)
        .args(arguments)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap()
}

/// A shared memory map of a file.
pub(crate) struct Map {
    start: NonNull<libc::c_void>,
    length: usize,
}

impl Map {
    pub(crate) fn new(file: &File, length: usize) -> Map {
        let size = length.try_into().unwrap();
        let protection = ProtFlags::PROT_READ | ProtFlags::PROT_WRITE;
        // SAFETY: the kernel chooses the address, so no other memory is touched; the map lives as long as this value.
        let start = unsafe { mman::mmap(None, size, protection, MapFlags::MAP_SHARED, file, 0) }.unwrap();
        Map { start, length }
    }

    pub(crate) fn get(&self, at: usize) -> u8 {
        assert!(at < self.length);
        // SAFETY: within the map; volatile, since others change it.
        unsafe { self.start.as_ptr().cast::<u8>().add(at).read_volatile() }
    }

    pub(crate) fn set(&self, at: usize, byte: u8) {
        assert!(at < self.length);
        // SAFETY: as in `get`.
        unsafe { self.start.as_ptr().cast::<u8>().add(at).write_volatile(byte) }
    }

    pub(crate) fn sync(&self) {
        // SAFETY: exactly the map.
        unsafe { mman::msync(self.start, self.length, MsFlags::MS_SYNC) }.unwrap();
    }
}

impl Drop for Map {
    fn drop(&mut self) {
        // SAFETY: exactly the map, which nobody uses any more.
        let _ = unsafe { mman::munmap(self.start, self.length) };
    }
}

/// A file handle as name_to_handle_at(2) gives it.
#[repr(C, align(8))]
#[derive(Clone)]
pub(crate) struct Handle {
    length: u32,
    kind: i32,
    bytes: [u8; 128],
}

impl Handle {
    pub(crate) fn of(path: &Path) -> Handle {
        let name = std::ffi::CString::new(path.as_os_str().as_encoded_bytes()).unwrap();
        let mut handle = Handle { length: 128, kind: 0, bytes: [0; 128] };
        let mut mount = 0;
        // SAFETY: the structure is a `struct file_handle` with room for `length` bytes behind its head.
        let result = unsafe {
            let raw = (&raw mut handle).cast::<libc::file_handle>();
            libc::name_to_handle_at(libc::AT_FDCWD, name.as_ptr(), raw, &raw mut mount, 0)
        };
        assert_eq!(result, 0, "{}", io::Error::last_os_error());
        handle
    }

    pub(crate) fn open(&self, mount: &File, flags: i32) -> io::Result<File> {
        let (mut handle, flags) = (self.clone(), flags | libc::O_CLOEXEC);
        // SAFETY: as in `of`; the kernel only reads it.
        let descriptor =
            unsafe { libc::open_by_handle_at(mount.as_raw_fd(), (&raw mut handle).cast::<libc::file_handle>(), flags) };
        if descriptor < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: just opened and nobody else's.
        Ok(unsafe { OwnedFd::from_raw_fd(descriptor) }.into())
    }
}
