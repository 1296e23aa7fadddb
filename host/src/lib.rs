//! Host services shared by the programs `lockbox` and `mount.lockbox`.
//!
//! This crate reads credentials and unlocks an archive with them, finds mounts and the daemons that
//! serve them, keeps memory out of swap and core dumps, and has the tables of exit codes and of the
//! options of `-o`. The wording of one program is in its [`Program`].

#![deny(unsafe_code)] // but for a descriptor taken over by its number, and a signal's default

pub mod control;
pub mod daemons;
mod failure;
pub mod help;
pub mod list_option;
pub mod located;
pub mod mount_options;
pub mod mounts;
pub mod namespaces;
pub mod proc;
pub mod remote;
pub mod secrets;
mod unlock;

pub use failure::{DAMAGED, DENIED, IN_USE, MOUNT_FAILED, NO_ARCHIVE, NO_SOURCE, NO_SPACE, NOT_ARCHIVE, OLDER, OTHER};
pub use failure::{Failure, Program, code, is_full};
pub use failure::{UNREACHABLE, USAGE, WRONG_KEY};
pub use located::place_names;
pub use secrets::Spinner;
pub use unlock::{Credentials, Prompter, gather, unlock, unlock_damaged, unlock_limits};

use std::os::unix::ffi::OsStrExt;
use std::path::Path;

/// Formats a path for a message or a question: no part of it drives a terminal, and it looks like
/// no other path.
pub fn shown(path: &Path) -> String {
    lockbox_terminal::display(path.as_os_str().as_bytes())
}
