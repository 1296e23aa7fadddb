//! Changes and lists key slots: adds, removes, replaces, describes; both header copies, one after
//! the other. Each change verifies the archive, writes the header and commits its new number
//! (HEADER-4). Also copies the header to a file of its own, and puts such a copy back.

use std::sync::Arc;

use super::header::{self, Header, SlotBlock, read_header};
use super::rollback::{self, RollbackCheck};
use super::slots::{self, KeyKind, NewKey, OpenedSlot, Secrets, SlotAddress};
use super::{RollbackGuard, RollbackOptions, UnlockLimits, UnlockedKey, open_header};
use crate::crypto::kdf::{KdfCost, constant_time_eq};
use crate::crypto::{KeyFile, Passphrase, RecoveryCode, SecretKey, generate_passphrase};
use crate::env::{Environment, SystemEnvironment};
use crate::error::{Error, Refusal, Result, Timestamp};
use crate::format::header::{Description, FEATURE_LOG, Framing, HEADER_BYTES, MAX_LABEL, Rewrap, SLOT_EMPTY};
use crate::format::{ArchiveId, KEY_SLOTS};
use crate::frame::PageCipher;
use crate::storage::{ArchiveSource, LockMode, Storage};
use crate::txn::{self, Volume};

/// Secrets and cost limits for a change of the archive's keys.
pub struct KeyAccess<'a> {
    pub secrets: &'a Secrets,
    pub limits: UnlockLimits,
    /// Rollback state of the user: an older copy or a fork is refused as on opening.
    pub seen: RollbackOptions,
}

/// A key slot as holders of the volume key see it.
#[derive(Clone, Debug)]
pub struct KeyInfo {
    pub slot: u8,
    pub kind: KeyKind,
    /// None for a slot of a program that described none: its label is readable only with its own
    /// secret.
    pub about: Option<KeyAbout>,
    /// The secrets that were given open it.
    pub opened: bool,
}

impl KeyInfo {
    /// Its label, when it has one that is known.
    pub fn label(&self) -> Option<&str> {
        self.about.as_ref().map(|about| about.label.as_str()).filter(|label| !label.is_empty())
    }
}

/// Description of a key slot.
#[derive(Clone, Debug)]
pub struct KeyAbout {
    pub label: String,
    pub created: Timestamp,
    /// Recipient of an age slot.
    pub recipient: Option<String>,
}

/// Result of a passphrase change.
#[derive(Clone, Debug)]
pub struct PassphraseChange {
    /// The slots that the old passphrase opened and the new one opens now, in order.
    pub slots: Vec<u8>,
    /// False when slots were left out for their cost: one of them may still have the old
    /// passphrase.
    pub all_tried: bool,
}

impl KeyAbout {
    fn new(description: Description) -> KeyAbout {
        let recipient = match description.rewrap {
            Rewrap::Recipient(text) => Some(text),
            Rewrap::Public(_) => None,
        };
        KeyAbout { label: description.label, created: description.created, recipient }
    }
}

/// A slot by its number or its label.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum KeyName {
    Slot(u8),
    Label(String),
}

impl KeyName {
    /// Digits are a number: no label consists of them alone.
    pub fn parse(text: &str) -> KeyName {
        let label = || KeyName::Label(text.to_owned());
        if text.bytes().all(|byte| byte.is_ascii_digit()) {
            text.parse().map_or_else(|_| label(), KeyName::Slot)
        } else {
            label()
        }
    }

    /// The slot in use that it names. Errors: `Invalid` for none or several.
    pub(crate) fn find<'k>(&self, keys: &'k [KeyInfo]) -> Result<&'k KeyInfo> {
        let named = |key: &&KeyInfo| match self {
            KeyName::Slot(slot) => key.slot == *slot,
            KeyName::Label(label) => key.label() == Some(label),
        };
        let mut found = keys.iter().filter(named);
        match (found.next(), found.next(), self) {
            (Some(key), None, _) => Ok(key),
            (None, _, KeyName::Slot(slot)) => Err(Error::invalid(format!("key slot {slot} is empty"))),
            // Such as that of a variable that is not set.
            (None, _, KeyName::Label(label)) if label.is_empty() => {
                Err(Error::invalid("an empty name denotes no key slot; use a number or a label"))
            }
            (None, _, KeyName::Label(label)) => {
                let shown = |label: &str| lockbox_terminal::display(label.as_bytes());
                let labels: Vec<String> = keys.iter().filter_map(KeyInfo::label).map(shown).collect();
                let those = match labels.is_empty() {
                    true => "none has a label".to_owned(),
                    false => format!("those with a label are {}", labels.join(", ")),
                };
                Err(Error::invalid(format!("no key slot has the label {}: {those}", shown(label))))
            }
            _ => Err(Error::invalid("several key slots have this label; use the number")),
        }
    }
}

