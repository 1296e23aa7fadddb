//! A process that fetches for another one, over sockets between the two.
//!
//! The daemon of a mount has the keys and, in its sandbox, reaches no network; this process reaches the network and has no key. It is given an
//! address and as many sockets as there may be readers at once. On each a request has 16 bytes (offset, length, order: 64, 32 and 32 bits in
//! little-endian order) and is answered, one at a time, with a code and a length of 32 bits each and as many bytes: those that were asked for, or a sentence.
//! It ends when the other side is gone.

use std::io::{self, BufRead, BufReader, IoSlice, IoSliceMut, Read, Write};
use std::mem::MaybeUninit;
use std::ops::Range;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::thread;

use lockbox::storage::Storage;
use lockbox::{Error, Result};
use parking_lot::{Condvar, Mutex};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags,
    recvmsg, sendmsg,
};
use serde::{Deserialize, Serialize};

use crate::address::Address;
use crate::file::RemoteFile;
use crate::{Options, failed};

/// Readers that are served at once.
const SOCKETS: usize = 16;
const READ: u32 = 0;
const NEED: u32 = 1;
const FORGET: u32 = 2;
/// Longest read: four times what a page has.
const MAX_READ: u32 = 64 << 20;
/// Longest sentence of a refusal.
const MAX_SENTENCE: u32 = 64 << 10;

#[derive(Serialize, Deserialize)]
struct Task {
    address: String,
    options: Options,
}

#[derive(Serialize, Deserialize)]
enum Opened {
    Length(u64),
    Failed(u32, String),
}

/// The other process's file, as a storage for reading.
pub struct Fetched {
    length: u64,
    idle: Mutex<Idle>,
    returned: Condvar,
    /// Its end of life is that of this socket's other end.
    control: Option<UnixStream>,
    child: Child,
}

struct Idle {
    sockets: Vec<UnixStream>,
    /// Those in use as well.
    whole: usize,
}

impl Fetched {
    /// Starts `command`, which calls [`serve`] with its standard input, and returns when the file is open there.
    ///
    /// # Errors
    /// As [`crate::open`]; `Io` when the process cannot be started.
    pub fn start(command: &mut Command, address: &Address, options: &Options) -> Result<Fetched> {
        let cannot = |error: io::Error| Error::io("cannot start the process that fetches", error);
        let (control, theirs) = UnixStream::pair().map_err(cannot)?;
        let mut child = command.stdin(OwnedFd::from(theirs)).stdout(Stdio::null()).spawn().map_err(cannot)?;
        match Fetched::introduce(&control, address, options) {
            Ok((length, sockets)) => {
                let idle = Mutex::new(Idle { whole: sockets.len(), sockets });
                Ok(Fetched { length, idle, returned: Condvar::new(), control: Some(control), child })
            }
            Err(error) => {
                drop(control);
                let _ = child.wait();
                Err(error)
            }
        }
    }

    fn introduce(control: &UnixStream, address: &Address, options: &Options) -> Result<(u64, Vec<UnixStream>)> {
        let cannot = |error: io::Error| Error::io("cannot start the process that fetches", error);
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
            Opened::Length(length) => Ok((length, ours)),
            Opened::Failed(code, sentence) => Err(error_of(code, sentence)),
        }
    }

    fn ask<T>(
        &self,
        offset: u64,
        length: u32,
        order: u32,
        take: &mut dyn FnMut(&mut UnixStream, u32) -> io::Result<T>,
    ) -> Result<T> {
        let mut socket = self.borrow()?;
        let mut answered = || -> io::Result<Result<T>> {
            let mut request = [0; 16];
            request[..8].copy_from_slice(&offset.to_le_bytes());
            request[8..12].copy_from_slice(&length.to_le_bytes());
            request[12..].copy_from_slice(&order.to_le_bytes());
            socket.write_all(&request)?;
            let mut head = [0; 8];
            socket.read_exact(&mut head)?;
            let [code, length] =
                [0, 4].map(|at| u32::from_le_bytes([head[at], head[at + 1], head[at + 2], head[at + 3]]));
            if code == 0 {
                return take(&mut socket, length).map(Ok);
            }
            let mut sentence = vec![0; length.min(MAX_SENTENCE) as usize];
            socket.read_exact(&mut sentence)?;
            Ok(Err(error_of(code, String::from_utf8_lossy(&sentence).into_owned())))
        };
        let answered = answered();
        let mut idle = self.idle.lock();
        match answered {
            Ok(answer) => {
                idle.sockets.push(socket);
                self.returned.notify_one();
                answer
            }
            Err(error) => {
                idle.whole -= 1;
                self.returned.notify_all();
                Err(Error::io("the process that fetches is gone", error))
            }
        }
    }

    fn borrow(&self) -> Result<UnixStream> {
        let mut idle = self.idle.lock();
        loop {
            if let Some(socket) = idle.sockets.pop() {
                return Ok(socket);
            }
            if idle.whole == 0 {
                return Err(failed("the process that fetches is gone".into(), io::ErrorKind::BrokenPipe));
            }
            self.returned.wait(&mut idle);
        }
    }
}

impl Drop for Fetched {
    fn drop(&mut self) {
        self.control = None;
        self.idle.lock().sockets.clear();
        let _ = self.child.wait();
    }
}

