//! Downloads a ciphertext and resumes cut connections while the lease lasts.

use std::cell::RefCell;
use std::io::{self, Read, Seek, SeekFrom};
use std::rc::Rc;
use std::thread;
use std::time::{Duration, Instant};

use lockbox_share_protocol::api::ShareEndpoint;
use lockbox_share_protocol::handle::Handle;
use lockbox_share_protocol::message::ErrorCode;
use lockbox_share_protocol::token::{Digest, LeaseToken};
use ureq::http::{StatusCode, header};

use crate::error::{Error, Result};
use crate::http::ShareClient;

/// Waits between two attempts grow from the first to the last.
const FIRST_WAIT: Duration = Duration::from_millis(200);
const LAST_WAIT: Duration = Duration::from_secs(5);

/// Source of a ciphertext download: client, lease, size and digest.
pub(crate) struct CiphertextSource<'a> {
    pub(crate) client: &'a ShareClient,
    pub(crate) handle: Handle,
    pub(crate) token: &'a LeaseToken,
    /// Bytes and SHA-256 of the ciphertext.
    pub(crate) size: u64,
    pub(crate) digest: Digest,
    /// How long to try without a new byte.
    pub(crate) retry_timeout: Duration,
}

/// Why a reader failed, more exactly than its `io::Error` can say.
pub(crate) type SharedError = Rc<RefCell<Option<Error>>>;

/// The ciphertext as something to read and seek in.
pub(crate) struct Download<'a> {
    ciphertext: CiphertextSource<'a>,
    position: u64,
    body: Option<ureq::BodyReader<'static>>,
    last_progress: Instant,
    failures: u32,
    fault: SharedError,
    progress: &'a dyn Fn(u64),
}

impl<'a> Download<'a> {
    /// Creates a reader; the first request is sent by the first read. `progress` is called with the
    /// number of bytes received.
    pub(crate) fn new(ciphertext: CiphertextSource<'a>, progress: &'a dyn Fn(u64)) -> Download<'a> {
        Download {
            ciphertext,
            position: 0,
            body: None,
            last_progress: Instant::now(),
            failures: 0,
            fault: SharedError::default(),
            progress,
        }
    }

    /// Where the reason of a failure will be.
    pub(crate) fn fault(&self) -> SharedError {
        self.fault.clone()
    }

    /// Bytes and SHA-256 that the whole has.
    pub(crate) fn size_and_digest(&self) -> (u64, Digest) {
        (self.ciphertext.size, self.ciphertext.digest)
    }

    fn connect(&mut self) -> Result<()> {
        let CiphertextSource { client, handle, token, size, digest, .. } = &self.ciphertext;
        let path = ShareEndpoint::Ciphertext.path(*handle).to_string();
        let response = client.range(&path, &token.to_text(), self.position, &digest.to_text())?;
        let range = response.headers().get(header::CONTENT_RANGE).and_then(|value| value.to_str().ok());
        let expected = format!("bytes {}-{}/{size}", self.position, size - 1);
        match response.status() {
            StatusCode::OK if self.position == 0 => {}
            StatusCode::PARTIAL_CONTENT if range == Some(expected.as_str()) => {}
            StatusCode::OK => return Err(Error::Damaged("the server has another file now".into())),
            status => return Err(client.protocol_error(format!("status {status} for a part of a file"))),
        }
        self.body = Some(response.into_body().into_reader());
        Ok(())
    }

    /// After a cut: waits, or gives up with the reason.
    fn retry_or_fail(&mut self, error: Error) -> io::Result<()> {
        self.body = None;
        let waiting_helps = match &error {
            Error::Unreachable { .. } => true,
            Error::Refused(failure) => {
                matches!(failure.error, ErrorCode::Limited | ErrorCode::Unavailable | ErrorCode::Timeout)
            }
            _ => false,
        };
        if waiting_helps && self.last_progress.elapsed() < self.ciphertext.retry_timeout {
            let wait = FIRST_WAIT * 2u32.pow(self.failures.min(5));
            self.failures += 1;
            tracing::info!(received = self.position, "the download was cut; trying again: {error}");
            thread::sleep(wait.min(LAST_WAIT));
            return Ok(());
        }
        let error = match error {
            Error::Unreachable { reason, .. } => {
                Error::Cut { received: self.position, size: self.ciphertext.size, reason }
            }
            other => other,
        };
        let reported = io::Error::other(error.to_string());
        *self.fault.borrow_mut() = Some(error);
        Err(reported)
    }
}

impl Read for Download<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let left = self.ciphertext.size - self.position;
        let wanted = buffer.len().min(usize::try_from(left).unwrap_or(usize::MAX));
        if wanted == 0 {
            return Ok(0);
        }
        loop {
            let Some(body) = &mut self.body else {
                if let Err(error) = self.connect() {
                    self.retry_or_fail(error)?;
                }
                continue;
            };
            match body.read(&mut buffer[..wanted]) {
                Ok(0) => {
                    self.retry_or_fail(self.ciphertext.client.interrupted_error("the connection ended early".into()))?;
                }
                Ok(count) => {
                    self.position += count as u64;
                    self.last_progress = Instant::now();
                    self.failures = 0;
                    (self.progress)(self.position);
                    return Ok(count);
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => {
                    self.retry_or_fail(self.ciphertext.client.interrupted_error(error.to_string()))?;
                }
            }
        }
    }
}

impl Seek for Download<'_> {
    fn seek(&mut self, to: SeekFrom) -> io::Result<u64> {
        let position = match to {
            SeekFrom::Start(position) => Some(position),
            SeekFrom::Current(step) => self.position.checked_add_signed(step),
            SeekFrom::End(step) => self.ciphertext.size.checked_add_signed(step),
        };
        let position = position.filter(|&position| position <= self.ciphertext.size);
        let position = position.ok_or(io::Error::from(io::ErrorKind::InvalidInput))?;
        if position != self.position {
            self.body = None;
            self.position = position;
        }
        Ok(position)
    }
}
