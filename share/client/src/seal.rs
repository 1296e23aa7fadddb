//! Seals content to the identity of a link, as an age v1 file, piece by piece.

use std::cell::RefCell;
use std::io::{self, Read, Write};
use std::iter;
use std::rc::Rc;

use age::stream::StreamWriter;
use lockbox_share_protocol::capsule::{Capsule, ContentLocation, MAX_CAPSULE};
use lockbox_share_protocol::token::Digest;
use sha2::{Digest as _, Sha256};
use zeroize::Zeroizing;

use crate::link::Secret;
use crate::meta::{AGE_OVERHEAD, MAX_INLINE, Meta};
use crate::source::Source;
use crate::{Error, Result};

/// age seals so many bytes at a time, each with a tag of [`TAG_LEN`] bytes.
pub(crate) const CHUNK_LEN: usize = 64 << 10;
pub(crate) const TAG_LEN: u64 = 16;

fn age_writer<W: Write>(secret: &Secret, output: W) -> Result<StreamWriter<W>> {
    let recipient = secret.identity()?.to_public();
    let encryptor = age::Encryptor::with_recipients(iter::once(&recipient as &dyn age::Recipient))
        .map_err(|error| Error::Invalid(format!("cannot seal: {error}")))?;
    encryptor.wrap_output(output).map_err(Error::io("cannot seal"))
}

/// A capsule with the content inside, or None when there is too much of it.
///
/// # Errors
/// When the source fails or changes.
pub(crate) fn seal_inline(secret: &Secret, source: &mut dyn Source) -> Result<Option<(Capsule, Meta)>> {
    let Some(size) = source.size() else { return Ok(None) };
    let placeholder = Meta::new(source.name().to_owned(), source.kind(), size, Digest::new([0; 32]));
    if size > MAX_INLINE || placeholder.encoded_length() + AGE_OVERHEAD > MAX_CAPSULE {
        return Ok(None);
    }
    let mut content = Zeroizing::new(Vec::with_capacity(MAX_CAPSULE));
    let mut pieces = ChunkReader::new(source);
    while !pieces.ended {
        content.extend_from_slice(pieces.next()?);
    }
    let meta = pieces.meta();
    Ok(Some((seal_capsule(secret, ContentLocation::Inline, &meta, &content)?, meta)))
}

/// The capsule of content that was sealed into the spool.
///
/// # Errors
/// When the name is longer than a capsule.
pub fn seal_spooled(secret: &Secret, meta: &Meta, size: u64, digest: Digest) -> Result<Capsule> {
    seal_capsule(secret, ContentLocation::Spooled { size, digest }, meta, &[])
}

fn seal_capsule(secret: &Secret, location: ContentLocation, meta: &Meta, content: &[u8]) -> Result<Capsule> {
    let mut writer = age_writer(secret, Vec::new())?;
    let sealed = writer.write_all(&meta.encode(content)).and_then(|()| writer.finish());
    let sealed = sealed.map_err(Error::io("cannot seal"))?;
    Capsule::new(location, &sealed).map_err(|error| Error::Invalid(format!("cannot seal: {error}")))
}

/// Content in pieces of [`CHUNK_LEN`] bytes, verified before the last byte is handed on.
struct ChunkReader<'a> {
    source: &'a mut dyn Source,
    /// Remaining bytes, if the source states its size.
    left: Option<u64>,
    done: u64,
    ended: bool,
    hash: Sha256,
    buffer: Zeroizing<Vec<u8>>,
}

impl<'a> ChunkReader<'a> {
    fn new(source: &'a mut dyn Source) -> ChunkReader<'a> {
        let buffer = Zeroizing::new(vec![0; CHUNK_LEN]);
        ChunkReader { left: source.size(), source, done: 0, ended: false, hash: Sha256::new(), buffer }
    }

    /// The next piece, empty at the end.
    fn next(&mut self) -> Result<&[u8]> {
        let wanted = self.left.map_or(CHUNK_LEN, |left| usize::try_from(left).unwrap_or(CHUNK_LEN).min(CHUNK_LEN));
        let mut filled = 0;
        let mut at_end = false;
        while filled < wanted && !at_end {
            match self.source.read(&mut self.buffer[filled..wanted]) {
                Ok(0) if self.left.is_none() => at_end = true,
                Ok(0) => return Err(Error::Changed(self.source.name().to_owned())),
                Ok(count) => filled += count,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(Error::io(format!("cannot read {}", self.source.name()))(error)),
            }
        }
        self.done += filled as u64;
        self.hash.update(&self.buffer[..filled]);
        if let Some(left) = &mut self.left {
            *left -= filled as u64;
            at_end = *left == 0;
        }
        if at_end && !self.ended {
            // More than the source stated would be missing without a word.
            if self.left.is_some() && has_more(self.source)? {
                return Err(Error::Changed(self.source.name().to_owned()));
            }
            self.source.verify()?;
            self.ended = true;
        }
        Ok(&self.buffer[..filled])
    }

    fn meta(&self) -> Meta {
        let digest = Digest::new(self.hash.clone().finalize().into());
        Meta::new(self.source.name().to_owned(), self.source.kind(), self.done, digest)
    }
}

fn has_more(source: &mut dyn Source) -> Result<bool> {
    let failed = Error::io(format!("cannot read {}", source.name()));
    loop {
        match source.read(&mut [0; 1]) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            other => return other.map(|count| count > 0).map_err(failed),
        }
    }
}

