//! Hostile archives, each created by one change of a valid one.

use super::super::super::fuzzing::Forge;
use crate::format::record::Root;
use crate::format::values::{
    DeadValue, Extent, HistoryValue, IndexEntry, InodeValue, XattrEntry, decode_index, encode_index, encode_xattrs,
};
use crate::format::{Generation, Ino, Key, Pointer, Run, TreeId, kind};
use crate::frame::{PageContent, PlainPage};
use crate::fs::mode;

/// Inodes of the sample, in order of creation.
pub(super) const ROOT: u64 = 1;
pub(super) const DIRECTORY: u64 = 2;
pub(super) const INLINE: u64 = 3;
pub(super) const TEXT: u64 = 7;
pub(super) const NOISE: u64 = 8;
pub(super) const LINK: u64 = 10;
pub(super) const MISSING: u64 = 40;

pub(super) struct Case {
    pub(super) name: String,
    /// The archive must be refused or reported; otherwise it only has to be tolerated.
    pub(super) refused: bool,
    pub(super) bytes: Vec<u8>,
}

/// Change of a value.
type Change = fn(&mut Vec<u8>);

#[derive(Default)]
pub(super) struct Cases(Vec<Case>);

impl Cases {
    pub(super) fn add(&mut self, name: impl Into<String>, refused: bool, change: impl FnOnce(&mut Forge)) {
        self.of(Forge::new(), name, refused, change);
    }

    /// Adds a case based on another sample.
    pub(super) fn of(
        &mut self,
        mut forge: Forge,
        name: impl Into<String>,
        refused: bool,
        change: impl FnOnce(&mut Forge),
    ) {
        change(&mut forge);
        self.0.push(Case { name: name.into(), refused, bytes: forge.finish() });
    }

    pub(super) fn bad(&mut self, name: impl Into<String>, change: impl FnOnce(&mut Forge)) {
        self.add(name, true, change);
    }

    fn bad_inode(&mut self, name: &str, ino: u64, change: impl FnOnce(&mut InodeValue)) {
        self.bad(name, |forge| forge.inode(ino, change));
    }

    pub(super) fn borne(&mut self, name: impl Into<String>, change: impl FnOnce(&mut Forge)) {
        self.add(name, false, change);
    }
}

pub(super) fn cases() -> Vec<Case> {
    let mut cases = Cases::default();
    names(&mut cases);
    values(&mut cases);
    inodes(&mut cases);
    directories(&mut cases);
    extents(&mut cases);
    nodes(&mut cases);
    trees(&mut cases);
    records(&mut cases);
    global(&mut cases);
    attributes(&mut cases);
    super::objects::add(&mut cases);
    super::contradictions::add(&mut cases);
    super::counters::add(&mut cases);
    super::logs::add(&mut cases);
    cases.0
}

/// Returns the first record of a kind.
pub(super) fn first(forge: &Forge, object: u64, kind: u8) -> Key {
    let found = forge.trees.iter().flatten().find(|(key, _)| key.kind == kind && key.object == object);
    found.unwrap_or_else(|| panic!("no record of kind {kind} of {object}")).0
}

fn list_value(name: &[u8], file_type: u8, ino: u64) -> Vec<u8> {
    [&[name.len() as u8, file_type], &ino.to_le_bytes()[..], name].concat()
}

fn index_value(name: &[u8], file_type: u8, sequence: u64, ino: u64) -> Vec<u8> {
    [&[name.len() as u8, file_type], &sequence.to_le_bytes()[..], &ino.to_le_bytes(), name].concat()
}

