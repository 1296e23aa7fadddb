//! Whole objects for a check of all bytes: one request for an object serves both the reads of the
//! archive and the comparison with the hash in the object's name.
//!
//! # Invariants
//! WHOLE-1  A verdict is about all bytes of an object as the store sent them in one response.
//! WHOLE-2  An object that was received is not requested as a whole again. Reads of one that memory
//!     does not keep any more request their range, as without this cache.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use lru::LruCache;
use parking_lot::{Condvar, Mutex};
use sha2::{Digest, Sha256};

use super::layout::{self, BLOCK, Incarnation, MAX_BLOCKS, MAX_BODY, TRAILER_BYTES, Trailer};
use super::map::{ObjectId, ObjectRef};
use super::objects::{ObjectRange, object_path};
use super::store::BucketStore;

/// Maximum bytes of the objects in memory: seven segments, of which 20 MiB of prefetch span four,
/// or many records of small commits.
const CAPACITY: usize = 64 << 20;
/// Maximum length of a segment or a record; the runs of a segment take less than the body of a
/// record.
const MAX_OBJECT_BYTES: u64 = MAX_BLOCKS as u64 * BLOCK + MAX_BODY + TRAILER_BYTES as u64;

/// Objects of one archive that a check reads as a whole.
pub struct WholeObjects {
    state: Mutex<WholeState>,
    arrived: Condvar,
}

struct WholeState {
    objects: LruCache<ObjectId, Arc<Vec<u8>>>,
    /// Bytes of these objects.
    bytes: usize,
    in_flight: HashSet<ObjectId>,
    /// Result of the comparison of each received object with the hash in its name.
    verdicts: HashMap<ObjectId, bool>,
}

impl WholeObjects {
    pub(crate) fn new() -> WholeObjects {
        let state = WholeState {
            objects: LruCache::unbounded(),
            bytes: 0,
            in_flight: HashSet::new(),
            verdicts: HashMap::new(),
        };
        WholeObjects { state: Mutex::new(state), arrived: Condvar::new() }
    }

    /// Reads `length` bytes of an object's blocks; None where the caller has to request them.
    pub(super) fn read(
        &self,
        store: &BucketStore,
        incarnation: &Incarnation,
        place: &ObjectRef,
        length: u64,
    ) -> Option<Vec<u8>> {
        let object = self.object(store, incarnation, &place.id)?;
        let start = u64::from(place.at) * BLOCK;
        object.get(start as usize..(start + length) as usize).map(<[u8]>::to_vec)
    }

    /// Returns whether the content of an object matches its name; None for one that was not
    /// received as a whole.
    pub(super) fn verdict(&self, id: &ObjectId) -> Option<bool> {
        self.state.lock().verdicts.get(id).copied()
    }

    fn object(&self, store: &BucketStore, incarnation: &Incarnation, id: &ObjectId) -> Option<Arc<Vec<u8>>> {
        let mut state = self.state.lock();
        while state.in_flight.contains(id) {
            self.arrived.wait(&mut state);
        }
        if let Some(object) = state.objects.get(id) {
            return Some(object.clone());
        }
        if state.verdicts.contains_key(id) {
            return None;
        }
        state.in_flight.insert(*id);
        drop(state);
        // The request for the range reports a failure, and its repetition comes here again.
        let answer = store.objects.get(&object_path(incarnation, id), ObjectRange::All(MAX_OBJECT_BYTES));
        let object = answer.ok().map(Arc::new);
        let verdict = object.as_ref().map(|object| has_expected_content(incarnation, id, object));
        let state = &mut *self.state.lock();
        state.in_flight.remove(id);
        if let (Some(object), Some(verdict)) = (&object, verdict) {
            state.bytes += object.len();
            state.objects.put(*id, object.clone());
            while state.bytes > CAPACITY
                && let Some((_, oldest)) = state.objects.pop_lru()
            {
                state.bytes -= oldest.len();
            }
            state.verdicts.insert(*id, verdict);
        }
        self.arrived.notify_all();
        object
    }
}

/// Returns whether the bytes match the object's name.
pub(super) fn has_expected_content(incarnation: &Incarnation, id: &ObjectId, bytes: &[u8]) -> bool {
    match id {
        ObjectId::Segment(hash) | ObjectId::Checkpoint(hash) => *hash == *Sha256::digest(bytes),
        ObjectId::Log(number) => {
            let Some(at) = bytes.len().checked_sub(TRAILER_BYTES) else { return false };
            let Ok(trailer) = Trailer::decode(&bytes[at..], incarnation) else { return false };
            if trailer.sequence != *number || trailer.bytes() != bytes.len() as u64 {
                return false;
            }
            let (pages, body) = bytes[..at].split_at((u64::from(trailer.blocks) * BLOCK) as usize);
            trailer.pages_hash == *Sha256::digest(pages) && layout::decode_body(&trailer, body).is_ok()
        }
    }
}
