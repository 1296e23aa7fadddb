//! Downloads a ciphertext, resumes cut connections while the lease lasts, and decrypts: each chunk
//! is authenticated before it is returned.

use std::cell::RefCell;
use std::io::{self, BufReader, Read, Seek, SeekFrom, Write};
use std::rc::Rc;
use std::time::{Duration, Instant};
use std::{iter, thread};

use age::stream::StreamReader;
use lockbox_share_protocol::api::ShareEndpoint;
use lockbox_share_protocol::token::{Digest, Handle, LeaseToken};
use sha2::{Digest as _, Sha256};
use ureq::http::{StatusCode, header};
use zeroize::Zeroizing;

use crate::http::ShareClient;
use crate::link::Secret;
use crate::meta::Meta;
use crate::seal::CHUNK_LEN;
use crate::{Error, Result};

/// Waits between two attempts grow from the first to the last.
const FIRST_WAIT: Duration = Duration::from_millis(200);
const LAST_WAIT: Duration = Duration::from_secs(5);

pub(crate) struct CiphertextSource<'a> {
    pub(crate) client: &'a ShareClient,
    pub(crate) handle: Handle,
    pub(crate) token: &'a LeaseToken,
    pub(crate) size: u64,
    pub(crate) digest: Digest,
    /// Time without a new byte after which the download fails.
    pub(crate) retry_timeout: Duration,
}

/// Cause of a failed read, more specific than its `io::Error`.
pub(crate) type SharedError = Rc<RefCell<Option<Error>>>;

pub(crate) fn read_error(fault: &SharedError, error: &io::Error) -> Error {
    fault.borrow_mut().take().unwrap_or_else(|| Error::Damaged(error.to_string()))
}

/// The ciphertext as something to read and seek in.
pub(crate) struct Download<'a> {
    pub(crate) ciphertext: CiphertextSource<'a>,
    position: u64,
    body: Option<ureq::BodyReader<'static>>,
    last_progress: Instant,
    failures: u32,
    pub(crate) fault: SharedError,
    progress: &'a dyn Fn(u64),
}

impl<'a> Download<'a> {
    /// Sends no request until the first read. `progress` is called with the number of bytes
    /// received.
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

    fn connect(&mut self) -> Result<()> {
        let CiphertextSource { client, handle, token, size, digest, .. } = &self.ciphertext;
        let path = ShareEndpoint::Ciphertext.path(*handle);
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

    fn retry_or_fail(&mut self, error: Error) -> io::Result<()> {
        self.body = None;
        let waiting_helps = matches!(error, Error::Unreachable { .. }) || error.is_temporary();
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
            let reason = match body.read(&mut buffer[..wanted]) {
                Ok(0) => "the connection ended early".into(),
                Ok(count) => {
                    self.position += count as u64;
                    self.last_progress = Instant::now();
                    self.failures = 0;
                    (self.progress)(self.position);
                    return Ok(count);
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => error.to_string(),
            };
            self.retry_or_fail(self.ciphertext.client.interrupted_error(reason))?;
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

pub(crate) fn verify_content(meta: &Meta, content: &[u8]) -> Result<()> {
    verify_digest(meta, content.len() as u64, Sha256::new_with_prefix(content))
}

fn verify_digest(meta: &Meta, length: u64, hash: Sha256) -> Result<()> {
    if length != meta.size {
        return Err(Error::Damaged(format!("it has {length} bytes and should have {}", meta.size)));
    }
    if hash.finalize()[..] != meta.sha256.as_bytes()[..] {
        return Err(Error::Damaged("its digest differs from the sealed one".into()));
    }
    Ok(())
}

/// Content that is opened while it is downloaded.
pub(crate) struct ContentDecryptor<'a> {
    reader: StreamReader<BufReader<Download<'a>>>,
    fault: SharedError,
    hash: Sha256,
    length: u64,
}

impl<'a> ContentDecryptor<'a> {
    pub(crate) fn new(secret: &Secret, download: Download<'a>) -> Result<ContentDecryptor<'a>> {
        let fault = download.fault.clone();
        let input = BufReader::with_capacity(CHUNK_LEN, download);
        let failed = |error: &age::DecryptError| fault.borrow_mut().take().unwrap_or_else(|| damaged(error));
        let decryptor = age::Decryptor::new_buffered(input).map_err(|error| failed(&error))?;
        let identity = secret.identity()?;
        let reader = decryptor.decrypt(iter::once(&identity as &dyn age::Identity)).map_err(|error| failed(&error))?;
        Ok(ContentDecryptor { reader, fault, hash: Sha256::new(), length: 0 })
    }

    /// Goes on behind content that was opened before: whole pieces, which are read from `before`
    /// for the digest.
    pub(crate) fn skip(&mut self, before: &mut impl Read, length: u64) -> Result<()> {
        let mut buffer = Zeroizing::new(vec![0; CHUNK_LEN]);
        let mut left = length;
        while left > 0 {
            let part = &mut buffer[..usize::try_from(left).unwrap_or(CHUNK_LEN).min(CHUNK_LEN)];
            before.read_exact(part).map_err(Error::io("cannot read the partial download"))?;
            self.hash.update(&*part);
            left -= part.len() as u64;
        }
        self.length = length;
        let Some(last) = length.checked_sub(1) else { return Ok(()) };
        // To the last byte before, not to the boundary behind it: there age looks at the file's
        // last piece first, and to the daemon the last byte is the end of the download.
        let gone = self.reader.seek(SeekFrom::Start(last)).and_then(|_| self.reader.read_exact(&mut buffer[..1]));
        gone.map_err(|error| read_error(&self.fault, &error))
    }

    /// Decrypts the rest and verifies the whole: on success `output` holds the sealed content.
    pub(crate) fn copy(mut self, meta: &Meta, output: &mut dyn Write) -> Result<()> {
        let mut buffer = Zeroizing::new(vec![0; CHUNK_LEN]);
        loop {
            // age ends without an error only behind a piece that was sealed as the last one.
            let count = self.reader.read(&mut buffer).map_err(|error| read_error(&self.fault, &error))?;
            if count == 0 {
                break;
            }
            self.hash.update(&buffer[..count]);
            self.length += count as u64;
            if self.length > meta.size {
                return Err(Error::Damaged(format!("it has more than the {} bytes that were sealed", meta.size)));
            }
            output.write_all(&buffer[..count]).map_err(Error::io("cannot write the download"))?;
        }
        verify_digest(meta, self.length, self.hash)
    }
}

pub(crate) fn damaged(error: &age::DecryptError) -> Error {
    match error {
        age::DecryptError::NoMatchingKeys => Error::Damaged("it was encrypted for another link".into()),
        other => Error::Damaged(other.to_string()),
    }
}
