//! Reads, authenticates, writes and repairs the two header copies (specification section 3).
//!
//! # Invariants
//! HEADER-1  At every moment one copy is whole on the medium: a copy is overwritten only while the
//!     other one is valid and at least as new.
//! HEADER-2  Nothing of a header is used for writing before its MAC and the commitment of the
//!     volume key are right.
//! HEADER-3  Each byte of one copy follows from the other copy and the volume key. So any loss or
//!     change in the copy that is not used is detected, and the copy is rewritten from the other
//!     one.
//! HEADER-4  A change of the header writes one copy, passes a barrier, writes the other copy,
//!     passes a barrier, and makes a commit with the new number in its record. From then on every
//!     program refuses an older header with that record. A crash before the commit leaves the new
//!     header with records of the old number: until the next commit only a user that remembers the
//!     new header would notice the old one.
//! HEADER-5  A copy of an unknown version, suite or feature is not overwritten, and the rest of the
//!     archive is not written either: a newer program may have begun to change it there. A copy
//!     that differs in nothing but the version is ours, altered: a change of the header always
//!     changes its number.

use std::fs::File;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::Path;

use crate::crypto::SecretKey;
use crate::crypto::kdf::{constant_time_eq, hkdf, hmac_sha256, sha256};
use crate::env::Environment;
use crate::error::{Error, Result};
use crate::format::header::{self, Framing, HEADER_BYTES, ParsedHeader};
use crate::format::{ArchiveId, BLOCK, HEADER_START, KEY_SLOTS, MIN_BLOCKS};
use crate::storage::{ArchiveSource, Storage};

/// One slot as it lies in the file.
pub(crate) type SlotBlock = [u8; BLOCK as usize];

/// Identity of a header that its copies share.
pub(crate) type Sums = [[u8; 32]; 2];

pub(crate) fn sums(copies: &[Vec<u8>; 2]) -> Sums {
    [&copies[0], &copies[1]].map(|copy| sha256(copy))
}

pub(crate) type Slots = Box<[SlotBlock; KEY_SLOTS]>;

/// The newer valid header copy, not yet authenticated, and the other one.
pub(crate) struct Header {
    parsed: ParsedHeader,
    /// Content of the unused copy, or the reason why it is unusable; None when the caller did not
    /// ask.
    other: Option<Result<ParsedHeader>>,
    /// The lowest sequence number of the valid copies.
    durable: u64,
}

const MAC_LABEL: &str = "lockbox/v1/header";
const COMMITMENT_LABEL: &str = "lockbox/v1/commitment";

impl Header {
    /// Picks the valid copy with the higher sequence number. Errors: `NotArchive`,
    /// `UnsupportedVersion`, `Damaged` when both copies or the rest of the file are missing.
    pub(crate) fn read(storage: &dyn Storage) -> Result<Header> {
        let length = storage.len()?;
        let copies = [read_copy(storage, length, 0), read_copy(storage, length, 1)];
        let is_archive =
            copies.iter().any(|copy| !matches!(copy, Err(Error::NotArchive(_) | Error::UnsupportedVersion(_))));
        if is_archive && length < MIN_BLOCKS * BLOCK {
            return Err(Error::damaged(format!("the file is truncated: bytes={length} least={}", MIN_BLOCKS * BLOCK)));
        }
        let (parsed, other) = match copies {
            [Ok(first), Ok(second)] if second.framing.sequence > first.framing.sequence => (second, Ok(first)),
            [Ok(first), second] => (first, second),
            [first, Ok(second)] => (second, first),
            [Err(first), Err(second)] => return Err(graver(first, second)),
        };
        let other = match other {
            Err(Error::UnsupportedVersion(reason)) => Err(unknown_or_altered(storage, length, &parsed, reason)?),
            other => other,
        };
        let durable = other.as_ref().map_or(u64::MAX, |other| other.framing.sequence).min(parsed.framing.sequence);
        Ok(Header { parsed, other: Some(other), durable })
    }

