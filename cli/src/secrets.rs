//! Cost limit of unlocking, and the keys in the keyring.
use std::path::Path;

use lockbox::crypto::Passphrase;
use lockbox::keys::{self, UnlockLimits, UnlockedKey};
use lockbox::storage::ArchiveSource;
use lockbox_host::secrets::{Cache, Keyring, PassphraseSources, Sources};

use crate::exit::Failure;
use crate::output;

/// What unlocking may cost
#[derive(clap::Args, Clone)]
pub(crate) struct LimitArgs {
    /// Let all key slots together ask for up to N MiB times passes of key derivation
    #[arg(long, value_name = "N")]
    kdf_limit: Option<u64>,
}

impl LimitArgs {
    pub(crate) fn limits(&self) -> UnlockLimits {
        lockbox_host::unlock_limits(self.kdf_limit)
    }
}

/// Returns the key of the archive at the location, which the user calls `name`: the one cached in
/// the keyring, or the one that the secrets open.
pub(crate) fn unlock(
    site: ArchiveSource<'_>,
    name: &Path,
    sources: &Sources,
    cache: &Cache,
    limits: &UnlockLimits,
) -> Result<UnlockedKey, Failure> {
    let (key, refused) = lockbox_host::unlock(site, name, sources, cache, limits)?;
    if let Some(sentence) = refused {
        output::complain(&sentence);
    }
    Ok(key)
}

/// Removes the cached key of the archive from this user's keyring: after a change of keys the next
/// command asks for them.
pub(crate) fn forget_kept(site: ArchiveSource<'_>) {
    // Without keyrings nothing is kept, and an archive without an id never was.
    let (Ok(keyring), Ok(archive)) = (Keyring::open(), keys::identify(site)) else { return };
    if let Err(error) = keyring.forget(&archive) {
        output::complain(&error.sentence);
    }
}

pub(crate) fn to_set(sources: &PassphraseSources, archive: &Path) -> Result<Passphrase, Failure> {
    Ok(sources.new_passphrase(archive)?.into())
}
