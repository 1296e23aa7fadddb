//! Commit ring: reads, writes and scrubs the slots of commit records.

use super::Pager;
use crate::env::Environment;
use crate::error::{Error, Result};
use crate::format::record::{CommitRecord, RECORD_PLAIN};
use crate::format::{BLOCK, RING_SLOTS, Tag, slot_block};

/// Record that was decrypted with the commit key at its slot. Its pages are not verified yet.
#[derive(Clone, Debug)]
pub(crate) struct AuthenticRecord {
    pub(crate) record: CommitRecord,
    pub(crate) tag: Tag,
}

impl Pager {
    /// Returns all authentic records by ascending generation. Slots that do not decrypt are random,
    /// torn or foreign, and are skipped: a torn write cannot be mistaken for a record.
    ///
    /// # Errors
    /// `Io` when a slot cannot be read: a transient fault must not look like a missing record.
    /// `Damaged` for an authentic record that does not decode.
    pub(crate) fn read_ring(&self) -> Result<Vec<AuthenticRecord>> {
        let mut records = Vec::new();
        for slot in 0..RING_SLOTS {
            let mut bytes = vec![0; BLOCK as usize];
            self.storage.read_at(slot_block(slot) * BLOCK, &mut bytes)?;
            let Some((plain, tag)) = self.cipher.open_record(slot, &bytes) else { continue };
            let record = CommitRecord::decode(&plain)?;
            if record.generation.slot() != slot {
                return Err(Error::damaged(format!("commit record in a foreign slot: slot={slot}")));
            }
            records.push(AuthenticRecord { record, tag });
        }
        records.sort_by_key(|r| r.record.generation);
        Ok(records)
    }

    /// Seals a record and writes it into its slot. Any failure except `NoSpace` sets the sticky
    /// error.
    pub(crate) fn write_record(&self, record: &CommitRecord) -> Result<Tag> {
        let plain = record.encode();
        debug_assert_eq!(plain.len(), RECORD_PLAIN);
        let slot = record.generation.slot();
        let (bytes, tag) = self.cipher.seal_record(slot, plain)?;
        self.write(slot_block(slot) * BLOCK, &bytes, "writing a commit record")?;
        Ok(tag)
    }

    /// Overwrites a slot with random bytes.
    pub(crate) fn scrub_slot(&self, slot: u64, environment: &dyn Environment) -> Result<()> {
        self.erase_blocks(slot_block(slot), 1, environment, "scrubbing a commit slot")
    }
}
