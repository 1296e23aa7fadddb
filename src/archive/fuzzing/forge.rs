//! Creates archives that are authentic but invalid: records, nodes and pages of any content, sealed
//! under a known key.

// The tests with hostile archives use more of it than the fuzz targets.
#![cfg_attr(not(test), allow(dead_code))]

use std::ops::ControlFlow;
use std::sync::{Arc, OnceLock};

use super::super::create::name_key;
use crate::btree::{NodeStore, Tree};
use crate::crypto::SecretKey;
use crate::env::{Environment, SeededEnvironment};
use crate::error::Result;
use crate::format::header::{FEATURE_LOG, Framing};
use crate::format::log::{EntryHead, LogEntry, entry_blocks, entry_capacity};
use crate::format::node::{INTERNAL_ENTRY, LEAF_ENTRY, NODE_HEAD, put_key};
use crate::format::page::PageKind;
use crate::format::record::{CommitRecord, Root};
use crate::format::values::{Extent, InodeValue, SnapshotValue};
use crate::format::{
    ArchiveId, BLOCK, Generation, Key, LOG, MIN_BLOCKS, NODE_CAPACITY, Pointer, REGION_BLOCKS, RING_SLOTS, ROOT_INO,
    Run, Tag, Timestamp, TreeId, kind, slot_block, space,
};
use crate::frame::{PageCipher, PageContent, PlainPage};
use crate::fs::{Compression, Creator, FileSystem, FsOptions, SyncProfile, XattrMode, mode};
use crate::keys::header::{self, Header, empty_slots};
use crate::storage::{MemoryStorage, Storage};
use crate::txn::{OpenOptions, Volume};

/// Id of every archive created here.
pub(in crate::archive) const ARCHIVE: ArchiveId = [7; 16];
const KEY: [u8; 32] = [9; 32];
const OPTIONS: FsOptions =
    FsOptions { max_dirty_bytes: 4 << 20, sync: SyncProfile::Periodic, pack: true, compression: Compression::Default };
pub(in crate::archive) const OWNER: Creator = Creator { uid: 1000, gid: 1000, umask: None };
/// Memory of the layers below the file system, in bytes.
const MEMORY: u64 = 16 << 20;

