//! Storage served by another process over Unix sockets.
//!
//! The process that has the archive's key can be cut off from the network, from a directory or from
//! a device; another process then holds the storage. Each socket carries one request at a time. A
//! request has 24 bytes (operation and byte count of 32 bits each, two arguments of 64 bits,
//! little-endian), followed by the data of a write. A response has a code and a length of 32 bits
//! each, followed by data or an error message. Prefetch hints get no response.

use std::io::{self, Read, Write};
use std::ops::Range;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::{Condvar, Mutex};

use super::Storage;
use crate::error::{Error, Result};

const READ: u32 = 0;
const NEED: u32 = 1;
const FORGET: u32 = 2;
const LENGTH: u32 = 3;
const WRITE: u32 = 4;
const ALLOCATE: u32 = 5;
const PUNCH: u32 = 6;
const CUT: u32 = 7;
const BARRIER: u32 = 8;
const PENDING_UPLOAD: u32 = 9;
/// Maximum bytes of one request: four times the largest page.
const MAX_TRANSFER: u32 = 64 << 20;
/// Maximum bytes of an error message.
const MAX_SENTENCE: u32 = 64 << 10;
const REQUEST_BYTES: usize = 24;
const ANSWER_BYTES: usize = 8;

/// Client of a storage in another process.
pub struct IpcStorage {
    /// Cached length; only this process writes to the storage.
    length: AtomicU64,
    writable: bool,
    ordered: bool,
    idle: Mutex<SocketPool>,
    returned: Condvar,
    /// Dropped after the sockets.
    keeper: Option<Box<dyn Send + Sync>>,
}

struct SocketPool {
    sockets: Vec<UnixStream>,
    /// Number of usable sockets, including those in use.
    whole: usize,
}

fn encode_request(order: u32, count: usize, first: u64, second: u64) -> [u8; REQUEST_BYTES] {
    let mut head = [0; REQUEST_BYTES];
    head[..4].copy_from_slice(&order.to_le_bytes());
    head[4..8].copy_from_slice(&(count as u32).to_le_bytes()); // at most MAX_TRANSFER
    head[8..16].copy_from_slice(&first.to_le_bytes());
    head[16..].copy_from_slice(&second.to_le_bytes());
    head
}

impl IpcStorage {
    /// Connects to the storage served at the other end of `sockets`; their number is the maximum of
    /// concurrent requests.
    ///
    /// # Errors
    /// When the server does not respond.
    pub fn new(sockets: Vec<UnixStream>, writable: bool) -> Result<IpcStorage> {
        let idle = Mutex::new(SocketPool { whole: sockets.len(), sockets });
        let length = AtomicU64::new(0);
        let borrowed = IpcStorage { length, writable, ordered: false, idle, returned: Condvar::new(), keeper: None };
        let mut length = [0; 8];
        borrowed.ask(encode_request(LENGTH, 0, 0, 0), &[], &mut length)?;
        borrowed.length.store(u64::from_le_bytes(length), Ordering::Release);
        Ok(borrowed)
    }

    /// Declares that the served storage has atomic barriers (STORAGE-4).
    pub fn with_atomic_barrier(self) -> IpcStorage {
        IpcStorage { ordered: true, ..self }
    }

    /// Keeps `keeper` alive until all sockets are closed.
    pub fn with_keeper(mut self, keeper: impl Send + Sync + 'static) -> IpcStorage {
        self.keeper = Some(Box::new(keeper));
        self
    }

    fn ask(&self, request: [u8; REQUEST_BYTES], data: &[u8], out: &mut [u8]) -> Result<()> {
        self.with_socket(|mut socket| {
            socket.write_all(&request)?;
            socket.write_all(data)?;
            let mut head = [0; ANSWER_BYTES];
            socket.read_exact(&mut head)?;
            let (code, length) = (number(&head, 0), number(&head, 4));
            if code == 0 {
                return if length as usize == out.len() {
                    socket.read_exact(out).map(Ok)
                } else {
                    Err(io::ErrorKind::InvalidData.into())
                };
            }
            let mut sentence = vec![0; length.min(MAX_SENTENCE) as usize];
            socket.read_exact(&mut sentence)?;
            Ok(Err(error_of(code, String::from_utf8_lossy(&sentence).into_owned())))
        })
    }

