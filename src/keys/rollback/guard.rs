//! Rollback check on open; records new commits while the archive is open.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::Mutex;

use super::known_places::Opened;
use super::{KnownPlaces, RollbackState, RollbackStateFile, SeenOptions, TRAIL, sentence};
use crate::crypto::SecretKey;
use crate::env::{Environment, SystemEnvironment};
use crate::error::{Error, Result, Timestamp};
use crate::format::ArchiveId;
use crate::txn::{Ancestry, Durable, Mark, Volume};

/// Rollback state and known places, loaded before the archive is opened.
#[derive(Default)]
pub(crate) struct RollbackCheck {
    pub(crate) file: Option<Arc<RollbackStateFile>>,
    pub(crate) seen: Option<RollbackState>,
    places: KnownPlaces,
    by_recipient: bool,
}

impl RollbackCheck {
    /// A file that cannot be read or was altered is one warning (SEEN-4).
    pub(crate) fn at(options: &SeenOptions, volume_key: &SecretKey, archive: &ArchiveId) -> RollbackCheck {
        let file = options.file(volume_key, archive);
        let seen = file.as_ref().and_then(|file| {
            file.load().unwrap_or_else(|error| {
                tracing::warn!("{}; an older copy of this archive would not be noticed", sentence(&error));
                None
            })
        });
        let places = KnownPlaces::at(options, volume_key, archive);
        RollbackCheck { file: file.map(Arc::new), seen, places, by_recipient: false }
    }

    /// With the kind of secret that opened the archive, on which first uses and refusals depend.
    pub(crate) fn opened_by_recipient(self, by_recipient: bool) -> RollbackCheck {
        RollbackCheck { by_recipient, ..self }
    }

    /// Starts new rollback state for an archive that replaces a checked one.
    pub(crate) fn of_successor(options: &SeenOptions, volume_key: &SecretKey, archive: &ArchiveId) -> RollbackCheck {
        RollbackCheck { seen: None, ..RollbackCheck::at(options, volume_key, archive) }
    }

    /// Returns a sentence for a user when the secret alone does not show the author of this
    /// archive: its public half is enough to make one, and this user remembers neither the archive
    /// nor the place.
    pub(crate) fn first_use(&self) -> Option<String> {
        let is_first = self.by_recipient && self.seen.is_none() && self.places.are_new();
        is_first.then(|| {
            format!(
                "this is the first use of this archive by this user, and a public key is enough to make an archive that yours opens: compare the \
                 fingerprint {} with the one that the author of the archive sees",
                self.places.fingerprint()
            )
        })
    }

    /// Returns whether the memory has to be replaced, and remembers the place, for an archive that
    /// may be used.
    ///
    /// # Errors
    /// `Replaced`, `Older` and `Forked` unless accepted.
    pub(crate) fn admit(
        &self,
        volume: &Volume,
        header_sequence: u64,
        options: &SeenOptions,
        only_reads: bool,
    ) -> Result<bool> {
        let replace = judge(volume, header_sequence, self.seen.as_ref(), options, only_reads)?;
        self.judge_places(options, Some(volume))?;
        self.places.remember(Some(volume));
        Ok(replace)
    }

    /// Judges the places alone, with the commits of the archive if it could be opened.
    ///
    /// # Errors
    /// `Replaced` unless accepted.
    pub(crate) fn judge_places(&self, options: &SeenOptions, volume: Option<&Volume>) -> Result<()> {
        let opened = Opened { by_recipient: self.by_recipient, before: self.seen.is_some() };
        self.places.judge(options, volume, opened)
    }

    pub(crate) fn places(&self) -> &KnownPlaces {
        &self.places
    }

    pub(crate) fn mark(&self) -> Option<&Mark> {
        self.seen.as_ref().map(RollbackState::mark)
    }
}

/// Judges whether the archive may be used; returns whether it must replace the remembered state.
/// `only_reads`: this command does not write to the archive.
///
/// # Errors
/// `Older` and `Forked` unless accepted. The header is judged also when nothing is remembered.
pub(crate) fn judge(
    volume: &Volume,
    header_sequence: u64,
    seen: Option<&RollbackState>,
    options: &SeenOptions,
    only_reads: bool,
) -> Result<bool> {
    let record = volume.durable();
    // A reader of a backup is shown its version, and neither compares nor remembers anything.
    let seen = seen.filter(|_| !(only_reads && volume.origin().is_some()));
    let known = record.header_sequence.max(seen.map_or(0, |seen| seen.header_sequence));
    if header_sequence < known && !options.accept_older {
        return Err(older_header(header_sequence, known));
    }
    let Some(seen) = seen else { return Ok(header_sequence < known) };
    let descent = volume.descent_from(seen.mark()).or_else(|error| match error {
        // A damaged history is no reason to refuse the files.
        Error::Damaged(reason) => {
            tracing::warn!("the history of the archive cannot be read ({reason}): a fork would not be noticed");
            Ok(Ancestry::Unknown)
        }
        error => Err(error),
    })?;
    let descent = match (descent, &seen.entry) {
        (Ancestry::Descendant, Some(entry)) => volume.descent_from_entry(seen.mark(), entry),
        (descent, _) => descent,
    };
    let forked = match descent {
        Ancestry::Descendant => return Ok(header_sequence < known),
        Ancestry::Unknown => {
            tracing::warn!(
                "the archive was written in so many sessions since {} that it cannot be told whether it is the one seen then",
                seen.time.utc()
            );
            return Ok(false);
        }
        Ancestry::Diverged => true,
        Ancestry::Older => !volume.opened_at().is_some_and(|newest| seen.comes_after(&newest)),
    };
    let facts = facts(seen, volume, record.time);
    match forked {
        false if options.accept_older => {}
        true if options.accept_fork => {}
        false => {
            return Err(Error::Older(format!(
                "{facts}. It is a copy from before then, such as a restored backup, or its newest commits were destroyed: \
                 what came later is lost if it is gone on with"
            )));
        }
        true => {
            return Err(Error::Forked(format!(
                "{facts}, and its history does not contain the one that was seen: two copies of the archive were written apart from each \
                 other. Keep both files"
            )));
        }
    }
    tracing::warn!("{facts}: accepted as asked");
    Ok(true)
}

