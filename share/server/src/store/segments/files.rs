//! Files of the built-in store: the head and the records of a segment, and the small files next to
//! them (identity, clock, decoy record, reserve).

use std::io;
use std::sync::Arc;

use crate::store::barrier_group::Syncable;
use crate::store::env::{Clock, Disk, DiskFile, StoreClock, StoreTime, random};
use crate::store::record::{
    CapsuleRef, FIXED, MAX_RECORD, Record, RecordPosition, encode, head_checksum, is_sound, parse, record_length,
};
use crate::store::share::{Key, Share};
use crate::store::{Result, StoreError};

/// Bytes of the head of a segment file.
pub(super) const HEAD: u64 = 64;
const SEGMENT_MAGIC: &[u8; 8] = b"LBXSHR1\0";
const WINDOW: usize = 256 * 1024;
/// Places that may look like a record and not be one, before a file is given up: a hostile file
/// must not cost a hash of 9 KiB for each 8 bytes.
const MAX_FALSE: u32 = 4096;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) enum SegmentClass {
    /// Shares with their content.
    Content,
    /// Audit records of shares, without content.
    Audit,
}

/// Head of a segment file: magic, nonce u64, minute u64, class u8, shard u8, zeros, checksum.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct SegmentHeader {
    pub(crate) nonce: u64,
    /// Of the store's time; from then on the content of the file is dead.
    pub(crate) minute: u64,
    pub(crate) class: SegmentClass,
    pub(crate) shard: u8,
}

impl SegmentHeader {
    pub(crate) fn encode(&self) -> [u8; HEAD as usize] {
        let mut out = [0; HEAD as usize];
        out[..8].copy_from_slice(SEGMENT_MAGIC);
        out[8..16].copy_from_slice(&self.nonce.to_le_bytes());
        out[16..24].copy_from_slice(&self.minute.to_le_bytes());
        out[24] = u8::from(self.class == SegmentClass::Audit);
        out[25] = self.shard;
        let sum = head_checksum(&out[..56]);
        out[56..].copy_from_slice(&sum.to_le_bytes());
        out
    }

    pub(crate) fn decode(bytes: &[u8]) -> Option<SegmentHeader> {
        let bytes: &[u8; HEAD as usize] = bytes.first_chunk()?;
        let word = |at: usize| u64::from_le_bytes(std::array::from_fn(|n| bytes[at + n]));
        if &bytes[..8] != SEGMENT_MAGIC || word(56) != head_checksum(&bytes[..56]) {
            return None;
        }
        let class = match bytes[24] {
            0 => SegmentClass::Content,
            1 => SegmentClass::Audit,
            _ => return None,
        };
        Some(SegmentHeader { nonce: word(8), minute: word(16), class, shard: bytes[25] })
    }

    /// Time from which on the content is dead. Saturates: the last minute is rounded up past time's
    /// end.
    pub(super) fn end(&self) -> StoreTime {
        StoreTime(self.minute.saturating_mul(60_000))
    }
}

/// Reads a segment from front to back with one bounded buffer.
pub(super) struct RecordScanner {
    file: Arc<dyn DiskFile>,
    nonce: u64,
    /// Where `buffer` begins in the file.
    start: u64,
    buffer: Vec<u8>,
    /// The next byte to look at.
    at: u64,
    /// The file had no more when it was read last.
    over: bool,
    /// End of the newest sound record.
    pub(super) end: u64,
    /// Bytes that belong to no sound record and have one behind them.
    pub(super) damaged: u64,
    false_starts: u32,
}

impl RecordScanner {
    pub(super) fn new(file: Arc<dyn DiskFile>, nonce: u64) -> RecordScanner {
        RecordScanner {
            file,
            nonce,
            start: HEAD,
            buffer: Vec::new(),
            at: HEAD,
            over: false,
            end: HEAD,
            damaged: 0,
            false_starts: 0,
        }
    }

    /// The next sound record and its place. After None there may be more when the file has grown.
    pub(super) fn next(&mut self) -> io::Result<Option<(u32, Record<'_>)>> {
        let (at, length) = loop {
            self.fill()?;
            let window = &self.buffer[(self.at - self.start) as usize..];
            if window.len() < FIXED || self.at > u64::from(u32::MAX) || self.false_starts > MAX_FALSE {
                return Ok(None);
            }
            if let Some(length) = record_length(window) {
                let place = RecordPosition { nonce: self.nonce, at: self.at };
                if is_sound(window, place) && parse(window).is_some() {
                    break (self.at, length);
                }
                self.false_starts += u32::from(length <= window.len());
            }
            self.at += 8;
        };
        self.damaged += at - self.end;
        self.at = at + length as u64;
        self.end = self.at;
        let window = &self.buffer[(at - self.start) as usize..];
        // Parsed a second time only to lend it: the first loan would have to end before the loop
        // goes on.
        Ok(parse(window).map(|record| (at as u32, record)))
    }

