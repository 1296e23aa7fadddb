//! Rewrites an archive into a new one without free space, and puts that in its place.
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
//! COMPACT-6  Where the archive is no file, whoever opened its storage keeps other writers away, and the storage takes what is written for it in the place of
//!     what it has (STORAGE-5), after COMPACT-1 to 3: there is no name, and nothing is left beside it. File data comes from afar, and is read once for the
//!     comparison, which authenticates all that a moment names.

pub(super) mod compare;
mod copy;
pub(super) mod names;
pub(super) mod pages;
pub(super) mod replace;
mod versions;

use std::path::Path;
use std::sync::Arc;

use super::create::name_key;
use names::Names;

use super::{Archive, OpenOptions};
use crate::env::SystemEnvironment;
use crate::error::{Error, Result};
use crate::format::header::{FEATURE_LOG, Framing};
use crate::format::{BLOCK, MAX_OFFSET, MIN_BLOCKS};
use crate::frame::PageCipher;
use crate::fs::FileSystem;
use crate::keys::header::{self, Header, Slots};
use crate::keys::seen::Looked;
use crate::keys::{SeenOptions, UnlockedKey, Witness};
use crate::storage::{FileStorage, Site, Storage};
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
    /// Rewrites the archive there (links are followed), with its snapshots. `step` gets the
    /// progress; when it fails, everything is left as it was.
    ///
    /// # Errors
    /// `InUse` while another process has it open, `Refused` for a file with several names,
    /// `Damaged` when a page of the live tree or of a snapshot does not open, `NoSpace`,
    /// `Replaced`, `Older` and `Forked` unless they are accepted; `Unsupported` for a storage that
    /// nothing can take the place of.
    pub fn compact<'a>(
        site: impl Into<Site<'a>>,
        key: &UnlockedKey,
        options: &CompactOptions,
        step: &mut dyn FnMut(CompactStep) -> Result<()>,
    ) -> Result<CompactReport> {
        rewrite(site.into(), key, options, &mut Target::same, step)
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
        Ok(Target { key: key.copy(), framing: with_log(header.framing()), slots: header.slots() })
    }
}

/// A new file has a log. Where the old one had none the number of the header grows, so that the old header cannot be put beside it to hide the log.
pub(super) fn with_log(framing: &Framing) -> Framing {
    let sequence = framing.sequence + u64::from(!framing.has_log());
    Framing { features: framing.features | FEATURE_LOG, sequence, ..framing.clone() }
}

/// Writes the content into a new archive that `prepare` describes, once the archive may be used, and puts that in the old one's place.
pub(super) fn rewrite(
    site: Site<'_>,
    key: &UnlockedKey,
    options: &CompactOptions,
    prepare: Prepare<'_>,
    step: &mut dyn FnMut(CompactStep) -> Result<()>,
) -> Result<CompactReport> {
    match site {
        Site::File(path) => rewrite_file(path, key, options, prepare, step),
        Site::Opened(storage) => rewrite_storage(storage, key, options, prepare, step),
    }
}

fn rewrite_file(
    path: &Path,
    key: &UnlockedKey,
    options: &CompactOptions,
    prepare: Prepare<'_>,
    step: &mut dyn FnMut(CompactStep) -> Result<()>,
) -> Result<CompactReport> {
    let real = std::fs::canonicalize(path).map_err(|e| Error::io(format!("cannot find {}", path.display()), e))?;
    let file = replace::Old::open(&real)?;
    file.check_names(options.break_links)?;
    let mut before = Before::look(file.storage().clone(), key, &options.seen)?;
    let sizes = file.sizes()?;
    if options.dry_run {
        return Ok(before.estimate(sizes));
    }
    before.settle()?;
    let target = prepare(&before.header, key)?;
    let (old, total) = (&before.archive, before.used);
    let superseded =
        &mut |left| is_superseded(left, key, old, &mut |done| step(CompactStep::Verifying { done, total }));
    for name in replace::remove_leftovers(file.entry(), UNFINISHED, superseded) {
        tracing::warn!(
            name,
            "this file lies beside the archive and may hold what the archive lacks, or be the archive as it was before 'key rekey': \
             look at it, then remove it"
        );
    }
    let beside = replace::Beside::new(file.entry(), UNFINISHED, &SystemEnvironment)?;
    step(CompactStep::Created)?;
    let new = before.copy(beside.shared(), &target, true, step)?;
    beside.take_after(&file)?;
    step(CompactStep::Prepared)?;
    file.check_names(options.break_links)?;
    write_header(beside.storage(), &target)?;
    before.announce(&target, &options.seen);
    let left = beside.replace(&file)?;
    let rekeyed = before.remember(new, &target, &options.seen);
    if let Some(left) = left {
        left.tell(&file, rekeyed)?;
    }
    let after = beside.sizes()?;
    // It is done: nobody can stop it any more.
    let _ = step(CompactStep::Replaced);
    Ok(report(sizes, after))
}

