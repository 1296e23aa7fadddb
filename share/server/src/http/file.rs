//! Sends a part of a file: read where the page cache has it, on another thread where the disk must be waited for.

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

/// Bytes that are read at a time: large enough that calls cost little, small enough that a thousand slow downloads fit in memory.
const PART: usize = 128 * 1024;

/// What is to be done when the last byte was handed to the connection.
pub(super) type AtEnd = Box<dyn FnOnce() + Send>;

/// The bytes of one answer.
pub(super) struct FileBody {
    file: Arc<File>,
    at: u64,
    end: u64,
    buffers: Arc<Mutex<Vec<Vec<u8>>>>,
    reading: Option<JoinHandle<io::Result<Part>>>,
    at_end: Option<AtEnd>,
    sent: Box<dyn Fn(u64) + Send>,
}

/// Bytes that were read, whose memory goes back to its body when they were sent.
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
    /// The bytes from `first` up to but not with `end`. `sent` counts, `at_end` runs once when all were handed over.
    pub(super) fn new(
        file: File,
        first: u64,
        end: u64,
        sent: Box<dyn Fn(u64) + Send>,
        at_end: Option<AtEnd>,
    ) -> FileBody {
        FileBody { file: Arc::new(file), at: first, end, buffers: Arc::default(), reading: None, at_end, sent }
    }

    /// Bytes that were not handed over yet.
    pub(super) fn left(&self) -> u64 {
        self.end - self.at
    }

    pub(super) fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Option<io::Result<Bytes>>> {
        if self.left() == 0 {
            return Poll::Ready(None);
        }
        if self.reading.is_none() {
            let wanted = usize::try_from(self.left()).unwrap_or(PART).min(PART);
            let mut bytes = self.buffers.lock().pop().unwrap_or_default();
            bytes.resize(PART, 0);
            let mut part = Part { bytes, length: 0, home: self.buffers.clone() };
            let flags = ReadWriteFlags::NOWAIT;
            let mut slices = [IoSliceMut::new(&mut part.bytes[..wanted])];
            match preadv2(&self.file, &mut slices, self.at, flags) {
                Ok(length) if length > 0 => {
                    part.length = length;
                    return Poll::Ready(Some(self.hand_over(part)));
                }
                // Nothing cached, or a file system that cannot tell: wait for it elsewhere. Nothing read is the end of the
                // file, which the blocking read reports as an error.
                Ok(_) | Err(Errno::AGAIN | Errno::OPNOTSUPP | Errno::INVAL | Errno::NOSYS | Errno::INTR) => {}
                Err(error) => return Poll::Ready(Some(Err(error.into()))),
            }
            let (file, at) = (self.file.clone(), self.at);
            self.reading = Some(tokio::task::spawn_blocking(move || {
                file.read_exact_at(&mut part.bytes[..wanted], at)?;
                part.length = wanted;
                Ok(part)
            }));
        }
        let Some(reading) = &mut self.reading else { return Poll::Ready(None) };
        let part = ready!(Pin::new(reading).poll(cx)).map_err(io::Error::other);
        self.reading = None;
        Poll::Ready(Some(part.and_then(|part| part).and_then(|part| self.hand_over(part))))
    }

    fn hand_over(&mut self, part: Part) -> io::Result<Bytes> {
        self.at += part.length as u64;
        (self.sent)(part.length as u64);
        if self.left() == 0
            && let Some(at_end) = self.at_end.take()
        {
            at_end();
        }
        Ok(Bytes::from_owner(part))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;
    use std::sync::atomic::{AtomicU64, Ordering};

    fn read(file: File, first: u64, end: u64) -> (Vec<u8>, Option<io::Error>, u64, bool) {
        let (sent, ended) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicU64::new(0)));
        let (count, mark) = (sent.clone(), ended.clone());
        let mut body = FileBody::new(
            file,
            first,
            end,
            Box::new(move |bytes| {
                count.fetch_add(bytes, Ordering::Relaxed);
            }),
            Some(Box::new(move || mark.store(1, Ordering::Relaxed))),
        );
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        let (mut bytes, mut failed) = (Vec::new(), None);
        runtime.block_on(async {
            while let Some(part) = std::future::poll_fn(|cx| body.poll(cx)).await {
                match part {
                    Ok(part) => bytes.extend_from_slice(&part),
                    Err(error) => {
                        failed = Some(error);
                        break;
                    }
                }
            }
        });
        (bytes, failed, sent.load(Ordering::Relaxed), ended.load(Ordering::Relaxed) == 1)
    }

    #[test]
    fn any_part_of_a_file_is_sent() {
        let mut file = tempfile::tempfile().unwrap();
        let content: Vec<u8> = (0..PART * 2 + 100).map(|n| (n % 251) as u8).collect();
        file.write_all(&content).unwrap();
        for (first, end) in [(0, content.len()), (1, 2), (PART - 1, PART + 1), (PART, content.len()), (5, 5)] {
            let (bytes, failed, sent, ended) = read(file.try_clone().unwrap(), first as u64, end as u64);
            assert!(bytes == content[first..end] && failed.is_none(), "{first}..{end}");
            assert_eq!(sent, (end - first) as u64);
            assert_eq!(ended, first < end);
        }
    }

    #[test]
    fn a_file_that_was_cut_is_an_error_and_no_end() {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(&[7; 1000]).unwrap();
        let (bytes, failed, _, ended) = read(file, 0, 2000);
        assert_eq!(bytes, [7; 1000]);
        assert!(failed.is_some() && !ended);
    }
}
