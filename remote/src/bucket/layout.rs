//! The bytes of the objects (format-spec/bucket.md): marker, records of the log, segments, checkpoints.
//!
//! All of it comes from a stranger. A hash shows that an answer is whole and belongs where it was found; it proves nothing about who wrote it, which the tags
//! of the archive's pages do. Every count is compared with what is there before anything is allocated.

use std::ops::Range;

use lockbox::{Error, Result};
use sha2::{Digest, Sha256};

use super::object_ref::{Entry, Hash, Id, Place};

/// Bytes of a block, the unit of the map (specification of the archive, 2).
pub(crate) const BLOCK: u64 = 4096;
pub(crate) const VERSION: u32 = 1;

/// Of a prefix: one that was emptied and made anew has another.
pub(crate) type Incarnation = [u8; 16];

const MARKER: &[u8; 8] = b"LBXBUCKT";
const RECORD: &[u8; 8] = b"LBXRECRD";
const SEGMENT: &[u8; 8] = b"LBXSEGMT";
const CHECKPOINT: &[u8; 8] = b"LBXCHKPT";

pub(crate) const MARKER_BYTES: usize = 64;
pub(crate) const TRAILER_BYTES: usize = 352;
const SEGMENT_TRAILER_BYTES: usize = 80;
/// Of a run of blocks in a segment's list.
const RUN_BYTES: u64 = 12;
const CHECKPOINT_TRAILER_BYTES: usize = 96;
const ID_BYTES: usize = 40;
const ENTRY_BYTES: usize = 20;
const DEAD_BYTES: usize = ID_BYTES + 8;

/// Longest archive: what an entry of a map can name.
pub(crate) const LONGEST: u64 = i64::MAX as u64 / BLOCK * BLOCK;
/// Most bytes of what a record says beside its pages.
pub(crate) const MAX_SAID: u64 = 4 << 20;
/// Most bytes of a checkpoint: of some three million runs.
pub(crate) const MAX_CHECKPOINT: u64 = 64 << 20;
/// Most blocks of pages in one object.
pub(crate) const MAX_BLOCKS: u32 = 16 << 8;
/// Most entries of what waits for its removal in one record; more are left for a collection.
pub(crate) const MAX_DEAD: usize = 16 << 10;
/// Longest name of a machine.
const MAX_HOST: usize = 64;
const ZEROS: u32 = u32::MAX;

fn damaged(what: &str) -> Error {
    Error::damaged(format!("the bucket: {what}"))
}

/// The first object of a prefix.
pub(crate) fn encode_marker(incarnation: &Incarnation) -> Vec<u8> {
    let mut out = Writer::default();
    out.bytes(MARKER);
    out.u32(VERSION);
    out.u32(0);
    out.bytes(incarnation);
    out.hash()
}

/// # Errors
/// `Unsupported` for a newer version, `Damaged` for what is no marker.
pub(crate) fn decode_marker(bytes: &[u8]) -> Result<Incarnation> {
    let mut reader = hashed(bytes, MARKER, MARKER_BYTES, "marker")?;
    check_version(reader.u32()?)?;
    reader.u32()?;
    reader.array()
}

/// What a record is for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Kind {
    /// A writer came. Never removed, so that its number is taken for ever.
    Open,
    #[default]
    Commit,
    /// A writer went.
    Close,
}

/// Who writes, so that others can be told.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Owner {
    pub(crate) host: String,
    /// A hash of what names the machine, and of what names its run since it was started.
    pub(crate) machine: [u8; 16],
    pub(crate) boot: [u8; 16],
    pub(crate) process: u32,
    /// When the process was started, in ticks of its machine.
    pub(crate) started: u64,
}

/// An object that no newer map needs, and since when; or records with numbers one after the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Dead {
    pub(crate) id: Id,
    /// Records behind the one that is named, at most [`MAX_BLOCKS`]; 0 for what is no record.
    pub(crate) more: u32,
    /// By the store's clock, in seconds since 1970; 0 for the time of the record that says it first, which its writer cannot know before the store has it.
    pub(crate) since: u64,
}

impl Dead {
    /// One object.
    pub(crate) fn of(id: Id, since: u64) -> Dead {
        Dead { id, more: 0, since }
    }

