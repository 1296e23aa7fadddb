//! Rewrites an archive into a new file without free space, and puts that in its place.
//!
//! # Order
//! COMPACT-1  The old file is locked for writing and opened for reading: nothing in it changes before its name goes to the new one.
//!     What only its log has is brought into its trees before, and what was left to be freed is freed, by a session like others: the new file is
//!     made of the trees, of the snapshots' and then of the live one (`copy.rs` has the argument).
//! COMPACT-2  The new file lies beside it, is locked, and holds the content, then a closed record. It is no archive yet: its header is still zeros.
//! COMPACT-3  It is verified from the medium: every page, count and entry by itself, then record by record and byte by byte against the old one, the
//!     live tree and each snapshot; what a moment shares with the one before is read once (`compare.rs` says why that is enough).
//! COMPACT-4  Owner, mode and extended attributes, fsync, the header with its key slots, fsync, exchange of the names, fsync of the directory, removal
//!     of the old file's name, fsync of the directory. So a crash leaves the old or the new archive under the name, and at most one file beside it.
//!     The next run removes that one when it has no header (COMPACT-2) or the beginning of one, when the archive goes on from its newest commit, or when
//!     it shows byte for byte what the archive shows, as after a kill between header and exchange. Anything else may be what another program put
//!     there; also the old file after a rekey, which nobody can open any more who has the new key alone.
//! COMPACT-5  Nothing is done to what a name means at that moment, and no other file becomes the archive: `replace.rs` has the argument.

pub(super) mod compare;
mod copy;
mod moments;
pub(super) mod names;
pub(super) mod pages;
pub(super) mod replace;

use std::path::Path;
use std::sync::Arc;

use super::create::name_key;
use names::Names;

use super::{Archive, OpenOptions};
use crate::crypto::SecretKey;
use crate::env::SystemEnvironment;
use crate::error::{Error, Result};
use crate::format::header::{FEATURE_LOG, Framing};
use crate::format::{BLOCK, MAX_OFFSET, MIN_BLOCKS};
use crate::frame::PageCipher;
use crate::fs::FileSystem;
use crate::keys::header::{self, Header, Slots};
use crate::keys::seen::{self, Looked};
use crate::keys::{SeenOptions, UnlockedKey, Witness};
use crate::storage::{FileStorage, Storage};
use crate::txn::{self, Descent, Mark, Volume};

/// What the name of an unfinished file says.
const UNFINISHED: &str = "compact";

/// How to compact.
#[derive(Clone, Debug, Default)]
pub struct CompactOptions {
    /// Only estimate.
    pub dry_run: bool,
    /// Go on when the file has several names: the others keep the old file.
    pub break_links: bool,
    /// What the user remembers of the archive: an older copy or a fork is refused as by [`Archive::open_seen`].
    pub seen: SeenOptions,
}

/// How far it is; bytes of file data, of about `total`. What several snapshots show counts once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CompactStep {
    Created,
    Copying {
        done: u64,
        total: u64,
    },
    Copied,
    Verifying {
        done: u64,
        total: u64,
    },
    Verified,
    /// From here on only the rename is left.
    Prepared,
    Replaced,
}

/// Sizes on the host in bytes: length of the file, and what it takes on the disk.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CompactReport {
    pub length_before: u64,
    pub disk_before: u64,
    /// After a dry run both are what the pages in use take, which is a little more than they would after compaction.
    pub length_after: u64,
    pub disk_after: u64,
}

impl Archive {
    /// Rewrites the archive at `path` (links are followed), with its snapshots. `step` is told how far it is; when it fails, everything is left as it was.
    ///
    /// # Errors
    /// `InUse` while it is open elsewhere, `Refused` for a file with several names, `Damaged` when a page of the live tree or of a snapshot
    /// does not open, `NoSpace`, `Older` and `Forked` unless they are accepted.
    pub fn compact(
        path: &Path,
        key: &UnlockedKey,
        options: &CompactOptions,
        step: &mut dyn FnMut(CompactStep) -> Result<()>,
    ) -> Result<CompactReport> {
        rewrite(path, key, options, &mut Target::same, step)
    }
}

/// Called now and then with the bytes of file data that are done; an error ends the work.
type Watch<'a> = dyn FnMut(u64) -> Result<()> + 'a;

