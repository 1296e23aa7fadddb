//! Rescues complete files from a damaged archive: without commit records and roots, with either
//! header copy, never writing to it.
//!
//! A file is complete as of generation g if leaves that were reachable together at g (`index`)
//! cover its keys without a gap, and every page named by its extents opens with the named tag. The
//! newest such g is used, and generations are never mixed. A leaf that covers a file's keys without
//! having any proves that the file was deleted. A complete file may still be outdated: it is
//! reported as unproved unless its leaves are known to belong to the newest commit with any trace
//! (RESCUE-3).
//!
//! Surviving log entries are applied over the leaves of the commit that they extend; the result
//! takes precedence over these leaves, and newer leaves over the result (`scan`). Names are taken
//! from the newest complete versions of the directories, and for an incomplete directory from its
//! surviving entries. Objects without a name, or with none that the host accepts, are written to
//! `unnamed/INO`.
//!
//! A snapshot is rescued on its own, instead of the live tree. Otherwise snapshots are only
//! reported (`scan`).

mod index;
mod object;
pub(crate) mod scan;
mod walk;

use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::env::{Environment, SystemEnvironment};
use crate::error::{Error, Result};
use crate::exchange::attributes::host_error;
use crate::exchange::staging_dir::{self, StagingDir};
use crate::exchange::{FileTotals, Problem, Progress, SkippedItems};
use crate::format::{Generation, Ino, Timestamp};
use crate::frame::PageCipher;
use crate::keys::UnlockedKey;
use crate::pager::Pager;
use crate::storage::{ArchiveSource, LockMode, Storage, host_call};
use scan::{StrictStorage, SurvivingLog};

/// Cache of decompressed file data, in bytes.
const CHUNK_CACHE: usize = 4 << 20;

/// Directory for objects without a name, or with none that the host accepts.
pub(crate) const UNNAMED: &str = "unnamed";
/// Directory for incomplete files.
pub(crate) const PARTIAL: &str = "partial";

#[derive(Clone, Debug)]
pub struct RescueOptions {
    /// Target directory on the host; created if missing, refused if not empty.
    pub to: PathBuf,
    /// Also write the surviving parts of incomplete files.
    pub partial: bool,
    /// Create devices, and keep set-ID and sticky bits of files and the attributes that grant
    /// privileges.
    pub privileges: bool,
    /// Name of a snapshot to rescue instead of the live tree.
    pub snapshot: Option<Vec<u8>>,
}

/// Result for one object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RescueState {
    /// Complete as of one generation, under its path.
    Whole,
    /// Partly lost.
    Partial,
    /// Only its name survived, or pages that do not open.
    Lost,
}

/// Report of one object.
#[derive(Debug)]
pub struct RescuedObject<'a> {
    pub state: RescueState,
    /// Path below the target.
    pub path: &'a [u8],
    pub ino: Ino,
    /// Generation of the rescued version; 0 if nothing survived.
    pub generation: Generation,
    /// A newer version is known to have existed, but is not complete.
    pub older: bool,
    /// There is no proof of whether a newer version existed.
    pub unproved: bool,
    /// Reason for which the object, or its newest version, is not complete.
    pub reason: &'a str,
}

/// Snapshot and the state of its tree. Its file data is not read until it is rescued itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SnapshotCondition {
    pub id: u64,
    pub name: Vec<u8>,
    pub time: Timestamp,
    pub generation: Generation,
    pub state: RescueState,
    /// Reason for which the tree is not complete.
    pub reason: String,
}

/// Knowledge about commits after the newest one of which records or nodes survived.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LaterCommits {
    /// There was none.
    Never,
    /// They may have been lost without a trace.
    #[default]
    Possible,
    /// File data of one survived, which was lost or never completed.
    Seen,
}

#[derive(Clone, Copy, Debug)]
pub enum RescueProgress<'a> {
    /// Bytes scanned, and bytes of the archive.
    Scanning(u64, u64),
    /// Progress of writing, and the number of all objects of which a part survived, with or without
    /// name.
    Writing(Progress<'a>, FileTotals),
}