    /// Every copy that is whole in itself, the newer first, however short the file is; for rescue.
    /// Errors: as [`Header::read`], when there is none.
    pub(crate) fn salvage(storage: &dyn Storage) -> Result<Vec<Header>> {
        let length = storage.len()?;
        let copies = match [read_copy(storage, length, 0), read_copy(storage, length, 1)] {
            [Err(first), Err(second)] => return Err(graver(first, second)),
            copies => copies,
        };
        // Rescue neither writes nor judges ages, so nothing counts as durable.
        let whole = copies.into_iter().flatten().map(|parsed| Header { parsed, other: None, durable: 0 });
        let mut whole: Vec<Header> = whole.collect();
        whole.sort_by_key(|header| std::cmp::Reverse(header.framing().sequence));
        Ok(whole)
    }

    /// A copy, whichever of the two it is, outside of an archive. Errors: as [`Header::read`].
    pub(crate) fn of_copy(bytes: &[u8]) -> Result<Header> {
        let parsed = header::decode(bytes, 0).or_else(|first| header::decode(bytes, 1).map_err(|_| first))?;
        let durable = parsed.framing.sequence;
        Ok(Header { parsed, other: None, durable })
    }

    /// Refuses unknown feature bits: this program could not preserve the data that a newer one put
    /// there for writers or keepers of headers. Nor may it overwrite a copy of an unknown kind
    /// (HEADER-5).
    pub(crate) fn check_writable(&self) -> Result<()> {
        if let Some(Err(Error::UnsupportedVersion(reason))) = &self.other {
            return Err(Error::UnsupportedVersion(format!(
                "copy {} of the header ({reason}), which a newer program may have written: open the archive read-only",
                1 - self.framing().copy
            )));
        }
        match self.parsed.read_only_features() | self.parsed.compatible_features() {
            0 => Ok(()),
            bits => Err(Error::UnsupportedVersion(format!(
                "feature bits {bits:#x} can only be read by this program: open the archive read-only"
            ))),
        }
    }

    pub(crate) fn framing(&self) -> &Framing {
        &self.parsed.framing
    }

    /// Returns a sequence number that is durable after any crash: a copy is written only when the
    /// other one has reached the medium (HEADER-1).
    pub(crate) fn durable_sequence(&self) -> u64 {
        self.durable
    }

    /// The copy as it was read, which its MAC covers with all that this program does not know.
    pub(crate) fn copy_bytes(&self) -> &[u8] {
        &self.parsed.bytes
    }

    pub(crate) fn slot(&self, slot: usize) -> &[u8] {
        &self.parsed.bytes[(slot + 1) * BLOCK as usize..][..BLOCK as usize]
    }

    /// HEADER-2: checks the commitment and the MAC.
    pub(crate) fn authenticate(&self, volume_key: &SecretKey) -> Result<()> {
        self.check_commitment(volume_key)?;
        let framing = self.framing();
        let mac = mac(volume_key, &framing.archive, &self.parsed.bytes);
        if !constant_time_eq(&mac, &framing.mac) {
            return Err(Error::damaged(format!("header failed authentication: copy={}", framing.copy)));
        }
        Ok(())
    }

    /// Checks that this is the key of the archive, regardless of changes in the rest of the header.
    pub(crate) fn check_commitment(&self, volume_key: &SecretKey) -> Result<()> {
        let framing = self.framing();
        if !constant_time_eq(&commitment(volume_key, &framing.archive), &framing.commitment) {
            return Err(Error::damaged("the header does not belong to this volume key"));
        }
        Ok(())
    }

