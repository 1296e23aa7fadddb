//! A process that fetches for another one, over sockets between the two.
//!
//! The daemon of a mount has the keys and, in its sandbox, reaches no network; this process reaches the network and has no key. It is given an
//! address and as many sockets as there may be readers at once, and lends the file on each; on one more it is asked for what came after, which it lends on sockets of its own
//! making: the other process may make none. Of an archive that is written to nothing comes after, and the end of that socket says that its writer is about to go. It ends when
//! the other side is gone.

use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::Shutdown;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Weak};
use std::thread;
use std::time::{Duration, Instant};

use lockbox::storage::lent::{code_of, error_of};
use lockbox::storage::{Borrowed, Storage, lend};
use lockbox::{Error, Result};
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};

use crate::Options;
use crate::address::Address;
use crate::broker::Broker;
use crate::bucket::{Follower, Living};
use crate::fd_passing::{MOST_SOCKETS, pairs, receive, send};
use crate::fetcher_reach::FetcherReach;
use crate::metrics::Traffic;

/// Readers that are served at once: as many event loops as a mount for many programs is told to have, and what else asks. Who waits for a store that is away keeps one.
const LENT: usize = 40;
/// With the one for news.
const SOCKETS: usize = LENT + 1;
const _: () = assert!(SOCKETS <= MOST_SOCKETS);

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
struct Served {
    storage: Arc<dyn Storage>,
    telling: Box<dyn Fn() -> Traffic>,
    /// Of what is read and has later moments.
    follower: Option<Follower>,
    /// What is written to.
    living: Option<Arc<Living>>,
}

impl Served {
    fn open(task: &Task) -> Result<Served> {
        let address = Address::parse(task.address.as_ref())?;
        let address = address.ok_or_else(|| Error::invalid("that is no address"))?;
        match task.access {
            Access::Read => {
                let (file, follower) = crate::open_file(&address, &task.options)?;
                Ok(Served { telling: Box::new(file.telling()), storage: file, follower, living: None })
            }
            Access::Write { take_over } => {
                let living = Arc::new(crate::open_living(&address, &task.options, take_over)?);
                living.insist();
                let telling = living.clone();
                let telling = Box::new(move || telling.traffic());
                Ok(Served { storage: living.clone(), telling, follower: None, living: Some(living) })
            }
        }
    }
}

#[derive(Serialize, Deserialize)]
enum Opened {
    /// `moment` for a file that has later ones.
    Here {
        ordered: bool,
        moment: Option<u64>,
        /// What the user should know.
        notice: Option<String>,
    },
    Failed(u32, String),
}

/// What is answered to whoever has a moment.
#[derive(Serialize, Deserialize)]
enum Newer {
    None,
    /// The sockets come with it.
    Moment(u64),
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
    /// Of what is written to.
    leaving: Option<UnixStream>,
}

