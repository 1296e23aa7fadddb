//! Commit ring and log area: reads, writes and erases sealed records and log entries (specification
//! 9, 10.4).

use super::Pager;
use crate::env::Environment;
use crate::error::{Error, Result, Timestamp};
use crate::format::log::{EntryHead, LOG_BLOCKS, LogEntry, LogMark};
use crate::format::record::{CommitRecord, RECORD_PLAIN};
use crate::format::{BLOCK, Generation, LOG, RING_SLOTS, Tag, slot_block};
use crate::frame::EntryStart;

/// Record that was decrypted with the commit key at its slot. Its pages are not verified yet.
#[derive(Clone, Debug)]
pub(crate) struct AuthenticRecord {
    pub(crate) record: CommitRecord,
    pub(crate) tag: Tag,
}

/// Chain of log entries that extend one record, from the first up to the first gap.
#[derive(Debug, Default)]
pub(crate) struct LogChain {
    pub(crate) entries: Vec<LogEntry>,
    /// Tags of `entries`, in the same order.
    pub(crate) tags: Vec<Tag>,
    /// Position after the last entry.
    pub(crate) last: Option<LogMark>,
    /// Set when the log has any entry of this record, complete or torn: then the record was
    /// durable.
    pub(crate) has_entries: bool,
    /// Number and time of the entry after the chain when its head decrypts and its body does not:
    /// torn by a crash or damaged later.
    pub(crate) torn: Option<(u32, Timestamp)>,
    /// Description of a lost entry that a later one followed, or of a lost record that an entry
    /// extends.
    pub(crate) lost: Option<String>,
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

    /// Seals an entry and writes it at block `address`. The blocks hold no live entry. Any failure
    /// except `NoSpace` sets the sticky error.
    pub(crate) fn write_entry(&self, head: &EntryHead, address: u64, body: &[u8]) -> Result<Tag> {
        let sealed = self.cipher.seal_entry(head, address, body)?;
        self.write(address * BLOCK, &sealed.bytes, "writing an entry of the log")?;
        Ok(sealed.tag)
    }

    /// Overwrites blocks `start..end` of the log with random bytes.
    pub(crate) fn erase_log(&self, start: u64, end: u64, environment: &dyn Environment) -> Result<()> {
        debug_assert!(LOG.0 <= start && start <= end && end <= LOG.1);
        self.erase_blocks(start, end - start, environment, "erasing entries of the log")
    }

    /// Drops cached copies, so that the log is next read from the medium.
    pub(crate) fn evict_log(&self) -> Result<()> {
        self.storage.evict(LOG.0 * BLOCK, LOG_BLOCKS * BLOCK)
    }

    /// Returns whether any block of the log area starts an entry of this archive, of any record.
    /// The cipher must have a log key.
    pub(crate) fn has_entries(&self) -> Result<bool> {
        let mut bytes = vec![0; (LOG_BLOCKS * BLOCK) as usize];
        self.storage.read_at(LOG.0 * BLOCK, &mut bytes)?;
        for (address, block) in (LOG.0..LOG.1).zip(bytes.chunks(BLOCK as usize)) {
            if self.cipher.open_entry_head(address, block)?.is_some() {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Reads the entries that extend the record of this `generation` and tag, at most `most`.
    /// `newest` is the highest generation of any record.
    ///
    /// # Errors
    /// `Io` when the log cannot be read: a transient fault must not look like its end. `Damaged`
    /// for an authentic entry that does not decode.
    pub(crate) fn read_log(
        &self,
        generation: Generation,
        record: Tag,
        most: u32,
        newest: Generation,
    ) -> Result<LogChain> {
        let mut bytes = vec![0; (LOG_BLOCKS * BLOCK) as usize];
        self.storage.read_at(LOG.0 * BLOCK, &mut bytes)?;
        let block = |address: u64| &bytes[((address - LOG.0) * BLOCK) as usize..];
        let extends = |start: &EntryStart| start.head.generation == generation && start.head.record == record;
        let begin = |address: u64| self.cipher.open_entry_head(address, block(address));
        let mut log = LogChain::default();
        let (mut address, mut number, mut previous) = (LOG.0, 1, Tag::default());
        while address < LOG.1
            && number <= most
            && let Some(start) = begin(address)?.filter(extends)
            && (start.head.number, start.head.previous) == (number, previous)
        {
            let end = address + u64::from(start.head.blocks);
            let whole = block(address)[..((end - address) * BLOCK) as usize].to_vec();
            let Some((body, tag)) = self.cipher.open_entry_body(&start, address, whole)? else {
                log.torn = Some((number, start.head.time));
                break;
            };
            log.entries.push(LogEntry::decode(&body)?);
            log.tags.push(tag);
            log.last = Some(LogMark { generation, record, number, entry: tag });
            (address, number, previous) = (end, number + 1, tag);
        }
        // Includes blocks of the chain: a record may list a pending log that extends a missing
        // commit.
        for block in LOG.0..LOG.1 {
            let Some(start) = begin(block)? else { continue };
            let head = &start.head;
            log.has_entries |= extends(&start);
            if head.generation > newest {
                log.lost = Some(format!(
                    "commit {} is lost, although the log has an entry that extends it",
                    head.generation.0
                ));
            } else if block < address || !extends(&start) {
                continue;
            } else if most == 0 {
                log.lost =
                    Some(format!("the log has an entry behind the end of its session (commit {})", generation.0));
            } else if head.number > number && number <= most && log.lost.is_none() {
                // The next entry may have been torn before its fsync returned; a later one was only
                // written after that entry was durable.
                log.lost = Some(format!(
                    "entry {number} of the log is lost, although entry {} came after it (commit {})",
                    head.number, generation.0
                ));
            }
        }
        Ok(log)
    }
}