    /// Returns a sentence about the flaw of the unused copy (HEADER-3). The used copy must be
    /// authentic.
    pub(crate) fn flaw(&self, volume_key: &SecretKey) -> Option<String> {
        let (used, copy) = (self.framing(), 1 - self.framing().copy);
        match self.other.as_ref()? {
            Err(Error::Damaged(reason) | Error::NotArchive(reason)) => {
                Some(format!("copy {copy} of the header is lost ({reason})"))
            }
            Err(Error::UnsupportedVersion(reason)) => {
                Some(format!("copy {copy} of the header is not known ({reason})"))
            }
            Err(error) => Some(format!("copy {copy} of the header cannot be read ({error})")),
            Ok(other) if other.framing.sequence < used.sequence => Some(format!(
                "copy {copy} of the header is older than the other one: number {} instead of {}",
                other.framing.sequence, used.sequence
            )),
            Ok(other) if other.bytes != encode_copy(used, &self.slots(), copy, volume_key) => {
                Some(format!("copy {copy} of the header was altered"))
            }
            Ok(_) => None,
        }
    }

    /// Returns whether a crash while the header was changed explains all flaws of the copy that is
    /// not used (HEADER-4). `recorded` is the number that the newest record carries: both copies of
    /// that header had reached the medium. The one that is used must be authentic.
    ///
    /// Copy 0 is written first. So copy 1 is a remnant of the crash when it has the number of the
    /// record or a later one, or is half written, and the copy used has a later number than the
    /// record. Copy 0 is half written while copy 1 still has the number of the record. Errors: the
    /// errors of the storage.
    pub(crate) fn is_interrupted(&self, storage: &dyn Storage, volume_key: &SecretKey, recorded: u64) -> Result<bool> {
        let used = self.framing();
        let copy = 1 - used.copy;
        match &self.other {
            Some(Ok(other)) => {
                let number = other.framing.sequence;
                let is_authentic =
                    || constant_time_eq(&mac(volume_key, &used.archive, &other.bytes), &other.framing.mac);
                Ok(copy == 1 && (recorded..used.sequence).contains(&number) && is_authentic())
            }
            Some(Err(Error::Damaged(_))) => {
                let there = copy_bytes(storage, storage.len()?, copy)?;
                let was_changed = if copy == 1 { used.sequence > recorded } else { used.sequence >= recorded };
                Ok(was_changed && is_half_written(&there, &encode_copy(used, &self.slots(), copy, volume_key)))
            }
            Some(Err(_)) | None => Ok(false),
        }
    }

    /// Returns the sums of both copies as they are when they are in order (HEADER-3).
    pub(crate) fn sums(&self, volume_key: &SecretKey) -> Sums {
        sums(&[0, 1].map(|copy| encode_copy(self.framing(), &self.slots(), copy, volume_key)))
    }

    /// Rewrites the copy that is lost, altered or older, and returns a sentence about it. The other
    /// copy must be authentic (HEADER-2).
    pub(crate) fn repair(&mut self, storage: &dyn Storage, volume_key: &SecretKey) -> Result<Option<String>> {
        let flaw = self.flaw(volume_key);
        if flaw.is_some() {
            write_copy(storage, self.framing(), &self.slots(), 1 - self.framing().copy, volume_key)?;
            self.other = None;
        }
        self.durable = self.parsed.framing.sequence;
        Ok(flaw.map(|flaw| format!("{flaw}; it was rewritten from the other copy")))
    }

    /// Replaces slots, given by number, kind and content, in both copies, one after the other. Both
    /// copies must be whole (see [`Header::repair`]).
    pub(crate) fn replace_slots(
        &self,
        storage: &dyn Storage,
        changes: &[(usize, (u8, SlotBlock))],
        volume_key: &SecretKey,
    ) -> Result<()> {
        let mut slots = self.slots();
        let mut framing = self.framing().clone();
        for (slot, (kind, block)) in changes {
            slots[*slot] = *block;
            framing.slots[*slot] = *kind;
        }
        framing.sequence += 1;
        // HEADER-1: each passes a barrier. After an error, a user that gave a new secret must know
        // which ones are valid.
        let first = write_copy(storage, &framing, &slots, 0, volume_key);
        first.map_err(|error| in_doubt(error, "the old or the new keys open it"))?;
        let second = write_copy(storage, &framing, &slots, 1, volume_key);
        second.map_err(|error| {
            in_doubt(error, "the new keys open it; the next change repairs the second copy of the header")
        })
    }

