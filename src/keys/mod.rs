//! Access to an archive: header copies, key slots, header backups, and the user's rollback state.
//!
//! It sees `txn` and `frame`, because a change of the header ends with a commit that carries its
//! number (HEADER-4), and the rollback state is compared with the chain of commits (SEEN-2). It
//! sees no `fs`.

mod backup;
mod change;
pub(crate) mod header;
pub(crate) mod header_commit;
pub(crate) mod rollback;
pub(crate) mod slots;
mod unlock;

pub use backup::{Restored, backup_header, restore_header};
pub(crate) use change::listed;
pub use change::{
    KeyAbout, KeyAccess, KeyInfo, KeyName, PassphraseChange, add, change_passphrase, list, list_all, list_unlocked,
    new_key_file, new_passphrase, new_recovery_code, remove, set_passphrase,
};
pub(crate) use header_commit::LEAST_MEMORY;
pub use header_commit::{check_place, repair_header};
pub use rollback::{
    Fingerprint, PlaceName, RollbackGuard, SeenOptions, remember_place, seen_directory, state_directory,
};
pub use slots::{KeyKind, NewKey, Secrets, UnlockLimits};
pub(crate) use unlock::open_header;
pub use unlock::{UnlockedKey, accept_kept, identify, kinds, unlock, unlock_damaged, unlock_with, wants_both};
