//! Runs the program on archives in a directory of their own, and describes directory trees for comparison.

use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::fs;
use std::io::{self, Write};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};

use nix::fcntl::{FcntlArg, fcntl};
use nix::libc;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use tempfile::TempDir;

pub(crate) const PASSPHRASE: &str = "correct horse";

/// Waits until nobody has the archive open: a program that another test starts has what this process opened, and its
/// lock, until it executes.
pub(crate) fn await_free(archive: &Path) {
    let file = fs::File::options().read(true).write(true).open(archive).unwrap();
    let mut whole = libc::flock { l_type: libc::F_WRLCK as libc::c_short, l_whence: 0, l_start: 0, l_len: 0, l_pid: 0 };
    fcntl(&file, FcntlArg::F_OFD_SETLKW(&whole)).unwrap();
    whole.l_type = libc::F_UNLCK as libc::c_short;
    fcntl(&file, FcntlArg::F_OFD_SETLK(&whole)).unwrap();
}

/// A directory with a passfile; archives and trees go beside it.
pub(crate) struct TestDir {
    directory: TempDir,
}

/// How a run ended.
#[derive(Debug)]
pub(crate) struct RunOutput {
    pub(crate) code: i32,
    pub(crate) stdout: Vec<u8>,
    pub(crate) stderr: String,
}

impl RunOutput {
    fn of(output: Output) -> RunOutput {
        RunOutput {
            code: output.status.code().unwrap_or(-1),
            stdout: output.stdout,
            stderr: String::from_utf8(output.stderr).unwrap(),
        }
    }
}

impl TestDir {
    pub(crate) fn new() -> TestDir {
        let directory = TempDir::new_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let work_dir = TestDir { directory };
        work_dir.write_passfile("pass", PASSPHRASE);
        work_dir
    }

    pub(crate) fn path(&self, name: impl AsRef<Path>) -> PathBuf {
        self.directory.path().join(name)
    }

    /// Writes a passfile.
    pub(crate) fn write_passfile(&self, name: &str, text: &str) -> PathBuf {
        let path = self.path(name);
        fs::write(&path, format!("{text}\n")).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
        path
    }

    pub(crate) fn command(&self) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_lockbox"));
        command.current_dir(self.directory.path()).stdin(Stdio::null());
        command.env_remove("LOCKBOX_PASSFILE").env_remove("LOCKBOX_PASSCOMMAND").env_remove("LOCKBOX_LOG");
        // No daemon of the machine can be taken for one of this test.
        command.env("XDG_RUNTIME_DIR", self.directory.path());
        command.env("XDG_STATE_HOME", self.directory.path().join("state"));
        command
    }

    /// Runs with the right passphrase.
    pub(crate) fn run<S: AsRef<OsStr>>(&self, arguments: &[S]) -> RunOutput {
        let mut command = self.command();
        command.env("LOCKBOX_PASSFILE", self.path("pass")).args(arguments);
        output_of(&mut command)
    }

    /// Runs with the right passphrase and must succeed without a word on standard error.
    pub(crate) fn run_ok<S: AsRef<OsStr>>(&self, arguments: &[S]) -> Vec<u8> {
        let output = self.run(arguments);
        assert_eq!((output.code, output.stderr.as_str()), (0, ""));
        output.stdout
    }

    /// Starts the command with the right passphrase.
    pub(crate) fn start(&self, command: &mut Command, arguments: &[&str]) -> Child {
        command.env("LOCKBOX_PASSFILE", self.path("pass")).args(arguments);
        command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap()
    }

    /// Makes an archive as cheaply as the program allows.
    pub(crate) fn create_archive(&self, name: &str) -> PathBuf {
        self.run_ok(&["create", name, "--kdf-memory", "1", "--kdf-passes", "1", "--weak-kdf"]);
        self.path(name)
    }
}

pub(crate) fn output_of(command: &mut Command) -> RunOutput {
    RunOutput::of(command.output().unwrap())
}

/// Runs with `input` on standard input.
pub(crate) fn output_with_input(command: &mut Command, input: &str) -> RunOutput {
    let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    match child.stdin.take().unwrap().write_all(input.as_bytes()) {
        // It ended before it read everything, which its answer explains.
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => {}
        written => written.unwrap(),
    }
    RunOutput::of(child.wait_with_output().unwrap())
}

