//! Reference counts, dead lists, snapshots and history (section 8).

use super::directory::is_valid_name;
use crate::error::{Error, Result};
use crate::format::codec::{array_at, check_zero, exact_array, put, time_at, u32_at, u64_at};
use crate::format::ids::{Generation, MAX_PAGE_BLOCKS, Run, SessionId, Tag, Timestamp};
use crate::format::record::Root;

/// Reference count record of a run of blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReferenceValue {
    pub run_blocks: u32,
    pub count: u32,
}

impl ReferenceValue {
    pub fn encode(&self) -> [u8; 8] {
        let mut out = [0; 8];
        put(&mut out, 0, self.run_blocks.to_le_bytes());
        put(&mut out, 4, self.count.to_le_bytes());
        out
    }

    /// # Errors
    /// `Damaged` for another length, an empty run, or a count below 2, which no record has.
    pub fn decode(value: &[u8]) -> Result<ReferenceValue> {
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

/// Dead-list record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeadValue {
    pub run: Run,
    pub born: Generation,
}

impl DeadValue {
    pub fn encode(&self) -> [u8; 16] {
        let mut out = [0; 16];
        put(&mut out, 0, self.run.pack().to_le_bytes());
        put(&mut out, 8, self.born.0.to_le_bytes());
        out
    }

    /// # Errors
    /// `Damaged` for another length or a run that no page can have.
    pub fn decode(value: &[u8]) -> Result<DeadValue> {
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
pub struct SnapshotValue {
    pub generation: Generation,
    pub time: Timestamp,
    pub root: Root,
    pub inodes: u64,
    pub name: Vec<u8>,
}

/// Bytes of a snapshot value before its name.
const SNAPSHOT_HEAD: usize = 73;

impl SnapshotValue {
    pub fn encode(&self) -> Vec<u8> {
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
    pub fn decode(value: &[u8]) -> Result<SnapshotValue> {
        let Some((head, name)) = value.split_first_chunk::<SNAPSHOT_HEAD>() else {
            return Err(Error::damaged("snapshot ends early"));
        };
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
pub struct HistoryValue {
    pub session: SessionId,
    pub last: Generation,
    pub last_tag: Tag,
}

impl HistoryValue {
    pub fn encode(&self) -> [u8; 40] {
        let mut out = [0; 40];
        put(&mut out, 0, self.session);
        put(&mut out, 16, self.last.0.to_le_bytes());
        put(&mut out, 24, self.last_tag);
        out
    }

    /// # Errors
    /// `Damaged` for another length.
    pub fn decode(value: &[u8]) -> Result<HistoryValue> {
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
    use proptest::prelude::*;

    use super::*;
    use crate::format::strategies::{mutated, name, noise, pointer, run, time};

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
