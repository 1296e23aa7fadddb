//! Byte layout of the objects (format-spec/bucket.md): marker, log records, segments, checkpoints.
//!
//! All input is untrusted. A hash shows that an object is complete and belongs where it was found;
//! it does not authenticate the writer, which the tags of the archive's pages do. Every count is
//! checked against the input's length before anything is allocated.

use std::ops::Range;

use lockbox::{Error, Result};
use sha2::{Digest, Sha256};

use super::map::{Hash, MapEntry, ObjectId, ObjectRef};

/// Block size in bytes, the unit of the map (specification of the archive, 2).
pub(crate) const BLOCK: u64 = 4096;
pub(crate) const VERSION: u32 = 1;

/// Random id of a prefix: one that was emptied and reused has another.
pub(crate) type Incarnation = [u8; 16];

const MARKER: &[u8; 8] = b"LBXBUCKT";
const RECORD: &[u8; 8] = b"LBXRECRD";
const SEGMENT: &[u8; 8] = b"LBXSEGMT";
const CHECKPOINT: &[u8; 8] = b"LBXCHKPT";

pub(crate) const MARKER_BYTES: usize = 64;
pub(crate) const TRAILER_BYTES: usize = 352;
const SEGMENT_TRAILER_BYTES: usize = 80;
/// Size of a run of blocks in a segment's list.
const RUN_BYTES: u64 = 12;
const CHECKPOINT_TRAILER_BYTES: usize = 96;
const ID_BYTES: usize = 40;
/// Size of a run in changes and in checkpoints.
pub(crate) const MAP_ENTRY_BYTES: usize = 20;
/// Runs that take as much space in a checkpoint as an object.
pub(crate) const OBJECT_RUNS: usize = ID_BYTES / MAP_ENTRY_BYTES;
const TOMBSTONE_BYTES: usize = ID_BYTES + 8;

/// Maximum archive length that a map entry can name.
pub(crate) const MAX_ARCHIVE_BYTES: u64 = i64::MAX as u64 / BLOCK * BLOCK;
/// Maximum size of a record's body, which is the part without its pages.
pub(crate) const MAX_BODY: u64 = 4 << 20;
/// Maximum size of a checkpoint: some three million runs.
pub(crate) const MAX_CHECKPOINT: u64 = 64 << 20;
/// Maximum blocks of pages in one object.
pub(crate) const MAX_BLOCKS: u32 = 16 << 8;
/// Maximum tombstones in one record; the rest is left to a garbage collection.
pub(crate) const MAX_TOMBSTONES: usize = 16 << 10;
/// Maximum length of a host name.
const MAX_HOST: usize = 64;
const ZERO_OBJECT: u32 = u32::MAX;

fn damaged(flaw: &str) -> Error {
    Error::damaged(format!("the bucket has {flaw}"))
}

/// Encodes the marker, the first object of a prefix.
pub(crate) fn encode_marker(incarnation: &Incarnation) -> Vec<u8> {
    let mut out = Writer::default();
    out.bytes(MARKER);
    out.u32(VERSION);
    out.u32(0);
    out.bytes(incarnation);
    out.finish()
}

/// Errors: `Unsupported` for a newer version, `Damaged` for an invalid marker.
pub(crate) fn decode_marker(bytes: &[u8]) -> Result<Incarnation> {
    let mut reader = open_hashed(bytes, MARKER, MARKER_BYTES, "marker")?;
    check_version(reader.u32()?)?;
    reader.u32()?;
    reader.array()
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum RecordKind {
    /// A writer acquired the archive. Never removed, so that its number stays taken.
    Open = 1,
    #[default]
    Commit = 2,
    /// A writer released the archive.
    Close = 3,
}

/// Identity of a writer, for messages to other users and for liveness checks.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct WriterIdentity {
    pub(crate) host: String,
    /// Hashes of the machine id and of the boot id.
    pub(crate) machine: [u8; 16],
    pub(crate) boot: [u8; 16],
    pub(crate) process: u32,
    /// Start time of the process, in clock ticks of its machine.
    pub(crate) started: u64,
}

