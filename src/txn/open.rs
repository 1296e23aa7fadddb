//! Makes a new volume and opens an existing one.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU64};
use std::sync::{Arc, OnceLock};

use arc_swap::ArcSwap;
use parking_lot::{Condvar, Mutex};

use super::Mark;
use super::commit::{Chain, CommitState};
use super::partly::PartlyNamed;
use super::recovery::{self, new_session};
use super::state::{Epochs, State};
use super::volume::{OpenOptions, Volume, Writer};
use crate::btree::{NodeStore, Tree};
use crate::env::Environment;
use crate::error::{Error, Result};
use crate::format::record::CommitRecord;
use crate::format::{BLOCK, Generation, MAX_INO, MIN_BLOCKS, RING_SLOTS, TreeId};
use crate::frame::PageCipher;
use crate::pager::Pager;
use crate::pager::space::SpaceMap;
use crate::storage::Storage;

/// Memory while an archive is made: nothing is read back.
const CREATE_MEMORY: u64 = 16 << 20;

/// Inode numbers that a transaction can give out before it has to be committed, with room to spare: it brings in 16,384 pages at most, of
/// about 100 inodes each.
const INODES_OF_TRANSACTION: u64 = 1 << 22;

/// What create and open know before the volume exists.
struct Start {
    record: CommitRecord,
    next_generation: Generation,
    space: SpaceMap,
    fallback: Option<String>,
    read_only: bool,
    memory: u64,
    header_sequence: u64,
    line: Vec<Mark>,
}

impl Volume {
    /// Makes a new, empty volume in a storage whose headers are written: random ring slots, empty trees. Nothing is durable
    /// before the first `commit`.
    pub(crate) fn create(
        storage: Arc<dyn Storage>,
        cipher: PageCipher,
        environment: Arc<dyn Environment>,
        header_sequence: u64,
    ) -> Result<Arc<Volume>> {
        let length = storage.len()?.max(MIN_BLOCKS * BLOCK);
        let record = CommitRecord {
            next_ino: 1,
            next_dead: 1,
            next_snapshot: 1,
            total_blocks: length / BLOCK,
            ..CommitRecord::default()
        };
        Volume::begin(storage, cipher, environment, header_sequence, record, Generation(1))
    }

    /// An empty volume with the counters of `record`, whose first commit will be `next_generation`.
    pub(super) fn begin(
        storage: Arc<dyn Storage>,
        cipher: PageCipher,
        environment: Arc<dyn Environment>,
        header_sequence: u64,
        record: CommitRecord,
        next_generation: Generation,
    ) -> Result<Arc<Volume>> {
        let pager = Arc::new(Pager::new(storage, cipher, CREATE_MEMORY as usize / 4));
        if pager.storage().len()? < record.total_blocks * BLOCK {
            pager.storage().set_len(record.total_blocks * BLOCK)?;
        }
        for slot in 0..RING_SLOTS {
            pager.scrub_slot(slot, &*environment)?;
        }
        let start = Start {
            space: SpaceMap::new(record.total_blocks, 0, false),
            next_generation,
            record,
            fallback: None,
            read_only: false,
            memory: CREATE_MEMORY,
            header_sequence,
            line: Vec::new(),
        };
        let volume = Volume::assemble(pager, environment, start)?;
        volume.writer.lock().changed = true;
        Ok(Arc::new(volume))
    }

    /// Recovers (writable) or just reads (read-only) the newest trustworthy commit.
    ///
    /// # Errors
    /// `Damaged` naming what is missing, `ReadOnly` when a writable open meets a read-only storage.
    #[cfg_attr(not(test), allow(dead_code, reason = "programs remember what they saw"))]
    pub(crate) fn open(
        storage: Arc<dyn Storage>,
        cipher: PageCipher,
        environment: Arc<dyn Environment>,
        header_sequence: u64,
        options: &OpenOptions,
    ) -> Result<Arc<Volume>> {
        Volume::open_seen(storage, cipher, environment, header_sequence, options, None)
    }

