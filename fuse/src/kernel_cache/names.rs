//! Names that are not certain: the kernel looks up again those of an operation that may have been done although it failed.
//!
//! With `sync=always` an operation is published first and committed then. When the commit fails the caller is told so, but the name is
//! there, or gone; the kernel, which keeps names for ever, believes what was before.

use std::ffi::OsStr;
use std::thread;

use fuser::INodeNo;
use lockbox::fs::SyncProfile;
use lockbox::{Error, Result};

use super::KernelCache;

impl KernelCache {
    /// Comes before the answer. The kernel holds the directory until it has that, so that telling it here would wait for ever.
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

/// Whether the operation may have been published. What is refused for the names themselves was not.
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