impl Storage for Fetched {
    fn len(&self) -> Result<u64> {
        Ok(self.length)
    }

    fn read_at(&self, offset: u64, out: &mut [u8]) -> Result<()> {
        let mut at = offset;
        for part in out.chunks_mut(MAX_READ as usize) {
            let wanted = part.len() as u32;
            self.ask(at, wanted, READ, &mut |socket, length| match length == wanted {
                true => socket.read_exact(part),
                false => Err(io::ErrorKind::InvalidData.into()),
            })?;
            at += u64::from(wanted);
        }
        Ok(())
    }

    fn will_need(&self, offset: u64, length: u64) {
        let _ = self.ask(offset, u32::try_from(length).unwrap_or(u32::MAX), NEED, &mut |_, _| Ok(()));
    }

    fn write_at(&self, _offset: u64, _data: &[u8]) -> Result<()> {
        Err(crate::file::read_only())
    }

    fn allocate(&self, _offset: u64, _length: u64) -> Result<()> {
        Err(crate::file::read_only())
    }

    fn punch(&self, _offset: u64, _length: u64) -> Result<()> {
        Err(crate::file::read_only())
    }

    fn set_len(&self, _length: u64) -> Result<()> {
        Err(crate::file::read_only())
    }

    /// There is nothing that could be lost.
    fn barrier(&self) -> Result<()> {
        Ok(())
    }

    fn evict(&self, offset: u64, length: u64) -> Result<()> {
        self.ask(offset, u32::try_from(length).unwrap_or(u32::MAX), FORGET, &mut |_, _| Ok(()))
    }

    fn next_data(&self, offset: u64) -> Result<Option<Range<u64>>> {
        Ok((offset < self.length).then_some(offset..self.length))
    }

    fn read_only(&self) -> bool {
        true
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
        RemoteFile::open(&address, &task.options).map(Arc::new)
    });
    let answer = match &opened {
        Ok(file) => Opened::Length(file.len().unwrap_or_default()),
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
        thread::Builder::new().name("serve".into()).spawn(move || attend(&file, socket))?;
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

/// One reader, until it is gone.
fn attend(file: &RemoteFile, mut socket: UnixStream) {
    let mut buffer = Vec::new();
    let mut request = [0; 16];
    while socket.read_exact(&mut request).is_ok() {
        let number = |at: usize| u32::from_le_bytes([request[at], request[at + 1], request[at + 2], request[at + 3]]);
        let offset = u64::from(number(0)) | u64::from(number(4)) << 32;
        let (length, order) = (number(8), number(12));
        buffer.clear();
        let done = match order {
            READ if length <= MAX_READ => {
                buffer.resize(length as usize, 0);
                file.read_at(offset, &mut buffer)
            }
            NEED => {
                file.will_need(offset, length.into());
                Ok(())
            }
            FORGET => file.evict(offset, length.into()),
            _ => return,
        };
        let code = done.map_or_else(
            |error| {
                let (code, sentence) = code_of(&error);
                buffer = sentence.into_bytes();
                buffer.truncate(MAX_SENTENCE as usize);
                code
            },
            |()| 0,
        );
        let mut head = [0; 8];
        head[..4].copy_from_slice(&code.to_le_bytes());
        head[4..].copy_from_slice(&(buffer.len() as u32).to_le_bytes());
        if socket.write_all(&head).and_then(|()| socket.write_all(&buffer)).is_err() {
            return;
        }
    }
}

/// Kinds of failed requests, by their code less [`KINDS_FROM`].
const KINDS: [io::ErrorKind; 6] = [
    // The first stands for all that are not here.
    io::ErrorKind::Other,
    io::ErrorKind::NotFound,
    io::ErrorKind::TimedOut,
    io::ErrorKind::PermissionDenied,
    io::ErrorKind::Unsupported,
    io::ErrorKind::StaleNetworkFileHandle,
];
const KINDS_FROM: u32 = 10;

fn code_of(error: &Error) -> (u32, String) {
    match error {
        Error::Invalid(sentence) => (1, sentence.clone()),
        Error::Damaged(sentence) => (2, sentence.clone()),
        Error::Io { context, source } => {
            let kind = KINDS.iter().position(|kind| *kind == source.kind()).unwrap_or(0);
            (KINDS_FROM + kind as u32, context.clone())
        }
        other => (KINDS_FROM, other.to_string()),
    }
}

fn error_of(code: u32, sentence: String) -> Error {
    match code {
        1 => Error::Invalid(sentence),
        2 => Error::Damaged(sentence),
        _ => {
            let kind = code.checked_sub(KINDS_FROM).and_then(|kind| KINDS.get(kind as usize));
            failed(sentence, *kind.unwrap_or(&io::ErrorKind::Other))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failure_is_the_same_on_the_other_side() {
        for error in [
            failed("cannot open it".into(), io::ErrorKind::NotFound),
            Error::Invalid("why".into()),
            Error::Damaged("where".into()),
            failed("it is away".into(), io::ErrorKind::TimedOut),
            failed("it was changed".into(), io::ErrorKind::StaleNetworkFileHandle),
        ] {
            let (code, sentence) = code_of(&error);
            assert_eq!(format!("{:?}", error_of(code, sentence)), format!("{error:?}"));
        }
    }
}