fn names(cases: &mut Cases) {
    let impossible: [&[u8]; 8] = [b"", b".", b"..", b"/", b"a/b", b"../escape", b"/tmp/escape", b"nul\0"];
    for name in impossible {
        let shown = String::from_utf8_lossy(name).into_owned();
        cases.bad(format!("name {shown:?} in the list"), |forge| {
            let key = first(forge, ROOT, kind::DIR_LIST);
            *forge.value(key) = list_value(name, 8, INLINE);
        });
        cases.bad(format!("name {shown:?} in the index"), |forge| {
            let key = first(forge, ROOT, kind::DIR_INDEX);
            *forge.value(key) = index_value(name, 8, 3, INLINE);
        });
    }
    cases.bad("a name of 256 bytes", |forge| {
        let key = first(forge, ROOT, kind::DIR_LIST);
        *forge.value(key) = [&list_value(&[], 8, INLINE)[..], &[b'a'; 256]].concat();
    });
    cases.bad("two entries of one name, a symbolic link and a directory", |forge| {
        let (key, value) =
            forge.live().iter().find(|(key, _)| key.kind == kind::DIR_LIST && key.object == ROOT).unwrap();
        let (mut key, name) = (*key, value[10..].to_vec());
        key.sub = 500;
        forge.put(TreeId::Live, key, &list_value(&name, 10, LINK));
    });
}

/// Values of every kind: truncated, extended, empty, and filled.
fn values(cases: &mut Cases) {
    let forge = Forge::new();
    let mut keys: Vec<(usize, Key)> = Vec::new();
    for (tree, records) in forge.trees.iter().enumerate().take(4) {
        for (key, _) in records {
            if !keys.iter().any(|(_, other)| other.kind == key.kind) {
                keys.push((tree, *key));
            }
        }
    }
    for (tree, key) in keys {
        let changes: [(&str, Change); 4] = [
            ("cut", |value| value.truncate(value.len().saturating_sub(1))),
            ("stretched", |value| value.push(0)),
            ("empty", Vec::clear),
            ("of ones", |value| value.fill(0xff)),
        ];
        for (what, change) in changes {
            if matches!((key.kind, what), (kind::INLINE, _) | (kind::XATTR_PIECE, "of ones")) {
                continue; // any bytes are right ones; lengths have cases of their own
            }
            cases.bad(format!("a value of kind {} {what}", key.kind), |forge| {
                change(&mut forge.trees[tree].iter_mut().find(|(other, _)| *other == key).unwrap().1);
            });
        }
    }
}

fn inodes(cases: &mut Cases) {
    cases.bad("a size of 2^63", |forge| {
        forge.value(Key::new(TEXT, kind::INODE, 0))[16..24].copy_from_slice(&(1u64 << 63).to_le_bytes());
    });
    cases.borne("a size of 2^63 - 1", |forge| forge.inode(NOISE, |inode| inode.size = i64::MAX as u64));
    for (name, links) in [("no links", 0), ("2^32 - 1 links", u32::MAX), ("a link too many", 9)] {
        cases.bad_inode(name, INLINE, |inode| inode.links = links);
    }
    for (name, file_mode) in [
        ("a mode without type", 0o644),
        ("an unknown type", 0o170_644),
        ("a file that says it is a directory", mode::DIRECTORY | 0o755),
        ("a file that says it is a link", mode::SYMLINK | 0o777),
        ("a file that says it is a device", mode::BLOCK | 0o666),
    ] {
        cases.bad_inode(name, INLINE, |inode| inode.mode = file_mode);
    }
    cases.bad_inode("a directory that says it is a file", DIRECTORY, |inode| inode.mode = mode::REGULAR | 0o644);
    cases.bad_inode("a root that is a file", ROOT, |inode| inode.mode = mode::REGULAR | 0o644);
    cases.bad_inode("2^64 - 1 bytes", TEXT, |inode| inode.bytes = u64::MAX);
    cases.bad_inode("no bytes", TEXT, |inode| inode.bytes = 0);
    cases.bad_inode("a directory of 2^62 entries", DIRECTORY, |inode| inode.size = 1 << 62);
    cases.bad_inode("a directory in itself", DIRECTORY, |inode| inode.parent = Ino(DIRECTORY));
    cases.bad_inode("a directory in a missing one", DIRECTORY, |inode| inode.parent = Ino(MISSING));
    cases.bad_inode("sequence numbers from the start", DIRECTORY, |inode| inode.next_sequence = 0);
    cases.borne("sequence numbers at the end", |forge| forge.inode(DIRECTORY, |inode| inode.next_sequence = u64::MAX));
    cases.borne("sequence numbers of the root at the end", |forge| {
        forge.inode(ROOT, |inode| inode.next_sequence = u64::MAX)
    });
    cases.borne("attribute pieces at the end", |forge| forge.inode(INLINE, |inode| inode.next_piece = u32::MAX));
    cases.bad_inode("a trim offset without record", NOISE, |inode| inode.trim = 4096);
    cases.bad_inode("unknown flags", INLINE, |inode| inode.flags = 0x80);
    cases.bad("a time of more than a second's nanoseconds", |forge| {
        forge.value(Key::new(INLINE, kind::INODE, 0))[40..44].fill(0xff);
    });
    cases.bad("no root directory", |forge| forge.remove(Key::new(ROOT, kind::INODE, 0)));
    cases.bad("an inode at the end of the numbers", |forge| {
        let value = forge.value(Key::new(INLINE, kind::INODE, 0)).clone();
        forge.put(TreeId::Live, Key::new(u64::MAX, kind::INODE, 0), &value);
    });
}