/// Object that no newer map needs, with the time of its death; or a run of records.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Tombstone {
    pub(crate) id: ObjectId,
    /// Further records of the run, at most [`MAX_BLOCKS`]; 0 if it is not a record.
    pub(crate) extra: u32,
    /// Time by the store's clock, in seconds since 1970; 0 in the record that declares the death,
    /// because its writer cannot know the time before the store has it.
    pub(crate) since: u64,
}

impl Tombstone {
    pub(crate) fn new(id: ObjectId, since: u64) -> Tombstone {
        Tombstone { id, extra: 0, since }
    }

    /// Iterates over all objects of the tombstone.
    pub(crate) fn ids(self) -> impl Iterator<Item = ObjectId> {
        let first = self.id.sequence().unwrap_or(0);
        (0..=u64::from(self.extra)).map(move |at| if at == 0 { self.id } else { ObjectId::Log(first + at) })
    }
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Trailer {
    pub(crate) kind: RecordKind,
    pub(crate) incarnation: Incarnation,
    pub(crate) sequence: u64,
    /// Incremented by each acquisition.
    pub(crate) epoch: u64,
    pub(crate) writer: [u8; 16],
    pub(crate) nonce: [u8; 16],
    /// Time by the writer's clock, in seconds since 1970: only displayed.
    pub(crate) time: u64,
    /// Hash of the previous record's trailer.
    pub(crate) previous: Hash,
    /// Name and length of the checkpoint that the changes apply to; None for the empty map.
    pub(crate) checkpoint: Option<(Hash, u64)>,
    /// Length of the archive in bytes.
    pub(crate) length: u64,
    /// Blocks of pages at the start of the record, and the hash of their bytes.
    pub(crate) blocks: u32,
    pub(crate) pages_hash: Hash,
    /// Lengths of the parts of the body, and its hash.
    pub(super) changes_bytes: u32,
    pub(super) tombstone_bytes: u32,
    pub(super) writer_bytes: u32,
    pub(super) body_hash: Hash,
    pub(crate) hash: Hash,
}

impl Trailer {
    pub(crate) fn body_bytes(&self) -> u64 {
        u64::from(self.changes_bytes) + u64::from(self.tombstone_bytes) + u64::from(self.writer_bytes)
    }

    pub(crate) fn bytes(&self) -> u64 {
        u64::from(self.blocks) * BLOCK + self.body_bytes() + TRAILER_BYTES as u64
    }

    fn encode(&self) -> Vec<u8> {
        let mut out = Writer::default();
        out.bytes(RECORD);
        out.u32(VERSION);
        out.u32(self.kind as u32);
        out.bytes(&self.incarnation);
        out.u64(self.sequence);
        out.u64(self.epoch);
        out.bytes(&self.writer);
        out.bytes(&self.nonce);
        out.u64(self.time);
        out.u64(self.length);
        out.bytes(&self.previous);
        let (checkpoint, bytes) = self.checkpoint.unwrap_or_default();
        out.bytes(&checkpoint);
        out.u64(bytes);
        out.u32(self.blocks);
        out.u32(self.changes_bytes);
        out.u32(self.tombstone_bytes);
        out.u32(self.writer_bytes);
        out.bytes(&self.pages_hash);
        out.bytes(&self.body_hash);
        out.bytes(&[0; 72]);
        out.finish()
    }