/// A new recovery code; [`add`] makes it open an archive.
///
/// # Errors
/// `Io` when the system has no randomness.
pub fn new_recovery_code() -> Result<RecoveryCode> {
    RecoveryCode::generate(&SystemEnvironment)
}

/// Generates a passphrase of six words.
///
/// # Errors
/// `Io` when the system has no randomness.
pub fn new_passphrase() -> Result<zeroize::Zeroizing<String>> {
    generate_passphrase(&SystemEnvironment)
}

/// Random content for a key file.
///
/// # Errors
/// `Io` when the system has no randomness.
pub fn new_key_file() -> Result<zeroize::Zeroizing<[u8; 64]>> {
    let mut bytes = zeroize::Zeroizing::new([0; 64]);
    SystemEnvironment.fill_random(&mut *bytes)?;
    Ok(bytes)
}

/// Every slot in use, and which of them the secrets open: all of those are tried. Needs no lock.
///
/// # Errors
/// As [`super::unlock_with`]; `OlderCopy` for a header that was put back, unless accepted.
pub fn list_all<'a>(site: impl Into<ArchiveSource<'a>>, access: &KeyAccess<'_>) -> Result<Vec<KeyInfo>> {
    let site = site.into();
    let header = read_header(site)?;
    let (opened, _) = slots::unlock_all(&header, access.secrets, &access.limits)?;
    header.authenticate(&opened[0].volume_key)?;
    check_age(site, &header, &opened[0], &access.seen)?;
    Ok(listed(&header, &opened[0].volume_key, &opened))
}

/// Every slot in use, with the first that opens: cheaper than [`list_all`].
///
/// # Errors
/// As [`list_all`].
pub fn list<'a>(site: impl Into<ArchiveSource<'a>>, access: &KeyAccess<'_>) -> Result<Vec<KeyInfo>> {
    let site = site.into();
    let (header, opened) = open_header(site, access.secrets, &access.limits)?;
    check_age(site, &header, &opened, &access.seen)?;
    Ok(listed(&header, &opened.volume_key, std::slice::from_ref(&opened)))
}

/// Lists every slot in use, with a key that was unlocked before. Needs no lock, and compares
/// nothing with the user's rollback state.
///
/// # Errors
/// Like [`super::identify`]; `Damaged` for the key of another archive, or for one from before its
/// keys were changed.
pub fn list_unlocked<'a>(site: impl Into<ArchiveSource<'a>>, key: &UnlockedKey) -> Result<Vec<KeyInfo>> {
    let header = read_header(site)?;
    header.authenticate(&key.volume_key)?;
    Ok(listed(&header, &key.volume_key, &[]))
}

/// Adds a slot for `new`, optionally with a label, and returns its number.
///
/// # Errors
/// Like [`super::unlock_with`]; `InUse` while another process has the archive open, `Invalid` for a
/// label in use or too long and when all slots are taken.
pub fn add<'a>(
    site: impl Into<ArchiveSource<'a>>,
    access: &KeyAccess<'_>,
    new: &NewKey<'_>,
    label: &str,
) -> Result<u8> {
    let change = Change::begin(site.into(), access)?;
    change.check_label(label)?;
    change.fill_empty(new, label)
}

