//! Encoding of tree record values: inodes and extents (specification sections 7.1 and 7.2),
//! reference counts, dead lists, snapshots and history (section 8).

mod directory;

pub(crate) use directory::{IndexEntry, ListEntry, MAX_XATTR, XATTR_PIECE, XattrEntry};
pub(crate) use directory::{
    decode_index, decode_list, decode_xattrs, encode_index, encode_list, encode_xattrs, find_in_index, is_valid_name,
};

use super::ids::{
    Generation, Ino, MAX_DATA, MAX_INO, MAX_OFFSET, MAX_PAGE_BLOCKS, Pointer, Run, SessionId, Tag, Timestamp,
};
use super::record::Root;
use super::{array_at, check_zero, ends_early, exact_array, put, put_time, time_at, u32_at, u64_at};
use crate::error::{Error, Result};

/// `InodeValue::trim` of an inode without a trim offset.
pub(crate) const NO_TRIM: u64 = u64::MAX;

pub(crate) mod inode_flags {
    pub(crate) const HAS_XATTRS: u32 = 1;
    pub(crate) const NO_PACK: u32 = 2;
    pub(crate) const NO_COMPRESS: u32 = 4;
}

const KNOWN_FLAGS: u32 = inode_flags::HAS_XATTRS | inode_flags::NO_PACK | inode_flags::NO_COMPRESS;
const INODE_BYTES: usize = 144;

/// Inode value (section 7.1).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct InodeValue {
    pub(crate) mode: u32,
    pub(crate) uid: u32,
    pub(crate) gid: u32,
    pub(crate) links: u32,
    pub(crate) size: u64,
    pub(crate) bytes: u64,
    pub(crate) atime: Timestamp,
    pub(crate) mtime: Timestamp,
    pub(crate) ctime: Timestamp,
    pub(crate) btime: Timestamp,
    pub(crate) rdev: u32,
    pub(crate) flags: u32,
    pub(crate) parent: Ino,
    pub(crate) next_sequence: u64,
    pub(crate) trim: u64,
    pub(crate) next_piece: u32,
}

impl InodeValue {
    pub(crate) fn encode(&self) -> [u8; 144] {
        let mut out = [0; INODE_BYTES];
        put(&mut out, 0, self.mode.to_le_bytes());
        put(&mut out, 4, self.uid.to_le_bytes());
        put(&mut out, 8, self.gid.to_le_bytes());
        put(&mut out, 12, self.links.to_le_bytes());
        put(&mut out, 16, self.size.to_le_bytes());
        put(&mut out, 24, self.bytes.to_le_bytes());
        put_time(&mut out, 32, self.atime);
        put_time(&mut out, 44, self.mtime);
        put_time(&mut out, 56, self.ctime);
        put_time(&mut out, 68, self.btime);
        put(&mut out, 80, self.rdev.to_le_bytes());
        put(&mut out, 84, self.flags.to_le_bytes());
        put(&mut out, 88, self.parent.0.to_le_bytes());
        put(&mut out, 96, self.next_sequence.to_le_bytes());
        put(&mut out, 104, self.trim.to_le_bytes());
        put(&mut out, 112, self.next_piece.to_le_bytes());
        out
    }

    /// # Errors
    /// `Damaged` for another length, unknown flags, a size or parent out of bounds, or a time with
    /// a full second of nanoseconds.
    pub(crate) fn decode(value: &[u8]) -> Result<InodeValue> {
        let value: &[u8; INODE_BYTES] = exact_array(value, "inode")?;
        check_zero(&value[116..], "inode")?;
        let inode = InodeValue {
            mode: u32_at(value, 0),
            uid: u32_at(value, 4),
            gid: u32_at(value, 8),
            links: u32_at(value, 12),
            size: u64_at(value, 16),
            bytes: u64_at(value, 24),
            atime: time_at(value, 32, "inode")?,
            mtime: time_at(value, 44, "inode")?,
            ctime: time_at(value, 56, "inode")?,
            btime: time_at(value, 68, "inode")?,
            rdev: u32_at(value, 80),
            flags: u32_at(value, 84),
            parent: Ino(u64_at(value, 88)),
            next_sequence: u64_at(value, 96),
            trim: u64_at(value, 104),
            next_piece: u32_at(value, 112),
        };
        if inode.flags & !KNOWN_FLAGS != 0 {
            return Err(Error::damaged(format!("inode has unknown flags: {:#x}", inode.flags)));
        }
        if inode.size > MAX_OFFSET || inode.parent.0 > MAX_INO {
            return Err(Error::damaged(format!(
                "inode is out of bounds: size={} parent={}",
                inode.size, inode.parent.0
            )));
        }
        Ok(inode)
    }
}

