//! A process that fetches for another one, over sockets between the two.
//!
//! The daemon of a mount has the keys and, in its sandbox, reaches no network; this process reaches the network and has no key. It is given an
//! address and as many sockets as there may be readers at once, and lends the file on each. It ends when the other side is gone.

use std::io::{self, BufRead, BufReader, IoSlice, IoSliceMut, Read, Write};
use std::mem::MaybeUninit;
use std::net::Shutdown;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Weak};
use std::thread;
use std::time::{Duration, Instant};

use lockbox::storage::lent::{code_of, error_of};
use lockbox::storage::{Borrowed, Storage, lend};
use lockbox::{Error, Result};
use parking_lot::Mutex;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags,
    recvmsg, sendmsg,
};
use serde::{Deserialize, Serialize};

use crate::Options;
use crate::address::Address;
use crate::bucket::Living;
use crate::file::RemoteFile;
use crate::traffic::Traffic;

/// Readers that are served at once.
const SOCKETS: usize = 16;

#[derive(Serialize, Deserialize)]
struct Task {
    address: String,
    options: Options,
    access: Access,
}

/// What is done to an archive at an address.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Access {
    Read,
    /// Each barrier waits until the store has said that its record is there.
    Write {
        take_over: bool,
    },
}

/// What the process has open.
enum Served {
    Read(Arc<RemoteFile>),
    Write(Arc<Living>),
}

impl Served {
    fn open(task: &Task) -> Result<Served> {
        let address = Address::parse(task.address.as_ref())?;
        let address = address.ok_or_else(|| Error::invalid("that is no address"))?;
        match task.access {
            Access::Read => crate::open_file(&address, &task.options).map(|file| Served::Read(Arc::new(file))),
            Access::Write { take_over } => {
                let living = crate::open_living(&address, &task.options, take_over)?;
                living.insist();
                Ok(Served::Write(Arc::new(living)))
            }
        }
    }

    fn storage(&self) -> Arc<dyn Storage> {
        match self {
            Served::Read(file) => file.clone(),
            Served::Write(living) => living.clone(),
        }
    }

    fn traffic(&self) -> Traffic {
        match self {
            Served::Read(file) => file.traffic(),
            Served::Write(living) => living.traffic(),
        }
    }
}

#[derive(Serialize, Deserialize)]
enum Opened {
    Here { ordered: bool },
    Failed(u32, String),
}

/// How long somebody waits for what was asked of the server so far: the process has nothing else to do there.
const TELLING: Duration = Duration::from_millis(250);
/// Longest line about that.
const MAX_TOLD: u64 = 4096;

/// What was asked of the server, told at any time.
#[derive(Serialize, Deserialize)]
struct Told {
    /// The byte of the question.
    asked: u8,
    traffic: Traffic,
}

/// The other process. Its end of life is that of this socket's other end.
struct Fetching {
    control: Arc<UnixStream>,
    child: Mutex<Child>,
}

impl Fetching {
    /// Returns when the process has ended, which first says to the store that nobody writes there any more.
    fn end(&self) {
        // Whoever asks just now has it too.
        let _ = self.control.shutdown(Shutdown::Both);
        let _ = self.child.lock().wait();
    }
}

/// Asks the other process what it asked of the server, beside whoever reads the file and waits for that.
pub struct Asking {
    /// Does not keep the process.
    control: Weak<UnixStream>,
    fetching: Weak<Fetching>,
    /// The last question.
    asked: Mutex<u8>,
}

impl Asking {
    /// Ends the process although the storage is not let go yet: nothing can be asked of that any more.
    pub fn end(&self) {
        if let Some(fetching) = self.fetching.upgrade() {
            fetching.end();
        }
    }

    /// None when it does not tell at once, and when it is gone.
    pub fn traffic(&self) -> Option<Traffic> {
        let control = self.control.upgrade()?;
        let mut asked = self.asked.lock();
        *asked = asked.wrapping_add(1);
        (&*control).write_all(&[*asked]).ok()?;
        let until = Instant::now() + TELLING;
        while Instant::now() < until {
            let told: Told = serde_json::from_slice(&line(&control).ok()?).ok()?;
            // Others are answers that came too late.
            if told.asked == *asked {
                return Some(told.traffic);
            }
        }
        None
    }
}