/// What a copy must keep of one object.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Object {
    pub(crate) mode: u32,
    pub(crate) owner: (u32, u32),
    pub(crate) links: u64,
    pub(crate) modified: (i64, i64),
    pub(crate) device: u64,
    /// Content of a file, target of a link.
    pub(crate) content: Vec<u8>,
    pub(crate) xattrs: BTreeMap<OsString, Vec<u8>>,
    /// First path in order with the same inode.
    pub(crate) same_as: PathBuf,
}

/// Every object below `root`, and the root itself under an empty path.
pub(crate) fn describe(root: &Path) -> BTreeMap<PathBuf, Object> {
    let mut paths = vec![root.to_path_buf()];
    let mut found = Vec::new();
    while let Some(path) = paths.pop() {
        if path.symlink_metadata().unwrap().is_dir() {
            paths.extend(fs::read_dir(&path).unwrap().map(|entry| entry.unwrap().path()));
        }
        found.push(path);
    }
    found.sort();
    let mut first = BTreeMap::new();
    let mut objects = BTreeMap::new();
    for path in found {
        let metadata = path.symlink_metadata().unwrap();
        let relative = path.strip_prefix(root).unwrap().to_path_buf();
        let same_as = first.entry(metadata.ino()).or_insert_with(|| relative.clone()).clone();
        let content = if metadata.is_symlink() {
            fs::read_link(&path).unwrap().into_os_string().into_vec()
        } else if metadata.is_file() {
            fs::read(&path).unwrap()
        } else {
            Vec::new()
        };
        let object = Object {
            mode: metadata.mode(),
            owner: (metadata.uid(), metadata.gid()),
            links: if metadata.is_dir() { 0 } else { metadata.nlink() },
            modified: (metadata.mtime(), metadata.mtime_nsec()),
            device: metadata.rdev(),
            content,
            xattrs: xattrs(&path),
            same_as,
        };
        objects.insert(relative, object);
    }
    objects
}

fn xattrs(path: &Path) -> BTreeMap<OsString, Vec<u8>> {
    let mut names = vec![0; 4096];
    let Ok(length) = rustix::fs::llistxattr(path, &mut names[..]) else { return BTreeMap::new() };
    // A label says where a file is, not what it is.
    let names = names[..length].split(|&b| b == 0).filter(|name| !name.is_empty() && *name != b"security.selinux");
    names
        .map(|name| {
            let mut value = vec![0; 4096];
            let length = rustix::fs::lgetxattr(path, name, &mut value[..]).unwrap();
            value.truncate(length);
            (OsStr::from_bytes(name).to_owned(), value)
        })
        .collect()
}

/// Names in a directory, sorted.
pub(crate) fn names(directory: &Path) -> Vec<OsString> {
    let mut names: Vec<_> = fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    names.sort();
    names
}

/// Sends the signal once `begun` is so; the exit code and what was complained about, unless the command was done before.
pub(crate) fn stop(mut child: Child, signal: Signal, begun: impl Fn() -> bool) -> Option<(Option<i32>, String)> {
    while !begun() {
        if child.try_wait().unwrap().is_some() {
            return None;
        }
        std::thread::yield_now();
    }
    kill(Pid::from_raw(child.id() as i32), signal).unwrap();
    let output = child.wait_with_output().unwrap();
    (output.status.code() != Some(0)).then(|| (output.status.code(), String::from_utf8(output.stderr).unwrap()))
}

/// SplitMix64 (Steele, Lea, Flood 2014) from a seed.
pub(crate) struct Dice(pub(crate) u64);

impl Dice {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    pub(crate) fn below(&mut self, end: usize) -> usize {
        (self.next() % end as u64) as usize
    }
}

/// Bytes that do not compress.
pub(crate) fn noise(length: usize) -> Vec<u8> {
    let mut dice = Dice(length as u64);
    let mut noise = vec![0; length.next_multiple_of(8)];
    for word in noise.chunks_exact_mut(8) {
        word.copy_from_slice(&dice.next().to_le_bytes());
    }
    noise.truncate(length);
    noise
}