    /// Errors: `Damaged` for anything but a record trailer of this incarnation.
    pub(crate) fn decode(bytes: &[u8], incarnation: &Incarnation) -> Result<Trailer> {
        let mut reader = open_hashed(bytes, RECORD, TRAILER_BYTES, "record")?;
        check_version(reader.u32()?)?;
        let kind = match reader.u32()? {
            1 => RecordKind::Open,
            2 => RecordKind::Commit,
            3 => RecordKind::Close,
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
            previous: reader.array()?,
            ..Trailer::default()
        };
        let (checkpoint, length) = (reader.array()?, reader.u64()?);
        trailer.checkpoint = (length > 0).then_some((checkpoint, length));
        trailer.blocks = reader.u32()?;
        trailer.changes_bytes = reader.u32()?;
        trailer.tombstone_bytes = reader.u32()?;
        trailer.writer_bytes = reader.u32()?;
        trailer.pages_hash = reader.array()?;
        trailer.body_hash = reader.array()?;
        trailer.hash.copy_from_slice(&bytes[TRAILER_BYTES - 32..]);
        if trailer.incarnation != *incarnation {
            return Err(damaged("a record of another archive, or of a previous one under the same prefix"));
        }
        if trailer.blocks > MAX_BLOCKS || trailer.body_bytes() > MAX_BODY || length > MAX_CHECKPOINT {
            return Err(damaged("a record with sizes above the limits"));
        }
        // There is one more of both.
        if trailer.sequence == 0 || trailer.sequence == u64::MAX || trailer.epoch == u64::MAX {
            return Err(damaged("a record with an impossible number"));
        }
        if trailer.length > i64::MAX as u64 {
            return Err(damaged("a record with an archive length above the limit"));
        }
        Ok(trailer)
    }
}

/// Body of a record, between its pages and its trailer.
pub(crate) struct RecordBody {
    /// Changes of the map since the checkpoint.
    pub(crate) changes: Vec<MapEntry>,
    pub(crate) tombstones: Vec<Tombstone>,
    pub(crate) writer: WriterIdentity,
}

/// Record without its pages.
pub(crate) type RecordParts = (Trailer, RecordBody);

/// Encodes a record, fills in the lengths and hashes of the trailer, and returns both.
pub(crate) fn encode_record(trailer: &Trailer, pages: &[u8], body: &RecordBody) -> (Vec<u8>, Trailer) {
    let mut changes = Writer::default();
    put_entries(&mut changes, &body.changes);
    let mut dead = Writer::default();
    for Tombstone { id, extra, since } in &body.tombstones {
        put_id(&mut dead, id, *extra);
        dead.u64(*since);
    }
    let mut owner = Writer::default();
    owner.bytes(&body.writer.machine);
    owner.bytes(&body.writer.boot);
    owner.u32(body.writer.process);
    owner.u64(body.writer.started);
    let host = body.writer.host.as_bytes();
    owner.bytes(&host[..host.len().min(MAX_HOST)]);
    let mut out = Vec::with_capacity(pages.len() + changes.0.len() + dead.0.len() + owner.0.len() + TRAILER_BYTES);
    out.extend_from_slice(pages);
    let at = out.len();
    for part in [&changes, &dead, &owner] {
        out.extend_from_slice(&part.0);
    }
    let mut trailer = Trailer {
        blocks: (pages.len() as u64 / BLOCK) as u32,
        pages_hash: Sha256::digest(pages).into(),
        changes_bytes: changes.0.len() as u32,
        tombstone_bytes: dead.0.len() as u32,
        writer_bytes: owner.0.len() as u32,
        body_hash: Sha256::digest(&out[at..]).into(),
        ..trailer.clone()
    };
    let encoded = trailer.encode();
    trailer.hash.copy_from_slice(&encoded[TRAILER_BYTES - 32..]);
    out.extend_from_slice(&encoded);
    (out, trailer)
}

/// Errors: `Damaged`.
pub(crate) fn decode_body(trailer: &Trailer, bytes: &[u8]) -> Result<RecordBody> {
    if bytes.len() as u64 != trailer.body_bytes() || trailer.body_hash != *Sha256::digest(bytes) {
        return Err(damaged("a truncated or altered record"));
    }
    let (changes, rest) = bytes.split_at(trailer.changes_bytes as usize);
    let (dead, owner) = rest.split_at(trailer.tombstone_bytes as usize);
    let changes = read_entries(&mut Reader(changes))?;
    let wrong = || damaged("an impossible list of removed objects");
    if dead.len() % TOMBSTONE_BYTES != 0 || dead.len() / TOMBSTONE_BYTES > MAX_TOMBSTONES {
        return Err(wrong());
    }
    let dead = dead.chunks(TOMBSTONE_BYTES).map(|bytes| {
        let mut reader = Reader(bytes);
        let ((id, extra), since) = (read_id(&mut reader)?, reader.u64()?);
        let is_valid = match id {
            ObjectId::Log(first) => {
                extra <= MAX_BLOCKS && first.checked_add(extra.into()).is_some_and(|last| last < trailer.sequence)
            }
            ObjectId::Segment(_) | ObjectId::Checkpoint(_) => extra == 0,
        };
        if is_valid { Ok(Tombstone { id, extra, since }) } else { Err(wrong()) }
    });
    let dead = dead.collect::<Result<_>>()?;
    let mut reader = Reader(owner);
    let (machine, boot, process, started) = (reader.array()?, reader.array()?, reader.u32()?, reader.u64()?);
    if reader.0.len() > MAX_HOST {
        return Err(damaged("a writer with too long a host name"));
    }
    let host = String::from_utf8_lossy(reader.0).into_owned();
    Ok(RecordBody { changes, tombstones: dead, writer: WriterIdentity { host, machine, boot, process, started } })
}

/// Encodes a segment of pages for these blocks; returns its bytes and its name.
pub(crate) fn encode_segment(
    incarnation: &Incarnation,
    nonce: &[u8; 16],
    blocks: &[Range<u64>],
    pages: &[u8],
) -> (Vec<u8>, Hash) {
    let mut out = Writer(Vec::with_capacity(pages.len() + blocks.len() * RUN_BYTES as usize + SEGMENT_TRAILER_BYTES));
    out.bytes(pages);
    for run in blocks {
        out.u64(run.start);
        out.u32((run.end - run.start) as u32);
    }
    out.bytes(SEGMENT);
    out.u32(VERSION);
    out.u32((pages.len() as u64 / BLOCK) as u32);
    out.bytes(incarnation);
    // Two segments of the same pages are two objects: a writer never removes an object that another
    // one has named.
    out.bytes(nonce);
    out.u64(blocks.len() as u64);
    out.bytes(&[0; 24]);
    debug_assert_eq!(out.0.len(), pages.len() + blocks.len() * RUN_BYTES as usize + SEGMENT_TRAILER_BYTES);
    let hash = Sha256::digest(&out.0).into();
    (out.0, hash)
}

/// Returns whether a segment with this number of blocks can have this length: its runs, at least
/// one, and the trailer follow the pages.
pub(crate) fn is_segment_length(blocks: u32, bytes: u64) -> bool {
    let runs = bytes.checked_sub(u64::from(blocks) * BLOCK + SEGMENT_TRAILER_BYTES as u64);
    runs.is_some_and(|runs| runs % RUN_BYTES == 0 && (1..=u64::from(blocks)).contains(&(runs / RUN_BYTES)))
}

/// Encodes a checkpoint of the map at the record `sequence`; returns its bytes and its name.
pub(crate) fn encode_checkpoint(
    incarnation: &Incarnation,
    nonce: &[u8; 16],
    sequence: u64,
    entries: &[MapEntry],
) -> (Vec<u8>, Hash) {
    let mut out = Writer::default();
    put_entries(&mut out, entries);
    let body = out.0.len() as u64;
    out.bytes(CHECKPOINT);
    out.u32(VERSION);
    out.u32(0);
    out.bytes(incarnation);
    out.bytes(nonce);
    out.u64(sequence);
    out.u64(body);
    out.bytes(&[0; 32]);
    debug_assert_eq!(out.0.len() as u64, body + CHECKPOINT_TRAILER_BYTES as u64);
    let hash = Sha256::digest(&out.0).into();
    (out.0, hash)
}

/// Errors: `Damaged` for another object than the one of this name.
pub(crate) fn decode_checkpoint(incarnation: &Incarnation, name: &Hash, bytes: &[u8]) -> Result<Vec<MapEntry>> {
    let wrong = || damaged("a checkpoint that does not match its name");
    if *name != *Sha256::digest(bytes) {
        return Err(wrong());
    }
    let at = bytes.len().checked_sub(CHECKPOINT_TRAILER_BYTES).ok_or_else(wrong)?;
    let (body, trailer) = bytes.split_at(at);
    let mut reader = Reader(trailer);
    if reader.array()? != *CHECKPOINT {
        return Err(wrong());
    }
    check_version(reader.u32()?)?;
    reader.u32()?;
    if reader.array()? != *incarnation {
        return Err(wrong());
    }
    read_entries(&mut Reader(body))
}

/// Writes the objects, then the entries, which refer to objects by index.
fn put_entries(out: &mut Writer, entries: &[MapEntry]) {
    let mut objects: Vec<(ObjectId, u32)> =
        entries.iter().filter_map(|entry| entry.place.map(|p| (p.id, p.blocks))).collect();
    objects.sort_unstable();
    objects.dedup();
    out.u32(objects.len() as u32);
    out.u32(entries.len() as u32);
    for (id, blocks) in &objects {
        put_id(out, id, *blocks);
    }
    for MapEntry { blocks, place } in entries {
        out.u64(blocks.start);
        out.u32((blocks.end - blocks.start) as u32);
        let number = |place: &ObjectRef| objects.partition_point(|object| *object < (place.id, place.blocks)) as u32;
        out.u32(place.as_ref().map_or(ZERO_OBJECT, number));
        out.u32(place.as_ref().map_or(0, |place| place.at));
    }
}

fn read_entries(reader: &mut Reader<'_>) -> Result<Vec<MapEntry>> {
    let wrong = || damaged("an impossible block map");
    let (objects, entries) = (reader.u32()? as usize, reader.u32()? as usize);
    let needed =
        objects.checked_mul(ID_BYTES).and_then(|bytes| entries.checked_mul(MAP_ENTRY_BYTES)?.checked_add(bytes));
    if needed != Some(reader.0.len()) {
        return Err(wrong());
    }
    let objects = (0..objects).map(|_| read_id(reader)).collect::<Result<Vec<_>>>()?;
    if objects.iter().any(|(id, blocks)| *blocks > MAX_BLOCKS || matches!(id, ObjectId::Checkpoint(_))) {
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
            ZERO_OBJECT => None,
            object => {
                let (id, blocks) = *objects.get(object as usize).ok_or_else(wrong)?;
                if at.checked_add(count).is_none_or(|end| end > blocks) {
                    return Err(wrong());
                }
                Some(ObjectRef { id, blocks, at })
            }
        };
        found.push(MapEntry { blocks: start..end, place });
    }
    Ok(found)
}