/// Empties a slot. Older copies of the file still open with its secret.
///
/// # Errors
/// As [`add`]; `Invalid` for the last slot that this program can open.
pub fn remove<'a>(site: impl Into<ArchiveSource<'a>>, access: &KeyAccess<'_>, name: &KeyName) -> Result<KeyInfo> {
    let change = Change::begin(site.into(), access)?;
    let keys = change.keys();
    let removed = name.find(&keys)?.clone();
    let slot = usize::from(removed.slot);
    let mut others = keys.iter().filter(|key| key.slot != removed.slot);
    if others.all(|key| matches!(key.kind, KeyKind::Unknown(_))) {
        return Err(Error::invalid(format!(
            "key slot {slot} is the last one: without it the archive could not be opened; add another key first"
        )));
    }
    let mut noise = [0; crate::format::BLOCK as usize];
    SystemEnvironment.fill_random(&mut noise)?;
    change.finish(vec![(slot, (SLOT_EMPTY, noise))])?;
    Ok(removed)
}

/// Replaces the passphrase of every slot that the secrets open, so that the old one opens none of
/// them; a key file that belongs to a slot stays.
///
/// # Errors
/// Like [`super::unlock_with`]; `InUse` while another process has the archive open, `Invalid` when
/// no opened slot has a passphrase.
pub fn change_passphrase<'a>(
    site: impl Into<ArchiveSource<'a>>,
    access: &KeyAccess<'_>,
    new: &Passphrase,
    kdf: KdfCost,
) -> Result<PassphraseChange> {
    let mut all_tried = true;
    let change = Change::begin_with(site.into(), access, |header| {
        let (opened, tried) = slots::unlock_all(header, access.secrets, &access.limits)?;
        all_tried = tried;
        Ok(opened)
    })?;
    let mut slots: Vec<usize> = change.opened.iter().map(|opened| opened.slot).collect();
    slots.sort_unstable();
    // A key file alone may be a key as well, and has no passphrase.
    let has_passphrase = |slot: &usize| slots::kind_of(&change.header, *slot).has_passphrase();
    let with: Vec<usize> = slots.iter().copied().filter(has_passphrase).collect();
    let slots = if with.is_empty() { slots } else { with };
    change.replace_passphrases(&slots, new, kdf, access.secrets.key_file.as_ref())?;
    Ok(PassphraseChange { slots: slots.into_iter().map(|slot| slot as u8).collect(), all_tried }) // below 32
}

/// Sets a passphrase with any secrets that open the archive: in the slot `name`, else in the only
/// passphrase slot, else in a new one. Returns the slot's number.
///
/// # Errors
/// As [`add`]; `Invalid` when there are several passphrase slots and none is named.
pub fn set_passphrase<'a>(
    site: impl Into<ArchiveSource<'a>>,
    access: &KeyAccess<'_>,
    name: Option<&KeyName>,
    new: &Passphrase,
    kdf: KdfCost,
) -> Result<u8> {
    let change = Change::begin(site.into(), access)?;
    let keys = change.keys();
    let slot = match name {
        Some(name) => usize::from(name.find(&keys)?.slot),
        None => {
            let mut passphrases = keys.iter().filter(|key| key.kind == KeyKind::Passphrase);
            match (passphrases.next(), passphrases.next()) {
                (Some(key), None) => usize::from(key.slot),
                (None, _) if keys.iter().any(|key| key.kind == KeyKind::KeyFileAndPassphrase) => {
                    return Err(Error::Refused(Refusal::PassphraseWithKeyFile));
                }
                (None, _) => return change.fill_empty(&NewKey::Passphrase(new, kdf), ""),
                _ => return Err(Error::Refused(Refusal::SeveralPassphrases)),
            }
        }
    };
    change.replace_passphrases(&[slot], new, kdf, access.secrets.key_file.as_ref())?;
    Ok(slot as u8) // below 32
}

/// The slots in use, in order.
pub(crate) fn listed(header: &Header, volume_key: &SecretKey, opened: &[OpenedSlot]) -> Vec<KeyInfo> {
    let info = |(slot, kind): (u8, KeyKind)| {
        let mine = opened.iter().find(|opened| opened.slot == usize::from(slot));
        let own = mine.and_then(|opened| opened.own.clone());
        let about = slots::description(header, slot.into(), volume_key).or(own).map(KeyAbout::new);
        KeyInfo { slot, kind, about, opened: mine.is_some() }
    };
    slots::kinds(header).into_iter().map(info).collect()
}

/// An archive that is locked and unlocked for a change of its slots.
struct Change {
    storage: Arc<dyn Storage>,
    header: Header,
    /// Slots that the secrets opened; at least one.
    opened: Vec<OpenedSlot>,
    current: VerifiedVolume,
}

