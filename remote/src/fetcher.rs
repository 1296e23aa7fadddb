//! A process that fetches for another one, over sockets between the two.
//!
//! The daemon of a mount has the keys and, in its sandbox, reaches no network; this process reaches the network and has no key. It is given an
//! address and as many sockets as there may be readers at once, and lends the file on each. It ends when the other side is gone.

use std::io::{self, BufRead, BufReader, IoSlice, IoSliceMut, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::thread;

use lockbox::storage::lent::{code_of, error_of};
use lockbox::storage::{Borrowed, lend};
use lockbox::{Error, Result};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags,
    recvmsg, sendmsg,
};
use serde::{Deserialize, Serialize};

use crate::Options;
use crate::address::Address;

/// Readers that are served at once.
const SOCKETS: usize = 16;

#[derive(Serialize, Deserialize)]
struct Task {
    address: String,
    options: Options,
}

#[derive(Serialize, Deserialize)]
enum Opened {
    Here,
    Failed(u32, String),
}

/// The other process.
struct Fetching {
    /// Its end of life is that of this socket's other end.
    control: Option<UnixStream>,
    child: Child,
}

/// The archive's file there, by a process of its own: `command`, which calls [`serve`] with its standard input.
///
/// # Errors
/// As [`crate::open`]; `Io` when the process cannot be started.
pub fn open_apart(command: &mut Command, address: &Address, options: &Options) -> Result<Borrowed> {
    let cannot = |error: io::Error| Error::io("cannot start the process that fetches", error);
    let (control, theirs) = UnixStream::pair().map_err(cannot)?;
    let child = command.stdin(OwnedFd::from(theirs)).stdout(Stdio::null()).spawn().map_err(cannot)?;
    let fetching = Fetching { control: Some(control), child };
    let sockets = fetching.introduce(address, options)?;
    Ok(Borrowed::new(sockets, false)?.kept_by(fetching))
}

impl Fetching {
    fn introduce(&self, address: &Address, options: &Options) -> Result<Vec<UnixStream>> {
        let cannot = |error: io::Error| Error::io("cannot start the process that fetches", error);
        let control = self.control.as_ref().ok_or_else(|| cannot(io::ErrorKind::NotConnected.into()))?;
        let pairs: Vec<_> = (0..SOCKETS).map(|_| UnixStream::pair()).collect::<io::Result<_>>().map_err(cannot)?;
        let (ours, theirs): (Vec<_>, Vec<_>) = pairs.into_iter().unzip();
        let theirs: Vec<_> = theirs.iter().map(AsFd::as_fd).collect();
        let task = Task { address: address.text(), options: options.clone() };
        let mut line = serde_json::to_vec(&task).map_err(|error| cannot(error.into()))?;
        line.push(b'\n');
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(SOCKETS))];
        let mut parts = SendAncillaryBuffer::new(&mut space);
        parts.push(SendAncillaryMessage::ScmRights(&theirs));
        // One byte brings the sockets; the rest is a stream.
        let sent = sendmsg(control, &[IoSlice::new(&line[..1])], &mut parts, SendFlags::NOSIGNAL);
        sent.map_err(|error| cannot(error.into()))?;
        (&mut &*control).write_all(&line[1..]).map_err(cannot)?;
        let mut answer = String::new();
        BufReader::new(control).read_line(&mut answer).map_err(cannot)?;
        match serde_json::from_str(&answer).map_err(|error| cannot(error.into()))? {
            Opened::Here => Ok(ours),
            Opened::Failed(code, sentence) => Err(error_of(code, sentence)),
        }
    }
}

impl Drop for Fetching {
    fn drop(&mut self) {
        self.control = None;
        let _ = self.child.wait();
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
    let address = Address::parse(task.address.as_ref());
    let opened = address.and_then(|address| {
        let address = address.ok_or_else(|| Error::invalid("that is no address"))?;
        crate::open_file(&address, &task.options).map(Arc::new)
    });
    let answer = match &opened {
        Ok(_) => Opened::Here,
        Err(error) => {
            let (code, sentence) = code_of(error);
            Opened::Failed(code, sentence)
        }
    };
    let mut line = serde_json::to_vec(&answer)?;
    line.push(b'\n');
    (&control).write_all(&line)?;
    let Ok(file) = opened else { return Ok(()) };
    for socket in sockets {
        let file = Arc::clone(&file);
        thread::Builder::new().name("serve".into()).spawn(move || lend(&*file, socket))?;
    }
    // Until the other side is gone: nothing more is sent.
    let _ = (&control).read(&mut [0]);
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