fn put_id(out: &mut Writer, id: &ObjectId, blocks: u32) {
    let mut number = [0; 32];
    let (kind, name) = match id {
        ObjectId::Log(sequence) => {
            number[..8].copy_from_slice(&sequence.to_le_bytes());
            (1, &number)
        }
        ObjectId::Segment(hash) => (2, hash),
        ObjectId::Checkpoint(hash) => (3, hash),
    };
    out.u32(kind);
    out.u32(blocks);
    out.bytes(name);
}

fn read_id(reader: &mut Reader<'_>) -> Result<(ObjectId, u32)> {
    let (kind, blocks, name) = (reader.u32()?, reader.u32()?, reader.array::<32>()?);
    let id = match kind {
        1 => ObjectId::Log(Reader(&name).u64()?),
        2 => ObjectId::Segment(name),
        3 => ObjectId::Checkpoint(name),
        _ => return Err(damaged("an object of an unknown kind")),
    };
    Ok((id, blocks))
}

fn check_version(version: u32) -> Result<()> {
    if version == VERSION {
        return Ok(());
    }
    Err(Error::Unsupported(format!("the bucket has version {version}, which this program does not support")))
}

/// Checks magic and hash and returns the bytes between them; the hash covers all bytes before it.
fn open_hashed<'a>(bytes: &'a [u8], magic: &[u8; 8], length: usize, kind: &str) -> Result<Reader<'a>> {
    let is_whole = bytes.len() == length
        && bytes.starts_with(magic)
        && *Sha256::digest(&bytes[..length - 32]) == bytes[length - 32..];
    if !is_whole {
        return Err(damaged(&format!("an invalid or truncated {kind}")));
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

    /// Appends the hash of the bytes and returns them.
    fn finish(mut self) -> Vec<u8> {
        let hash = Sha256::digest(&self.0);
        self.bytes(&hash);
        self.0
    }
}

struct Reader<'a>(&'a [u8]);

impl Reader<'_> {
    fn array<const N: usize>(&mut self) -> Result<[u8; N]> {
        let (first, rest) = self.0.split_first_chunk().ok_or_else(|| damaged("a truncated object"))?;
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