/// COMPACT-6
fn rewrite_storage(
    storage: &Arc<dyn Storage>,
    key: &UnlockedKey,
    options: &CompactOptions,
    prepare: Prepare<'_>,
    step: &mut dyn FnMut(CompactStep) -> Result<()>,
) -> Result<CompactReport> {
    let sizes = |storage: &dyn Storage| Ok::<_, Error>((storage.len()?, storage.allocated()?));
    let mut before = Before::look(storage.clone(), key, &options.seen)?;
    let sizes_before = sizes(&**storage)?;
    if options.dry_run {
        return Ok(before.estimate(sizes_before));
    }
    before.settle()?;
    let target = prepare(&before.header, key)?;
    let next = storage.succeed()?;
    step(CompactStep::Created)?;
    let new = before.copy(next.storage(), &target, false, step)?;
    step(CompactStep::Prepared)?;
    write_header(&*next.storage(), &target)?;
    let after = sizes(&*next.storage())?;
    before.announce(&target, &options.seen);
    next.publish()?;
    before.remember(new, &target, &options.seen);
    let _ = step(CompactStep::Replaced);
    Ok(report(sizes_before, after))
}

/// Says what the new archive is made with.
type Prepare<'a> = &'a mut dyn FnMut(&Header, &UnlockedKey) -> Result<Target>;

/// Lengths and bytes on the host.
type Sizes = (u64, u64);

fn report((length_before, disk_before): Sizes, (length_after, disk_after): Sizes) -> CompactReport {
    CompactReport { length_before, disk_before, length_after, disk_after }
}

/// The archive that is written anew.
struct Before<'a> {
    storage: Arc<dyn Storage>,
    key: &'a UnlockedKey,
    header: Header,
    looked: Looked,
    /// What is remembered was contradicted, and that was accepted.
    replace: bool,
    archive: Arc<FileSystem>,
    /// Bytes, by the archive's word; who shows how far it is counts every byte twice.
    used: u64,
}