impl Change {
    fn begin(site: ArchiveSource<'_>, access: &KeyAccess<'_>) -> Result<Change> {
        Change::begin_with(site, access, |header| {
            slots::unlock(header, access.secrets, &access.limits).map(|opened| vec![opened])
        })
    }

    fn begin_with(
        site: ArchiveSource<'_>,
        access: &KeyAccess<'_>,
        unlock: impl FnOnce(&Header) -> Result<Vec<OpenedSlot>>,
    ) -> Result<Change> {
        let storage = site.open(LockMode::Exclusive)?;
        let header = Header::read(&*storage)?;
        let opened = unlock(&header)?;
        let first = opened.first().ok_or(Error::WrongKey)?;
        header.authenticate(&first.volume_key)?;
        let by_recipient = slots::is_recipient(&header, first.slot);
        let current = VerifiedVolume::verify(storage.clone(), &header, &first.volume_key, &access.seen, by_recipient)?;
        Ok(Change { storage, header, opened, current })
    }

    /// The key of the first slot that opened: the header was authenticated with it.
    fn volume_key(&self) -> &SecretKey {
        &self.opened[0].volume_key
    }

    fn address(&self, slot: usize) -> SlotAddress<'_> {
        SlotAddress { archive: &self.header.framing().archive, slot, volume_key: self.volume_key() }
    }

    fn keys(&self) -> Vec<KeyInfo> {
        listed(&self.header, self.volume_key(), &self.opened)
    }

    fn make(&self, slot: usize, new: &NewKey<'_>, label: String) -> Result<(u8, SlotBlock)> {
        slots::make(&self.address(slot), new, label, &SystemEnvironment)
    }

    /// Writes a new key to the first empty slot, and returns its number.
    fn fill_empty(self, new: &NewKey<'_>, label: &str) -> Result<u8> {
        let slot = (0..KEY_SLOTS).find(|&slot| self.header.framing().slots[slot] == SLOT_EMPTY);
        let slot = slot.ok_or_else(|| Error::invalid("all 32 key slots are in use: remove one first"))?;
        let made = self.make(slot, new, label.to_owned())?;
        self.finish(vec![(slot, made)])?;
        Ok(slot as u8) // below 32
    }

    fn check_label(&self, label: &str) -> Result<()> {
        if label.len() > MAX_LABEL {
            return Err(Error::invalid(format!("the label is too long: bytes={} most={MAX_LABEL}", label.len())));
        }
        if label.chars().any(char::is_control) {
            return Err(Error::invalid("a label has no control characters"));
        }
        if !label.is_empty() && label.bytes().all(|byte| byte.is_ascii_digit()) {
            return Err(Error::invalid("a label must not be a number, as numbers name slots"));
        }
        let taken = |key: &KeyInfo| key.about.as_ref().is_some_and(|about| about.label == label);
        match self.keys().iter().find(|key| !label.is_empty() && taken(key)) {
            Some(key) => Err(Error::invalid(format!("key slot {} has this label already", key.slot))),
            None => Ok(()),
        }
    }

    /// Writes the slots with another passphrase and everything else as it was.
    fn replace_passphrases(
        self,
        slots: &[usize],
        new: &Passphrase,
        kdf: KdfCost,
        file: Option<&KeyFile>,
    ) -> Result<()> {
        let mut made = Vec::with_capacity(slots.len());
        for &slot in slots {
            let key = match (slots::kind_of(&self.header, slot), file) {
                (KeyKind::Passphrase, _) => NewKey::Passphrase(new, kdf),
                (KeyKind::KeyFileAndPassphrase, Some(file)) => NewKey::KeyFileAndPassphrase(file, new, kdf),
                (kind, _) => return Err(Error::Refused(Refusal::NoPassphrase { slot, kind: kind.name() })),
            };
            let known = self.keys().into_iter().find(|key| usize::from(key.slot) == slot);
            let label = known.and_then(|key| key.about).map(|about| about.label).unwrap_or_default();
            made.push((slot, self.make(slot, &key, label)?));
        }
        self.finish(made)
    }

    /// Writes the slots, and a description for each slot that was opened and has none yet.
    fn finish(mut self, mut slots: Vec<(usize, (u8, SlotBlock))>) -> Result<()> {
        for opened in &self.opened {
            let own = opened.slot;
            let described = slots::description(&self.header, own, self.volume_key()).is_some();
            if let Some(description) = opened.own.as_ref().filter(|_| !described)
                && slots.iter().all(|(slot, _)| *slot != own)
            {
                let kind = self.header.framing().slots[own];
                let mut block = [0; crate::format::BLOCK as usize];
                block.copy_from_slice(self.header.slot(own));
                let block = slots::describe(&self.address(own), kind, block, description, &SystemEnvironment)?;
                slots.push((own, (kind, block)));
            }
        }
        let sequence = self.header.framing().sequence;
        let volume_key = &self.opened[0].volume_key;
        // A crash between the two copies must find the other one whole.
        if let Some(mended) = self.header.repair(&*self.storage, volume_key)? {
            tracing::warn!("{mended}");
        }
        self.header.replace_slots(&*self.storage, &slots, volume_key)?;
        // Both copies have reached the medium (SEEN-3, HEADER-4).
        let framing = Framing { sequence: sequence + 1, ..self.header.framing().clone() };
        let newest = commit_header(self.storage.clone(), &framing, volume_key, self.current);
        RollbackGuard::new(newest.volume, sequence + 1, newest.looked, newest.replace).remember();
        Ok(())
    }
}

