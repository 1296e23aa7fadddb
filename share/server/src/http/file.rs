//! Sends a part of a file: read where the page cache has it, on another thread where the disk must
//! be waited for.

use std::fs::File;
use std::io::{self, IoSliceMut};
use std::os::unix::fs::FileExt;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use parking_lot::Mutex;
use rustix::io::{Errno, ReadWriteFlags, preadv2};
use tokio::task::JoinHandle;

use super::transfer::Transfer;

/// Bytes that are read at a time: large enough that calls cost little, small enough that a thousand
/// slow downloads fit in memory.
pub(super) const PART: usize = 128 * 1024;

/// The bytes of one answer.
pub(super) struct FileBody {
    file: Arc<File>,
    end: u64,
    buffers: Arc<Mutex<Vec<Vec<u8>>>>,
    reading: Option<JoinHandle<io::Result<Part>>>,
    transfer: Transfer,
}

/// Read buffer; its memory returns to the body after sending.
struct Part {
    bytes: Vec<u8>,
    length: usize,
    home: Arc<Mutex<Vec<Vec<u8>>>>,
}

impl AsRef<[u8]> for Part {
    fn as_ref(&self) -> &[u8] {
        &self.bytes[..self.length]
    }
}

impl Drop for Part {
    fn drop(&mut self) {
        self.home.lock().push(std::mem::take(&mut self.bytes));
    }
}

impl FileBody {
    /// The bytes up to but not with `end`, for as long as `transfer` lets them go.
    pub(super) fn new(file: File, end: u64, transfer: Transfer) -> FileBody {
        FileBody { file: Arc::new(file), end, buffers: Arc::default(), reading: None, transfer }
    }

    /// Bytes that were not handed over yet.
    pub(super) fn left(&self) -> u64 {
        self.end.saturating_sub(self.transfer.at())
    }

    pub(super) fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Option<io::Result<Bytes>>> {
        if self.left() == 0 {
            return Poll::Ready(None);
        }
        if self.reading.is_none() {
            let last = self.left() <= PART as u64;
            if let Err(error) = ready!(self.transfer.poll_leave(cx, last)) {
                return Poll::Ready(Some(Err(error)));
            }
            let wanted = usize::try_from(self.left()).unwrap_or(PART).min(PART);
            let mut bytes = self.buffers.lock().pop().unwrap_or_default();
            bytes.resize(PART, 0);
            let mut part = Part { bytes, length: 0, home: self.buffers.clone() };
            let flags = ReadWriteFlags::NOWAIT;
            let mut slices = [IoSliceMut::new(&mut part.bytes[..wanted])];
            match preadv2(&self.file, &mut slices, self.transfer.at(), flags) {
                Ok(length) if length > 0 => {
                    part.length = length;
                    return Poll::Ready(Some(Ok(self.hand_over(part))));
                }
                // Nothing cached, or a file system that cannot tell: wait for it elsewhere. Nothing
                // read is the end of the file, which the blocking read reports as an error.
                Ok(_) | Err(Errno::AGAIN | Errno::OPNOTSUPP | Errno::INVAL | Errno::NOSYS | Errno::INTR) => {}
                Err(error) => return Poll::Ready(Some(Err(error.into()))),
            }
            let (file, at) = (self.file.clone(), self.transfer.at());
            self.reading = Some(tokio::task::spawn_blocking(move || {
                file.read_exact_at(&mut part.bytes[..wanted], at)?;
                part.length = wanted;
                Ok(part)
            }));
        }
        let Some(reading) = &mut self.reading else { return Poll::Ready(None) };
        let part = ready!(Pin::new(reading).poll(cx)).map_err(io::Error::other);
        self.reading = None;
        Poll::Ready(Some(part.and_then(|part| part).map(|part| self.hand_over(part))))
    }

    fn hand_over(&mut self, part: Part) -> Bytes {
        self.transfer.handed_over(part.length as u64);
        Bytes::from_owner(part)
    }
}
