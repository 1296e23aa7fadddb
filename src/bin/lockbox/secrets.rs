//! What commands need of secrets: passphrases in the library's type, what unlocking may cost, and no core dumps.

use std::path::Path;

use lockbox::archive::UnlockLimits;
use lockbox::crypto::Passphrase;
use lockbox_secrets::{Bytes, Sources};
use nix::sys::resource::{Resource, setrlimit};

use crate::exit::Failure;

/// What unlocking may cost
#[derive(clap::Args)]
pub(crate) struct LimitArgs {
    /// Let all key slots together ask for up to N MiB times passes of key derivation
    #[arg(long, value_name = "N")]
    kdf_limit: Option<u64>,
}

impl LimitArgs {
    pub(crate) fn limits(&self) -> UnlockLimits {
        self.kdf_limit.map_or_else(UnlockLimits::default, UnlockLimits::raised)
    }
}

/// The passphrase of an archive that exists.
pub(crate) fn existing(sources: &Sources, archive: &Path) -> Result<Passphrase, Failure> {
    Ok(typed(sources.passphrase(archive)?))
}

/// A passphrase to be set.
pub(crate) fn to_set(sources: &Sources, archive: &Path) -> Result<Passphrase, Failure> {
    Ok(typed(sources.new_passphrase(archive)?))
}

/// The old and the new passphrase.
pub(crate) fn both(sources: &Sources, new: Option<&Path>, archive: &Path) -> Result<(Passphrase, Passphrase), Failure> {
    let (old, new) = sources.old_and_new(new, archive)?;
    Ok((typed(old), typed(new)))
}

/// Moves the bytes, so that there is no second copy of them.
fn typed(mut bytes: Bytes) -> Passphrase {
    Passphrase::new(std::mem::take(&mut *bytes))
}

/// No core dump and no debugger sees what is in memory. A host that refuses costs this protection, not the work.
pub(crate) fn keep_out_of_core_dumps() {
    let _ = setrlimit(Resource::RLIMIT_CORE, 0, 0);
    let _ = nix::sys::prctl::set_dumpable(false);
}