    /// Runs `talk` with an idle socket; a socket is discarded after an I/O error.
    fn with_socket(&self, talk: impl FnOnce(&UnixStream) -> io::Result<Result<()>>) -> Result<()> {
        let socket = self.borrow()?;
        let talked = talk(&socket);
        let mut idle = self.idle.lock();
        match talked {
            Ok(answer) => {
                idle.sockets.push(socket);
                self.returned.notify_one();
                answer
            }
            Err(error) => {
                idle.whole -= 1;
                self.returned.notify_all();
                Err(connection_error(error))
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
                return Err(connection_error(io::ErrorKind::BrokenPipe.into()));
            }
            self.returned.wait(&mut idle);
        }
    }

    fn order(&self, order: u32, first: u64, second: u64) -> Result<()> {
        self.ask(encode_request(order, 0, first, second), &[], &mut [])
    }

    fn check_writable(&self) -> Result<()> {
        if self.writable { Ok(()) } else { Err(Error::ReadOnly("an archive on a server can only be read".into())) }
    }

    fn grown(&self, end: u64) {
        self.length.fetch_max(end, Ordering::AcqRel);
    }
}

impl Storage for IpcStorage {
    fn len(&self) -> Result<u64> {
        Ok(self.length.load(Ordering::Acquire))
    }

    fn read_at(&self, offset: u64, out: &mut [u8]) -> Result<()> {
        for (number, part) in (0..).zip(out.chunks_mut(MAX_TRANSFER as usize)) {
            let first = offset + number * u64::from(MAX_TRANSFER);
            self.ask(encode_request(READ, part.len(), first, 0), &[], part)?;
        }
        Ok(())
    }

    /// Always true: only remote storage is served over IPC.
    fn is_remote(&self) -> bool {
        true
    }

    /// Sent without a response. The read that follows usually uses the same socket, so the server
    /// handles both in one wakeup.
    fn will_need(&self, offset: u64, length: u64) {
        let request = encode_request(NEED, 0, offset, length);
        let _ = self.with_socket(|mut socket| socket.write_all(&request).map(Ok));
    }

    fn write_at(&self, offset: u64, data: &[u8]) -> Result<()> {
        self.check_writable()?;
        for (number, part) in (0..).zip(data.chunks(MAX_TRANSFER as usize)) {
            let first = offset + number * u64::from(MAX_TRANSFER);
            self.ask(encode_request(WRITE, part.len(), first, 0), part, &mut [])?;
            self.grown(first + part.len() as u64);
        }
        Ok(())
    }

    fn allocate(&self, offset: u64, length: u64) -> Result<()> {
        self.check_writable()?;
        self.order(ALLOCATE, offset, length)?;
        self.grown(offset.saturating_add(length));
        Ok(())
    }

    fn punch(&self, offset: u64, length: u64) -> Result<()> {
        self.check_writable()?;
        self.order(PUNCH, offset, length)
    }

    fn set_len(&self, length: u64) -> Result<()> {
        self.check_writable()?;
        self.order(CUT, length, 0)?;
        self.length.store(length, Ordering::Release);
        Ok(())
    }

    fn barrier(&self) -> Result<()> {
        // Read-only storage has no writes to lose.
        if self.writable { self.order(BARRIER, 0, 0) } else { Ok(()) }
    }

    fn pending_upload_bytes(&self) -> Result<u64> {
        let mut bytes = [0; 8];
        if self.writable {
            self.ask(encode_request(PENDING_UPLOAD, 0, 0, 0), &[], &mut bytes)?;
        }
        Ok(u64::from_le_bytes(bytes))
    }

    fn has_atomic_barrier(&self) -> bool {
        self.ordered
    }

    fn evict(&self, offset: u64, length: u64) -> Result<()> {
        self.order(FORGET, offset, length)
    }

    fn next_data(&self, offset: u64) -> Result<Option<Range<u64>>> {
        let length = self.len()?;
        Ok((offset < length).then_some(offset..length))
    }

    fn read_only(&self) -> bool {
        !self.writable
    }
}