impl Before<'_> {
    fn look<'a>(storage: Arc<dyn Storage>, key: &'a UnlockedKey, seen: &SeenOptions) -> Result<Before<'a>> {
        let header = key.read_header(&*storage)?;
        header.check_writable()?;
        let looked = Looked::at(seen, &key.volume_key, &key.archive).opened_by_recipient(key.by_recipient);
        let archive = open(storage.clone(), key, header.framing(), looked.mark(), true)?;
        let replace = looked.admit(&archive.volume, header.framing().sequence, seen, false)?;
        if let Some(sentence) = looked.first_use() {
            tracing::warn!("{sentence}");
        }
        let used =
            archive.volume.durable().used_blocks.saturating_add(MIN_BLOCKS).saturating_mul(BLOCK).min(MAX_OFFSET);
        Ok(Before { storage, key, header, looked, replace, archive, used })
    }

    fn estimate(&self, sizes: Sizes) -> CompactReport {
        report(sizes, (self.used, self.used))
    }

    /// COMPACT-1: has a session like others put in order what an unfinished one left.
    fn settle(&mut self) -> Result<()> {
        let old = &self.archive;
        if old.volume.lays_log() || old.has_left_over()? || old.volume.has_begun_removals()? {
            self.header.repair(&*self.storage, &self.key.volume_key)?;
            let mended = self.open(false)?;
            mended.finish_removals(&mut || Ok(()))?;
            mended.close()?;
            self.archive = self.open(true)?;
        }
        Ok(())
    }

    fn open(&self, read_only: bool) -> Result<Arc<FileSystem>> {
        open(self.storage.clone(), self.key, self.header.framing(), self.looked.mark(), read_only)
    }

    /// COMPACT-2 and 3; with `each_page`, which the comparison reads as well, by itself before.
    fn copy(
        &self,
        storage: Arc<dyn Storage>,
        target: &Target,
        each_page: bool,
        step: &mut dyn FnMut(CompactStep) -> Result<()>,
    ) -> Result<Arc<Volume>> {
        let (old, total) = (&*self.archive, self.used);
        let new = fill(old, storage.clone(), target, &mut |done| step(CompactStep::Copying { done, total }))?;
        step(CompactStep::Copied)?;
        verify(old, storage, target, each_page, &mut |done| step(CompactStep::Verifying { done, total }))?;
        step(CompactStep::Verified)?;
        Ok(new)
    }

    /// PLACE-4
    fn announce(&self, target: &Target, seen: &SeenOptions) {
        if target.framing.commitment != self.header.framing().commitment {
            Looked::of_successor(seen, &target.key.volume_key, &target.key.archive).places().announce();
        }
    }

    /// From here on the archive as it was before is an older copy. Whether it has a new key now.
    fn remember(self, new: Arc<Volume>, target: &Target, seen: &SeenOptions) -> bool {
        let rekeyed = target.framing.commitment != self.header.framing().commitment;
        if !rekeyed {
            let sequence = self.header.durable_sequence().max(target.framing.sequence);
            Witness::new(new, sequence, self.looked, self.replace).remember();
        } else {
            // Also under the old key: a copy from before is an older one to who opens it.
            Witness::new(new.clone(), target.framing.sequence, self.looked, self.replace).remember();
            let looked = Looked::of_successor(seen, &target.key.volume_key, &target.key.archive);
            looked.places().remember(Some(&new));
            Witness::new(new, target.framing.sequence, looked, false).remember();
        }
        rekeyed
    }
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
fn write_header(storage: &dyn Storage, target: &Target) -> Result<()> {
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
    storage: Arc<dyn Storage>,
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

fn fill(old: &FileSystem, storage: Arc<dyn Storage>, target: &Target, watch: &mut Watch<'_>) -> Result<Arc<Volume>> {
    let environment = Arc::new(SystemEnvironment);
    let key = &target.key;
    let cipher = PageCipher::new(&key.volume_key, key.archive, target.framing.has_log(), environment.clone());
    let new = Volume::continue_from(&old.volume, storage, cipher, environment, target.framing.sequence)?;
    let names = Names::new(&old.name_key, &name_key(&key.volume_key, &key.archive));
    copy::copy(&old.volume, &new, &names, watch)?;
    Ok(new)
}

/// COMPACT-3
fn verify(
    old: &FileSystem,
    storage: Arc<dyn Storage>,
    target: &Target,
    each_page: bool,
    watch: &mut Watch<'_>,
) -> Result<()> {
    storage.barrier()?;
    storage.evict(0, storage.len()?)?;
    let new = open(storage, &target.key, &target.framing, None, true)?;
    let mut findings = new.volume.check_space(each_page, &mut |_, _| {})?;
    findings.extend(new.check_structure(false, &mut |_, _| {})?.1);
    if let Some(finding) = findings.first() {
        return Err(Error::damaged(format!("the new archive is not sound: {finding}")));
    }
    let names = Names::new(&old.name_key, &new.name_key);
    compare::compare(&old.volume, &new.volume, &names, watch)
}