/// Least memory in bytes: with less the caches of the layers cannot work, and a change of the
/// header needs no more.
pub(crate) const LEAST_MEMORY: u64 = 16 << 20;

/// An archive that may be changed, as far as its user knows.
pub(crate) struct VerifiedVolume {
    pub(crate) volume: Arc<Volume>,
    pub(crate) looked: RollbackCheck,
    /// The rollback state was contradicted, and the user accepted that.
    pub(crate) replace: bool,
}

impl VerifiedVolume {
    /// Verifies, by reading only, that this is not an older copy of the archive, in which a change
    /// of the header would be lost. The header must be authentic. Errors: `Replaced`, `OlderCopy`
    /// and `ForkedCopy` unless accepted, `Damaged` when no commit can be trusted.
    pub(crate) fn verify(
        storage: Arc<dyn Storage>,
        header: &Header,
        volume_key: &SecretKey,
        seen: &RollbackOptions,
        by_recipient: bool,
    ) -> Result<VerifiedVolume> {
        header.check_writable()?;
        let looked = RollbackCheck::at(seen, volume_key, &header.framing().archive).opened_by_recipient(by_recipient);
        let sequence = header.framing().sequence;
        let volume = open_commits(storage, header.framing(), volume_key, true, &looked)?;
        let replace = looked.admit(&volume, sequence, seen, false)?;
        warn_first_use(&looked);
        Ok(VerifiedVolume { volume, looked, replace })
    }
}

/// Checks, for commands that read the header alone, whether a header with a higher number is known:
/// from the rollback state and, if no other process writes the archive, from its newest commit.
/// Damage there is no reason to hide the keys. Errors: `Replaced` and `OlderCopy` unless accepted.
pub(crate) fn check_age(
    site: ArchiveSource<'_>,
    header: &Header,
    opened: &OpenedSlot,
    seen: &RollbackOptions,
) -> Result<()> {
    let (sequence, volume_key) = (header.framing().sequence, &opened.volume_key);
    let looked = RollbackCheck::at(seen, volume_key, &header.framing().archive);
    let looked = looked.opened_by_recipient(slots::is_recipient(header, opened.slot));
    let volume = site
        .open(LockMode::Shared)
        .and_then(|storage| open_commits(storage, header.framing(), volume_key, true, &looked))
        .ok();
    looked.judge_places(seen, volume.as_deref())?;
    looked.places.remember(volume.as_deref());
    warn_first_use(&looked);
    if seen.accept_older {
        return Ok(());
    }
    let committed = volume.map_or(0, |volume| volume.durable().header_sequence);
    let known = committed.max(looked.seen.as_ref().map_or(0, |seen| seen.header_sequence));
    // Another process may have changed the keys since the header was read.
    if sequence < known && read_header(site)?.framing().sequence < known {
        return Err(rollback::older_header(sequence, known));
    }
    Ok(())
}