/// Serves a storage to the process at the other end until it disconnects or sends an invalid
/// request.
pub fn serve_storage(storage: &dyn Storage, mut socket: UnixStream) {
    // Response header and payload. Grows to the longest response and is not cleared between
    // requests.
    let mut buffer = vec![0; ANSWER_BYTES];
    let mut head = [0; REQUEST_BYTES];
    while socket.read_exact(&mut head).is_ok() {
        let (order, count) = (number(&head, 0), number(&head, 4));
        let wide = |at: usize| u64::from(number(&head, at)) | u64::from(number(&head, at + 4)) << 32;
        let (first, second) = (wide(8), wide(16));
        if count > MAX_TRANSFER {
            return;
        }
        let mut length = 0;
        let done = match order {
            READ => {
                length = count as usize;
                storage.read_at(first, payload_mut(&mut buffer, length))
            }
            NEED => {
                storage.will_need(first, second);
                continue;
            }
            FORGET => storage.evict(first, second),
            LENGTH => storage.len().map(|bytes| length = put_number(&mut buffer, bytes)),
            WRITE => {
                let data = payload_mut(&mut buffer, count as usize);
                if socket.read_exact(data).is_err() {
                    return;
                }
                storage.write_at(first, data)
            }
            ALLOCATE => storage.allocate(first, second),
            PUNCH => storage.punch(first, second),
            CUT => storage.set_len(first),
            BARRIER => storage.barrier(),
            PENDING_UPLOAD => storage.pending_upload_bytes().map(|bytes| length = put_number(&mut buffer, bytes)),
            _ => return,
        };
        let code = done.map_or_else(
            |error| {
                let (code, sentence) = code_of(&error);
                length = sentence.len().min(MAX_SENTENCE as usize);
                payload_mut(&mut buffer, length).copy_from_slice(&sentence.as_bytes()[..length]);
                code
            },
            |()| 0,
        );
        buffer[..4].copy_from_slice(&code.to_le_bytes());
        buffer[4..ANSWER_BYTES].copy_from_slice(&(length as u32).to_le_bytes());
        if socket.write_all(&buffer[..ANSWER_BYTES + length]).is_err() {
            return;
        }
    }
}

fn put_number(buffer: &mut Vec<u8>, number: u64) -> usize {
    payload_mut(buffer, size_of::<u64>()).copy_from_slice(&number.to_le_bytes());
    size_of::<u64>()
}

/// Returns `length` bytes of arbitrary content after the response header.
fn payload_mut(buffer: &mut Vec<u8>, length: usize) -> &mut [u8] {
    if buffer.len() < ANSWER_BYTES + length {
        buffer.resize(ANSWER_BYTES + length, 0);
    }
    &mut buffer[ANSWER_BYTES..ANSWER_BYTES + length]
}

fn connection_error(error: io::Error) -> Error {
    match error.kind() {
        // Timeout of the socket.
        io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => {
            Error::request("the process that serves the archive does not respond", io::ErrorKind::TimedOut)
        }
        _ => Error::io("the process that serves the archive has ended", error),
    }
}

fn number(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
}

/// Kinds of I/O errors, by error code minus [`KINDS_FROM`].
const KINDS: [io::ErrorKind; 6] = [
    // Stands for all kinds not listed.
    io::ErrorKind::Other,
    io::ErrorKind::NotFound,
    io::ErrorKind::TimedOut,
    io::ErrorKind::PermissionDenied,
    io::ErrorKind::Unsupported,
    io::ErrorKind::StaleNetworkFileHandle,
];
const KINDS_FROM: u32 = 10;

/// Encodes an error as a non-zero code and a message.
pub fn code_of(error: &Error) -> (u32, String) {
    match error {
        Error::Invalid(sentence) => (1, sentence.clone()),
        Error::Damaged(sentence) => (2, sentence.clone()),
        Error::InUse(sentence) => (3, sentence.clone()),
        Error::NotArchive(sentence) => (4, sentence.clone()),
        Error::Unsupported(sentence) => (5, sentence.clone()),
        Error::NoSpace(sentence) => (6, sentence.clone()),
        // An error of the host keeps its cause, and does not become one of a server.
        Error::Io { context, source } if error.request_kind().is_none() => (KINDS_FROM, format!("{context}: {source}")),
        other => {
            let kind = KINDS.iter().position(|kind| Some(*kind) == other.request_kind()).unwrap_or(0);
            (KINDS_FROM + kind as u32, other.to_string())
        }
    }
}

