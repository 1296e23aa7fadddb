//! Rollback state of this user: its directory, and the deviations that options accept.
use std::path::Path;

use lockbox::format::ArchiveId;
use lockbox::keys::{self, Fingerprint, SeenOptions, seen_directory};
use lockbox_host::place_names;
use nix::unistd::geteuid;

/// What to do about an archive that is not what was seen before
#[derive(clap::Args, Clone, Default)]
pub(crate) struct SeenArgs {
    /// Go on with a copy that is older than what was seen of the archive, such as a restored backup
    #[arg(long)]
    accept_older: bool,
    /// Go on with a copy that was written apart from the one that was seen
    #[arg(long)]
    accept_fork: bool,
    /// Go on with another archive than the one that was opened at this place before
    #[arg(long)]
    accept_other: bool,
}

/// Remembers an archive that a command of this user put there.
pub(crate) fn remember_place(path: &Path, archive: ArchiveId, fingerprint: Fingerprint) {
    keys::remember_place(&SeenArgs::default().options(path), archive, fingerprint);
}

impl SeenArgs {
    /// For the archive that its user calls `archive`.
    pub(crate) fn options(&self, archive: &Path) -> SeenOptions {
        let directory =
            seen_directory(std::env::var_os("XDG_STATE_HOME"), std::env::var_os("HOME"), geteuid().is_root());
        SeenOptions {
            directory,
            accept_older: self.accept_older,
            accept_fork: self.accept_fork,
            accept_other: self.accept_other,
            places: place_names(archive),
        }
    }
}