/// The header has a lower number than one that the archive had already.
pub(crate) fn older_header(header_sequence: u64, known: u64) -> Error {
    Error::Older(format!(
        "its header (number {header_sequence}) is older than one that this archive had already (number {known}): a passphrase that \
             was changed or removed since then would open it again"
    ))
}

fn facts(seen: &RollbackState, volume: &Volume, time: Timestamp) -> String {
    let (generation, time, ends) = match volume.origin() {
        None => (volume.durable().generation, time, "ends with"),
        Some(origin) => (origin.generation, origin.time, "is a backup of"),
    };
    let of_log = |entries: usize| match entries {
        0 => String::new(),
        1 => " and an entry of its log".into(),
        several => format!(" and {several} entries of its log"),
    };
    let entries = seen.entry.map_or(0, |entry| entry.number as usize);
    // Of another commit they compare with nothing.
    let found = if entries > 0 && seen.mark().generation == generation { volume.opened_entries() } else { 0 };
    format!(
        "this user saw commit {}{} of the archive on {} UTC, but this file {ends} commit {}{} of {} UTC",
        seen.mark().generation.0,
        of_log(entries),
        seen.time.utc(),
        generation.0,
        of_log(found),
        time.utc()
    )
}

/// Remembers an open archive for its user.
pub struct RollbackGuard {
    volume: Arc<Volume>,
    file: Option<Arc<RollbackStateFile>>,
    header_sequence: u64,
    saved: Mutex<Option<RollbackState>>,
    complained: AtomicBool,
}

impl RollbackGuard {
    /// `replace`: the rollback state was contradicted, and the user accepted that.
    pub(crate) fn new(
        volume: Arc<Volume>,
        header_sequence: u64,
        looked: RollbackCheck,
        replace: bool,
    ) -> RollbackGuard {
        let saved = Mutex::new(looked.seen.filter(|_| !replace));
        RollbackGuard { volume, file: looked.file, header_sequence, saved, complained: AtomicBool::new(false) }
    }

    /// Returns the check for another opening of the same archive, without opening the state file
    /// again.
    pub(crate) fn looked(&self) -> RollbackCheck {
        // The key binds a later open to this archive, whichever file lies at its place.
        RollbackCheck { file: self.file.clone(), seen: self.saved.lock().clone(), ..RollbackCheck::default() }
    }

    /// Remembers the newest durable commit, and the last durable entry of its log, if they are not
    /// remembered yet. A failure costs one warning (SEEN-4). A commit with pending uploads is not
    /// remembered: the remote archive would be older than that.
    pub fn remember(&self) {
        if let Some(file) = &self.file
            && let Err(error) = self.try_remember(file)
            && !self.complained.swap(true, Ordering::Relaxed)
        {
            tracing::warn!("{}; an older copy of this archive would not be noticed later", sentence(&error));
        }
    }

    fn try_remember(&self, file: &RollbackStateFile) -> Result<()> {
        let mut saved = self.saved.lock();
        let Some(Durable { mark, entry }) = self.volume.durable_point() else { return Ok(()) };
        let reach = (mark.generation, entry.map_or(0, |entry| entry.number));
        // A reader knows one commit or entry less than the writer that it follows (LINEAGE-1).
        let known = saved.as_ref().filter(|saved| saved.reach() >= reach);
        if known.is_some_and(|known| known.header_sequence >= self.header_sequence) {
            return Ok(());
        }
        // Asked after the point was read: when nothing is kept back now, nothing of it was.
        if self.volume.pending_upload_bytes()? > 0 {
            return Ok(());
        }
        let environment = SystemEnvironment;
        let (trail, entry) = match known {
            Some(known) => (known.trail.clone(), known.entry),
            // Of a damaged history the newest commit is remembered at least.
            None => (self.volume.trail(mark, TRAIL).unwrap_or_else(|_| vec![mark]), entry),
        };
        let seen = RollbackState { time: environment.now(), header_sequence: self.header_sequence, trail, entry };
        file.save(&seen, &environment)?;
        *saved = Some(seen);
        Ok(())
    }
}