    /// All that it names.
    pub(crate) fn ids(self) -> impl Iterator<Item = Id> {
        let first = if let Id::Log(first) = self.id { first } else { 0 };
        (0..=u64::from(self.more)).map(move |at| if at == 0 { self.id } else { Id::Log(first + at) })
    }
}

/// The end of a record.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Trailer {
    pub(crate) kind: Kind,
    pub(crate) incarnation: Incarnation,
    pub(crate) sequence: u64,
    /// Grows with each writer that comes.
    pub(crate) epoch: u64,
    pub(crate) writer: [u8; 16],
    pub(crate) nonce: [u8; 16],
    /// By the writer's clock, in seconds since 1970: told to people only.
    pub(crate) time: u64,
    /// Of the trailer of the record before.
    pub(crate) before: Hash,
    /// Name and length of the checkpoint that the changes count from; None for the empty map.
    pub(crate) checkpoint: Option<(Hash, u64)>,
    /// Length of the archive in bytes.
    pub(crate) length: u64,
    /// Blocks of pages that the record begins with, and the hash of their bytes.
    pub(crate) blocks: u32,
    pub(crate) pages: Hash,
    /// Lengths of what is said between the pages and the trailer, and the hash of it.
    pub(super) changes: u32,
    pub(super) dead: u32,
    pub(super) owner: u32,
    pub(super) said: Hash,
    /// Of the trailer itself.
    pub(crate) hash: Hash,
}

impl Trailer {
    /// Bytes of what is said between pages and trailer.
    pub(crate) fn said_bytes(&self) -> u64 {
        u64::from(self.changes) + u64::from(self.dead) + u64::from(self.owner)
    }

    /// Of the whole record.
    pub(crate) fn bytes(&self) -> u64 {
        u64::from(self.blocks) * BLOCK + self.said_bytes() + TRAILER_BYTES as u64
    }

    fn encode(&self) -> Vec<u8> {
        let mut out = Writer::default();
        out.bytes(RECORD);
        out.u32(VERSION);
        out.u32(match self.kind {
            Kind::Open => 1,
            Kind::Commit => 2,
            Kind::Close => 3,
        });
        out.bytes(&self.incarnation);
        out.u64(self.sequence);
        out.u64(self.epoch);
        out.bytes(&self.writer);
        out.bytes(&self.nonce);
        out.u64(self.time);
        out.u64(self.length);
        out.bytes(&self.before);
        let (checkpoint, bytes) = self.checkpoint.unwrap_or_default();
        out.bytes(&checkpoint);
        out.u64(bytes);
        out.u32(self.blocks);
        out.u32(self.changes);
        out.u32(self.dead);
        out.u32(self.owner);
        out.bytes(&self.pages);
        out.bytes(&self.said);
        out.bytes(&[0; 72]);
        out.hash()
    }

    /// # Errors
    /// `Damaged` for what is no trailer of a record of this incarnation.
    pub(crate) fn decode(bytes: &[u8], incarnation: &Incarnation) -> Result<Trailer> {
        let mut reader = hashed(bytes, RECORD, TRAILER_BYTES, "record")?;
        check_version(reader.u32()?)?;
        let kind = match reader.u32()? {
            1 => Kind::Open,
            2 => Kind::Commit,
            3 => Kind::Close,
            _ => return Err(damaged("a record of an unknown kind")),
        };
        let mut trailer = Trailer {
            kind,
            incarnation: reader.array()?,
            sequence: reader.u64()?,
            epoch: reader.u64()?,
            writer: reader.array()?,
            nonce: reader.array()?,
            time: reader.u64()?,
            length: reader.u64()?,
            before: reader.array()?,
            ..Trailer::default()
        };
        let (checkpoint, length) = (reader.array()?, reader.u64()?);
        trailer.checkpoint = (length > 0).then_some((checkpoint, length));
        trailer.blocks = reader.u32()?;
        trailer.changes = reader.u32()?;
        trailer.dead = reader.u32()?;
        trailer.owner = reader.u32()?;
        trailer.pages = reader.array()?;
        trailer.said = reader.array()?;
        trailer.hash.copy_from_slice(&bytes[TRAILER_BYTES - 32..]);
        if trailer.incarnation != *incarnation {
            return Err(damaged("a record that belongs to another archive, or to one that was here before"));
        }
        if trailer.blocks > MAX_BLOCKS || trailer.said_bytes() > MAX_SAID || length > MAX_CHECKPOINT {
            return Err(damaged("a record that says that it is larger than any"));
        }
        // There is one more of both.
        if trailer.sequence == 0 || trailer.sequence == u64::MAX || trailer.epoch == u64::MAX {
            return Err(damaged("a record of a number that cannot be"));
        }
        if trailer.length > i64::MAX as u64 {
            return Err(damaged("a record of an archive that is longer than any"));
        }
        Ok(trailer)
    }
}