/// Decodes the code and message of [`code_of`].
pub fn error_of(code: u32, sentence: String) -> Error {
    match code {
        1 => Error::Invalid(sentence),
        2 => Error::Damaged(sentence),
        3 => Error::InUse(sentence),
        4 => Error::NotArchive(sentence),
        5 => Error::Unsupported(sentence),
        6 => Error::NoSpace(sentence),
        _ => {
            let kind = code.checked_sub(KINDS_FROM).and_then(|kind| KINDS.get(kind as usize));
            Error::request(sentence, *kind.unwrap_or(&io::ErrorKind::Other))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::storage::{CountingStorage, MemoryStorage};

    #[test]
    fn a_served_storage_behaves_like_the_original() {
        let memory = MemoryStorage::new();
        memory.write_at(0, b"0123456789").unwrap();
        let (ours, theirs) = UnixStream::pair().unwrap();
        std::thread::scope(|scope| {
            scope.spawn(|| serve_storage(&memory, theirs));
            let borrowed = IpcStorage::new(vec![ours], true).unwrap();
            assert_eq!(borrowed.len().unwrap(), 10);
            borrowed.write_at(8, b"abcd").unwrap();
            borrowed.allocate(10, 10).unwrap();
            borrowed.set_len(14).unwrap();
            borrowed.barrier().unwrap();
            assert_eq!(borrowed.pending_upload_bytes().unwrap(), 0);
            let mut out = [1; 14];
            borrowed.read_at(0, &mut out).unwrap();
            assert_eq!(&out, b"01234567abcd\0\0");
            assert_eq!(borrowed.len().unwrap(), memory.len().unwrap());
            // The socket stays usable after an error response.
            assert!(matches!(borrowed.read_at(10, &mut out), Err(Error::Damaged(_))));
            borrowed.evict(0, 14).unwrap();
            drop(borrowed);
        });
    }

    /// With a single socket, a response to the hint would be taken for the response to the read.
    #[test]
    fn prefetch_hints_precede_reads_and_get_no_response() {
        let storage = CountingStorage::new(true);
        storage.write_at(0, b"0123456789").unwrap();
        let (ours, theirs) = UnixStream::pair().unwrap();
        std::thread::scope(|scope| {
            scope.spawn(|| serve_storage(&storage, theirs));
            let borrowed = IpcStorage::new(vec![ours], false).unwrap();
            for at in 0..5 {
                borrowed.will_need(at, 5);
                let mut out = [0; 2];
                borrowed.read_at(at, &mut out).unwrap();
                assert_eq!(out, [b'0' + at as u8, b'1' + at as u8]);
                assert_eq!(storage.take_hints(), std::slice::from_ref(&(at..at + 5)));
            }
            drop(borrowed);
        });
    }

    #[test]
    fn a_read_only_storage_rejects_writes() {
        let memory = MemoryStorage::new();
        let (ours, theirs) = UnixStream::pair().unwrap();
        std::thread::scope(|scope| {
            scope.spawn(|| serve_storage(&memory, theirs));
            let borrowed = IpcStorage::new(vec![ours], false).unwrap();
            assert!(matches!(borrowed.write_at(0, b"a"), Err(Error::ReadOnly(_))));
            assert!(matches!(borrowed.set_len(5), Err(Error::ReadOnly(_))));
            drop(borrowed);
        });
        assert_eq!(memory.len().unwrap(), 0);
    }

    #[test]
    fn a_timeout_is_not_reported_as_disconnect() {
        let (ours, silent) = UnixStream::pair().unwrap();
        ours.set_read_timeout(Some(std::time::Duration::from_millis(1))).unwrap();
        let error = IpcStorage::new(vec![ours], false).err().unwrap();
        assert!(matches!(&error, Error::Io { source, .. } if source.kind() == io::ErrorKind::TimedOut), "{error:?}");
        assert!(error.to_string().contains("does not respond"), "{error}");
        drop(silent);
        let (ours, _) = UnixStream::pair().unwrap();
        let error = IpcStorage::new(vec![ours], false).err().unwrap();
        assert!(error.to_string().contains("has ended"), "{error}");
    }

    #[test]
    fn a_failure_is_the_same_on_the_other_side() {
        for error in [
            Error::request("cannot open it", io::ErrorKind::NotFound),
            Error::Invalid("why".into()),
            Error::Damaged("where".into()),
            Error::InUse("by whom".into()),
            Error::NotArchive("what".into()),
            Error::Unsupported("what".into()),
            Error::NoSpace("where".into()),
            Error::request("it is away", io::ErrorKind::TimedOut),
            Error::request("it was changed", io::ErrorKind::StaleNetworkFileHandle),
        ] {
            let (code, sentence) = code_of(&error);
            assert_eq!(format!("{:?}", error_of(code, sentence)), format!("{error:?}"));
        }
        let (code, sentence) = code_of(&Error::io("cannot open a cache", io::Error::from_raw_os_error(13)));
        let error = error_of(code, sentence);
        assert_eq!(error.to_string(), "cannot open a cache: Permission denied (os error 13)");
        assert_eq!(error.request_kind(), Some(io::ErrorKind::Other), "no server refused it");
    }
}