    pub(crate) fn slots(&self) -> Slots {
        let mut slots = empty_slots();
        for (i, block) in slots.iter_mut().enumerate() {
            block.copy_from_slice(self.slot(i));
        }
        slots
    }
}

/// Reads the archive's header, regardless of locks on the archive. Errors: like [`Header::read`],
/// and `NotArchive` if it is not a regular file.
pub(crate) fn read_header<'a>(site: impl Into<ArchiveSource<'a>>) -> Result<Header> {
    match site.into() {
        ArchiveSource::File(path) => Header::read(&HeaderFile::open(path)?),
        ArchiveSource::Storage(storage) => Header::read(&**storage),
    }
}

/// The archive file without a lock: enough to read the header, which survives a concurrent change
/// of one copy.
struct HeaderFile {
    file: File,
    length: u64,
}

impl HeaderFile {
    fn open(path: &Path) -> Result<HeaderFile> {
        let failed = |source| Error::io(format!("cannot open {}", path.display()), source);
        // A FIFO would block the open for ever, so the kind is looked at first.
        let metadata = std::fs::metadata(path).map_err(failed)?;
        if metadata.is_dir() {
            return Err(Error::NotArchive("it is a directory".into()));
        }
        if !metadata.is_file() {
            return Err(Error::NotArchive("it is not a regular file".into()));
        }
        let file = File::open(path).map_err(failed)?;
        let length = file.metadata().map_err(failed)?.size();
        Ok(HeaderFile { file, length })
    }
}

impl Storage for HeaderFile {
    fn len(&self) -> Result<u64> {
        Ok(self.length)
    }

    fn read_at(&self, offset: u64, out: &mut [u8]) -> Result<()> {
        self.file.read_exact_at(out, offset).map_err(|e| Error::io("cannot read the header", e))
    }

    fn evict(&self, _offset: u64, _length: u64) -> Result<()> {
        Ok(())
    }

    fn next_data(&self, offset: u64) -> Result<Option<std::ops::Range<u64>>> {
        Ok((offset < self.length).then_some(offset..self.length))
    }

    fn read_only(&self) -> bool {
        true
    }
}

/// 32 slots of zeros, made on the heap.
pub(crate) fn empty_slots() -> Slots {
    let boxed: Box<[SlotBlock]> = vec![[0; BLOCK as usize]; KEY_SLOTS].into_boxed_slice();
    // The slice was made with exactly KEY_SLOTS elements.
    boxed.try_into().unwrap_or_else(|_| unreachable!())
}

/// Returns slots of random bytes, the content of empty slots.
pub(crate) fn random_slots(environment: &dyn Environment) -> Result<Slots> {
    let mut slots = empty_slots();
    slots.iter_mut().try_for_each(|slot| environment.fill_random(slot))?;
    Ok(slots)
}

pub(crate) fn commitment(volume_key: &SecretKey, archive: &ArchiveId) -> [u8; 32] {
    *hkdf(volume_key, archive, COMMITMENT_LABEL).bytes()
}

/// Overwrites both copies, `whole` last: the copy that is known to be valid, if any (HEADER-1).
pub(crate) fn write_over(
    storage: &dyn Storage,
    whole: Option<u8>,
    framing: &Framing,
    slots: &[SlotBlock; KEY_SLOTS],
    volume_key: &SecretKey,
) -> Result<()> {
    let last = whole.unwrap_or(1);
    for copy in [1 - last, last] {
        write_copy(storage, framing, slots, copy, volume_key)?;
    }
    Ok(())
}