    /// Like [`Volume::open`]; `seen` is remembered as durable, so recovery does not undo it (L2).
    pub(crate) fn open_seen(
        storage: Arc<dyn Storage>,
        cipher: PageCipher,
        environment: Arc<dyn Environment>,
        header_sequence: u64,
        options: &OpenOptions,
        seen: Option<&Mark>,
    ) -> Result<Arc<Volume>> {
        if storage.read_only() && !options.read_only {
            return Err(Error::ReadOnly("the archive's file cannot be written".into()));
        }
        let writable = !options.read_only;
        let pager = Arc::new(Pager::new(storage, cipher, (options.memory / 2) as usize));
        let recovered = recovery::choose(&pager, writable, &*environment, seen)?;
        let mut record = recovered.record.clone();
        if !record.closed {
            // Numbers of files that were lost with the last session must not come to mean others.
            let next = record.next_ino.saturating_add(INODES_OF_TRANSACTION).min(MAX_INO + 1);
            record.next_ino = record.next_ino.max(next);
        }
        let length = pager.storage().len()?;
        let total = record.total_blocks.min(length / BLOCK).max(MIN_BLOCKS);
        if writable && length > total * BLOCK {
            // Growth of a transaction that never committed, or a part of a block. The rejected slot was scrubbed behind a barrier before.
            pager.storage().set_len(total * BLOCK)?;
        }
        let start = Start {
            space: SpaceMap::new(total, record.used_blocks, !record.closed),
            next_generation: recovered.next_generation,
            fallback: recovered.fallback.clone(),
            read_only: options.read_only,
            memory: options.memory,
            line: recovered.line(),
            record,
            header_sequence,
        };
        let volume = Volume::assemble(pager, environment, start)?;
        let mut chain = Chain::default();
        let whole = recovered.restore_space(&volume, &mut chain)?;
        if !whole {
            tracing::warn!("the space map's chain of commit records is broken: it is rebuilt from the trees");
            match volume.rebuild_space(&mut chain) {
                // Readers need no space map, and what is whole must stay readable.
                Err(Error::Damaged(reason)) if !writable => tracing::warn!("{reason}"),
                rebuilt => rebuilt?,
            }
        }
        volume.commits.lock().chain = chain;
        Ok(Arc::new(volume))
    }

    fn assemble(pager: Arc<Pager>, environment: Arc<dyn Environment>, start: Start) -> Result<Volume> {
        let state = Arc::new(State::of_record(&start.record));
        let space_root = start.record.roots[TreeId::Space as usize - 1];
        Ok(Volume {
            store: NodeStore::new(pager.clone(), (start.memory / 4) as usize),
            session: new_session(&environment)?,
            environment,
            epochs: Epochs::new(&state),
            writer: Mutex::new(Writer {
                generation: start.next_generation,
                next_sequence: state.sequence + 1,
                born: HashMap::new(),
                freed: Vec::new(),
                superseded: Vec::new(),
                changed: false,
            }),
            published: ArcSwap::new(state),
            space: Arc::new(Mutex::new(start.space)),
            space_tree: ArcSwap::from_pointee(Tree::from_root(TreeId::Space, &space_root)),
            commits: Mutex::new(CommitState::default()),
            commit_done: Condvar::new(),
            commit_joined: Condvar::new(),
            durable: ArcSwap::from_pointee(start.record),
            flusher: OnceLock::new(),
            reclaimer: OnceLock::new(),
            shortage: Mutex::new(()),
            short: AtomicU64::new(0),
            erasing: Mutex::new(()),
            staged: AtomicBool::new(false),
            dirty_nodes: AtomicI64::new(0),
            list_entries: AtomicU64::new(0),
            unsynced: AtomicU64::new(0),
            early_barrier: Mutex::new(()),
            last_erase: Mutex::new(0),
            partly_named: PartlyNamed::default(),
            open_generation: AtomicU64::new(start.next_generation.0),
            header_sequence: start.header_sequence,
            read_only: start.read_only,
            fallback: start.fallback,
            line: start.line,
            memory: start.memory,
            pager,
        })
    }
}
