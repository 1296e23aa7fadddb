//! Rescues what is whole from a damaged archive: without commit records and roots, with either header copy, never writing to it.
//!
//! A file is whole as of generation g when leaves that were in the tree together at g (`index`) cover its keys without a gap and every page
//! that its extents name opens with the tag named; the newest such g wins. Nothing of another generation is mixed in. A leaf that covers a
//! file's keys without having any says that the file was deleted. What is whole may still not be the newest: it is called unproved unless its
//! leaves are known to be those of the newest commit that anything shows (RESCUE-3). Entries of the log that are left are laid over the leaves of the
//! commit that they extend, and come before those and behind newer ones (`log`). Names come from the directories' own newest whole versions, and where a
//! directory is not whole from what is left of it; what has no name left goes to `unnamed/INO`.
//!
//! A snapshot is rescued by itself, in the place of the live tree, and told of beside it (`snapshots`).

mod index;
mod log;
mod object;
mod orphan_data;
pub(crate) mod scan;
mod snapshots;
mod strict_storage;
mod walk;
mod write;

use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::env::{Environment, SystemEnvironment};
use crate::error::{Error, Result};
use crate::exchange::staging_dir::{self, Stage};
use crate::exchange::{Amount, LeftOut, Problem, Progress};
use crate::format::{Generation, Ino, Timestamp};
use crate::frame::PageCipher;
use crate::keys::UnlockedKey;
use crate::pager::Pager;
use crate::storage::{LockMode, Site, Storage};
use strict_storage::Asked;

/// Decompressed file data kept while pages are read.
const CELL_CACHE: usize = 4 << 20;

/// Where what has no name goes.
pub const UNNAMED: &str = "unnamed";
/// Where what is not whole goes.
pub const PARTIAL: &str = "partial";

/// How to rescue.
#[derive(Clone, Debug)]
pub struct RescueOptions {
    /// Directory of the host that takes what is found; made when it is missing, refused when it is not empty.
    pub to: PathBuf,
    /// Also write what is left of files that are not whole.
    pub partial: bool,
    /// Makes devices, and keeps set-ID and sticky bits of files and the attributes that give
    /// rights.
    pub privileges: bool,
    /// What the snapshot of this name shows, in place of what is there now.
    pub snapshot: Option<Vec<u8>>,
}

/// What became of one object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RescueState {
    /// All of it, as of one generation, under its path.
    Whole,
    /// Something of it is left.
    Partial,
    /// Known by name alone, or by pages that do not open.
    Lost,
}

/// One object and what became of it.
#[derive(Debug)]
pub struct Rescued<'a> {
    pub state: RescueState,
    /// Below the target.
    pub path: &'a [u8],
    pub ino: Ino,
    /// As of which commit; 0 when nothing is left.
    pub generation: Generation,
    /// A newer version is known to have existed, but is not whole.
    pub older: bool,
    /// Nothing that is left shows whether a newer version existed.
    pub unproved: bool,
    /// Why it is not (or not the newest) whole.
    pub reason: &'a str,
}

/// A snapshot and what is left of its index: of its content nothing is read before it is rescued itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KeptSnapshot {
    pub id: u64,
    pub name: Vec<u8>,
    pub time: Timestamp,
    pub generation: Generation,
    pub state: RescueState,
    /// Why it is not whole.
    pub reason: String,
}

/// What is known of commits after the newest one that records and the tree's nodes show.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Later {
    /// There was none.
    Never,
    /// They may have been lost without a trace.
    #[default]
    Possible,
    /// File data is left that was written for one, which was lost or never made.
    Seen,
}

/// How far a rescue is.
#[derive(Clone, Copy, Debug)]
pub enum RescueProgress<'a> {
    /// (bytes scanned, bytes of the archive)
    Scanning(u64, u64),
    /// With all objects of which something is left, named or not.
    Writing(Progress<'a>, Amount),
}