const EXTENT_BYTES: usize = 56;

/// Extent value (section 7.2): part of a page that holds a range of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Extent {
    pub page: Pointer,
    pub start: u32,
    pub length: u32,
    pub born: Generation,
}

impl Extent {
    pub(crate) fn encode(&self) -> [u8; 56] {
        let mut out = [0; EXTENT_BYTES];
        put(&mut out, 0, self.page.encode());
        put(&mut out, 32, self.start.to_le_bytes());
        put(&mut out, 36, self.length.to_le_bytes());
        put(&mut out, 40, self.born.0.to_le_bytes());
        out
    }

    /// # Errors
    /// `Damaged` for another length, no page, or a part that is empty or exceeds the longest page.
    pub(crate) fn decode(value: &[u8]) -> Result<Extent> {
        let value: &[u8; EXTENT_BYTES] = exact_array(value, "extent")?;
        check_zero(&value[48..], "extent")?;
        let extent = Extent {
            page: Pointer::decode(&array_at(value, 0))?,
            start: u32_at(value, 32),
            length: u32_at(value, 36),
            born: Generation(u64_at(value, 40)),
        };
        if extent.page.is_null() {
            return Err(Error::damaged("extent has a null pointer"));
        }
        // The sum of two u32 fits into u64.
        if extent.length == 0 || u64::from(extent.start) + u64::from(extent.length) > MAX_DATA as u64 {
            return Err(Error::damaged(format!(
                "extent is out of bounds: start={} length={}",
                extent.start, extent.length
            )));
        }
        Ok(extent)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ReferenceValue {
    pub run_blocks: u32,
    pub count: u32,
}

impl ReferenceValue {
    pub(crate) fn encode(&self) -> [u8; 8] {
        let mut out = [0; 8];
        put(&mut out, 0, self.run_blocks.to_le_bytes());
        put(&mut out, 4, self.count.to_le_bytes());
        out
    }

    /// # Errors
    /// `Damaged` for another length, an empty run, or a count below 2, which no record has.
    pub(crate) fn decode(value: &[u8]) -> Result<ReferenceValue> {
        let value: &[u8; 8] = exact_array(value, "reference count")?;
        let reference = ReferenceValue { run_blocks: u32_at(value, 0), count: u32_at(value, 4) };
        if reference.run_blocks == 0 || reference.count < 2 {
            return Err(Error::damaged(format!(
                "reference count is out of bounds: blocks={} count={}",
                reference.run_blocks, reference.count
            )));
        }
        Ok(reference)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct DeadValue {
    pub run: Run,
    pub born: Generation,
}

impl DeadValue {
    pub(crate) fn encode(&self) -> [u8; 16] {
        let mut out = [0; 16];
        put(&mut out, 0, self.run.pack().to_le_bytes());
        put(&mut out, 8, self.born.0.to_le_bytes());
        out
    }

    /// # Errors
    /// `Damaged` for another length or a run that no page can have.
    pub(crate) fn decode(value: &[u8]) -> Result<DeadValue> {
        let value: &[u8; 16] = exact_array(value, "dead-list entry")?;
        let dead = DeadValue { run: Run::unpack(u64_at(value, 0)), born: Generation(u64_at(value, 8)) };
        if dead.run.blocks == 0 || dead.run.blocks > MAX_PAGE_BLOCKS {
            return Err(Error::damaged(format!("dead-list entry has a wrong run: blocks={}", dead.run.blocks)));
        }
        Ok(dead)
    }
}

/// Snapshot record. An empty name means that the snapshot is being destroyed and its tree must not
/// be read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct SnapshotValue {
    pub generation: Generation,
    pub time: Timestamp,
    pub root: Root,
    pub inodes: u64,
    pub name: Vec<u8>,
}

/// Bytes of a snapshot value before its name.
const SNAPSHOT_HEAD: usize = 73;

impl SnapshotValue {
    pub(crate) fn encode(&self) -> Vec<u8> {
        debug_assert!(self.name.is_empty() || is_valid_name(&self.name));
        let mut out = Vec::with_capacity(SNAPSHOT_HEAD + self.name.len());
        out.extend_from_slice(&self.generation.0.to_le_bytes());
        out.extend_from_slice(&self.time.seconds.to_le_bytes());
        out.extend_from_slice(&self.time.nanos.to_le_bytes());
        out.extend_from_slice(&[0; 4]);
        out.extend_from_slice(&self.root.encode());
        out.extend_from_slice(&self.inodes.to_le_bytes());
        out.push(self.name.len() as u8);
        out.extend_from_slice(&self.name);
        out
    }

    /// # Errors
    /// `Damaged` for a wrong length, non-zero flags, or a name that no directory entry can have.
    pub(crate) fn decode(value: &[u8]) -> Result<SnapshotValue> {
        let (head, name) = value.split_first_chunk::<SNAPSHOT_HEAD>().ok_or_else(|| ends_early("snapshot"))?;
        check_zero(&head[20..24], "snapshot")?;
        if usize::from(head[72]) != name.len() || !(name.is_empty() || is_valid_name(name)) {
            return Err(Error::damaged(format!("snapshot has a wrong name: length={} bytes={}", head[72], name.len())));
        }
        Ok(SnapshotValue {
            generation: Generation(u64_at(head, 0)),
            time: time_at(head, 8, "snapshot")?,
            root: Root::decode(&array_at(head, 24))?,
            inodes: u64_at(head, 64),
            name: name.to_vec(),
        })
    }
}

/// History record of one ended session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct HistoryValue {
    pub session: SessionId,
    pub last: Generation,
    pub last_tag: Tag,
}

impl HistoryValue {
    pub(crate) fn encode(&self) -> [u8; 40] {
        let mut out = [0; 40];
        put(&mut out, 0, self.session);
        put(&mut out, 16, self.last.0.to_le_bytes());
        put(&mut out, 24, self.last_tag);
        out
    }

    /// # Errors
    /// `Damaged` for another length.
    pub(crate) fn decode(value: &[u8]) -> Result<HistoryValue> {
        let value: &[u8; 40] = exact_array(value, "history")?;
        Ok(HistoryValue {
            session: array_at(value, 0),
            last: Generation(u64_at(value, 16)),
            last_tag: array_at(value, 24),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::ids::Run;
    use crate::format::tests::{mutated, name, noise, pointer, run, time};
    use proptest::prelude::*;

    fn changed(at: usize, bytes: &[u8]) -> Result<InodeValue> {
        let mut value = InodeValue { trim: NO_TRIM, ..InodeValue::default() }.encode();
        value[at..at + bytes.len()].copy_from_slice(bytes);
        InodeValue::decode(&value)
    }

    #[test]
    fn reserved_bytes_and_unknown_flags_of_an_inode_are_refused() {
        for (at, value) in [(84, 8), (87, 1), (116, 1), (143, 1)] {
            assert!(matches!(changed(at, &[value]), Err(Error::Damaged(_))), "at={at}");
        }
    }

    #[test]
    fn bounds_of_an_inode_are_checked() {
        assert!(changed(16, &MAX_OFFSET.to_le_bytes()).is_ok());
        assert!(changed(16, &(MAX_OFFSET + 1).to_le_bytes()).is_err());
        assert!(changed(88, &(MAX_INO + 1).to_le_bytes()).is_err());
        for at in [40, 52, 64, 76] {
            assert!(changed(at, &1_000_000_000u32.to_le_bytes()).is_err(), "at={at}");
        }
        assert!(InodeValue::decode(&[0; 143]).is_err() && InodeValue::decode(&[0; 145]).is_err());
    }

    proptest! {
        #[test]
        fn inodes_round_trip(words in any::<[u32; 6]>(), longs in any::<[u64; 4]>(), size in 0..=MAX_OFFSET,
                             times in (time(), time(), time(), time()), flags in 0..8u32, parent in 0..=MAX_INO) {
            let inode = InodeValue {
                mode: words[0], uid: words[1], gid: words[2], links: words[3], size, bytes: longs[0],
                atime: times.0, mtime: times.1, ctime: times.2, btime: times.3, rdev: words[4], flags,
                parent: Ino(parent), next_sequence: longs[1], trim: longs[2], next_piece: words[5],
            };
            prop_assert_eq!(InodeValue::decode(&inode.encode()).unwrap(), inode);
        }

        #[test]
        fn no_inode_value_panics(bytes in noise(150), damaged in mutated(InodeValue::default().encode().to_vec())) {
            let _ = InodeValue::decode(&bytes);
            let _ = InodeValue::decode(&damaged);
        }
    }

    fn extent() -> Extent {
        let page = Pointer { run: Run::new(500, 33), generation: Generation(3), tag: [4; 16] };
        Extent { page, start: 0, length: 131_072, born: Generation(5) }
    }

    fn refused(extent: Extent) -> bool {
        matches!(Extent::decode(&extent.encode()), Err(Error::Damaged(_)))
    }

    #[test]
    fn an_extent_names_bytes_of_a_page() {
        assert_eq!(Extent::decode(&extent().encode()).unwrap(), extent());
        assert!(refused(Extent { page: Pointer::NULL, ..extent() }));
        assert!(refused(Extent { length: 0, ..extent() }));
        assert!(refused(Extent { start: 1, ..extent() }));
        assert!(refused(Extent { start: u32::MAX, length: u32::MAX, ..extent() }));
    }

    #[test]
    fn reserved_bytes_of_an_extent_are_zero() {
        for at in [48, 55] {
            let mut value = extent().encode();
            value[at] = 1;
            assert!(Extent::decode(&value).is_err(), "at={at}");
        }
        assert!(Extent::decode(&extent().encode()[..55]).is_err());
    }

    proptest! {
        #[test]
        fn extents_round_trip(page in pointer(), start in 0..131_072u32, length in 1..=131_072u32, born in any::<u64>()) {
            let extent = Extent { page, start, length: length.min(131_072 - start), born: Generation(born) };
            prop_assert_eq!(Extent::decode(&extent.encode()).unwrap(), extent);
        }

        #[test]
        fn no_extent_value_panics(bytes in noise(60), damaged in mutated(extent().encode().to_vec())) {
            let _ = Extent::decode(&bytes);
            let _ = Extent::decode(&damaged);
        }
    }

    fn snapshot() -> SnapshotValue {
        SnapshotValue {
            generation: Generation(9),
            time: Timestamp::default(),
            root: Root::default(),
            inodes: 3,
            name: b"before".to_vec(),
        }
    }

    #[test]
    fn a_reference_record_counts_at_least_two() {
        for (run_blocks, count, good) in [(1, 2, true), (1, 1, false), (1, 0, false), (0, 2, false)] {
            let value = ReferenceValue { run_blocks, count }.encode();
            assert_eq!(ReferenceValue::decode(&value).is_ok(), good, "{run_blocks} {count}");
        }
        assert!(ReferenceValue::decode(&[1; 9]).is_err());
    }

    #[test]
    fn a_dead_list_entry_names_a_page() {
        for (blocks, good) in [(1, true), (64, true), (0, false), (65, false)] {
            let value = DeadValue { run: Run::new(70, blocks), born: Generation(1) }.encode();
            assert_eq!(DeadValue::decode(&value).is_ok(), good, "blocks={blocks}");
        }
    }

    #[test]
    fn a_snapshot_has_a_name_and_no_flags() {
        let good = snapshot().encode();
        assert_eq!(SnapshotValue::decode(&good).unwrap(), snapshot());
        for (at, value) in [(20, 1), (23, 1), (57, 1), (72, 5), (72, 7), (73, 0), (73, b'/')] {
            let mut bytes = good.clone();
            bytes[at] = value;
            assert!(SnapshotValue::decode(&bytes).is_err(), "at={at}");
        }
        assert!(SnapshotValue::decode(&good[..73]).is_err());
    }

    proptest! {
        #[test]
        fn global_values_round_trip(
            counts in (1..u32::MAX, 2..u32::MAX), run in run(), longs in any::<[u64; 3]>(), time in time(),
            root in (pointer(), 0..16u8), name in name(), ids in any::<[[u8; 16]; 2]>(),
        ) {
            let reference = ReferenceValue { run_blocks: counts.0, count: counts.1 };
            prop_assert_eq!(ReferenceValue::decode(&reference.encode()).unwrap(), reference);
            let dead = DeadValue { run, born: Generation(longs[0]) };
            prop_assert_eq!(DeadValue::decode(&dead.encode()).unwrap(), dead);
            let root = Root { pointer: root.0, level: root.1 };
            let snapshot = SnapshotValue { generation: Generation(longs[1]), time, root, inodes: longs[2], name };
            prop_assert_eq!(SnapshotValue::decode(&snapshot.encode()).unwrap(), snapshot);
            let history = HistoryValue { session: ids[0], last: Generation(longs[0]), last_tag: ids[1] };
            prop_assert_eq!(HistoryValue::decode(&history.encode()).unwrap(), history);
        }

        #[test]
        fn no_input_panics(bytes in noise(120), damaged in mutated(snapshot().encode())) {
            for input in [&bytes, &damaged] {
                let _ = ReferenceValue::decode(input);
                let _ = DeadValue::decode(input);
                let _ = SnapshotValue::decode(input);
                let _ = HistoryValue::decode(input);
            }
        }
    }
}
