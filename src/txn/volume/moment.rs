//! Read-only volumes of a snapshot or a pinned version of an open archive.
//!
//! Such a volume uses the pages of that archive and has caches and a version of its own, which
//! never changes. It pins no version of the archive. A snapshot needs no pin: as long as it has its
//! name, neither its nodes nor the pages of its extents are freed (specification section 8).
//!
//! So the holder of the volume must prevent removal of the snapshot meanwhile. Where that cannot be
//! guaranteed, [`Operation::require_moment`] checks within the operation itself.

use std::sync::Arc;

use super::{Pinned, Start, Volume};
use crate::error::{Error, Result};
use crate::format::record::{CommitRecord, Roots};
use crate::format::values::SnapshotValue;
use crate::format::{Key, TreeId, kind};
use crate::pager::space::SpaceMap;
use crate::txn::commit::Session;
use crate::txn::operation::Operation;
use crate::txn::snapshot_list::is_being_removed;

/// Nodes that are read of it are kept in so many bytes, a quarter of this.
const MEMORY: u64 = 32 << 20;

impl Volume {
    /// The snapshot of this name as a volume that can only be read.
    ///
    /// # Errors
    /// `NotFound` when there is none of this name.
    pub(crate) fn moment(&self, name: &[u8]) -> Result<Arc<Volume>> {
        let (id, snapshot) = self.snapshot_named(name)?;
        let mut volume = self.beside(&snapshot);
        volume.moment = Some(id);
        Ok(Arc::new(volume))
    }

    /// Returns the pinned version as a read-only volume. The caller holds the pin as long as the
    /// volume is in use.
    pub(crate) fn pinned_moment(&self, pinned: &Pinned) -> Arc<Volume> {
        Arc::new(self.beside(pinned.content()))
    }

    fn beside(&self, snapshot: &SnapshotValue) -> Volume {
        let durable = self.durable();
        // The other trees are those of the archive, which go on changing: they are not used here.
        let mut roots = Roots::default();
        roots[TreeId::Live] = snapshot.root;
        let record = CommitRecord {
            generation: snapshot.generation,
            time: snapshot.time,
            closed: true,
            roots,
            next_ino: durable.next_ino,
            inodes: snapshot.inodes,
            total_blocks: durable.total_blocks,
            ..CommitRecord::default()
        };
        let pager = self.medium.pager.clone();
        let start = Start {
            // Nothing is allocated.
            space: SpaceMap::new(record.total_blocks, 0, false, pager.reserved()),
            next_generation: snapshot.generation.next(),
            record,
            fallback: None,
            lost: None,
            lost_pages: Vec::new(),
            memory: MEMORY,
            session: Session { id: durable.session, header_sequence: durable.header_sequence, read_only: true },
            line: Vec::new(),
            log: None,
        };
        Volume::assemble(pager, self.medium.environment.clone(), start)
    }

    /// Returns whether `other` has the same pages: both are views of one open archive.
    pub(crate) fn shares_pages_with(&self, other: &Volume) -> bool {
        Arc::ptr_eq(&self.medium.pager, &other.medium.pager)
    }
}

impl Operation<'_> {
    /// Checks, within this operation, that the snapshot that `moment` shows still has its name.
    ///
    /// # Errors
    /// `Stale` when it has not, or `moment` shows no snapshot.
    pub(crate) fn require_moment(&self, moment: &Volume) -> Result<()> {
        let id = moment.moment.ok_or(Error::Stale)?;
        let found = self.trees.snapshots.get(self.store, Key::new(id, kind::SNAPSHOT, 0), SnapshotValue::decode)?;
        if found.is_some_and(|snapshot| !is_being_removed(&snapshot)) { Ok(()) } else { Err(Error::Stale) }
    }
}
