//! End of the listing of each open directory, by handle.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;

const SHARDS: u64 = 16;

pub(crate) struct OpenDirectories {
    next: AtomicU64,
    shards: Vec<Mutex<HashMap<u64, u64>>>,
}

impl Default for OpenDirectories {
    fn default() -> OpenDirectories {
        OpenDirectories { next: AtomicU64::new(1), shards: (0..SHARDS).map(|_| Mutex::default()).collect() }
    }
}

impl OpenDirectories {
    fn shard(&self, handle: u64) -> &Mutex<HashMap<u64, u64>> {
        &self.shards[(handle % SHARDS) as usize]
    }

    /// Opens a listing that ends before `bound`.
    pub(crate) fn open(&self, bound: u64) -> u64 {
        let handle = self.next.fetch_add(1, Ordering::Relaxed);
        self.shard(handle).lock().insert(handle, bound);
        handle
    }

    pub(crate) fn bound(&self, handle: u64) -> Option<u64> {
        self.shard(handle).lock().get(&handle).copied()
    }

    /// Sets a new end: rewinddir(3) must see entries created since opendir(3).
    pub(crate) fn rewind(&self, handle: u64, bound: u64) {
        self.shard(handle).lock().insert(handle, bound);
    }

    pub(crate) fn close(&self, handle: u64) {
        self.shard(handle).lock().remove(&handle);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_handle_has_its_bound() {
        let directories = OpenDirectories::default();
        let (a, b) = (directories.open(10), directories.open(20));
        assert_eq!((directories.bound(a), directories.bound(b)), (Some(10), Some(20)));
        directories.rewind(a, 30);
        assert_eq!(directories.bound(a), Some(30));
        directories.close(a);
        assert_eq!(directories.bound(a), None);
    }
}