fn directories(cases: &mut Cases) {
    for (name, file_type, ino) in [
        ("an entry of a missing inode", 8, MISSING),
        ("an entry of inode 0", 8, 0),
        ("an entry beyond the inode numbers", 8, u64::MAX),
        ("an entry of another type", 4, INLINE),
        ("a hard link of a directory", 4, DIRECTORY),
        ("a loop to the root", 4, ROOT),
    ] {
        cases.bad(name, |forge| {
            forge.put(TreeId::Live, Key::new(ROOT, kind::DIR_LIST, 600), &list_value(b"more", file_type, ino));
        });
        cases.bad(format!("{name}, below"), |forge| {
            forge.put(TreeId::Live, Key::new(DIRECTORY, kind::DIR_LIST, 600), &list_value(b"more", file_type, ino));
        });
    }
    cases.bad("a directory in itself by an entry", |forge| {
        forge.put(TreeId::Live, Key::new(DIRECTORY, kind::DIR_LIST, 601), &list_value(b"self", 4, DIRECTORY));
    });
    for (name, gone) in [("no list", kind::DIR_LIST), ("no index", kind::DIR_INDEX)] {
        cases.bad(name, |forge| forge.live().retain(|(key, _)| key.kind != gone || key.object != ROOT));
    }
    cases.bad("index and list that name different inodes", |forge| {
        let key = first(forge, ROOT, kind::DIR_INDEX);
        let mut entries: Vec<IndexEntry> = decode_index(forge.value(key)).unwrap();
        entries[0].ino = Ino(NOISE + 1);
        *forge.value(key) = encode_index(&entries);
    });
    cases.bad("an index under a hash that is not the name's", |forge| {
        let at = forge.live().iter().position(|(key, _)| key.kind == kind::DIR_INDEX && key.object == ROOT).unwrap();
        forge.live()[at].0.sub ^= 1;
        forge.live().sort_by_key(|(key, _)| *key);
    });
    cases.bad("an entry at position 2^64 - 1", |forge| {
        forge.put(TreeId::Live, Key::new(ROOT, kind::DIR_LIST, u64::MAX), &list_value(b"last", 8, INLINE));
    });
    cases.bad("entries of a file", |forge| {
        forge.put(TreeId::Live, Key::new(NOISE, kind::DIR_LIST, 3), &list_value(b"in a file", 8, INLINE));
    });
}

fn bad_extent(cases: &mut Cases, name: &str, change: impl FnOnce(&mut Extent)) {
    cases.bad(name, |forge| {
        let key = first(forge, NOISE, kind::EXTENT);
        let mut extent = Extent::decode(forge.value(key)).unwrap();
        change(&mut extent);
        *forge.value(key) = extent.encode().to_vec();
    });
}