/// What was rescued.
#[derive(Debug, Default)]
pub struct RescueReport {
    /// Authentic pages of any age.
    pub pages: u64,
    pub unreadable_blocks: u64,
    /// The newest generation that a record or a node of the tree shows.
    pub newest: Generation,
    /// Whether all leaves of that generation are left, so that nothing can be missing but what is listed.
    pub index_whole: bool,
    pub later: Later,
    /// Entries of the log that are laid over what they extend.
    pub entries: u64,
    /// An entry of the log is lost that another one came after, so what was made durable last is not all there.
    pub entries_lost: bool,
    /// The snapshots that are known, the oldest first; of the rescue of a snapshot that one alone.
    pub snapshots: Vec<KeptSnapshot>,
    /// Whether they are those of the newest commit.
    pub snapshots_proved: bool,
    /// Why there may be others.
    pub snapshots_lost: Option<String>,
    pub files: u64,
    pub directories: u64,
    pub links: u64,
    /// Symbolic links, FIFOs, sockets and devices.
    pub others: u64,
    pub bytes: u64,
    /// Whole, but not the newest version.
    pub older: u64,
    /// Whole, but perhaps not the newest version.
    pub unproved: u64,
    pub partial: u64,
    pub lost: u64,
    pub unnamed: u64,
    /// Attributes that the host refused, such as `trusted.` ones of somebody who is not root, and what would lend rights.
    pub left: LeftOut,
    /// What could not be made or set on the host.
    pub problems: Vec<Problem>,
}

impl RescueReport {
    /// Whether what was rescued is all that the commit `newest` had, and nothing shows a newer one; `later` tells whether that proves anything. Of the
    /// snapshots that were not rescued themselves, whether they are known and their index is left.
    pub fn complete(&self) -> bool {
        self.partial + self.lost + self.older + self.unproved + self.unreadable_blocks == 0
            && self.index_whole
            && self.later != Later::Seen
            && !self.entries_lost
            && self.snapshots_lost.is_none()
            && (self.snapshots_proved || self.snapshots.is_empty())
            && self.snapshots.iter().all(|snapshot| snapshot.state == RescueState::Whole)
            && self.problems.is_empty()
    }
}

/// Writes everything that is whole in the archive there below `options.to`; `item` gets each object and what became of it;
/// an error of `item` or `progress` ends the rescue, and what was rescued until then stays.
///
/// # Errors
/// `Invalid` for a target that is not empty, `InUse`, failures of the host that end everything, requests that fail where the archive is elsewhere; `Refused` and `Damaged` when there is no snapshot of the
/// name, or none is known. All other damage is no error: it is reported.
pub fn rescue<'a>(
    site: impl Into<Site<'a>>,
    key: &UnlockedKey,
    options: &RescueOptions,
    item: &mut dyn FnMut(&Rescued<'_>) -> Result<()>,
    progress: &mut dyn FnMut(&RescueProgress<'_>) -> Result<()>,
) -> Result<RescueReport> {
    let site = site.into();
    let storage = site.open(LockMode::Shared)?;
    let environment = Arc::new(SystemEnvironment);
    // Whether there is a log shows in its entries.
    let cipher = PageCipher::new(&key.volume_key, key.archive, true, environment.clone());
    if matches!(site, Site::File(_)) {
        return rescue_from(storage, cipher, &*environment, options, item, progress);
    }
    let asked = Arc::new(Asked::of(storage));
    let rescued = rescue_from(asked.clone(), cipher, &*environment, options, item, progress);
    asked.check().and(rescued)
}

/// [`rescue`] from any storage.
pub(crate) fn rescue_from(
    storage: Arc<dyn Storage>,
    cipher: PageCipher,
    environment: &dyn Environment,
    options: &RescueOptions,
    item: &mut dyn FnMut(&Rescued<'_>) -> Result<()>,
    progress: &mut dyn FnMut(&RescueProgress<'_>) -> Result<()>,
) -> Result<RescueReport> {
    staging_dir::sweep(&options.to);
    refuse_content(&options.to)?;
    let log = log::FoundLog::read(&*storage, &cipher)?;
    // Without one there may be pages in its place.
    let cipher = if log.is_there() { cipher } else { cipher.without_log() };
    let pager = Arc::new(Pager::new(storage, cipher, CELL_CACHE));
    let index = index::LeafIndex::build(pager.clone(), log, &mut |done, total| {
        progress(&RescueProgress::Scanning(done, total))
    })?;
    let index = match &options.snapshot {
        Some(name) => index.of_snapshot(name)?,
        None => index,
    };
    let stage = Stage::new(&options.to, environment)?;
    walk::run(index, &pager, &stage, options, item, progress)
}

/// The target is new or empty, so that nothing found can be mistaken for something rescued, or the other way round.
fn refuse_content(to: &Path) -> Result<()> {
    match std::fs::read_dir(to) {
        Ok(mut entries) => match entries.next() {
            None => Ok(()),
            Some(_) => Err(Error::invalid(format!("{} is not empty: name a new directory", to.display()))),
        },
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(()),
        Err(error) => Err(Error::io(format!("cannot look into {}", to.display()), error)),
    }
}
