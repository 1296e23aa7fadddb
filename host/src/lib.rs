//! What the programs `lockbox` and `mount.lockbox` both need of the host they run on.
//!
//! It gets secrets from where their owners keep them and unlocks an archive with them, finds mounts and the daemons that serve them, keeps
//! what is in memory out of swap and core dumps, and has the one table of exit codes and that of the words that `-o` takes. What a
//! program says in its own words comes from its [`Program`].

#![deny(unsafe_code)] // but for taking a descriptor over by its number

pub mod daemons;
pub mod elsewhere;
mod failure;
mod given;
pub mod harden;
pub mod located;
pub mod mounts;
pub mod namespaces;
mod place_names;
pub mod point;
pub mod proc;
pub mod secrets;
mod spare;
mod unlock;
pub mod words;
mod working;

pub use failure::{DAMAGED, IN_USE, MOUNT_FAILED, NO_SPACE, NOT_ARCHIVE, OLDER, OTHER, USAGE, WRONG_KEY};
pub use failure::{Failure, Program, code, is_full};
pub use given::{Asker, Given, gather};
pub use place_names::place_names;
pub use unlock::{unlock, unlock_damaged, unlock_limits};
pub use working::Working;

use std::os::unix::ffi::OsStrExt;
use std::path::Path;

/// A path for a message or a question: a terminal obeys nothing in it, and it looks like no other path.
pub fn shown(path: &Path) -> String {
    lockbox_terminal::display(path.as_os_str().as_bytes())
}