impl Asking {
    /// From now on what the store does not take in time is kept on this host, and barriers succeed.
    pub fn leave(&self) {
        if let Some(leaving) = &self.leaving {
            // Whose other end is gone has left.
            let _ = leaving.shutdown(Shutdown::Both);
        }
    }

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

/// Asks the other process whether the archive has gone on.
pub struct News {
    socket: UnixStream,
    /// Of what was taken last.
    moment: u64,
    /// Does not keep the process.
    fetching: Weak<Kept>,
}

impl News {
    /// Has `take` what the archive is now, when that is something new. What it does not take it is given again. Whether it took something.
    ///
    /// # Errors
    /// Those of requests and that of `take`; `Io` when the process is gone.
    pub fn look(&mut self, take: &mut dyn FnMut(Arc<dyn Storage>) -> Result<()>) -> Result<bool> {
        let gone = |error: io::Error| Error::io("the process that fetches has ended", error);
        (&self.socket).write_all(&self.moment.to_le_bytes()).map_err(gone)?;
        let (first, sockets) = receive(&self.socket, LENT).map_err(gone)?;
        let mut line = vec![first];
        // Nothing comes behind it.
        BufReader::new(&self.socket).take(1 << 20).read_until(b'\n', &mut line).map_err(gone)?;
        match serde_json::from_slice(&line).map_err(|error| gone(error.into()))? {
            Newer::None => Ok(false),
            Newer::Failed(code, sentence) => Err(error_of(code, sentence)),
            Newer::Moment(moment) => {
                let kept = self.fetching.upgrade().ok_or_else(|| gone(io::ErrorKind::BrokenPipe.into()))?;
                take(Arc::new(Borrowed::new(sockets, false)?.ordered().kept_by(kept)))?;
                self.moment = moment;
                Ok(true)
            }
        }
    }
}

/// What a process of its own opened.
pub struct Apart {
    pub storage: Borrowed,
    pub asking: Asking,
    /// Of an archive that is read and has later moments.
    pub news: Option<News>,
    /// What the user should know.
    pub notice: Option<String>,
}

/// The archive's file there, by a process of its own: `command`, which calls [`serve`] with its standard input.
///
/// # Errors
/// As [`crate::open`]; `Io` when the process cannot be started.
pub fn open_apart(command: &mut Command, address: &Address, options: &Options, access: Access) -> Result<Apart> {
    let cannot = |error: io::Error| Error::io("cannot start the process that fetches", error);
    let (control, theirs) = UnixStream::pair().map_err(cannot)?;
    let child = command.stdin(OwnedFd::from(theirs)).stdout(Stdio::null()).spawn().map_err(cannot)?;
    let fetching = Arc::new(Fetching { control: Arc::new(control), child: Mutex::new(child) });
    let Introduced { sockets, ordered, asking, news, notice } = introduce(&fetching.control, address, options, access)?;
    let asking = Asking { fetching: Arc::downgrade(&fetching), ..asking };
    let borrowed = Borrowed::new(sockets, access != Access::Read)?;
    let kept = Arc::new(Kept(fetching));
    let news = news.map(|(socket, moment)| News { socket, moment, fetching: Arc::downgrade(&kept) });
    let storage = if ordered { borrowed.ordered() } else { borrowed }.kept_by(kept);
    Ok(Apart { storage, asking, news, notice })
}

/// Ends the process with the last storage.
struct Kept(Arc<Fetching>);

impl Drop for Kept {
    fn drop(&mut self) {
        self.0.end();
    }
}

/// What is there when both processes know each other.
struct Introduced {
    /// By which the file is read.
    sockets: Vec<UnixStream>,
    ordered: bool,
    asking: Asking,
    /// To ask for later moments, and the number of the first.
    news: Option<(UnixStream, u64)>,
    notice: Option<String>,
}

/// Says what is to be opened, and returns when it is.
fn introduce(control: &Arc<UnixStream>, address: &Address, options: &Options, access: Access) -> Result<Introduced> {
    let cannot = |error: io::Error| Error::io("cannot start the process that fetches", error);
    let (mut ours, theirs) = pairs(SOCKETS).map_err(cannot)?;
    let task = Task { address: address.text(), options: options.clone(), access };
    send(control, &task, &theirs).map_err(cannot)?;
    drop(theirs);
    let news = ours.split_off(LENT).pop();
    let mut answer = String::new();
    BufReader::new(&**control).read_line(&mut answer).map_err(cannot)?;
    match serde_json::from_str(&answer).map_err(|error| cannot(error.into()))? {
        Opened::Here { ordered, moment, notice } => {
            control
                .set_read_timeout(Some(TELLING))
                .and_then(|()| control.set_write_timeout(Some(TELLING)))
                .map_err(cannot)?;
            let (control, fetching) = (Arc::downgrade(control), Weak::new());
            let (news, leaving) = if access == Access::Read { (news, None) } else { (None, news) };
            let asking = Asking { control, fetching, asked: Mutex::new(0), leaving };
            Ok(Introduced { sockets: ours, ordered, asking, news: news.zip(moment), notice })
        }
        Opened::Failed(code, sentence) => Err(error_of(code, sentence)),
    }
}

/// The process's side: opens the archive of the task and serves until the other side is gone.
/// `confine` is called before the first request; from then on `broker` looks up names and
/// credentials, which this process may not.
///
/// # Errors
/// When the message is not a task. An error that keeps the file from being opened is sent to the
/// other side.
pub fn serve(control: UnixStream, broker: Option<Broker>, confine: impl FnOnce(&FetcherReach)) -> io::Result<()> {
    let (first, mut sockets) = receive(&control, SOCKETS)?;
    let mut line = vec![first];
    BufReader::new(&control).take(1 << 20).read_until(b'\n', &mut line)?;
    let mut task: Task = serde_json::from_slice(&line)?;
    task.options.broker = broker;
    confine(&FetcherReach::of(&task.address, &task.options, task.access != Access::Read));
    let Served { storage, telling, follower, living } = match Served::open(&task) {
        Ok(served) => served,
        Err(error) => {
            let (code, sentence) = code_of(&error);
            return send(&control, &Opened::Failed(code, sentence), &[]);
        }
    };
    let moment = follower.as_ref().map(Follower::moment);
    let notice = living.as_ref().and_then(|living| living.notice());
    send(&control, &Opened::Here { ordered: storage.ordered(), moment, notice }, &[])?;
    let news = sockets.pop();
    serve_on(&storage, sockets)?;
    // A moment that nobody reads any more is let go.
    drop(storage);
    match (follower, &living, news) {
        (Some(follower), _, Some(news)) => {
            thread::Builder::new().name("follow".into()).spawn(move || follow(follower, news))?;
        }
        (None, Some(living), Some(mut leaving)) => {
            let living = Arc::downgrade(living);
            let wait = move || {
                // Nothing comes but its end.
                let _ = leaving.read(&mut [0]);
                if let Some(living) = living.upgrade() {
                    living.leave();
                }
            };
            thread::Builder::new().name("leave".into()).spawn(wait)?;
        }
        _ => {}
    }
    // Until the other side is gone.
    let mut asked = [0];
    while matches!((&control).read(&mut asked), Ok(1)) {
        // Who does not wait for the answer may be gone.
        if send(&control, &Told { asked: asked[0], traffic: telling() }, &[]).is_err() {
            break;
        }
    }
    // Whatever still asks is let down: the last word is that nobody writes any more.
    if let Some(living) = living {
        living.go();
    }
    Ok(())
}

fn serve_on(storage: &Arc<dyn Storage>, sockets: Vec<UnixStream>) -> io::Result<()> {
    for socket in sockets {
        let storage = storage.clone();
        thread::Builder::new().name("serve".into()).spawn(move || lend(&*storage, socket))?;
    }
    Ok(())
}

/// Answers whoever has a moment of the archive, until that asks no more.
fn follow(mut follower: Follower, news: UnixStream) {
    let mut shown = [0; 8];
    while (&news).read_exact(&mut shown).is_ok() {
        let looked = follower.look().and_then(|()| {
            if follower.moment() <= u64::from_le_bytes(shown) {
                return Ok((Newer::None, Vec::new()));
            }
            let cannot = |error| Error::io("cannot lend what is new", error);
            let (ours, theirs) = pairs(LENT).map_err(cannot)?;
            let file: Arc<dyn Storage> = follower.file().clone();
            serve_on(&file, ours).map_err(cannot)?;
            Ok((Newer::Moment(follower.moment()), theirs))
        });
        let (told, sockets) = looked.unwrap_or_else(|error| {
            let (code, sentence) = code_of(&error);
            (Newer::Failed(code, sentence), Vec::new())
        });
        if send(&news, &told, &sockets).is_err() {
            return;
        }
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
        let serving = thread::spawn(|| serve(theirs, None, |_| {}));
        let control = Arc::new(ours);
        let address = Address::parse(format!("file://{}", place.path().display()).as_ref()).unwrap().unwrap();
        let Introduced { sockets, ordered, asking, .. } =
            introduce(&control, &address, &options, Access::Read).unwrap();
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
        let asking =
            Asking { control: Arc::downgrade(&ours), fetching: Weak::new(), asked: Mutex::new(0), leaving: None };
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