    /// Resumes after the newest sound record: new records may have overwritten a torn tail.
    pub(super) fn again(&mut self) {
        self.at = self.end;
        self.over = false;
        self.buffer.clear();
        self.start = self.at;
    }

    fn fill(&mut self) -> io::Result<()> {
        let used = self.buffer.len().min((self.at - self.start) as usize);
        if self.buffer.len() - used >= MAX_RECORD || self.over {
            return Ok(());
        }
        self.buffer.drain(..used);
        self.start = self.at;
        let kept = self.buffer.len();
        self.buffer.resize(WINDOW, 0);
        let read = self.file.read_at(&mut self.buffer[kept..], self.start + kept as u64)?;
        self.over = kept + read < WINDOW;
        self.buffer.truncate(kept + read);
        Ok(())
    }
}

/// Few enough that a group of changes has few files to sync, enough that two threads seldom meet.
pub(super) const SHARDS: usize = 4;
const IDENTITY: &str = "store";
const STORE_MAGIC: &[u8; 8] = b"LBXSHS1\0";
/// The record of the decoy, as long as that of a usual capsule.
const DECOY_CAPSULE: usize = 512;
/// A file of this many bytes is given up when the disk is full, so that shares can still be
/// claimed, revoked and cleaned away.
const RESERVE_BYTES: usize = 1024 * 1024;
pub(super) const RESERVE: &str = "reserve";

/// The key of handles, made with the store.
pub(super) fn identity(disk: &dyn Disk, names: &dyn Syncable) -> Result<[u8; 16]> {
    let damaged = || StoreError::Unavailable("the file that identifies the store is damaged".into());
    if disk.list()?.iter().any(|name| name == IDENTITY) {
        let mut bytes = [0; 40];
        let read = disk.open(IDENTITY).and_then(|file| file.read_at(&mut bytes, 0))?;
        let sum = head_checksum(&bytes[..32]).to_le_bytes();
        if read != bytes.len() || &bytes[..8] != STORE_MAGIC || bytes[32..] != sum || usize::from(bytes[24]) != SHARDS {
            return Err(damaged());
        }
        return bytes[8..24].try_into().map_err(|_| damaged());
    }
    let secret: [u8; 16] = random()?;
    let mut bytes = [0; 40];
    bytes[..8].copy_from_slice(STORE_MAGIC);
    bytes[8..24].copy_from_slice(&secret);
    bytes[24] = SHARDS as u8;
    let sum = head_checksum(&bytes[..32]).to_le_bytes();
    bytes[32..].copy_from_slice(&sum);
    replace(disk, IDENTITY, &bytes)?;
    names.sync()?;
    Ok(secret)
}

/// Replaces a file atomically.
fn replace(disk: &dyn Disk, name: &str, bytes: &[u8]) -> io::Result<()> {
    let fresh = format!("{name}.new");
    let file = disk.create(&fresh)?;
    file.write_at(bytes, 0)?;
    file.sync()?;
    disk.rename(&fresh, name)
}

/// Store time goes on where it was saved, or begins.
pub(super) fn resume_clock(disk: &dyn Disk, clock: &Arc<dyn Clock>) -> StoreClock {
    let saved = || {
        let mut bytes = [0; 256];
        let read = disk.open("clock").ok()?.read_at(&mut bytes, 0).ok()?;
        StoreClock::resume(Arc::clone(clock), std::str::from_utf8(&bytes[..read]).ok()?)
    };
    saved().unwrap_or_else(|| StoreClock::fresh(Arc::clone(clock)))
}

pub(super) fn save_clock(disk: &dyn Disk, clock: &StoreClock) -> Result<()> {
    match replace(disk, "clock", clock.saved().as_bytes()).map_err(StoreError::from) {
        // On a full disk the older file tells the time well enough.
        Err(StoreError::Full) => Ok(()),
        other => other,
    }
}

/// Creates the decoy record that is read for a missing share.
pub(super) fn decoy(disk: &dyn Disk, decoy: &Share) -> io::Result<Arc<dyn DiskFile>> {
    let file = disk.create("decoy")?;
    let mut bytes = Vec::new();
    let share = Share { capsule_bytes: DECOY_CAPSULE as u32, ..*decoy };
    let capsule = CapsuleRef::Here(&[0; DECOY_CAPSULE]);
    encode(&Key([0; 16]), &share, capsule, RecordPosition { nonce: 0, at: 0 }, &mut bytes);
    file.write_at(&bytes, 0)?;
    Ok(file)
}

/// Frees the reserve. False when it was given up before.
pub(super) fn give_up_reserve(disk: &dyn Disk) -> bool {
    disk.remove(RESERVE).is_ok()
}

/// A full disk took the reserve; when there is space again it comes back.
pub(super) fn restore_reserve(disk: &dyn Disk) {
    if disk.open(RESERVE).is_ok() {
        return;
    }
    if disk.create(RESERVE).and_then(|file| file.write_at(&vec![0x5a; RESERVE_BYTES], 0)).is_err() {
        // No space yet: half a reserve would stand in the way of what it is kept for.
        let _ = disk.remove(RESERVE);
    }
}
