//! Invalidates names whose operation failed but may have been published.
//!
//! With `sync=always` an operation is published first and committed then. If the commit fails the
//! caller gets the error, but the name exists, or is gone. The kernel caches names without expiry
//! and would keep the old state.

use std::ffi::OsStr;
use std::thread;

use fuser::INodeNo;
use lockbox::fs::SyncProfile;
use lockbox::{Error, Result};

use super::KernelCache;

impl KernelCache {
    /// Invalidates the names of a failed operation; call it before the reply. The kernel holds the
    /// directory's lock until the reply, so the invalidation runs in a thread: here it would
    /// deadlock.
    pub(crate) fn invalidate_uncertain_names<T>(
        &self,
        profile: SyncProfile,
        result: &Result<T>,
        names: &[(INodeNo, &OsStr)],
    ) {
        let Err(error) = result else { return };
        if !may_be_published(profile, error) {
            return;
        }
        let Some(notifier) = self.notifier.get().cloned() else { return };
        let names: Vec<_> = names.iter().map(|&(parent, name)| (parent, name.to_owned())).collect();
        let told = thread::Builder::new().name("names".into()).spawn(move || {
            for (parent, name) in names {
                // The kernel may not know the name.
                let _ = notifier.inval_entry(parent, &name);
            }
        });
        if let Err(error) = told {
            tracing::warn!(%error, "the kernel may believe in a name that is not so");
        }
    }
}

/// Returns whether the operation may have been published. Errors about the names themselves come
/// before that.
fn may_be_published(profile: SyncProfile, error: &Error) -> bool {
    let refused = matches!(
        error,
        Error::Exists
            | Error::NotFound
            | Error::NotDirectory
            | Error::IsDirectory
            | Error::NotEmpty
            | Error::NameTooLong
            | Error::Invalid(_)
    );
    profile == SyncProfile::Always && !refused
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_uncertain_when_its_commit_may_have_failed() {
        let failed = Error::Latched(String::new());
        assert!(may_be_published(SyncProfile::Always, &failed));
        assert!(!may_be_published(SyncProfile::Periodic, &failed));
        for refused in [Error::Exists, Error::NotFound, Error::NotEmpty] {
            assert!(!may_be_published(SyncProfile::Always, &refused), "{refused}");
        }
    }
}