/// Returns both copies as stored in a file, to be those of a copy of the archive. Errors: `Damaged`
/// when one of them is lost or older: the next open for writing repairs that.
pub(crate) fn whole_copies(storage: &dyn Storage) -> Result<[Vec<u8>; 2]> {
    let length = storage.len()?;
    let copies = [read_copy(storage, length, 0)?, read_copy(storage, length, 1)?];
    if copies[0].framing.sequence != copies[1].framing.sequence {
        return Err(Error::damaged("the two copies of the header differ; open the archive for writing once"));
    }
    Ok(copies.map(|copy| copy.bytes.to_vec()))
}

/// Writes the header copies of another file of the archive to this one where they differ. A usable
/// copy stays until the other one is written (HEADER-1).
pub(crate) fn write_copies(storage: &dyn Storage, copies: &[Vec<u8>; 2]) -> Result<()> {
    let length = storage.len()?;
    let there = [copy_bytes(storage, length, 0)?, copy_bytes(storage, length, 1)?];
    let whole = |copy: u8| header::decode(&there[usize::from(copy)], copy).is_ok();
    let last = u8::from(whole(1) && !whole(0));
    for copy in [1 - last, last] {
        let bytes = &copies[usize::from(copy)];
        if there[usize::from(copy)] != *bytes {
            storage.write_at(HEADER_START[usize::from(copy)] * BLOCK, bytes)?;
            storage.barrier()?;
        }
    }
    Ok(())
}

fn in_doubt(error: Error, result: &str) -> Error {
    let context = format!("while the keys of the archive were written; {result}");
    match error {
        Error::Io { context: doing, source } => Error::Io { context: format!("{doing} {context}"), source },
        Error::NoSpace(detail) => Error::NoSpace(format!("{detail} {context}")),
        error => error,
    }
}

/// Encodes one copy with its MAC, writes it and passes a barrier.
pub(crate) fn write_copy(
    storage: &dyn Storage,
    framing: &Framing,
    slots: &[SlotBlock; KEY_SLOTS],
    copy: u8,
    volume_key: &SecretKey,
) -> Result<()> {
    let bytes = encode_copy(framing, slots, copy, volume_key);
    storage.write_at(HEADER_START[usize::from(copy)] * BLOCK, &bytes)?;
    storage.barrier()
}

/// Returns whether a header was ever finished in this file. A process killed while it wrote the
/// first copy leaves the beginning of one followed by zeros, and zeros in place of the second copy;
/// no finished header can come to look like that.
pub(crate) fn is_begun(storage: &dyn Storage) -> Result<bool> {
    let length = storage.len()?;
    let [first, second] = [copy_bytes(storage, length, 0)?, copy_bytes(storage, length, 1)?];
    let is_empty = |bytes: &[u8]| bytes.iter().all(|&byte| byte == 0);
    if !is_empty(&second) {
        return Ok(true);
    }
    let ends_empty = || first.len() == HEADER_BYTES && is_empty(&first[HEADER_BYTES - BLOCK as usize..]);
    // It begins as one, and is not whole.
    let is_torn = || ends_empty() && matches!(header::decode(&first, 0), Err(Error::Damaged(_)));
    Ok(!is_empty(&first) && !is_torn())
}

pub(crate) fn encode_copy(
    framing: &Framing,
    slots: &[SlotBlock; KEY_SLOTS],
    copy: u8,
    volume_key: &SecretKey,
) -> Vec<u8> {
    let mut framing = Framing { copy, mac: [0; 32], ..framing.clone() };
    framing.mac = mac(volume_key, &framing.archive, &header::encode(&framing, slots));
    header::encode(&framing, slots)
}

fn mac(volume_key: &SecretKey, archive: &ArchiveId, copy_bytes: &[u8]) -> [u8; 32] {
    hmac_sha256(&hkdf(volume_key, archive, MAC_LABEL), &header::mac_input(copy_bytes))
}

