//! What writing the content of one volume into another needs: a volume that goes on from it, and pages that are framed already.

use std::ops::ControlFlow;
use std::sync::Arc;

use super::commit::Chain;
use super::references;
use super::{Operation, Reservation, Volume};
use crate::env::Environment;
use crate::error::{Error, Result};
use crate::format::record::CommitRecord;
use crate::format::{BLOCK, Generation, Key, MIN_BLOCKS, Pointer};
use crate::frame::{PageCipher, PlainPage};
use crate::storage::Storage;

/// Room asked for beyond a page when free space is in fragments: 1 MiB, what a file grows by at least.
const ROOM: u64 = 1 << 20;
/// So often, which is more than a file's growth can be in fragments.
const ROOM_ATTEMPTS: usize = 32;

impl Volume {
    /// Makes an empty volume in `storage` that goes on from the newest commit of `from`: generations, inode
    /// numbers and the history of sessions continue, and its first record names that of `from`. `header_sequence` is the number of its headers,
    /// `inodes` is what will be put into it.
    pub(crate) fn continue_from(
        from: &Volume,
        storage: Arc<dyn Storage>,
        cipher: PageCipher,
        environment: Arc<dyn Environment>,
        header_sequence: u64,
        inodes: u64,
    ) -> Result<Arc<Volume>> {
        let old = from.durable();
        let record = CommitRecord {
            next_ino: old.next_ino,
            inodes,
            next_dead: old.next_dead,
            next_snapshot: old.next_snapshot,
            total_blocks: storage.len()?.max(MIN_BLOCKS * BLOCK) / BLOCK,
            ..CommitRecord::default()
        };
        let next = Generation(from.open_generation.load(std::sync::atomic::Ordering::Acquire));
        let volume = Volume::begin(storage, cipher, environment, header_sequence, record, next)?;
        let before = from.commits.lock().chain.clone();
        volume.commits.lock().chain =
            Chain { tag: before.tag, previous_session: before.previous_session, ..Chain::default() };
        Ok(volume)
    }

    /// How many extents (and dead-list entries) name the page at this pointer.
    pub(crate) fn count_of_page(&self, page: &Pointer) -> Result<u64> {
        references::count(&self.state().trees.references, &self.store, page.run.address)
    }

    /// Every record of the history.
    pub(crate) fn history(&self) -> Result<Vec<(Key, Vec<u8>)>> {
        let mut records = Vec::new();
        self.state().trees.history.scan(&self.store, Key::MIN, Key::MAX, &mut |key, value| {
            records.push((key, value.to_vec()));
            Ok(ControlFlow::Continue(()))
        })?;
        Ok(records)
    }

    /// Seals and writes a framed page of file data; the caller names it in an operation (`adopt`).
    pub(crate) fn write_framed(&self, page: &PlainPage) -> Result<Pointer> {
        let mut room = self.reserve_data(page.blocks() * BLOCK, 0)?;
        // Held together, or the same fragments would be promised again and again.
        let mut more: Vec<Reservation> = Vec::new();
        for _ in 0..ROOM_ATTEMPTS {
            if let Some(run) = self.allocate(page.blocks(), &mut room)? {
                return self.seal_and_write(page, run);
            }
            more.push(self.reserve_data(ROOM, 0)?);
        }
        Err(Error::NoSpace("the free space of the new file is in fragments".into()))
    }
}

impl Operation<'_> {
    /// Puts a record of another volume's history into this one's.
    pub(crate) fn insert_history(&mut self, key: Key, value: &[u8]) -> Result<()> {
        self.changed = true;
        self.trees.history.insert(self.volume.store(), &mut self.global_edits, key, value)?;
        Ok(())
    }
}