/// What a record says beside its trailer.
pub(crate) struct Said {
    /// What lies elsewhere than the checkpoint says.
    pub(crate) changes: Vec<Entry>,
    pub(crate) dead: Vec<Dead>,
    pub(crate) owner: Owner,
}

/// The bytes of a record, of a trailer whose lengths and hashes are filled in here; and that trailer.
pub(crate) fn encode_record(trailer: &Trailer, pages: &[u8], said: &Said) -> (Vec<u8>, Trailer) {
    let mut changes = Writer::default();
    put_entries(&mut changes, &said.changes);
    let mut dead = Writer::default();
    for Dead { id, more, since } in &said.dead {
        put_id(&mut dead, id, *more);
        dead.u64(*since);
    }
    let mut owner = Writer::default();
    owner.bytes(&said.owner.machine);
    owner.bytes(&said.owner.boot);
    owner.u32(said.owner.process);
    owner.u64(said.owner.started);
    let host = said.owner.host.as_bytes();
    owner.bytes(&host[..host.len().min(MAX_HOST)]);
    let mut out = Vec::with_capacity(pages.len() + changes.0.len() + dead.0.len() + owner.0.len() + TRAILER_BYTES);
    out.extend_from_slice(pages);
    let at = out.len();
    for part in [&changes, &dead, &owner] {
        out.extend_from_slice(&part.0);
    }
    let mut trailer = Trailer {
        blocks: (pages.len() as u64 / BLOCK) as u32,
        pages: Sha256::digest(pages).into(),
        changes: changes.0.len() as u32,
        dead: dead.0.len() as u32,
        owner: owner.0.len() as u32,
        said: Sha256::digest(&out[at..]).into(),
        ..trailer.clone()
    };
    let encoded = trailer.encode();
    trailer.hash.copy_from_slice(&encoded[TRAILER_BYTES - 32..]);
    out.extend_from_slice(&encoded);
    (out, trailer)
}

/// What the bytes between pages and trailer say.
///
/// # Errors
/// `Damaged`.
pub(crate) fn decode_said(trailer: &Trailer, bytes: &[u8]) -> Result<Said> {
    if bytes.len() as u64 != trailer.said_bytes() || trailer.said != *Sha256::digest(bytes) {
        return Err(damaged("a record that is not whole"));
    }
    let (changes, rest) = bytes.split_at(trailer.changes as usize);
    let (dead, owner) = rest.split_at(trailer.dead as usize);
    let changes = take_entries(&mut Reader(changes))?;
    if dead.len() % DEAD_BYTES != 0 || dead.len() / DEAD_BYTES > MAX_DEAD {
        return Err(damaged("a list of removed objects that cannot be"));
    }
    let dead = dead.chunks(DEAD_BYTES).map(|bytes| {
        let mut reader = Reader(bytes);
        let ((id, more), since) = (take_id(&mut reader)?, reader.u64()?);
        let can_be = match id {
            Id::Log(first) => {
                more <= MAX_BLOCKS && first.checked_add(more.into()).is_some_and(|last| last < trailer.sequence)
            }
            Id::Segment(_) | Id::Checkpoint(_) => more == 0,
        };
        if can_be { Ok(Dead { id, more, since }) } else { Err(damaged("a list of removed objects that cannot be")) }
    });
    let dead = dead.collect::<Result<_>>()?;
    let mut reader = Reader(owner);
    let (machine, boot, process, started) = (reader.array()?, reader.array()?, reader.u32()?, reader.u64()?);
    if reader.0.len() > MAX_HOST {
        return Err(damaged("a writer whose name is longer than any"));
    }
    let host = String::from_utf8_lossy(reader.0).into_owned();
    Ok(Said { changes, dead, owner: Owner { host, machine, boot, process, started } })
}

