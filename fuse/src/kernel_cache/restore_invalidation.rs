//! Invalidation for a restore, which creates files without requests of the kernel (KERNEL-11).

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::sync::atomic::Ordering;

use fuser::INodeNo;
use lockbox::format::Ino;
use lockbox::{Error, Result};

use super::KernelCache;

impl KernelCache {
    /// Hides the content of this directory from the kernel, and shows the directory that was hidden
    /// before.
    pub(crate) fn hide_directory(&self, directory: Ino) {
        self.hidden.store(directory.0, Ordering::SeqCst);
    }

    /// # Errors
    /// `PermissionDenied` for the hidden directory.
    pub(crate) fn check_visible(&self, directory: INodeNo) -> Result<()> {
        if self.hidden.load(Ordering::SeqCst) == directory.0 { Err(Error::PermissionDenied) } else { Ok(()) }
    }

    /// Makes the kernel drop a name, existing or missing. No other thread may create, remove or
    /// rename it meanwhile. Not to be called from an event loop: the kernel may hold the
    /// directory's lock for a request that waits for us.
    pub(crate) fn invalidate_name(&self, directory: Ino, name: &[u8]) {
        if let Some(notifier) = self.notifier.get() {
            // The kernel may not know the directory or the name.
            let _ = notifier.inval_entry(INodeNo(directory.0), OsStr::from_bytes(name));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_directory_is_hidden_and_at_first_none() {
        let cache = KernelCache::default();
        let is_open = |ino| cache.check_visible(INodeNo(ino)).is_ok();
        assert!(is_open(1) && is_open(7) && is_open(9));
        cache.hide_directory(Ino(7));
        assert!(is_open(1) && !is_open(7));
        cache.hide_directory(Ino(9));
        assert!(is_open(7) && !is_open(9), "it is deleted by then");
    }
}