fn extents(cases: &mut Cases) {
    bad_extent(cases, "an extent of nothing", |extent| extent.length = 0);
    bad_extent(cases, "an extent beyond its page", |extent| extent.start += 10_000);
    bad_extent(cases, "an extent longer than any page", |extent| extent.length = u32::MAX);
    bad_extent(cases, "an extent from 2^32 - 1", |extent| extent.start = u32::MAX);
    bad_extent(cases, "an extent without page", |extent| extent.page = Pointer::NULL);
    bad_extent(cases, "an extent in the header", |extent| extent.page.run = Run::new(0, 5));
    bad_extent(cases, "an extent in the ring", |extent| extent.page.run = Run::new(353, 5));
    bad_extent(cases, "an extent behind the file", |extent| extent.page.run.address = 1 << 40);
    bad_extent(cases, "an extent at the end of all blocks", |extent| extent.page.run.address = (1 << 48) - 1);
    bad_extent(cases, "an extent of another generation", |extent| extent.page.generation = Generation(1 << 60));
    bad_extent(cases, "an extent with another tag", |extent| extent.page.tag = [1; 16]);
    bad_extent(cases, "an extent of a page of one block", |extent| extent.page.run.blocks = 1);
    bad_extent(cases, "an extent of 65,535 blocks", |extent| extent.page.run.blocks = 65_535);
    bad_extent(cases, "an extent born after the archive's end", |extent| extent.born = Generation(u64::MAX));
    cases.bad("extents that overlap", |forge| {
        let key = first(forge, NOISE, kind::EXTENT);
        let value = forge.value(key).clone();
        forge.put(TreeId::Live, Key { sub: key.sub + 10, ..key }, &value);
    });
    cases.bad("an extent that reaches beyond all offsets", |forge| {
        let key = first(forge, NOISE, kind::EXTENT);
        let value = forge.value(key).clone();
        forge.put(TreeId::Live, Key { sub: i64::MAX as u64 - 5, ..key }, &value);
    });
    cases.bad("an extent at offset 2^64 - 1", |forge| {
        let key = first(forge, NOISE, kind::EXTENT);
        let value = forge.value(key).clone();
        forge.put(TreeId::Live, Key { sub: u64::MAX, ..key }, &value);
    });
    cases.bad("extents of a directory", |forge| {
        let value = {
            let key = first(forge, NOISE, kind::EXTENT);
            forge.value(key).clone()
        };
        forge.put(TreeId::Live, Key::new(DIRECTORY, kind::EXTENT, 0), &value);
    });
    cases.bad("inline data and extents", |forge| {
        forge.put(TreeId::Live, Key::new(NOISE, kind::INLINE, 0), b"both");
    });
    cases.bad("inline data of 3,501 bytes", |forge| *forge.value(Key::new(INLINE, kind::INLINE, 0)) = vec![1; 3501]);
    cases.bad("inline data of 16,000 bytes", |forge| *forge.value(Key::new(INLINE, kind::INLINE, 0)) = vec![1; 16_000]);
    cases
        .bad("inline data of a directory", |forge| forge.put(TreeId::Live, Key::new(DIRECTORY, kind::INLINE, 0), b"x"));
    cases.bad("inline data of nobody", |forge| forge.put(TreeId::Live, Key::new(MISSING, kind::INLINE, 0), b"x"));
}