/// A segment of the pages, which are of these blocks, and its name.
pub(crate) fn encode_segment(
    incarnation: &Incarnation,
    nonce: &[u8; 16],
    blocks: &[Range<u64>],
    pages: &[u8],
) -> (Vec<u8>, Hash) {
    let mut out = Writer(Vec::with_capacity(pages.len() + blocks.len() * 12 + SEGMENT_TRAILER_BYTES));
    out.bytes(pages);
    for run in blocks {
        out.u64(run.start);
        out.u32((run.end - run.start) as u32);
    }
    out.bytes(SEGMENT);
    out.u32(VERSION);
    out.u32((pages.len() as u64 / BLOCK) as u32);
    out.bytes(incarnation);
    // Two segments of the same pages are two objects: what one writer removes is never what another one has named meanwhile.
    out.bytes(nonce);
    out.u64(blocks.len() as u64);
    out.bytes(&[0; 24]);
    debug_assert_eq!(out.0.len(), pages.len() + blocks.len() * 12 + SEGMENT_TRAILER_BYTES);
    let hash = Sha256::digest(&out.0).into();
    (out.0, hash)
}

/// Whether a segment with so many blocks of pages can have this length: behind them stand their runs, one at least, and the trailer.
pub(crate) fn is_length_of_segment(blocks: u32, bytes: u64) -> bool {
    let runs = bytes.checked_sub(u64::from(blocks) * BLOCK + SEGMENT_TRAILER_BYTES as u64);
    runs.is_some_and(|runs| runs % RUN_BYTES == 0 && (1..=u64::from(blocks)).contains(&(runs / RUN_BYTES)))
}

/// A checkpoint of the map behind the record `sequence`, which has these entries, and its name.
pub(crate) fn encode_checkpoint(
    incarnation: &Incarnation,
    nonce: &[u8; 16],
    sequence: u64,
    entries: &[Entry],
) -> (Vec<u8>, Hash) {
    let mut out = Writer::default();
    put_entries(&mut out, entries);
    let said = out.0.len() as u64;
    out.bytes(CHECKPOINT);
    out.u32(VERSION);
    out.u32(0);
    out.bytes(incarnation);
    out.bytes(nonce);
    out.u64(sequence);
    out.u64(said);
    out.bytes(&[0; 32]);
    debug_assert_eq!(out.0.len() as u64, said + CHECKPOINT_TRAILER_BYTES as u64);
    let hash = Sha256::digest(&out.0).into();
    (out.0, hash)
}

/// # Errors
/// `Damaged` for another object than the one of this name.
pub(crate) fn decode_checkpoint(incarnation: &Incarnation, name: &Hash, bytes: &[u8]) -> Result<Vec<Entry>> {
    let wrong = || damaged("a checkpoint that is not the one that was named");
    if *name != *Sha256::digest(bytes) {
        return Err(wrong());
    }
    let at = bytes.len().checked_sub(CHECKPOINT_TRAILER_BYTES).ok_or_else(wrong)?;
    let (said, trailer) = bytes.split_at(at);
    let mut reader = Reader(trailer);
    if reader.array()? != *CHECKPOINT {
        return Err(wrong());
    }
    check_version(reader.u32()?)?;
    reader.u32()?;
    if reader.array()? != *incarnation {
        return Err(wrong());
    }
    take_entries(&mut Reader(said))
}

/// Objects first, then the entries, which name them by their number there.
fn put_entries(out: &mut Writer, entries: &[Entry]) {
    let mut objects: Vec<(Id, u32)> =
        entries.iter().filter_map(|entry| entry.place.map(|p| (p.id, p.blocks))).collect();
    objects.sort_unstable();
    objects.dedup();
    out.u32(objects.len() as u32);
    out.u32(entries.len() as u32);
    for (id, blocks) in &objects {
        put_id(out, id, *blocks);
    }
    for Entry { blocks, place } in entries {
        out.u64(blocks.start);
        out.u32((blocks.end - blocks.start) as u32);
        let number = |place: &Place| objects.partition_point(|object| *object < (place.id, place.blocks)) as u32;
        out.u32(place.as_ref().map_or(ZEROS, number));
        out.u32(place.as_ref().map_or(0, |place| place.at));
    }
}

