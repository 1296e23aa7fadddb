//! Arguments and steps of unlocking an archive and of changing its keys.
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use lockbox::Error;
use lockbox::archive::{Archive, KdfCost};
use lockbox::crypto::{KeyFile, Passphrase};
use lockbox::keys::{self, KeyAccess, KeyKind, RollbackOptions, Secrets, UnlockLimits, seen_directory};
use lockbox::storage::ArchiveSource;
use lockbox_host::remote::ArchiveLocation;
use lockbox_host::secrets::{Keyring, PassphraseSources, Sources};
use lockbox_host::{Credentials, Program, Spinner, WRONG_KEY, gather, place_names, shown};
use nix::unistd::geteuid;

use crate::exit::{Failure, Lockbox};
use crate::output;
use crate::progress::Bar;

/// Limits of the cost of unlocking
#[derive(clap::Args, Clone, Default)]
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

/// Removes the cached key of the archive from this user's keyring: after a change of keys the next
/// command asks for them.
pub(crate) fn forget_kept(site: ArchiveSource<'_>) {
    // Without keyrings nothing is kept, and an archive without an id never was.
    let (Ok(keyring), Ok(archive)) = (Keyring::open(), keys::identify(site)) else { return };
    if let Err(error) = keyring.forget(&archive) {
        output::complain(&error.sentence);
    }
}

/// Duration of a calibrated derivation.
const TARGET_MILLIS: u64 = 1000;

/// Cost of the key derivation
#[derive(clap::Args, Default)]
pub(crate) struct KdfArgs {
    /// Memory of the key derivation in MiB; calibrated to about one second by default
    #[arg(long, value_name = "MIB", value_parser = clap::value_parser!(u32).range(1..=4096))]
    kdf_memory: Option<u32>,
    /// Passes over that memory
    #[arg(long, visible_alias = "kdf-time", value_name = "N", value_parser = clap::value_parser!(u32).range(1..=64))]
    kdf_passes: Option<u32>,
    /// Lanes computed side by side
    #[arg(long, visible_alias = "kdf-parallelism", value_name = "N", value_parser = clap::value_parser!(u32).range(1..=16))]
    kdf_lanes: Option<u32>,
    /// Allow less than 64 MiB and 3 passes: an attacker with a copy of the archive can then guess passphrases cheaply
    #[arg(long)]
    weak_kdf: bool,
}

impl KdfArgs {
    /// A person at a terminal `sees` that it takes a while.
    pub(crate) fn cost(&self, sees: bool) -> Result<KdfCost, Failure> {
        if self.kdf_memory.is_none() && self.kdf_passes.is_none() && self.kdf_lanes.is_none() {
            let _working = Spinner::deriving(sees);
            return Ok(Archive::calibrate(TARGET_MILLIS, memory_limit_kib()));
        }
        let floor = KdfCost::FLOOR;
        let cost = KdfCost {
            memory_kib: self.kdf_memory.map_or(floor.memory_kib, |mib| mib * 1024),
            passes: self.kdf_passes.unwrap_or(floor.passes),
            lanes: self.kdf_lanes.unwrap_or(floor.lanes),
        };
        let work = |cost: KdfCost| u64::from(cost.memory_kib) * u64::from(cost.passes);
        if (cost.memory_kib < floor.memory_kib || work(cost) < work(floor)) && !self.weak_kdf {
            return Err(Failure::usage(
                "the key derivation is weaker than 64 MiB and 3 passes; --weak-kdf allows it for tests",
            ));
        }
        Ok(cost)
    }
}

/// Returns half of the machine's memory, at most 1 GiB: the archive is to open on other machines
/// too.
fn memory_limit_kib() -> u32 {
    const MOST: u32 = 1 << 20;
    let table = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    lockbox_host::proc::kib(&table, "MemTotal").map_or(MOST, |kib| u32::try_from(kib / 2).unwrap_or(MOST).min(MOST))
}

/// Options for an archive that differs from its last known state
#[derive(clap::Args, Clone, Default)]
pub(crate) struct SeenArgs {
    /// Go on with a copy that is older than the last known state of the archive, such as a restored backup
    #[arg(long)]
    accept_older: bool,
    /// Go on with a copy that has diverged from the last known state of the archive
    #[arg(long)]
    accept_fork: bool,
    /// Go on with another archive than was opened at this place before
    #[arg(long)]
    accept_other: bool,
}

impl SeenArgs {
    pub(crate) fn options(&self, archive: &Path) -> RollbackOptions {
        let directory =
            seen_directory(std::env::var_os("XDG_STATE_HOME"), std::env::var_os("HOME"), geteuid().is_root());
        RollbackOptions {
            directory,
            accept_older: self.accept_older,
            accept_fork: self.accept_fork,
            accept_other: self.accept_other,
            places: place_names(archive),
        }
    }
}

/// Options that open the archive
#[derive(clap::Args)]
pub(crate) struct UnlockArgs {
    #[command(flatten)]
    sources: Sources,
    #[command(flatten)]
    limit: LimitArgs,
    #[command(flatten)]
    seen: SeenArgs,
}

impl UnlockArgs {
    pub(crate) fn bar(&self) -> Bar {
        Bar::new(self.sources.passphrase.quiet)
    }