/// What the new file is made with.
pub(super) struct Target {
    pub(super) key: UnlockedKey,
    pub(super) framing: Framing,
    pub(super) slots: Slots,
}

impl Target {
    /// Everything as it is.
    fn same(header: &Header, key: &UnlockedKey) -> Result<Target> {
        Ok(Target { key: copied(key), framing: with_log(header.framing()), slots: header.slots() })
    }
}

/// A new file has a log. Where the old one had none the number of the header grows, so that the old header cannot be put beside it to hide the log.
pub(super) fn with_log(framing: &Framing) -> Framing {
    let sequence = framing.sequence + u64::from(!framing.has_log());
    Framing { features: framing.features | FEATURE_LOG, sequence, ..framing.clone() }
}

fn copied(key: &UnlockedKey) -> UnlockedKey {
    UnlockedKey { archive: key.archive, volume_key: SecretKey::new(*key.volume_key.bytes()) }
}

/// Writes the content into a new file that `prepare` describes, once the archive may be used, and puts that in the old one's place.
pub(super) fn rewrite(
    path: &Path,
    key: &UnlockedKey,
    options: &CompactOptions,
    prepare: &mut dyn FnMut(&Header, &UnlockedKey) -> Result<Target>,
    step: &mut dyn FnMut(CompactStep) -> Result<()>,
) -> Result<CompactReport> {
    let real = std::fs::canonicalize(path).map_err(|e| Error::io(format!("cannot find {}", path.display()), e))?;
    let file = replace::Old::open(&real)?;
    let storage = file.storage();
    file.check_names(options.break_links)?;
    let mut header = key.read_header(&**storage)?;
    header.check_writable()?;
    let looked = Looked::at(&options.seen, &key.volume_key, &key.archive);
    let sequence = header.framing().sequence;
    let mut old = open(storage.clone(), key, header.framing(), looked.mark(), true)?;
    let replace = seen::judge(&old.volume, sequence, looked.seen.as_ref(), &options.seen, false)?;
    let (length_before, disk_before) = file.sizes()?;
    // The archive's word; who shows how far it is counts every byte twice.
    let used = old.volume.durable().used_blocks.saturating_add(MIN_BLOCKS).saturating_mul(BLOCK).min(MAX_OFFSET);
    if options.dry_run {
        return Ok(CompactReport { length_before, disk_before, length_after: used, disk_after: used });
    }
    if old.volume.lays_log() || old.has_left_over()? || old.volume.has_begun_removals()? {
        header.repair(&**storage, &key.volume_key)?;
        let mended = open(storage.clone(), key, header.framing(), looked.mark(), false)?;
        mended.finish_removals(&mut || Ok(()))?;
        mended.close()?;
        old = open(storage.clone(), key, header.framing(), looked.mark(), true)?;
    }
    let target = prepare(&header, key)?;
    let superseded =
        &mut |left| is_superseded(left, key, &old, &mut |done| step(CompactStep::Verifying { done, total: used }));
    for name in replace::remove_leftovers(file.entry(), UNFINISHED, superseded) {
        tracing::warn!(
            name,
            "this file lies beside the archive and may hold what the archive lacks, or be the archive as it was before 'key rekey': \
             look at it, then remove it"
        );
    }
    let beside = replace::Beside::new(file.entry(), UNFINISHED, &SystemEnvironment)?;
    step(CompactStep::Created)?;
    let total = used;
    let new = fill(&old, beside.shared(), &target, &mut |done| step(CompactStep::Copying { done, total }))?;
    step(CompactStep::Copied)?;
    verify(&old, beside.shared(), &target, &mut |done| step(CompactStep::Verifying { done, total }))?;
    step(CompactStep::Verified)?;
    beside.take_after(&file)?;
    step(CompactStep::Prepared)?;
    file.check_names(options.break_links)?;
    write_header(beside.storage(), &target)?;
    let left = beside.replace(&file)?;
    // From here on the file as it was before is an older copy.
    let rekeyed = target.framing.commitment != header.framing().commitment;
    if !rekeyed {
        Witness::new(new, header.durable_sequence().max(target.framing.sequence), looked, replace).remember();
    } else {
        // Also under the old key: a copy from before is an older one to who opens it.
        Witness::new(new.clone(), target.framing.sequence, looked, replace).remember();
        let file = options.seen.file(&target.key.volume_key, &target.key.archive);
        Witness::new(new, target.framing.sequence, Looked { file: file.map(Arc::new), seen: None }, false).remember();
    }
    if let Some(left) = left {
        left.tell(&file, rekeyed)?;
    }
    let (length_after, disk_after) = beside.sizes()?;
    // It is done: nobody can stop it any more.
    let _ = step(CompactStep::Replaced);
    Ok(CompactReport { length_before, disk_before, length_after, disk_after })
}