/// A line, byte by byte: what follows is for the next one who reads.
fn line(mut control: &UnixStream) -> io::Result<Vec<u8>> {
    let (mut line, mut byte) = (Vec::new(), [0]);
    while line.len() as u64 <= MAX_TOLD {
        control.read_exact(&mut byte)?;
        if byte[0] == b'\n' {
            return Ok(line);
        }
        line.push(byte[0]);
    }
    Err(io::ErrorKind::InvalidData.into())
}

/// The archive's file there, by a process of its own: `command`, which calls [`serve`] with its standard input.
///
/// # Errors
/// As [`crate::open`]; `Io` when the process cannot be started.
pub fn open_apart(
    command: &mut Command,
    address: &Address,
    options: &Options,
    access: Access,
) -> Result<(Borrowed, Asking)> {
    let cannot = |error: io::Error| Error::io("cannot start the process that fetches", error);
    let (control, theirs) = UnixStream::pair().map_err(cannot)?;
    let child = command.stdin(OwnedFd::from(theirs)).stdout(Stdio::null()).spawn().map_err(cannot)?;
    let fetching = Arc::new(Fetching { control: Arc::new(control), child: Mutex::new(child) });
    let (sockets, ordered, asking) = introduce(&fetching.control, address, options, access)?;
    let asking = Asking { fetching: Arc::downgrade(&fetching), ..asking };
    let borrowed = Borrowed::new(sockets, access != Access::Read)?;
    Ok((if ordered { borrowed.ordered() } else { borrowed }.kept_by(Kept(fetching)), asking))
}

/// Ends the process with the storage.
struct Kept(Arc<Fetching>);

impl Drop for Kept {
    fn drop(&mut self) {
        self.0.end();
    }
}

/// Says what is to be opened, and returns when it is: the sockets that it is read by, whether it is ordered, and one to ask.
fn introduce(
    control: &Arc<UnixStream>,
    address: &Address,
    options: &Options,
    access: Access,
) -> Result<(Vec<UnixStream>, bool, Asking)> {
    let cannot = |error: io::Error| Error::io("cannot start the process that fetches", error);
    let pairs: Vec<_> = (0..SOCKETS).map(|_| UnixStream::pair()).collect::<io::Result<_>>().map_err(cannot)?;
    let (ours, theirs): (Vec<_>, Vec<_>) = pairs.into_iter().unzip();
    let theirs: Vec<_> = theirs.iter().map(AsFd::as_fd).collect();
    let task = Task { address: address.text(), options: options.clone(), access };
    let mut line = serde_json::to_vec(&task).map_err(|error| cannot(error.into()))?;
    line.push(b'\n');
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(SOCKETS))];
    let mut parts = SendAncillaryBuffer::new(&mut space);
    parts.push(SendAncillaryMessage::ScmRights(&theirs));
    // One byte brings the sockets; the rest is a stream.
    let sent = sendmsg(&**control, &[IoSlice::new(&line[..1])], &mut parts, SendFlags::NOSIGNAL);
    sent.map_err(|error| cannot(error.into()))?;
    (&**control).write_all(&line[1..]).map_err(cannot)?;
    let mut answer = String::new();
    BufReader::new(&**control).read_line(&mut answer).map_err(cannot)?;
    match serde_json::from_str(&answer).map_err(|error| cannot(error.into()))? {
        Opened::Here { ordered } => {
            control
                .set_read_timeout(Some(TELLING))
                .and_then(|()| control.set_write_timeout(Some(TELLING)))
                .map_err(cannot)?;
            let (control, fetching) = (Arc::downgrade(control), Weak::new());
            Ok((ours, ordered, Asking { control, fetching, asked: Mutex::new(0) }))
        }
        Opened::Failed(code, sentence) => Err(error_of(code, sentence)),
    }
}

/// The process's side: opens what it is told to and serves until the other side is gone.
///
/// # Errors
/// When what comes is no task. What keeps the file from being opened is told to the other side.
pub fn serve(control: UnixStream) -> io::Result<()> {
    let (first, sockets) = receive(&control)?;
    let mut line = vec![first];
    BufReader::new(&control).take(1 << 20).read_until(b'\n', &mut line)?;
    let task: Task = serde_json::from_slice(&line)?;
    let opened = Served::open(&task);
    let answer = match &opened {
        Ok(served) => Opened::Here { ordered: served.storage().ordered() },
        Err(error) => {
            let (code, sentence) = code_of(error);
            Opened::Failed(code, sentence)
        }
    };
    let mut line = serde_json::to_vec(&answer)?;
    line.push(b'\n');
    (&control).write_all(&line)?;
    let Ok(served) = opened else { return Ok(()) };
    for socket in sockets {
        let storage = served.storage();
        thread::Builder::new().name("serve".into()).spawn(move || lend(&*storage, socket))?;
    }
    // Until the other side is gone.
    let mut asked = [0];
    while matches!((&control).read(&mut asked), Ok(1)) {
        let mut line = serde_json::to_vec(&Told { asked: asked[0], traffic: served.traffic() })?;
        line.push(b'\n');
        // Who does not wait for the answer may be gone.
        if (&control).write_all(&line).is_err() {
            break;
        }
    }
    // Whatever still asks is let down: the last word is that nobody writes any more.
    if let Served::Write(living) = &served {
        living.go();
    }
    Ok(())
}

