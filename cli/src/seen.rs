//! What this user remembers of archives: where, and what is accepted although it contradicts that.
use lockbox::keys::{SeenOptions, seen_directory};
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
}

impl SeenArgs {
    pub(crate) fn options(&self) -> SeenOptions {
        let directory =
            seen_directory(std::env::var_os("XDG_STATE_HOME"), std::env::var_os("HOME"), geteuid().is_root());
        SeenOptions { directory, accept_older: self.accept_older, accept_fork: self.accept_fork }
    }
}