/// Checks HEADER-5 before a header is overwritten: refuses a copy of an unknown feature that the
/// archive's own key authenticates. An attacker can have put any other copy there. Errors:
/// `UnsupportedVersion`.
pub(crate) fn check_known(storage: &dyn Storage, archive: &ArchiveId, volume_key: &SecretKey) -> Result<()> {
    let length = storage.len()?;
    for copy in 0..2 {
        let bytes = copy_bytes(storage, length, copy)?;
        let Ok(whole) = <&[u8; HEADER_BYTES]>::try_from(&bytes[..]) else { continue };
        if let Err(error @ Error::UnsupportedVersion(_)) = header::decode(whole, copy)
            && constant_time_eq(&mac(volume_key, archive, whole), &header::mac_of(whole))
        {
            return Err(error);
        }
    }
    Ok(())
}

fn read_copy(storage: &dyn Storage, length: u64, copy: u8) -> Result<ParsedHeader> {
    let bytes = copy_bytes(storage, length, copy)?;
    if bytes.is_empty() {
        return Err(Error::NotArchive(if length == 0 { "the file is empty" } else { "the file is too short" }.into()));
    }
    header::decode(&bytes, copy)
}

fn copy_bytes(storage: &dyn Storage, length: u64, copy: u8) -> Result<Vec<u8>> {
    let start = HEADER_START[usize::from(copy)] * BLOCK;
    let mut bytes = vec![0; length.saturating_sub(start).min(HEADER_BYTES as u64) as usize];
    if !bytes.is_empty() {
        storage.read_at(start, &mut bytes)?;
    }
    Ok(bytes)
}

/// HEADER-5: why the copy that is not `used` cannot be: it is unknown, or its version was altered.
fn unknown_or_altered(storage: &dyn Storage, length: u64, used: &ParsedHeader, reason: String) -> Result<Error> {
    let other = copy_bytes(storage, length, 1 - used.framing.copy)?;
    Ok(match header::differ_by_version(&other, &used.bytes) {
        true => Error::damaged("its version was altered"),
        false => Error::UnsupportedVersion(reason),
    })
}

/// Bytes that reach the medium whole or not at all.
const SECTOR: usize = 512;

/// Minimum of bits in which a rewritten sector of a slot differs: keys, nonces, tags and the room
/// behind them are random, so half of the bits of the 16 bytes that change at least, but for one
/// time in 10^8.
const LEAST_CHANGED: u32 = 32;

/// Returns whether a copy can be a mixture of two headers, sector by sector, one of which is
/// `whole`: the number and the kinds of the slots may differ, MAC and checksum, and slots that were
/// filled again.
fn is_half_written(there: &[u8], whole: &[u8]) -> bool {
    const CHANGING: [std::ops::Range<usize>; 3] = [64..72, 104..136, 4032..4096];
    if there.len() != whole.len() {
        return false;
    }
    let (framing, slots) = there.split_at(BLOCK as usize);
    let (whole_framing, whole_slots) = whole.split_at(BLOCK as usize);
    let differs = |at: usize| framing[at] != whole_framing[at];
    let is_framing = (0..framing.len()).all(|at| !differs(at) || CHANGING.iter().any(|range| range.contains(&at)));
    let changed = |(one, other): (&[u8], &[u8])| one.iter().zip(other).map(|(a, b)| (a ^ b).count_ones()).sum::<u32>();
    let mut sectors = slots.chunks(SECTOR).zip(whole_slots.chunks(SECTOR)).map(changed);
    is_framing && sectors.all(|bits| bits == 0 || bits >= LEAST_CHANGED)
}

/// Returns the more informative error of two failed copies.
fn graver(first: Error, second: Error) -> Error {
    let weight = |error: &Error| match error {
        Error::NotArchive(_) => 0,
        Error::Damaged(_) => 1,
        Error::UnsupportedVersion(_) => 3,
        _ => 2,
    };
    if weight(&second) > weight(&first) { second } else { first }
}