fn warn_first_use(looked: &RollbackCheck) {
    if let Some(sentence) = looked.first_use() {
        tracing::warn!("{sentence}");
    }
}

/// Compares an archive with the memory of its place, for a command that opens it in its own way, as
/// damaged as it is. Nothing is remembered.
///
/// # Errors
/// `Replaced` unless accepted.
pub fn check_place(key: &UnlockedKey, seen: &RollbackOptions) -> Result<()> {
    let looked = RollbackCheck::at(seen, &key.volume_key, &key.archive).opened_by_recipient(key.by_recipient);
    looked.judge_places(seen, None)
}

/// Opens the commits of an archive under this header.
pub(crate) fn open_commits(
    storage: Arc<dyn Storage>,
    framing: &Framing,
    volume_key: &SecretKey,
    read_only: bool,
    looked: &RollbackCheck,
) -> Result<Arc<Volume>> {
    let environment = Arc::new(SystemEnvironment);
    let cipher = PageCipher::new(volume_key, framing.archive, framing.has_log(), environment.clone());
    let options = txn::OpenOptions { read_only, memory: LEAST_MEMORY };
    Volume::open_seen(storage, cipher, environment, framing.sequence, &options, looked.mark())
}

/// HEADER-4: commits the number of this header, which is on the medium in both copies. Returns the
/// newest commit, to be remembered.
///
/// The change of the keys is complete before this call. So an error that prevents the commit (a
/// full disk, damage in the space map) is reported, but the change has succeeded: the next commit
/// of any process makes up for it.
pub(crate) fn commit_header(
    storage: Arc<dyn Storage>,
    framing: &Framing,
    volume_key: &SecretKey,
    before: VerifiedVolume,
) -> VerifiedVolume {
    let committed = open_commits(storage, framing, volume_key, false, &before.looked)
        .and_then(|volume| volume.record_header().map(|()| volume));
    match committed {
        Ok(volume) => VerifiedVolume { volume, ..before },
        Err(error) => {
            tracing::warn!(
                "the keys are changed, but no commit could be made that says so ({error}): until the next one, the header of before could \
                 be put back unnoticed, and its keys would open the archive again"
            );
            before
        }
    }
}

/// Rewrites the copy of the header that is lost, altered or older than the other one, and returns a
/// sentence about it; None when both are in order. Nothing else is changed.
///
/// # Errors
/// Like opening the archive for writing.
pub fn repair_header<'a>(
    site: impl Into<ArchiveSource<'a>>,
    key: &UnlockedKey,
    seen: &RollbackOptions,
) -> Result<Option<String>> {
    let storage = site.into().open(LockMode::Exclusive)?;
    let mut header = key.read_header(&*storage)?;
    VerifiedVolume::verify(storage.clone(), &header, &key.volume_key, seen, key.by_recipient)?;
    header.repair(&*storage, &key.volume_key)
}

/// Sequence numbers of a restored header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Restored {
    /// Header sequence number of the backup.
    pub backup: u64,
    /// The highest that the archive had already.
    pub known: u64,
}

/// The newer whole header copy, [`HEADER_BYTES`] long. Needs neither key nor lock.
///
/// # Errors
/// As [`super::kinds`].
pub fn backup_header<'a>(site: impl Into<ArchiveSource<'a>>) -> Result<Vec<u8>> {
    let header = read_header(site)?;
    Ok(header.copy_bytes().to_vec())
}