/// Callback that changes the plain content of a page before it is sealed.
type PageEdit = Box<dyn FnMut(&mut PlainPage<'static>)>;
/// Callback that changes the plain bytes of the record before it is sealed.
type RecordEdit = Box<dyn FnOnce(&mut Vec<u8>)>;

/// Offsets and bytes to write there.
type Patches = Vec<(usize, Vec<u8>)>;

/// Log entry. It extends the record and names its predecessor, unless its head is patched.
#[derive(Default)]
pub(in crate::archive) struct ForgedEntry {
    pub(in crate::archive) says: LogEntry,
    /// Patches of head and body before they are sealed.
    pub(in crate::archive) on_head: Patches,
    pub(in crate::archive) on_body: Patches,
    /// First block, if not the one after the previous entry.
    pub(in crate::archive) block: Option<u64>,
    /// The body does not open.
    pub(in crate::archive) torn: bool,
}

/// Contents of an archive, to be edited and written again.
pub(in crate::archive) struct Forge {
    /// Records of each tree by number - 1, in the order in which they are written.
    pub(in crate::archive) trees: [Vec<(Key, Vec<u8>)>; 5],
    /// Counters as they will be published; roots, lists and the length of the file are filled in.
    pub(in crate::archive) record: CommitRecord,
    /// Bytes of entries in a leaf: a smaller number makes a deeper tree.
    pub(in crate::archive) leaf_bytes: usize,
    /// The space map is computed from the written pages.
    pub(in crate::archive) honest_space: bool,
    /// Additional record of an otherwise correct space map.
    pub(in crate::archive) more_space: Option<(Key, Vec<u8>)>,
    pub(in crate::archive) on_page: Option<PageEdit>,
    pub(in crate::archive) on_record: Option<RecordEdit>,
    /// Log entries after the record, for an archive with a log.
    pub(in crate::archive) entries: Vec<ForgedEntry>,
    base: Vec<u8>,
    next_block: u64,
    /// Pages sealed here, which the file has in addition to `base`.
    pages: Vec<(Run, Vec<u8>)>,
    cipher: PageCipher,
}

pub(in crate::archive) fn key() -> SecretKey {
    SecretKey::new(KEY)
}

/// Returns a storage with two header copies without key slots, with these incompatible features.
pub(in crate::archive) fn with_header(features: u64) -> Result<MemoryStorage> {
    let storage = MemoryStorage::new();
    storage.set_len(MIN_BLOCKS * BLOCK)?;
    let mut blocks = empty_slots();
    for block in blocks.iter_mut() {
        SeededEnvironment::new(5).fill_random(block)?;
    }
    let commitment = header::commitment(&key(), &ARCHIVE);
    let framing =
        Framing { copy: 0, features, archive: ARCHIVE, sequence: 1, commitment, slots: [0; 32], mac: [0; 32] };
    for copy in 0..2 {
        header::write_copy(&storage, &framing, &blocks, copy, &key())?;
    }
    Ok(storage)
}

/// Returns whether the header declares a log; false without a header.
fn has_log(storage: &dyn Storage) -> bool {
    Header::read(storage).is_ok_and(|header| header.framing().has_log())
}

/// Creates a file system on a storage that has a header.
pub(in crate::archive) fn create_on(storage: Arc<dyn Storage>, seed: u64) -> Result<Arc<FileSystem>> {
    let environment: Arc<dyn Environment> = Arc::new(SeededEnvironment::new(seed));
    let cipher = PageCipher::new(&key(), ARCHIVE, has_log(&*storage), environment.clone());
    let volume = Volume::create(storage, cipher, environment.clone(), 1)?;
    let fs = FileSystem::new(volume, environment, name_key(&key(), &ARCHIVE), OPTIONS)?;
    fs.format(OWNER)?;
    fs.sync()?;
    Ok(fs)
}

/// Opens a storage like `Archive::open`, without header check and lock.
pub(in crate::archive) fn open_on(storage: Arc<dyn Storage>, read_only: bool) -> Result<Arc<FileSystem>> {
    let environment: Arc<dyn Environment> = Arc::new(SeededEnvironment::new(storage.len()?));
    let cipher = PageCipher::new(&key(), ARCHIVE, has_log(&*storage), environment.clone());
    let options = OpenOptions { read_only, memory: MEMORY };
    let volume = Volume::open(storage, cipher, environment.clone(), 1, &options)?;
    let fs = FileSystem::new(volume, environment, name_key(&key(), &ARCHIVE), OPTIONS)?;
    fs.attributes(ROOT_INO)?;
    Ok(fs)
}

pub(in crate::archive) fn noise(seed: u64, length: usize) -> Vec<u8> {
    let random = SeededEnvironment::new(seed);
    (0..length).map(|_| random.next_u64() as u8).collect()
}

/// Returns a small archive with every kind of object and data page.
fn sample(features: u64) -> Result<Vec<u8>> {
    let storage = Arc::new(with_header(features)?);
    let fs = create_on(storage.clone(), 1)?;
    let put = |directory, name: &[u8], content: &[u8]| -> Result<_> {
        let ino = fs.make_node(directory, name, mode::REGULAR | 0o640, 0, OWNER)?.ino;
        fs.write(ino, 0, content)?;
        Ok(ino)
    };
    let directory = fs.make_directory(ROOT_INO, b"directory", 0o750, OWNER)?.ino;
    let inline = put(ROOT_INO, b"inline", b"a few bytes")?;
    for n in 0..3u64 {
        put(directory, format!("packed{n}").as_bytes(), &noise(n, 900 + 100 * n as usize))?;
    }
    let text = put(ROOT_INO, b"text", &b"all work and no play makes jack a dull boy\n".repeat(900))?;
    put(ROOT_INO, b"noise", &noise(99, 20_000))?;
    let sparse = put(directory, b"sparse", b"begin")?;
    fs.write(sparse, 400_000, b"end")?;
    fs.set_xattr(inline, b"user.short", b"value", XattrMode::Set)?;
    fs.set_xattr(text, b"user.long", &noise(7, 7000), XattrMode::Set)?;
    fs.make_symlink(directory, b"link", b"../noise", OWNER)?;
    fs.make_node(ROOT_INO, b"fifo", mode::FIFO | 0o600, 0, OWNER)?;
    fs.link(text, directory, b"text too")?;
    fs.close()?;
    Ok(storage.contents())
}

/// Records of an archive that was read once, for any number of forged ones.
struct Original {
    base: Vec<u8>,
    trees: [Vec<(Key, Vec<u8>)>; 5],
    /// The next record, of a closed session without lists.
    record: CommitRecord,
    has_log: bool,
}

impl Original {
    fn read(base: Vec<u8>) -> Result<Original> {
        let storage = Arc::new(MemoryStorage::from_contents(base.clone()));
        let has_log = has_log(&*storage);
        let fs = open_on(storage, true)?;
        let mut record = (*fs.volume.durable()).clone();
        let mut trees: [Vec<(Key, Vec<u8>)>; 5] = Default::default();
        let store: &NodeStore = fs.volume.store();
        for (id, records) in TreeId::ALL.into_iter().zip(&mut trees) {
            let tree = Tree::from_root(id, &record.roots[id]);
            tree.scan(store, Key::MIN, Key::MAX, &mut |key, value| {
                records.push((key, value.to_vec()));
                Ok(ControlFlow::Continue(()))
            })?;
        }
        record.generation = record.generation.next();
        record.checkpoint = record.generation;
        record.closed = true;
        record.two_barrier = false;
        (record.allocated, record.freed, record.delta_list) = Default::default();
        Ok(Original { base, trees, record, has_log })
    }
}

impl Forge {
    pub(in crate::archive) fn new() -> Forge {
        static SAMPLE: OnceLock<Original> = OnceLock::new();
        Forge::copy(SAMPLE.get_or_init(|| Original::read(sample(0).expect("the sample")).expect("the sample opens")))
    }

    /// Returns the contents of the sample archive with an empty log.
    pub(in crate::archive) fn with_log() -> Forge {
        static SAMPLE: OnceLock<Original> = OnceLock::new();
        Forge::copy(
            SAMPLE.get_or_init(|| Original::read(sample(FEATURE_LOG).expect("the sample")).expect("the sample opens")),
        )
    }

    pub(in crate::archive) fn of(base: Vec<u8>) -> Result<Forge> {
        Ok(Forge::copy(&Original::read(base)?))
    }

    fn copy(original: &Original) -> Forge {
        let Original { base, trees, record, has_log } = original;
        Forge {
            trees: trees.clone(),
            record: record.clone(),
            leaf_bytes: NODE_CAPACITY - NODE_HEAD,
            honest_space: true,
            more_space: None,
            on_page: None,
            on_record: None,
            entries: Vec::new(),
            base: base.clone(),
            next_block: base.len() as u64 / BLOCK,
            pages: Vec::new(),
            cipher: PageCipher::new(&key(), ARCHIVE, *has_log, Arc::new(SeededEnvironment::new(3))),
        }
    }

    pub(in crate::archive) fn live(&mut self) -> &mut Vec<(Key, Vec<u8>)> {
        &mut self.trees[0]
    }

    /// Returns the value of a record of the live tree.
    pub(in crate::archive) fn value(&mut self, key: Key) -> &mut Vec<u8> {
        &mut self.live().iter_mut().find(|(other, _)| *other == key).expect("the record is there").1
    }

    /// Inserts or replaces a record of a tree at its position.
    pub(in crate::archive) fn put(&mut self, tree: TreeId, key: Key, value: &[u8]) {
        let records = &mut self.trees[tree as usize - 1];
        match records.binary_search_by_key(&key, |(key, _)| *key) {
            Ok(at) => records[at].1 = value.to_vec(),
            Err(at) => records.insert(at, (key, value.to_vec())),
        }
    }

    pub(in crate::archive) fn remove(&mut self, key: Key) {
        self.live().retain(|(other, _)| *other != key);
    }

    pub(in crate::archive) fn inode(&mut self, ino: u64, change: impl FnOnce(&mut InodeValue)) {
        let value = self.value(Key::new(ino, kind::INODE, 0));
        let mut inode = InodeValue::decode(value).expect("an inode");
        change(&mut inode);
        *value = inode.encode().to_vec();
    }

    pub(in crate::archive) fn has_log(&self) -> bool {
        self.cipher.has_log()
    }

    /// Appends an empty entry of an unfinished session.
    pub(in crate::archive) fn entry(&mut self) -> &mut ForgedEntry {
        self.record.closed = false;
        let says = LogEntry { next_ino: self.record.next_ino, inodes: self.record.inodes, ..LogEntry::default() };
        self.entries.push(ForgedEntry { says, ..ForgedEntry::default() });
        self.entries.last_mut().expect("just pushed")
    }

    /// Removes all records from the ring except the forged one.
    pub(in crate::archive) fn only_record(&mut self) {
        for slot in 0..RING_SLOTS {
            self.base[(slot_block(slot) * BLOCK) as usize..][..BLOCK as usize].fill(0);
        }
    }

    /// Seals a page at the end of the file.
    pub(in crate::archive) fn page(&mut self, mut page: PlainPage<'static>) -> Pointer {
        if let Some(edit) = &mut self.on_page {
            edit(&mut page);
        }
        let run = Run::new(self.next_block, page.blocks().clamp(1, 64));
        self.next_block += run.blocks;
        let sealed = self.cipher.seal(&page, run, self.record.generation).expect("a page of its own length");
        self.pages.push((run, sealed.bytes));
        sealed.pointer
    }

    fn node(&mut self, tree: TreeId, level: u8, body: Vec<u8>) -> Pointer {
        let plain_length = body.len() as u32;
        let owner = tree as u64;
        let content = PageContent::Body(body);
        let kind = PageKind::Node;
        let page = PlainPage { kind, compressed: false, plain_length, owner, position: level.into(), content };
        self.page(page)
    }

    /// Writes a tree of these records, valid or not.
    fn tree(&mut self, tree: TreeId, records: &[(Key, Vec<u8>)]) -> Root {
        if records.is_empty() {
            return Root::default();
        }
        let mut groups: Vec<&[(Key, Vec<u8>)]> = Vec::new();
        let (mut start, mut held) = (0, 0);
        for (at, (_, value)) in records.iter().enumerate() {
            let bytes = LEAF_ENTRY + value.len();
            if at > start && held + bytes > self.leaf_bytes {
                groups.push(&records[start..at]);
                (start, held) = (at, 0);
            }
            held += bytes;
        }
        groups.push(&records[start..]);
        let mut level = 0;
        let lowers: Vec<Key> =
            groups.iter().enumerate().map(|(n, group)| if n == 0 { Key::MIN } else { group[0].0 }).collect();
        let mut children = Vec::new();
        for (n, group) in groups.iter().enumerate() {
            let upper = lowers.get(n + 1).copied().unwrap_or(Key::MAX);
            let mut body = node_head(tree, level, group.len(), lowers[n], upper);
            for (key, value) in *group {
                put_key(&mut body, *key);
                body.extend_from_slice(&(value.len() as u16).to_le_bytes());
                body.extend_from_slice(value);
            }
            children.push((lowers[n], self.node(tree, level, body)));
        }
        let fan = (self.leaf_bytes / INTERNAL_ENTRY).max(2);
        while children.len() > 1 {
            level += 1;
            let mut above = Vec::new();
            for (n, group) in children.chunks(fan).enumerate() {
                let upper = children.get((n + 1) * fan).map_or(Key::MAX, |(key, _)| *key);
                let mut body = node_head(tree, level, group.len(), group[0].0, upper);
                for (key, pointer) in group {
                    put_key(&mut body, *key);
                    body.extend_from_slice(&pointer.encode());
                }
                above.push((group[0].0, self.node(tree, level, body)));
            }
            children = above;
        }
        Root { pointer: children[0].1, level }
    }

    /// Writes a node of any content, for handmade roots and pointers.
    pub(in crate::archive) fn raw_node(
        &mut self,
        tree: TreeId,
        level: u8,
        fences: (Key, Key),
        children: &[(Key, Pointer)],
    ) -> Pointer {
        let mut body = node_head(tree, level, children.len(), fences.0, fences.1);
        for (key, pointer) in children {
            put_key(&mut body, *key);
            body.extend_from_slice(&pointer.encode());
        }
        self.node(tree, level, body)
    }

    /// Writes the live tree and returns its root, for handmade roots and snapshots.
    pub(in crate::archive) fn live_root(&mut self) -> Root {
        let records = self.trees[0].clone();
        self.tree(TreeId::Live, &records)
    }

    /// Writes everything but the space map and the record; given `roots` are kept.
    pub(in crate::archive) fn build(mut self, roots: [Option<Root>; 4]) -> Vec<u8> {
        for (id, given) in TreeId::ALL.into_iter().zip(roots) {
            let records = std::mem::take(&mut self.trees[id as usize - 1]);
            self.record.roots[id] = given.unwrap_or_else(|| self.tree(id, &records));
            self.trees[id as usize - 1] = records;
        }
        if self.honest_space {
            self.trees[4] = self.space_records();
            self.trees[4].extend(self.more_space.take());
        }
        let records = std::mem::take(&mut self.trees[4]);
        self.record.roots[TreeId::Space] = self.tree(TreeId::Space, &records);
        let mut out = self.base;
        out.resize((self.next_block * BLOCK) as usize, 0);
        for (run, bytes) in &self.pages {
            out[run.offset() as usize..][..bytes.len()].copy_from_slice(bytes);
        }
        self.record.total_blocks = self.next_block;
        let slot = self.record.generation.slot();
        let mut plain = self.record.encode();
        if let Some(edit) = self.on_record {
            edit(&mut plain);
        }
        let (sealed, tag) = self.cipher.seal_record(slot, plain).expect("a record");
        out[(slot_block(slot) * BLOCK) as usize..][..BLOCK as usize].copy_from_slice(&sealed);
        write_log(&mut out, &self.cipher, (self.record.generation, tag), &self.entries);
        out
    }

    /// Returns the space map records for all referenced and written pages, including the map's own
    /// leaf.
    fn space_records(&mut self) -> Vec<(Key, Vec<u8>)> {
        let mut runs: Vec<Run> = self.pages.iter().map(|(run, _)| *run).collect();
        runs.push(Run::new(self.next_block, 4));
        let extents = self.trees[0].iter().filter(|(key, _)| key.kind == kind::EXTENT);
        runs.extend(extents.filter_map(|(_, value)| Extent::decode(value).ok()).map(|extent| extent.page.run));
        let total = self.next_block + 4;
        let mut regions = vec![Box::new([0u64; space::REGION_WORDS]); total.div_ceil(REGION_BLOCKS) as usize];
        for block in runs.iter().filter(|run| run.end() <= total).flat_map(|run| run.address..run.end()) {
            let at = (block % REGION_BLOCKS) as usize;
            regions[(block / REGION_BLOCKS) as usize][at / 64] |= 1 << (at % 64);
        }
        self.record.used_blocks = regions.iter().flat_map(|bits| bits.iter()).map(|w| u64::from(w.count_ones())).sum();
        let value = |(n, bits): (usize, &space::RegionBits)| (Key::new(n as u64, kind::SPACE, 0), space::encode(bits));
        regions.iter().map(|bits| &**bits).enumerate().map(value).collect()
    }

    pub(in crate::archive) fn finish(self) -> Vec<u8> {
        self.build([None; 4])
    }

    /// Adds a snapshot record with this root and adjusts the counters.
    pub(in crate::archive) fn snapshot(&mut self, id: u64, root: Root, name: &[u8]) {
        let record = &mut self.record;
        record.next_snapshot = record.next_snapshot.max(id.saturating_add(1));
        if !name.is_empty() && id >= record.newest_snapshot_id {
            (record.newest_snapshot, record.newest_snapshot_id) = (record.generation, id);
        }
        let value = SnapshotValue {
            generation: self.record.generation,
            time: self.record.time,
            root,
            inodes: self.record.inodes,
            name: name.to_vec(),
        };
        self.put(TreeId::Snapshots, Key::new(id, kind::SNAPSHOT, 0), &value.encode());
    }

    /// Adds a snapshot record with a possibly invalid name.
    pub(in crate::archive) fn snapshot_bytes(&mut self, id: u64, name: &[u8]) {
        self.snapshot(id, Root::default(), b"");
        let records = &mut self.trees[TreeId::Snapshots as usize - 1];
        let value = &mut records.iter_mut().find(|(key, _)| key.object == id).expect("just put").1;
        *value.last_mut().expect("the length of the name") = name.len() as u8;
        value.extend_from_slice(name);
    }
}

/// Overwrites a part of `value`, truncating `bytes` at its end.
pub(super) fn overwrite(value: &mut [u8], at: usize, bytes: &[u8]) {
    if let Some(place) = value.get_mut(at..) {
        let length = place.len().min(bytes.len());
        place[..length].copy_from_slice(&bytes[..length]);
    }
}

/// Writes consecutive entries; parts outside of the log are dropped.
fn write_log(out: &mut [u8], cipher: &PageCipher, (generation, record): (Generation, Tag), entries: &[ForgedEntry]) {
    let (mut block, mut previous) = (LOG.0, Tag::default());
    for (number, forged) in (1..).zip(entries) {
        let mut body = forged.says.encode();
        forged.on_body.iter().for_each(|(at, bytes)| overwrite(&mut body, *at, bytes));
        let (length, blocks) = (body.len() as u32, entry_blocks(body.len()));
        let time = Timestamp::default();
        let head = EntryHead { generation, record, number, length, previous, time, blocks: blocks as u16 };
        let mut plain = head.encode();
        forged.on_head.iter().for_each(|(at, bytes)| overwrite(&mut plain, *at, bytes));
        block = forged.block.unwrap_or(block);
        let sealed =
            cipher.seal_entry_parts(&plain, block, &body, entry_capacity(blocks)).expect("an archive with a log");
        let mut bytes = sealed.bytes;
        if let Some(last) = bytes.last_mut() {
            *last ^= u8::from(forged.torn);
        }
        if (LOG.0..LOG.1).contains(&block) {
            overwrite(&mut out[..(LOG.1 * BLOCK) as usize], (block * BLOCK) as usize, &bytes);
        }
        (block, previous) = (block + blocks, sealed.tag);
    }
}

fn node_head(tree: TreeId, level: u8, count: usize, lower: Key, upper: Key) -> Vec<u8> {
    let mut out = vec![level, tree as u8];
    out.extend_from_slice(&(count as u16).to_le_bytes());
    out.extend_from_slice(&[0; 4]);
    put_key(&mut out, lower);
    put_key(&mut out, upper);
    out
}
