//! Decrypts capsules as a whole and ciphertext in chunks; each chunk is authenticated before it is
//! returned.

use std::io::{BufReader, Read, Seek, SeekFrom, Write};
use std::iter;

use age::stream::StreamReader;
use lockbox_share_protocol::capsule::Capsule;
use sha2::{Digest as _, Sha256};
use zeroize::Zeroizing;

use crate::download::{Download, SharedError};
use crate::error::{Error, Result};
use crate::meta::Meta;
use crate::seal::CHUNK_LEN;
use crate::secret::Secret;

/// Description of the content, and the content when the capsule holds it.
pub(crate) fn open_capsule(secret: &Secret, capsule: &Capsule) -> Result<(Meta, Zeroizing<Vec<u8>>)> {
    let plain =
        age::decrypt(&secret.identity()?, capsule.sealed()).map(Zeroizing::new).map_err(|error| damaged(&error))?;
    let (meta, content) = Meta::decode(&plain)?;
    Ok((meta, Zeroizing::new(content.to_vec())))
}

/// Checks content against the size and digest of its description.
pub(crate) fn verify_content(meta: &Meta, content: &[u8]) -> Result<()> {
    let mut hash = Sha256::new();
    hash.update(content);
    verify_digest(meta, content.len() as u64, hash)
}

fn verify_digest(meta: &Meta, length: u64, hash: Sha256) -> Result<()> {
    if length != meta.size {
        return Err(Error::Damaged(format!("it has {length} bytes and should have {}", meta.size)));
    }
    if hash.finalize()[..] != meta.sha256.as_bytes()[..] {
        return Err(Error::Damaged("its digest is not the one that was sealed".into()));
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
    /// Reads and authenticates the header.
    pub(crate) fn new(secret: &Secret, download: Download<'a>) -> Result<ContentDecryptor<'a>> {
        let fault = download.fault();
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
            before.read_exact(part).map_err(Error::io("cannot read what was received before"))?;
            self.hash.update(&*part);
            left -= part.len() as u64;
        }
        self.length = length;
        let Some(last) = length.checked_sub(1) else { return Ok(()) };
        // To the last byte before, not to the boundary behind it: there age looks at the file's
        // last piece first, and to the daemon the last byte is the end of the download.
        let gone = self.reader.seek(SeekFrom::Start(last)).and_then(|_| self.reader.read_exact(&mut buffer[..1]));
        gone.map_err(|error| self.into_error(&error))
    }

    /// Decrypts the rest and verifies the whole: on success `output` holds the sealed content.
    pub(crate) fn copy(&mut self, meta: &Meta, output: &mut dyn Write) -> Result<()> {
        let mut buffer = Zeroizing::new(vec![0; CHUNK_LEN]);
        loop {
            // age ends without an error only behind a piece that was sealed as the last one.
            let count = self.reader.read(&mut buffer).map_err(|error| self.into_error(&error))?;
            if count == 0 {
                break;
            }
            self.hash.update(&buffer[..count]);
            self.length += count as u64;
            if self.length > meta.size {
                return Err(Error::Damaged(format!("it has more than the {} bytes that were sealed", meta.size)));
            }
            output.write_all(&buffer[..count]).map_err(Error::io("cannot write what was received"))?;
        }
        verify_digest(meta, self.length, self.hash.clone())
    }

    fn into_error(&self, error: &std::io::Error) -> Error {
        let fault = self.fault.borrow_mut().take();
        fault.unwrap_or_else(|| Error::Damaged(error.to_string()))
    }
}

fn damaged(error: &age::DecryptError) -> Error {
    match error {
        age::DecryptError::NoMatchingKeys => Error::Damaged("it was sealed for another link".into()),
        other => Error::Damaged(other.to_string()),
    }
}