fn too_large(max_length: u64) -> Error {
    Error::Invalid(format!("encrypted size exceeds the server's limit of {max_length} bytes"))
}

/// Ciphertext that is made while it is read.
pub struct SealingReader<'a> {
    pieces: ChunkReader<'a>,
    /// None when the last part was made.
    writer: Option<StreamWriter<SharedBuffer>>,
    pending: Rc<RefCell<Vec<u8>>>,
    consumed: usize,
    length: Option<u64>,
    /// Bytes of the ciphertext that were read, and how many there may be.
    produced: u64,
    max_length: u64,
    hash: Sha256,
    error: Option<Error>,
}

struct SharedBuffer(Rc<RefCell<Vec<u8>>>);

impl Write for SharedBuffer {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.borrow_mut().extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl<'a> SealingReader<'a> {
    /// Begins to seal `source` into at most so many bytes.
    ///
    /// # Errors
    /// When sealing is not possible, or there will be too many. A source without a known end fails
    /// with that when it is read.
    pub fn new(secret: &Secret, source: &'a mut dyn Source, max_length: u64) -> Result<SealingReader<'a>> {
        let pending = Rc::new(RefCell::new(Vec::with_capacity(2 * CHUNK_LEN)));
        let writer = age_writer(secret, SharedBuffer(pending.clone()))?;
        let head = pending.borrow().len() as u64;
        let size = source.size();
        let length = size.map(|size| head + size + TAG_LEN * size.div_ceil(CHUNK_LEN as u64).max(1));
        if length.is_some_and(|length| length > max_length) {
            return Err(too_large(max_length));
        }
        Ok(SealingReader {
            pieces: ChunkReader::new(source),
            writer: Some(writer),
            pending,
            consumed: 0,
            length,
            produced: 0,
            max_length,
            hash: Sha256::new(),
            error: None,
        })
    }

    /// Bytes of the ciphertext, when they are known beforehand.
    pub fn length(&self) -> Option<u64> {
        self.length
    }

    /// Bytes of the content that were sealed.
    pub(crate) fn content_bytes(&self) -> u64 {
        self.pieces.done
    }

    /// Takes the cause of a failed read, which is more specific than its `io::Error`.
    pub(crate) fn take_error(&mut self) -> Option<Error> {
        self.error.take()
    }

    /// Returns content description, ciphertext size and digest; to be called after the last read.
    pub fn finish(self) -> (Meta, u64, Digest) {
        (self.pieces.meta(), self.produced, Digest::new(self.hash.finalize().into()))
    }

    fn advance(&mut self) -> Result<()> {
        let Some(writer) = &mut self.writer else { return Ok(()) };
        let piece = self.pieces.next()?;
        writer.write_all(piece).map_err(Error::io("cannot seal"))?;
        if self.pieces.ended
            && let Some(writer) = self.writer.take()
        {
            writer.finish().map_err(Error::io("cannot seal"))?;
        }
        Ok(())
    }
}

impl Read for SealingReader<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        while self.consumed == self.pending.borrow().len() && self.writer.is_some() {
            self.pending.borrow_mut().clear();
            self.consumed = 0;
            let result = match self.produced > self.max_length {
                true => Err(too_large(self.max_length)),
                false => self.advance(),
            };
            if let Err(error) = result {
                let told = io::Error::other(error.to_string());
                self.error = Some(error);
                return Err(told);
            }
        }
        let pending = self.pending.borrow();
        let part = &pending[self.consumed..];
        let count = part.len().min(buffer.len());
        buffer[..count].copy_from_slice(&part[..count]);
        self.hash.update(&part[..count]);
        self.consumed += count;
        self.produced += count as u64;
        Ok(count)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Clone)]
    struct Bytes {
        content: Vec<u8>,
        at: usize,
        changes: bool,
        has_size: bool,
    }

    impl Source for Bytes {
        fn name(&self) -> &str {
            "bytes"
        }

        fn size(&self) -> Option<u64> {
            self.has_size.then_some(self.content.len() as u64)
        }

        fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
            let count = buffer.len().min(self.content.len() - self.at).min(10_000);
            buffer[..count].copy_from_slice(&self.content[self.at..self.at + count]);
            self.at += count;
            Ok(count)
        }

        fn verify(&mut self) -> Result<()> {
            if self.changes { Err(Error::Changed("bytes".into())) } else { Ok(()) }
        }
    }

    fn bytes(length: usize) -> Bytes {
        Bytes { content: (0..length).map(|i| (i * i / 7) as u8).collect(), at: 0, changes: false, has_size: true }
    }

    fn opened(ciphertext: &[u8]) -> Vec<u8> {
        age::decrypt(&Secret::sample().identity().unwrap(), ciphertext).unwrap()
    }

    const ALL: u64 = u64::MAX;

    #[test]
    fn sealed_content_is_an_age_file_of_the_length_foretold() {
        for length in [0, 1, CHUNK_LEN - 1, CHUNK_LEN, CHUNK_LEN + 1, 3 * CHUNK_LEN, 200_001] {
            for has_size in [true, false] {
                let mut source = Bytes { has_size, ..bytes(length) };
                let mut sealing = SealingReader::new(&Secret::sample(), &mut source, ALL).unwrap();
                let mut ciphertext = Vec::new();
                sealing.read_to_end(&mut ciphertext).unwrap();
                assert_eq!(sealing.length(), has_size.then_some(ciphertext.len() as u64), "{length}");
                let (meta, size, digest) = sealing.finish();
                assert_eq!((meta.size, size), (length as u64, ciphertext.len() as u64));
                assert_eq!(digest.as_bytes()[..], Sha256::digest(&ciphertext)[..]);
                assert_eq!(meta.sha256.as_bytes()[..], Sha256::digest(&source.content)[..]);
                assert!(opened(&ciphertext) == source.content, "{length}");
            }
        }
    }

    #[test]
    fn what_is_too_large_is_told_before_or_as_soon_as_it_is_known() {
        let mut whole = Vec::new();
        SealingReader::new(&Secret::sample(), &mut bytes(4 * CHUNK_LEN), ALL).unwrap().read_to_end(&mut whole).unwrap();
        assert!(SealingReader::new(&Secret::sample(), &mut bytes(4 * CHUNK_LEN), 3 * CHUNK_LEN as u64).is_err());
        let mut endless = Bytes { has_size: false, ..bytes(4 * CHUNK_LEN) };
        let mut sealing = SealingReader::new(&Secret::sample(), &mut endless, CHUNK_LEN as u64).unwrap();
        let mut ciphertext = Vec::new();
        assert!(sealing.read_to_end(&mut ciphertext).is_err());
        assert!(matches!(sealing.take_error(), Some(Error::Invalid(_))));
        assert!(endless.at < 4 * CHUNK_LEN, "all of it was read");
    }

    #[test]
    fn a_changed_source_never_becomes_a_whole_file() {
        for (length, has_size) in
            [0, 1, CHUNK_LEN, 3 * CHUNK_LEN].map(|length| [(length, true), (length, false)]).as_flattened()
        {
            let mut source = Bytes { changes: true, has_size: *has_size, ..bytes(*length) };
            let mut sealing = SealingReader::new(&Secret::sample(), &mut source, ALL).unwrap();
            let mut ciphertext = Vec::new();
            assert!(sealing.read_to_end(&mut ciphertext).is_err());
            assert!(matches!(sealing.take_error(), Some(Error::Changed(_))));
            assert!(age::decrypt(&Secret::sample().identity().unwrap(), &ciphertext).is_err());
            assert!(seal_inline(&Secret::sample(), &mut Bytes { changes: true, ..bytes(10) }).is_err());
        }
    }

    #[test]
    fn small_content_goes_into_the_capsule() {
        for length in [0, 1, 100, 6000] {
            let (capsule, meta) = seal_inline(&Secret::sample(), &mut bytes(length)).unwrap().unwrap();
            assert_eq!(capsule.content(), ContentLocation::Inline);
            let plain = opened(capsule.sealed());
            let (read, content) = Meta::decode(&plain).unwrap();
            assert_eq!((&read, content), (&meta, &bytes(length).content[..]));
        }
        for length in [MAX_CAPSULE - AGE_OVERHEAD, MAX_CAPSULE] {
            let mut source = bytes(length);
            assert!(seal_inline(&Secret::sample(), &mut source).unwrap().is_none());
            assert_eq!(source.at, 0, "read, and missing from what is sealed next");
        }
    }

    /// The random part of the header differs from run to run.
    #[test]
    fn the_largest_content_fits_whatever_the_header() {
        for _ in 0..50 {
            let mut length = MAX_CAPSULE - AGE_OVERHEAD;
            while seal_inline(&Secret::sample(), &mut bytes(length)).unwrap().is_none() {
                length -= 1;
            }
            assert!(length > 6000);
        }
    }

    #[test]
    fn memory_stays_bounded() {
        let mut source = bytes(64 * CHUNK_LEN);
        let mut sealing = SealingReader::new(&Secret::sample(), &mut source, ALL).unwrap();
        let mut buffer = [0; 1000];
        while sealing.read(&mut buffer).unwrap() > 0 {
            assert!(sealing.pending.borrow().capacity() <= 4 * CHUNK_LEN);
        }
    }
}