    /// Runs `action`, which a key of the archive allows, with all given secrets. A passphrase typed
    /// at a terminal has three tries, so `action` must change nothing when it is wrong. Errors:
    /// failures of the sources, and those of `action` in the words of [`failure`].
    pub(crate) fn with_access<T>(
        &self,
        archive: &ArchiveLocation,
        action: impl FnMut(&KeyAccess<'_>) -> lockbox::Result<T>,
    ) -> Result<T, Failure> {
        self.attempt(archive, &mut self.given(archive)?, action)
    }

    /// Like [`UnlockArgs::with_access`], with credentials gathered before.
    pub(crate) fn attempt<T>(
        &self,
        archive: &ArchiveLocation,
        given: &mut Credentials,
        mut action: impl FnMut(&KeyAccess<'_>) -> lockbox::Result<T>,
    ) -> Result<T, Failure> {
        let attempt = |secrets: &Secrets| match action(&self.access(secrets, archive)) {
            Err(Error::WrongKey) => Ok(None),
            done => done.map(Some),
        };
        let done = given.open::<Lockbox, _, _>(archive.path(), &self.sources, attempt);
        done.and_then(|done| done.ok_or(Error::WrongKey)).map_err(|error| failure(archive, error))
    }

    /// Like [`UnlockArgs::given`], but reports a wrong passphrase typed at a terminal before
    /// anything else is asked or shown. That derives its key once more than the command does, so it
    /// is not for programs.
    pub(crate) fn verified(&self, archive: &ArchiveLocation) -> Result<Credentials, Failure> {
        let mut given = self.given(archive)?;
        if given.is_typed(&self.sources) {
            self.attempt(archive, &mut given, |access| keys::list(archive.source(), access))?;
        }
        Ok(given)
    }

    /// Returns all given credentials; the passphrase is requested only when something may need it.
    pub(crate) fn given(&self, archive: &ArchiveLocation) -> Result<Credentials, Failure> {
        let mut given = gather::<Lockbox>(archive.path(), &self.sources)?;
        if given.secrets.passphrase.is_none() && self.needs_passphrase(archive) {
            given.add_passphrase(archive.path(), &self.sources)?;
        }
        Ok(given)
    }

    /// Like [`UnlockArgs::verified`], with a new passphrase, from `new` or as
    /// [`PassphraseSources::old_and_new`] reads them.
    pub(crate) fn given_and_new(
        &self,
        new: Option<&Path>,
        archive: &ArchiveLocation,
    ) -> Result<(Credentials, Passphrase), Failure> {
        self.sources.passphrase.check()?;
        let passphrase = &self.sources.passphrase;
        if new.is_none() && passphrase.is_typed() {
            return Ok((self.verified(archive)?, passphrase.new_one(None, archive.path())?.into()));
        }
        let mut files = self.sources.clone();
        files.passphrase = PassphraseSources { passfile_any: passphrase.passfile_any, ..Default::default() };
        let mut given = if self.sources.names_file() {
            gather(archive.path(), &files)?
        } else {
            Credentials::from(Secrets::default())
        };
        if !self.sources.names_file() || passphrase.any_named() || self.needs_passphrase(archive) {
            let (old, new) = passphrase.old_and_new(new, archive.path())?;
            given.add_typed(old.into());
            return Ok((given, new.into()));
        }
        Ok((given, passphrase.new_one(new, archive.path())?.into()))
    }

    pub(crate) fn advises(&self) -> bool {
        self.sources.passphrase.advises()
    }

    pub(crate) fn access<'a>(&self, secrets: &'a Secrets, archive: &ArchiveLocation) -> KeyAccess<'a> {
        KeyAccess { secrets, limits: self.limit.limits(), seen: self.seen.options(archive.path()) }
    }

    /// Reads a key file that is to open the archive from now on; it must be private like any other.
    pub(crate) fn new_key_file(&self, path: &Path) -> Result<KeyFile, Failure> {
        let passphrase = PassphraseSources { passfile_any: self.sources.passphrase.passfile_any, ..Default::default() };
        let sources = Sources { keyfile: Some(PathBuf::from(path)), passphrase, ..Sources::default() };
        let gathered = gather(path, &sources)?.secrets.key_file;
        gathered.ok_or_else(|| Failure::other(format!("{} is not a key file", shown(path))))
    }

    /// Returns whether the key file opens nothing without a passphrase.
    fn needs_passphrase(&self, archive: &ArchiveLocation) -> bool {
        // A header that cannot be read is the business of the command.
        let kinds = keys::kinds(archive.source()).unwrap_or_default();
        let has = |kind| kinds.iter().any(|(_, other)| *other == kind);
        self.sources.keyfile.is_some() && has(KeyKind::KeyFileAndPassphrase) && !has(KeyKind::KeyFile)
    }
}

pub(crate) fn failure(place: &ArchiveLocation, error: Error) -> Failure {
    let Error::WrongKey = error else { return Lockbox::failure(place.path(), error) };
    let kinds = keys::kinds(place.source()).unwrap_or_default();
    let kinds: BTreeSet<&str> = kinds.into_iter().map(|(_, kind)| kind.name()).collect();
    let kinds = Vec::from_iter(kinds).join(", ");
    let opens = if kinds.is_empty() { String::new() } else { format!(" (it opens with: {kinds})") };
    Failure::new(WRONG_KEY, format!("{}: wrong passphrase or key{opens}", shown(place.path())))
}