/// Writes the header in `backup` to both places of the archive. The secrets must open a key slot of
/// the backup.
///
/// # Errors
/// `Invalid` for an invalid backup or one of another archive, `OlderCopy` when the archive's keys
/// were changed since and that is not accepted (`seen.accept_older`), `Damaged`, `InUse`,
/// `WrongKey`.
pub fn restore_header<'a>(
    site: impl Into<ArchiveSource<'a>>,
    backup: &[u8],
    access: &KeyAccess<'_>,
) -> Result<Restored> {
    let storage = site.into().open(LockMode::Exclusive)?;
    let backup = read_backup(backup)?;
    let mine = backup.framing().clone();
    backup.check_writable()?;
    let found = Header::read(&*storage).ok();
    let misfit = |error| found.as_ref().and_then(|found| misfit(found.framing(), &mine)).unwrap_or(error);
    let opened = slots::unlock(&backup, access.secrets, &access.limits).map_err(misfit)?;
    let volume_key = &opened.volume_key;
    backup.authenticate(volume_key)?;
    header::check_known(&*storage, &mine.archive, volume_key)?;
    // An attacker can put any header there; only one that the archive's own key authenticates
    // counts.
    let present = found.as_ref().filter(|found| found.authenticate(volume_key).is_ok());
    if let Some(present) = present {
        present.check_writable()?;
    }
    // The log feature is a fact of the file: a present header gives it better than a backup of
    // another time, and without a header the log itself does.
    let features = match present {
        Some(present) => present.framing().features,
        None => mine.features | features_of_file(storage.clone(), mine.archive, volume_key)?,
    };
    let beside = Framing { features, ..mine.clone() };

    let looked = RollbackCheck::at(&access.seen, volume_key, &mine.archive);
    let looked = looked.opened_by_recipient(slots::is_recipient(&backup, opened.slot));
    let volume = open_commits(storage.clone(), &beside, volume_key, true, &looked).map_err(|error| match error {
        Error::Damaged(reason) => misfit(Error::damaged(format!(
            "the header backup is of another archive, or the archive's commits are lost as well: {reason}"
        ))),
        error => error,
    })?;
    looked.judge_places(&access.seen, Some(&volume))?;
    let whole = present.map(|header| header.framing().copy);
    let remembered = looked.seen.as_ref().map_or(0, |seen| seen.header_sequence);
    let numbered = present.map_or(0, |header| header.framing().sequence);
    let known = numbered.max(volume.durable().header_sequence).max(remembered);
    // Two copies of the archive with separate key changes may have headers of the same number.
    let newest = mine.sequence > known
        || (mine.sequence == known && present.is_none_or(|present| present.slots() == backup.slots()));
    if !newest && !access.seen.accept_older {
        return Err(Error::OlderCopy(format!(
            "the header backup (number {}) is older than the archive's keys (number {known}): a passphrase or key that was changed or \
             removed since then would open it again",
            mine.sequence
        )));
    }
    // A header that replaces a newer one needs a higher number, or every program would take it for
    // an older one put back.
    let next = known.checked_add(1).ok_or_else(|| Error::damaged("the archive's header has the highest number"))?;
    let sequence = if newest { mine.sequence } else { next };
    let framing = Framing { sequence, ..beside };
    header::write_over(&*storage, whole, &framing, &backup.slots(), volume_key)?;
    looked.places.remember(Some(&volume));
    let current = VerifiedVolume { volume, looked, replace: false };
    let newest = commit_header(storage, &framing, volume_key, current);
    RollbackGuard::new(newest.volume, sequence, newest.looked, newest.replace).remember();
    Ok(Restored { backup: mine.sequence, known })
}

/// Returns the feature bits derived from an archive without a header (specification 3.7).
fn features_of_file(storage: Arc<dyn Storage>, archive: ArchiveId, volume_key: &SecretKey) -> Result<u64> {
    let cipher = PageCipher::new(volume_key, archive, true, Arc::new(SystemEnvironment));
    Ok(if txn::has_entries(storage, cipher)? { FEATURE_LOG } else { 0 })
}

/// Returns the reason why a backup cannot belong to the archive whose (unauthenticated) header was
/// found.
fn misfit(found: &Framing, mine: &Framing) -> Option<Error> {
    if found.archive != mine.archive {
        return Some(Error::invalid("the header backup is of another archive"));
    }
    (!constant_time_eq(&found.commitment, &mine.commitment)).then(|| {
        Error::invalid(
            "the header backup is from before the archive was given a new volume key: it opens older copies only",
        )
    })
}

fn read_backup(bytes: &[u8]) -> Result<Header> {
    let refused = |why: &str| Error::invalid(format!("not a usable header backup: {why}"));
    if bytes.len() != HEADER_BYTES {
        return Err(refused(&format!("it has {} bytes instead of {HEADER_BYTES}", bytes.len())));
    }
    Header::of_copy(bytes).map_err(|error| match error {
        Error::NotArchive(_) => refused("it does not begin like a header"),
        Error::Damaged(reason) => refused(&format!("it is damaged ({reason})")),
        error => error,
    })
}