/// The first byte of the task, and the sockets that came with it.
fn receive(control: &UnixStream) -> io::Result<(u8, Vec<UnixStream>)> {
    let mut first = [0];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(SOCKETS))];
    let mut parts = RecvAncillaryBuffer::new(&mut space);
    let received = recvmsg(control, &mut [IoSliceMut::new(&mut first)], &mut parts, RecvFlags::CMSG_CLOEXEC)?;
    let mut sockets = Vec::new();
    for part in parts.drain() {
        if let RecvAncillaryMessage::ScmRights(rights) = part {
            sockets.extend(rights.map(UnixStream::from));
        }
    }
    if received.bytes == 1 && !sockets.is_empty() {
        Ok((first[0], sockets))
    } else {
        Err(io::ErrorKind::InvalidData.into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bucket::{Bucket, Directory};
    use crate::{Names, Options};

    #[test]
    fn what_was_asked_is_told_beside_the_readers_and_to_nobody_when_the_process_hangs() {
        let place = tempfile::tempdir().unwrap();
        let options = Options { cache_directory: None, timeout: Some(Duration::ZERO), ..Options::default() };
        let directory = Directory::open(place.path(), Some(Names::Ours)).unwrap();
        let mut bucket = Bucket::open(Box::new(directory), "file:///a".into(), &options, false).unwrap();
        bucket.fresh().unwrap().write_at(0, &vec![7; 12 << 20]).unwrap();
        bucket.publish().unwrap();
        let (ours, theirs) = UnixStream::pair().unwrap();
        let serving = thread::spawn(|| serve(theirs));
        let control = Arc::new(ours);
        let address = Address::parse(format!("file://{}", place.path().display()).as_ref()).unwrap().unwrap();
        let (sockets, ordered, asking) = introduce(&control, &address, &options, Access::Read).unwrap();
        assert!(ordered);
        let borrowed = Borrowed::new(sockets, false).unwrap();
        let before = asking.traffic().unwrap();
        // The newest record's number by a list; the marker, the record, and what the file begins with.
        assert!(before.lists == 1 && before.reads >= 3 && before.offline_since.is_none(), "{before:?}");
        borrowed.read_at(8 << 20, &mut [0; 4096]).unwrap();
        borrowed.read_at(8 << 20, &mut [0; 4096]).unwrap();
        let after = asking.traffic().unwrap();
        assert!(after.reads > before.reads && after.bytes >= before.bytes + (256 << 10), "{after:?}");
        assert!(after.memory_hits > before.memory_hits && after.disk_hits == 0, "{after:?}");
        // Whoever asks is not what keeps the process.
        drop((borrowed, control));
        assert!(asking.traffic().is_none());
        serving.join().unwrap().unwrap();
        let (ours, silent) = UnixStream::pair().unwrap();
        ours.set_read_timeout(Some(Duration::from_millis(1))).unwrap();
        let ours = Arc::new(ours);
        let asking = Asking { control: Arc::downgrade(&ours), fetching: Weak::new(), asked: Mutex::new(0) };
        assert!(asking.traffic().is_none());
        // It goes on, and its late answer is not taken for the one to the next question.
        let tell = |asked, reads| {
            let told = Told { asked, traffic: Traffic { reads, ..Traffic::default() } };
            (&silent).write_all(&[&serde_json::to_vec(&told).unwrap()[..], b"\n"].concat()).unwrap();
        };
        tell(1, 10);
        tell(2, 20);
        assert_eq!(asking.traffic().map(|traffic| traffic.reads), Some(20));
        (&silent).write_all(&vec![b'x'; 100_000]).unwrap();
        assert!(asking.traffic().is_none(), "what never ends is not waited for");
    }
}