fn take_entries(reader: &mut Reader<'_>) -> Result<Vec<Entry>> {
    let wrong = || damaged("a map that cannot be");
    let (objects, entries) = (reader.u32()? as usize, reader.u32()? as usize);
    let needed = objects.checked_mul(ID_BYTES).and_then(|bytes| entries.checked_mul(ENTRY_BYTES)?.checked_add(bytes));
    if needed != Some(reader.0.len()) {
        return Err(wrong());
    }
    let objects = (0..objects).map(|_| take_id(reader)).collect::<Result<Vec<_>>>()?;
    if objects.iter().any(|(id, blocks)| *blocks > MAX_BLOCKS || matches!(id, Id::Checkpoint(_))) {
        return Err(wrong());
    }
    let mut found = Vec::with_capacity(entries);
    let mut behind = 0;
    for _ in 0..entries {
        let (start, count, object, at) = (reader.u64()?, reader.u32()?, reader.u32()?, reader.u32()?);
        let end = start.checked_add(count.into()).filter(|end| *end <= i64::MAX as u64 / BLOCK).ok_or_else(wrong)?;
        if start < behind || count == 0 {
            return Err(wrong());
        }
        behind = end;
        let place = match object {
            ZEROS => None,
            object => {
                let (id, blocks) = *objects.get(object as usize).ok_or_else(wrong)?;
                if at.checked_add(count).is_none_or(|end| end > blocks) {
                    return Err(wrong());
                }
                Some(Place { id, blocks, at })
            }
        };
        found.push(Entry { blocks: start..end, place });
    }
    Ok(found)
}

fn put_id(out: &mut Writer, id: &Id, blocks: u32) {
    let mut number = [0; 32];
    let (kind, name) = match id {
        Id::Log(sequence) => {
            number[..8].copy_from_slice(&sequence.to_le_bytes());
            (1, &number)
        }
        Id::Segment(hash) => (2, hash),
        Id::Checkpoint(hash) => (3, hash),
    };
    out.u32(kind);
    out.u32(blocks);
    out.bytes(name);
}

fn take_id(reader: &mut Reader<'_>) -> Result<(Id, u32)> {
    let (kind, blocks, name) = (reader.u32()?, reader.u32()?, reader.array::<32>()?);
    let id = match kind {
        1 => Id::Log(Reader(&name).u64()?),
        2 => Id::Segment(name),
        3 => Id::Checkpoint(name),
        _ => return Err(damaged("an object of an unknown kind")),
    };
    Ok((id, blocks))
}

fn check_version(version: u32) -> Result<()> {
    match version {
        VERSION => Ok(()),
        other => Err(Error::Unsupported(format!("the bucket is of version {other}, which this program does not know"))),
    }
}

/// What is between the magic and the hash at the end, which is of all before it.
fn hashed<'a>(bytes: &'a [u8], magic: &[u8; 8], length: usize, what: &str) -> Result<Reader<'a>> {
    let is_whole = bytes.len() == length
        && bytes.starts_with(magic)
        && *Sha256::digest(&bytes[..length - 32]) == bytes[length - 32..];
    if !is_whole {
        return Err(damaged(&format!("a {what} that is none, or is not whole")));
    }
    Ok(Reader(&bytes[8..length - 32]))
}

#[derive(Default)]
struct Writer(Vec<u8>);

impl Writer {
    fn bytes(&mut self, bytes: &[u8]) {
        self.0.extend_from_slice(bytes);
    }

    fn u32(&mut self, number: u32) {
        self.bytes(&number.to_le_bytes());
    }

    fn u64(&mut self, number: u64) {
        self.bytes(&number.to_le_bytes());
    }

    /// With the hash of all of it behind it.
    fn hash(mut self) -> Vec<u8> {
        let hash = Sha256::digest(&self.0);
        self.bytes(&hash);
        self.0
    }
}

struct Reader<'a>(&'a [u8]);

impl Reader<'_> {
    fn array<const N: usize>(&mut self) -> Result<[u8; N]> {
        let (first, rest) = self.0.split_first_chunk().ok_or_else(|| damaged("an object that ends too early"))?;
        self.0 = rest;
        Ok(*first)
    }

    fn u32(&mut self) -> Result<u32> {
        self.array().map(u32::from_le_bytes)
    }

    fn u64(&mut self) -> Result<u64> {
        self.array().map(u64::from_le_bytes)
    }
}