/// Changes the nodes of one tree and level before they are sealed.
fn bad_node(cases: &mut Cases, name: &str, mut change: impl FnMut(&mut PlainPage<'static>, &mut Vec<u8>) + 'static) {
    cases.bad(name, |forge| {
        forge.leaf_bytes = 900;
        let mut done = false;
        forge.on_page = Some(Box::new(move |page| {
            let mut body = match &mut page.content {
                PageContent::Body(body) if page.position == 1 && !done => std::mem::take(body),
                _ => return,
            };
            done = true;
            change(page, &mut body);
            page.content = PageContent::Body(body);
        }));
    });
}

fn put(body: &mut [u8], at: usize, bytes: &[u8]) {
    body[at..at + bytes.len()].copy_from_slice(bytes);
}

fn nodes(cases: &mut Cases) {
    bad_node(cases, "a lower fence that lies", |_, body| put(body, 8, &[5; 8]));
    bad_node(cases, "an upper fence that lies", |_, body| put(body, 25, &[0; 17]));
    bad_node(cases, "a level that lies", |_, body| body[0] = 7);
    bad_node(cases, "a level beyond all", |_, body| body[0] = 255);
    bad_node(cases, "a tree that lies", |_, body| body[1] = 3);
    bad_node(cases, "65,535 entries", |_, body| put(body, 2, &[0xff; 2]));
    bad_node(cases, "no entries", |_, body| put(body, 2, &[0; 2]));
    bad_node(cases, "a prologue of another level", |page, _| page.position = 2);
    bad_node(cases, "a prologue of another tree", |page, _| page.owner = 2);
    bad_node(cases, "a plain length of 2^32 - 1", |page, _| page.plain_length = u32::MAX);
    bad_node(cases, "two children that are one page", |_, body| body.copy_within(59..91, 108));
    bad_node(cases, "children out of order", |_, body| put(body, 91, &[0; 17]));
    bad_node(cases, "a child that is null", |_, body| put(body, 59, &[0; 32]));
    bad_node(cases, "a child in the header", |_, body| put(body, 59, &(4u64 << 48 | 3).to_le_bytes()));
    for (name, claimed) in
        [("a node that grows", 200u32), ("a node that shrinks", 16_280), ("a node of 4 GiB", u32::MAX)]
    {
        bad_node(cases, name, move |page, body| {
            *body = zstd::bulk::compress(&vec![0; 16_000], 1).unwrap();
            (page.compressed, page.plain_length) = (true, claimed);
        });
    }
    bad_node(cases, "a frame of gigabytes", |page, body| {
        // Content size 2^40 in the head of the frame, then one block of 128 KiB zeros, repeated.
        let mut frame = vec![0x28, 0xb5, 0x2f, 0xfd, 0xe0];
        frame.extend((1u64 << 40).to_le_bytes());
        for _ in 0..900 {
            frame.extend([0x02, 0x00, 0x10, 0x00]);
        }
        *body = frame;
        (page.compressed, page.plain_length) = (true, 16_000);
    });
    bad_node(cases, "a frame that wants a window of terabytes", |page, body| {
        *body = vec![0x28, 0xb5, 0x2f, 0xfd, 0x00, 0xff, 0x01, 0x00, 0x00];
        (page.compressed, page.plain_length) = (true, 16_000);
    });
    bad_node(cases, "a compressed node with bytes behind the frame", |page, body| {
        *body = [zstd::bulk::compress(body, 1).unwrap(), vec![1, 2, 3]].concat();
        page.compressed = true;
    });
}

fn trees(cases: &mut Cases) {
    let mut root = |name: &str, make: &dyn Fn(&mut Forge) -> Root| {
        let mut forge = Forge::new();
        let root = make(&mut forge);
        cases.0.push(Case { name: name.into(), refused: true, bytes: forge.build([Some(root), None, None, None]) });
    };
    root("a live tree without root", &|_| Root::default());
    root("a root of another level", &|forge| Root { level: 3, ..forge.live_root() });
    root("a root that is file data", &|forge| {
        let key = first(forge, NOISE, kind::EXTENT);
        Root { pointer: Extent::decode(forge.value(key)).unwrap().page, level: 0 }
    });
    root("a root of another generation", &|forge| {
        let root = forge.live_root();
        Root { pointer: Pointer { generation: Generation(1), ..root.pointer }, ..root }
    });
    root("a root behind the file", &|forge| {
        let mut root = forge.live_root();
        root.pointer.run.address = 1 << 30;
        root
    });
    root("a root in the header", &|forge| {
        let mut root = forge.live_root();
        root.pointer.run.address = 4;
        root
    });
    root("sixteen levels over nothing", &|forge| {
        let mut pointer = forge.raw_node(TreeId::Live, 0, (Key::MIN, Key::MAX), &[]);
        for level in 1..=15 {
            pointer = forge.raw_node(TreeId::Live, level, (Key::MIN, Key::MAX), &[(Key::MIN, pointer)]);
        }
        Root { pointer, level: 15 }
    });
    root("a tree of shared subtrees", &|forge| {
        // Each level references the one below 300 times: 300^15 leaves for a reader that does not
        // check fences.
        let mut pointer = forge.raw_node(TreeId::Live, 0, (Key::MIN, Key::MAX), &[]);
        for level in 1..=15 {
            let children: Vec<_> = (0..300).map(|n| (Key::new(n, 0, 0), pointer)).collect();
            pointer = forge.raw_node(TreeId::Live, level, (Key::MIN, Key::MAX), &children);
        }
        Root { pointer, level: 15 }
    });
    cases.bad("two records of one key", |forge| {
        let again = forge.live()[3].clone();
        forge.live().insert(3, again);
    });
    cases.bad("records out of order", |forge| forge.live().swap(4, 9));
    cases.bad("the greatest key as a record", |forge| forge.live().push((Key::MAX, vec![1])));
    // Readers skip a record at a foreign position, like one of an unknown kind; a check reports it.
    let strays = [
        (TreeId::Live, Key::new(INLINE, kind::INODE, 1)),
        (TreeId::Live, Key::new(INLINE, kind::INLINE, 1)),
        (TreeId::Live, Key::new(INLINE, kind::HISTORY, 0)),
        (TreeId::Live, Key::new(INLINE, kind::ORPHAN, 0)),
        (TreeId::References, Key::new(INLINE, kind::INODE, 0)),
        (TreeId::References, Key::new(1, kind::REFERENCE, 400)),
        (TreeId::Snapshots, Key::new(INLINE, kind::INODE, 0)),
        (TreeId::Snapshots, Key::new(1, kind::SNAPSHOT, 7)),
        (TreeId::History, Key::new(INLINE, kind::INODE, 0)),
        (TreeId::History, Key::new(7, kind::HISTORY, 1)),
    ];
    for (tree, key) in strays {
        cases.bad(format!("a record in a foreign place: {tree:?} {key:?}"), |forge| forge.put(tree, key, &[0; 144]));
    }
    cases.bad("a mark that has a value", |forge| {
        forge.put(TreeId::Live, Key::new(0, kind::TRIM, NOISE), b"value");
        forge.inode(NOISE, |inode| inode.trim = 1 << 40);
    });
    cases.borne("records of an unknown kind", |forge| {
        forge.put(TreeId::Live, Key::new(INLINE, 99, 0), b"for a later version");
    });
}

fn bad_record(cases: &mut Cases, name: &str, refused: bool, at: usize, bytes: &'static [u8]) {
    cases.add(name, refused, |forge| forge.on_record = Some(Box::new(move |plain| put(plain, at, bytes))));
}

fn records(cases: &mut Cases) {
    const MOST: &[u8] = &[0xff; 8];
    bad_record(cases, "a commit of another slot", true, 0, &[0x77]);
    bad_record(cases, "commit 2^64 - 1", true, 0, MOST);
    bad_record(cases, "commit 0", true, 0, &[0; 8]);
    bad_record(cases, "a session that begins after its commit", true, 40, MOST);
    bad_record(cases, "header sequence 2^64 - 1", false, 48, MOST);
    bad_record(cases, "a time of 2^32 nanoseconds", true, 64, &[0xff; 4]);
    bad_record(cases, "unknown flags of a commit", true, 68, &[0xf0]);
    bad_record(cases, "a root of level 200", true, 72 + 32, &[200]);
    bad_record(cases, "a root with a reserved byte", true, 72 + 39, &[1]);
    bad_record(cases, "the next inode beyond all", true, 272, MOST);
    bad_record(cases, "the next inode before the others", true, 272, &[2, 0, 0, 0, 0, 0, 0, 0]);
    bad_record(cases, "inodes in use beyond all", true, 280, MOST);
    bad_record(cases, "blocks in use beyond all", true, 288, MOST);
    bad_record(cases, "a file of 2^64 - 1 blocks", true, 296, MOST);
    bad_record(cases, "a file of 2^52 blocks", true, 296, &[0, 0, 0, 0, 0, 0, 0x10, 0]);
    bad_record(cases, "a file without blocks", true, 296, &[0; 8]);
    bad_record(cases, "the last dead-list entry", false, 304, MOST);
    bad_record(cases, "the last snapshot", false, 312, MOST);
    bad_record(cases, "a snapshot of the future", true, 320, MOST);
    bad_record(cases, "a newest snapshot that is not there", true, 336, MOST);
    bad_record(cases, "a checkpoint of the future", false, 328, MOST);
    bad_record(cases, "a checkpoint of the past", false, 328, &[1, 0, 0, 0, 0, 0, 0, 0]);
    bad_record(cases, "lists beyond the record", true, 376, &[0xff; 4]);
    bad_record(cases, "an allocated page that is empty", true, 376, &[1]);
    bad_record(cases, "a freed run that is empty", true, 378, &[1]);
    bad_record(cases, "a delta list in the ring", false, 344, &[34, 0, 0, 0, 0, 0, 1, 0, 1]);
    bad_record(cases, "a delta list behind the file", false, 344, &[0, 0, 0, 0, 1, 0, 1, 0, 1]);
    cases.borne("pages freed that are in use", |forge| {
        forge.record.freed = vec![Run::new(385, 20), Run::new(0, 65_535), Run::new((1 << 48) - 1, 65_535)];
    });
}

fn global(cases: &mut Cases) {
    let reference = |block: u64, blocks: u32, count: u32| {
        let value = [blocks.to_le_bytes(), count.to_le_bytes()].concat();
        (Key::new(0, kind::REFERENCE, block), value)
    };
    for (name, block, blocks, count) in [
        ("a count of 0", 390, 1, 0),
        ("a count of 1", 390, 1, 1),
        ("a count of 2^32 - 1", 390, 1, u32::MAX),
        ("counts of no block", 390, 0, 2),
        ("counts of 2^32 - 1 blocks", 390, u32::MAX, 2),
        ("counts at the end of all blocks", u64::MAX, u32::MAX, 2),
        ("counts of the header", 0, 33, 2),
    ] {
        cases.bad(name, |forge| {
            let (key, value) = reference(block, blocks, count);
            forge.put(TreeId::References, key, &value);
        });
    }
    cases.bad("counts that overlap", |forge| {
        for block in [390, 395] {
            let (key, value) = reference(block, 10, 3);
            forge.put(TreeId::References, key, &value);
        }
    });
    let dead = |run: Run| DeadValue { run, born: Generation(1) }.encode();
    cases.bad("a dead list without snapshot", |forge| {
        forge.put(TreeId::References, Key::new(5, kind::DEAD, 1), &dead(Run::new(400, 1)));
    });
    cases.bad("a dead page behind the file", |forge| {
        forge.put(TreeId::References, Key::new(5, kind::DEAD, 1), &dead(Run::new(1 << 47, 64)));
    });
    for (name, pointer) in [
        ("a snapshot whose root is in the header", Run::new(4, 4)),
        ("a snapshot whose root is behind the file", Run::new(1 << 40, 4)),
    ] {
        cases.bad(name, |forge| {
            let page = Pointer { run: pointer, generation: Generation(1), tag: [0; 16] };
            forge.snapshot(1, Root { pointer: page, level: 0 }, b"daily");
        });
    }
    cases.bad("a snapshot with a name that leads out", |forge| forge.snapshot_bytes(1, b"../out"));
    cases.bad("a snapshot of number 2^64 - 1", |forge| {
        let page = Pointer { run: Run::new(4, 4), generation: Generation(1), tag: [0; 16] };
        forge.snapshot(u64::MAX, Root { pointer: page, level: 15 }, b"");
    });
    for (name, session_first, last) in [
        ("a session that ends before it begins", 9, 2),
        ("a session of all commits", 1, u64::MAX),
        ("a session at the end", u64::MAX, u64::MAX),
    ] {
        cases.borne(name, |forge| {
            let value = HistoryValue { session: [1; 16], last: Generation(last), last_tag: [2; 16] };
            forge.put(TreeId::History, Key::new(0, kind::HISTORY, session_first), &value.encode());
        });
    }
    let space = |cases: &mut Cases, name: &str, region: u64, value: &[u8]| {
        cases.bad(name, |forge| {
            forge.honest_space = false;
            forge.trees[4] = vec![(Key::new(region, kind::SPACE, 0), value.to_vec())];
        });
    };
    space(cases, "nothing in use", 0, &[1, 0, 0]);
    space(cases, "everything in use", 0, &[1, 1, 0, 0, 0, 0, 0x20]);
    space(cases, "header and ring in use", 0, &[1, 1, 0, 0, 0, 65, 0]);
    space(cases, "a region at the end of all blocks", u64::MAX, &[1, 1, 0, 0, 0, 0, 0x20]);
    space(cases, "a region behind the file", 1 << 35, &[1, 1, 0, 0, 0, 0, 0x20]);
    space(cases, "a region of an unknown encoding", 0, &[2, 0, 0]);
}

fn attributes(cases: &mut Cases) {
    cases.bad("attribute pieces that are missing", |forge| {
        forge.live().retain(|(key, _)| key.kind != kind::XATTR_PIECE)
    });
    cases.bad("an attribute piece that is missing in the middle", |forge| {
        let key = first(forge, TEXT, kind::XATTR_PIECE);
        forge.remove(Key { sub: key.sub + 1, ..key });
    });
    cases.bad("an attribute piece that is too long", |forge| {
        let key = first(forge, TEXT, kind::XATTR_PIECE);
        forge.value(key).push(1);
    });
    cases.bad("attribute pieces of nobody", |forge| {
        forge.put(TreeId::Live, Key::new(INLINE, kind::XATTR_PIECE, 77 << 32), &[1; 3000]);
    });
    let xattr = |cases: &mut Cases, name: &str, entry: XattrEntry| {
        cases.bad(name, |forge| {
            let key = first(forge, INLINE, kind::XATTR);
            *forge.value(key) = raw_xattr(&entry);
        });
    };
    let entry = |name: &[u8], length: u32, piece: u32, value: &[u8]| XattrEntry {
        name: name.to_vec(),
        length,
        piece,
        value: value.to_vec(),
    };
    xattr(cases, "an attribute of 4 GiB", entry(b"user.short", u32::MAX, 1, b""));
    xattr(cases, "an attribute of 64 KiB without pieces", entry(b"user.short", 65_536, 3, b""));
    xattr(cases, "an attribute with a NUL in its name", entry(b"user.\0", 1, 0, b"x"));
    xattr(cases, "an attribute without a name", entry(b"", 1, 0, b"x"));
    xattr(cases, "an attribute under another name's hash", entry(b"user.other", 1, 0, b"x"));
    cases.bad("an attribute twice", |forge| {
        let key = first(forge, INLINE, kind::XATTR);
        let one = XattrEntry { name: b"user.short".to_vec(), length: 1, piece: 0, value: b"x".to_vec() };
        *forge.value(key) = encode_xattrs(&[one.clone(), one]);
    });
    cases.bad("a list that is none", |forge| {
        let key = first(forge, INLINE, kind::XATTR);
        *forge.value(key) = raw_xattr(&entry(b"system.posix_acl_access", 3, 0, b"abc"));
    });
    cases.bad("attributes that the inode denies", |forge| forge.inode(INLINE, |inode| inode.flags = 0));
    for (name, target) in
        [("a link to nothing", &b""[..]), ("a link with a NUL", b"a\0b"), ("a link of 3,501 bytes", &[b'a'; 3501])]
    {
        cases.bad(name, |forge| {
            *forge.value(Key::new(LINK, kind::INLINE, 0)) = target.to_vec();
            forge.inode(LINK, |inode| (inode.size, inode.bytes) = (target.len() as u64, target.len() as u64));
        });
    }
    cases.borne("a link out of every directory", |forge| {
        let target = b"/tmp/../../../../etc";
        *forge.value(Key::new(LINK, kind::INLINE, 0)) = target.to_vec();
        forge.inode(LINK, |inode| (inode.size, inode.bytes) = (target.len() as u64, target.len() as u64));
    });
    cases.bad("a link shorter than it says", |forge| forge.inode(LINK, |inode| inode.size = 4000));
    for (name, mark, ino) in [
        ("an orphan that has a name", kind::ORPHAN, INLINE),
        ("an orphan that is missing", kind::ORPHAN, MISSING),
        ("an orphan root", kind::ORPHAN, ROOT),
        ("an orphan at the end of the numbers", kind::ORPHAN, u64::MAX),
        ("a trim record without offset", kind::TRIM, NOISE),
        ("a trim record of nobody", kind::TRIM, MISSING),
        ("a trim record of a directory", kind::TRIM, DIRECTORY),
    ] {
        cases.bad(name, |forge| forge.put(TreeId::Live, Key::new(0, mark, ino), &[]));
    }
}

/// Encodes without the encoder's own checks.
fn raw_xattr(entry: &XattrEntry) -> Vec<u8> {
    let head = [entry.name.len() as u8, u8::from(entry.piece != 0)];
    [&head[..], &entry.length.to_le_bytes(), &entry.piece.to_le_bytes(), &entry.name, &entry.value].concat()
}
