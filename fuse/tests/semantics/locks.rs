//! Locks, which are the kernel's own.

use std::io::{BufRead, BufReader, Read, Write};
use std::path::Path;
use std::process::Child;

use nix::errno::Errno;
use nix::fcntl::{FcntlArg, fcntl};
use nix::libc::{self, EAGAIN, EWOULDBLOCK};
use rustix::fs::{FlockOperation, flock};

use crate::support::{Mount, code, create, python};

/// A process that takes a lock, says so, and holds it until it is told to go on.
struct Holder(Child, BufReader<std::process::ChildStdout>);

impl Holder {
    fn new(path: &Path, lock: &str) -> Holder {
        let program = format!(
            "import fcntl, struct, sys\n\
             file = open(sys.argv[1], 'r+b')\n\
             {lock}\n\
             print('locked', flush=True)\n\
             sys.stdin.readline()\n\
             file.close()\n\
             print('closed', flush=True)\n\
             sys.stdin.readline()\n"
        );
        let mut child = python(&program, &[path]);
        let output = BufReader::new(child.stdout.take().unwrap());
        Holder(child, output)
    }

    fn hears(&mut self, word: &str) {
        let mut line = String::new();
        self.1.read_line(&mut line).unwrap();
        assert_eq!(line.trim(), word);
    }

    fn go_on(&mut self) {
        self.0.stdin.as_mut().unwrap().write_all(b"\n").unwrap();
    }

    fn end(mut self) {
        drop(self.0.stdin.take());
        self.1.read_to_end(&mut Vec::new()).unwrap();
        assert!(self.0.wait().unwrap().success());
    }
}

fn range(kind: i32, start: i64, length: i64) -> libc::flock {
    libc::flock { l_type: kind as i16, l_whence: libc::SEEK_SET as i16, l_start: start, l_len: length, l_pid: 0 }
}

/// flock(2) works between descriptors and processes; a lock ends with its last descriptor.
#[test]
fn flock_excludes() {
    let mount = Mount::new();
    let path = mount.path("file");
    let (first, second) = (create(&path), create(&path));
    flock(&first, FlockOperation::LockShared).unwrap();
    flock(&second, FlockOperation::NonBlockingLockShared).unwrap();
    assert_eq!(code(flock(&second, FlockOperation::NonBlockingLockExclusive)), EWOULDBLOCK);
    drop(first);
    flock(&second, FlockOperation::LockExclusive).unwrap();
    let mut waiting = Holder::new(&path, "fcntl.flock(file, fcntl.LOCK_EX)");
    flock(&second, FlockOperation::Unlock).unwrap();
    waiting.hears("locked");
    assert_eq!(code(flock(&second, FlockOperation::NonBlockingLockShared)), EWOULDBLOCK);
    waiting.go_on();
    waiting.hears("closed");
    flock(&second, FlockOperation::NonBlockingLockExclusive).unwrap();
    waiting.end();
}

/// Locks of ranges by fcntl(2) work between processes, with waiting, and end with any close of the file by their process,
/// and with its death.
#[test]
fn posix_locks_exclude() {
    let mount = Mount::new();
    let path = mount.path("file");
    let file = create(&path);
    let take = "fcntl.lockf(file, fcntl.LOCK_EX, 100, 50)";
    let try_lock = |start, length| fcntl(&file, FcntlArg::F_SETLK(&range(libc::F_WRLCK, start, length)));
    let mut holder = Holder::new(&path, take);
    holder.hears("locked");
    assert_eq!(try_lock(149, 10), Err(Errno::from_raw(EAGAIN)));
    try_lock(150, 10).unwrap();
    try_lock(0, 50).unwrap();
    holder.go_on();
    holder.hears("closed");
    try_lock(100, 1).unwrap();
    holder.end();
    let mut waiting = Holder::new(&path, take);
    fcntl(&file, FcntlArg::F_SETLK(&range(libc::F_UNLCK, 0, 0))).unwrap();
    waiting.hears("locked");
    waiting.0.kill().unwrap();
    fcntl(&file, FcntlArg::F_SETLKW(&range(libc::F_WRLCK, 0, 0))).unwrap();
    waiting.0.wait().unwrap();
}

/// Locks of open file descriptions (F_OFD_SETLK) work within a process and between processes.
#[test]
fn locks_of_open_file_descriptions_exclude() {
    let mount = Mount::new();
    let path = mount.path("file");
    let (first, second) = (create(&path), create(&path));
    fcntl(&first, FcntlArg::F_OFD_SETLK(&range(libc::F_WRLCK, 10, 10))).unwrap();
    let try_second = |kind, start| fcntl(&second, FcntlArg::F_OFD_SETLK(&range(kind, start, 1)));
    assert_eq!(try_second(libc::F_RDLCK, 19), Err(Errno::EAGAIN));
    try_second(libc::F_WRLCK, 20).unwrap();
    let descriptor = first.try_clone().unwrap();
    drop(first);
    assert_eq!(try_second(libc::F_WRLCK, 10), Err(Errno::EAGAIN));
    drop(descriptor);
    fcntl(&second, FcntlArg::F_OFD_SETLKW(&range(libc::F_WRLCK, 10, 10))).unwrap();
    let other = "fcntl.fcntl(file, 38, struct.pack('hhqqi', fcntl.F_WRLCK, 0, 0, 0, 0))";
    let mut waiting = Holder::new(&path, other);
    drop(second);
    waiting.hears("locked");
    waiting.end();
}