#[derive(Debug, Default)]
pub struct RescueReport {
    /// Authentic pages of any age.
    pub pages: u64,
    pub unreadable_blocks: u64,
    /// Newest generation of a surviving record or tree node.
    pub newest: Generation,
    /// All leaves of that generation survived, so only the listed objects can be missing.
    pub index_whole: bool,
    pub later: LaterCommits,
    /// Log entries that were applied.
    pub entries: u64,
    /// A log entry was lost although a later one exists, so some of the newest durable changes are
    /// missing.
    pub entries_lost: bool,
    /// Known snapshots, oldest first; in the rescue of a snapshot, only that one.
    pub snapshots: Vec<SnapshotCondition>,
    /// The list of snapshots is that of the newest commit.
    pub snapshots_proved: bool,
    /// Reason for which there may be other snapshots.
    pub snapshots_lost: Option<String>,
    pub files: u64,
    pub directories: u64,
    pub links: u64,
    /// Symbolic links, FIFOs, sockets and devices.
    pub others: u64,
    pub bytes: u64,
    /// Complete objects that are not the newest version.
    pub older: u64,
    /// Complete objects that may not be the newest version.
    pub unproved: u64,
    pub partial: u64,
    pub lost: u64,
    pub unnamed: u64,
    /// Attributes that the host refused, such as `trusted.` ones without root, and skipped
    /// privileges.
    pub skipped: SkippedItems,
    /// Objects that could not be created or completed on the host.
    pub problems: Vec<Problem>,
}

impl RescueReport {
    /// Returns whether the rescued objects are all of the commit `newest`, with no sign of a newer
    /// one; `later` shows whether that is a proof. Snapshots other than the rescued one must be
    /// known, with complete trees.
    pub fn complete(&self) -> bool {
        self.partial + self.lost + self.older + self.unproved + self.unreadable_blocks == 0
            && self.index_whole
            && self.later != LaterCommits::Seen
            && !self.entries_lost
            && self.snapshots_lost.is_none()
            && (self.snapshots_proved || self.snapshots.is_empty())
            && self.snapshots.iter().all(|snapshot| snapshot.state == RescueState::Whole)
            && self.problems.is_empty()
    }
}

/// Writes all complete objects of the archive below `options.to`. `item` is called with the report
/// of each object; an error of `item` or `progress` ends the rescue, and the objects written before
/// remain.
///
/// # Errors
/// `Invalid` for a target that is not empty, `InUse`, fatal failures of the host, and failed
/// requests for a remote archive; `Refused` and `Damaged` if no snapshot of the name exists, or
/// none is known. All other damage is reported, not an error.
pub fn rescue<'a>(
    site: impl Into<ArchiveSource<'a>>,
    key: &UnlockedKey,
    options: &RescueOptions,
    item: &mut dyn FnMut(&RescuedObject<'_>) -> Result<()>,
    progress: &mut dyn FnMut(&RescueProgress<'_>) -> Result<()>,
) -> Result<RescueReport> {
    let site = site.into();
    let storage = site.open(LockMode::Shared)?;
    let environment = Arc::new(SystemEnvironment);
    // Whether the archive has a log is determined by its entries.
    let cipher = PageCipher::new(&key.volume_key, key.archive, true, environment.clone());
    if matches!(site, ArchiveSource::File(_)) {
        return rescue_from(storage, cipher, &*environment, options, item, progress);
    }
    let strict = Arc::new(StrictStorage::of(storage));
    let rescued = rescue_from(strict.clone(), cipher, &*environment, options, item, progress);
    strict.check().and(rescued)
}

/// [`rescue`] from any storage.
pub(crate) fn rescue_from(
    storage: Arc<dyn Storage>,
    cipher: PageCipher,
    environment: &dyn Environment,
    options: &RescueOptions,
    item: &mut dyn FnMut(&RescuedObject<'_>) -> Result<()>,
    progress: &mut dyn FnMut(&RescueProgress<'_>) -> Result<()>,
) -> Result<RescueReport> {
    staging_dir::sweep(&options.to);
    refuse_content(&options.to)?;
    let log = SurvivingLog::read(&*storage, &cipher)?;
    // Without a log, its blocks may contain pages.
    let cipher = if log.exists() { cipher } else { cipher.without_log() };
    let pager = Arc::new(Pager::new(storage, cipher, CHUNK_CACHE));
    let index = index::LeafIndex::build(pager.clone(), log, &mut |done, total| {
        progress(&RescueProgress::Scanning(done, total))
    })?;
    let index = match &options.snapshot {
        Some(name) => index.of_snapshot(name)?,
        None => index,
    };
    let stage = StagingDir::new(&options.to, environment)?;
    let report = walk::run(index, &pager, &stage, options, item, progress)?;
    // A user may discard the damaged archive next.
    host_call::sync_file_system(stage.target()).map_err(host_error("cannot make the rescued files durable"))?;
    Ok(report)
}

/// Checks that the target is new or empty, so that its objects cannot be mistaken for rescued ones,
/// or vice versa.
fn refuse_content(to: &Path) -> Result<()> {
    match std::fs::read_dir(to) {
        Ok(mut entries) => match entries.next() {
            None => Ok(()),
            Some(_) => Err(Error::invalid(format!("{} is not empty: name a new directory", to.display()))),
        },
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(()),
        Err(error) => Err(Error::io(format!("cannot read {}", to.display()), error)),
    }
}