/// Whether a file that lies where an unfinished one would has nothing that the archive lacks (COMPACT-4).
fn is_superseded(
    left: Arc<FileStorage>,
    key: &UnlockedKey,
    archive: &FileSystem,
    watch: &mut Watch<'_>,
) -> Result<bool> {
    if !header::is_begun(&*left)? {
        return Ok(true);
    }
    let header = Header::read(&*left)?;
    if header.framing().archive != key.archive {
        return Ok(false);
    }
    header.authenticate(&key.volume_key)?;
    let left = open(left, key, header.framing(), None, true)?;
    let Some(newest) = left.volume.opened_at() else { return Ok(false) };
    if archive.volume.descent_from(&newest)? == Descent::Continues {
        return Ok(true);
    }
    // The log of a file that another program put there may say more than its trees.
    if left.volume.lays_log() {
        return Ok(false);
    }
    let names = Names::new(&archive.name_key, &left.name_key);
    compare::compare(&archive.volume, &left.volume, &names, watch).map(|()| true)
}

/// Makes an archive of the verified content (COMPACT-4).
fn write_header(storage: &FileStorage, target: &Target) -> Result<()> {
    let key = &target.key.volume_key;
    for copy in 0..2 {
        header::write_copy(storage, &target.framing, &target.slots, copy, key)?;
    }
    storage.evict(0, storage.len()?)?;
    let written = Header::read(storage)?;
    written.authenticate(key)?;
    match written.flaw(key) {
        None => Ok(()),
        Some(flaw) => Err(Error::damaged(format!("the new archive is not sound: {flaw}"))),
    }
}

/// COMPACT-1: whatever the lock, it mostly reads only.
fn open(
    storage: Arc<FileStorage>,
    key: &UnlockedKey,
    framing: &Framing,
    seen: Option<&Mark>,
    read_only: bool,
) -> Result<Arc<FileSystem>> {
    let options = OpenOptions { read_only, ..OpenOptions::default() };
    let environment = Arc::new(SystemEnvironment);
    let cipher = PageCipher::new(&key.volume_key, key.archive, framing.has_log(), environment.clone());
    let volume_options = txn::OpenOptions { read_only, memory: options.memory / 2 };
    let volume = Volume::open_seen(storage, cipher, environment.clone(), framing.sequence, &volume_options, seen)?;
    FileSystem::new(volume, environment, name_key(&key.volume_key, &key.archive), options.file_system_options())
}

fn fill(old: &FileSystem, storage: Arc<FileStorage>, target: &Target, watch: &mut Watch<'_>) -> Result<Arc<Volume>> {
    let environment = Arc::new(SystemEnvironment);
    let key = &target.key;
    let cipher = PageCipher::new(&key.volume_key, key.archive, target.framing.has_log(), environment.clone());
    let new = Volume::continue_from(&old.volume, storage, cipher, environment, target.framing.sequence)?;
    let names = Names::new(&old.name_key, &name_key(&key.volume_key, &key.archive));
    copy::copy(&old.volume, &new, &names, watch)?;
    Ok(new)
}

/// COMPACT-3
fn verify(old: &FileSystem, storage: Arc<FileStorage>, target: &Target, watch: &mut Watch<'_>) -> Result<()> {
    storage.barrier()?;
    storage.evict(0, storage.len()?)?;
    let new = open(storage, &target.key, &target.framing, None, true)?;
    let mut findings = new.volume.check_space(true, &mut |_, _| {})?;
    findings.extend(new.check_structure(false, &mut |_, _| {})?.1);
    if let Some(finding) = findings.first() {
        return Err(Error::damaged(format!("the new archive is not sound: {finding}")));
    }
    let names = Names::new(&old.name_key, &new.name_key);
    compare::compare(&old.volume, &new.volume, &names, watch)
}
