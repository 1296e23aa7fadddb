//! Keys of archives in files: added, removed, listed, replaced by a new volume key, and headers
//! backed up and restored.

use std::path::PathBuf;

use super::*;
use crate::archive::{CompactStep, KeepKeys, OpenOptions, RekeyOptions};
use crate::crypto::identity::Recipient;
use crate::crypto::{KeyFile, NoPrompts, Prompts, RecoveryCode};
use crate::env::seeds;
use crate::format::ROOT_INO;
use crate::fs::{SetAttributes, XattrMode, mode};
use crate::keys::{KeyAccess, KeyKind, KeyName, RollbackOptions};
use crate::storage::{FileStorage, LockMode};

pub(super) struct Case {
    place: tempfile::TempDir,
}

impl Case {
    pub(super) fn new() -> Case {
        let case = Case { place: tempfile::tempdir().unwrap() };
        let options = CreateOptions { kdf: KdfCost::TEST, creator: Creator { uid: 0, gid: 0, umask: None } };
        Archive::create(&case.path(), &passphrase("first"), &options).unwrap();
        case
    }

    pub(super) fn path(&self) -> PathBuf {
        self.place.path().join("a.lbx")
    }

    fn seen(&self) -> RollbackOptions {
        RollbackOptions { directory: Some(self.place.path().join("seen")), ..RollbackOptions::default() }
    }

    pub(super) fn access<'a>(&self, secrets: &'a Secrets) -> KeyAccess<'a> {
        KeyAccess { secrets, limits: UnlockLimits::default(), seen: self.seen() }
    }

    fn add(&self, new: &NewKey<'_>, label: &str) -> u8 {
        keys::add(&self.path(), &self.access(&secrets("first")), new, label).unwrap()
    }

    fn opens(&self, secrets: &Secrets) -> bool {
        self.try_open(secrets, &self.seen()).is_ok()
    }

    pub(super) fn try_open(&self, secrets: &Secrets, seen: &RollbackOptions) -> crate::Result<Archive> {
        let key = keys::unlock_with(&self.path(), secrets, &UnlockLimits::default())?;
        Archive::open_seen(&self.path(), &key, &OpenOptions::default(), seen)
    }

    fn remove(&self, name: &str) -> crate::Result<u8> {
        let access = secrets("first");
        keys::remove(&self.path(), &self.access(&access), &KeyName::parse(name)).map(|removed| removed.slot)
    }

    pub(super) fn rekey(&self, opened_with: &Secrets, keep: KeepKeys) -> crate::Result<crate::archive::RekeyReport> {
        let prompts = prompts();
        let options = RekeyOptions { keep, break_links: false, dry_run: false, prompts: &prompts };
        Archive::rekey(&self.path(), &self.access(opened_with), &options, &mut |_| Ok(()))
    }
}

fn prompts() -> Arc<dyn Prompts> {
    Arc::new(NoPrompts)
}

pub(super) fn key_file() -> KeyFile {
    KeyFile::read(&(0..64).collect::<Vec<u8>>()[..]).unwrap()
}

fn with_file() -> Secrets {
    Secrets { key_file: Some(key_file()), ..Secrets::default() }
}

fn refusal<T>(result: crate::Result<T>) -> String {
    result.err().map(|error| error.to_string()).unwrap_or_default()
}

#[test]
fn keys_are_added_listed_and_removed_by_number_or_label() {
    let case = Case::new();
    let code = RecoveryCode::generate(&SeededEnvironment::new(1)).unwrap();
    assert_eq!(case.add(&NewKey::KeyFile(&key_file()), "usb stick"), 1);
    assert_eq!(case.add(&NewKey::RecoveryCode(&code), ""), 2);
    assert!(case.opens(&with_file()));
    // Any of them can read all labels.
    let keys = keys::list(&case.path(), &case.access(&with_file())).unwrap();
    let shown: Vec<_> =
        keys.iter().map(|key| (key.slot, key.kind, key.about.as_ref().unwrap().label.as_str(), key.opened)).collect();
    let expected = [
        (0, KeyKind::Passphrase, "", false),
        (1, KeyKind::KeyFile, "usb stick", true),
        (2, KeyKind::RecoveryCode, "", false),
    ];
    assert_eq!(shown, expected);
    let both = Secrets { key_file: Some(key_file()), ..secrets("first") };
    let keys = keys::list_all(&case.path(), &case.access(&both)).unwrap();
    assert_eq!(keys.iter().map(|key| key.opened).collect::<Vec<_>>(), [true, true, false]);

    assert!(refusal(case.remove("no such")).contains("no key slot has the label"));
    assert!(refusal(case.remove("7")).contains("is empty"));
    assert_eq!(case.remove("2").unwrap(), 2);
    assert!(refusal(case.remove("")).contains("an empty name denotes no key slot"), "slot 0 has no label");
    assert_eq!(case.remove("usb stick").unwrap(), 1);
    assert!(!case.opens(&with_file()));
    assert!(refusal(case.remove("0")).contains("the last one"));
    assert!(case.opens(&secrets("first")));
}

#[test]
fn a_label_names_one_slot_and_all_slots_can_be_used() {
    let case = Case::new();
    let access = secrets("first");
    let add = |label: &str| keys::add(&case.path(), &case.access(&access), &NewKey::KeyFile(&key_file()), label);
    for (label, why) in [("7", "number"), ("a\nb", "control"), (&"x".repeat(256)[..], "too long")] {
        assert!(refusal(add(label)).contains(why), "{label}");
    }
    add("one").unwrap();
    assert!(refusal(add("one")).contains("already"));
    for _ in 2..32 {
        add("").unwrap();
    }
    assert!(refusal(add("")).contains("32 key slots"));
    assert!(case.opens(&access) && case.opens(&with_file()));
}

#[test]
fn a_new_passphrase_takes_the_place_of_the_old_one_with_a_recovery_code_too() {
    let case = Case::new();
    let code = RecoveryCode::generate(&SeededEnvironment::new(1)).unwrap();
    case.add(&NewKey::RecoveryCode(&code), "drawer");
    let recovery = Secrets { recovery_code: Some(code), ..Secrets::default() };
    let set = |name: Option<&KeyName>, text: &str| {
        keys::set_passphrase(&case.path(), &case.access(&recovery), name, &passphrase(text), KdfCost::TEST)
    };
    assert_eq!(set(None, "second").unwrap(), 0);
    assert!(case.opens(&secrets("second")) && !case.opens(&secrets("first")));
    let change =
        |with: &Secrets| keys::change_passphrase(&case.path(), &case.access(with), &passphrase("third"), KdfCost::TEST);
    change(&secrets("second")).unwrap();
    assert!(case.opens(&secrets("third")) && !case.opens(&secrets("second")));
    assert!(refusal(change(&recovery)).contains("no passphrase that could be changed"));
    let extra = secrets("third");
    keys::add(&case.path(), &case.access(&extra), &NewKey::Passphrase(&passphrase("x"), KdfCost::TEST), "").unwrap();
    assert!(refusal(set(None, "fourth")).contains("several key slots"));
    assert_eq!(set(Some(&KeyName::Slot(2)), "fourth").unwrap(), 2);
    assert!(case.opens(&secrets("third")) && case.opens(&secrets("fourth")) && !case.opens(&secrets("x")));
}

#[test]
fn a_changed_passphrase_opens_no_slot_any_more_that_it_opened() {
    let case = Case::new();
    let same = passphrase("first");
    case.add(&NewKey::KeyFile(&key_file()), "stick");
    case.add(&NewKey::Passphrase(&same, KdfCost::TEST), "again");
    case.add(&NewKey::Passphrase(&passphrase("other"), KdfCost::TEST), "other");
    case.add(&NewKey::KeyFileAndPassphrase(&key_file(), &same, KdfCost::TEST), "both");
    let change = |with: &Secrets, new: &str, limits: UnlockLimits| {
        let access = KeyAccess { limits, ..case.access(with) };
        keys::change_passphrase(&case.path(), &access, &passphrase(new), KdfCost::TEST).unwrap()
    };
    // The key file opens a slot of its own too, and is tried first.
    let with = Secrets { key_file: Some(key_file()), ..secrets("first") };
    let changed = change(&with, "second", UnlockLimits::default());
    assert_eq!((changed.slots, changed.all_tried), (vec![0, 2, 4], true));
    let opened = |with: &Secrets| -> Vec<u8> {
        let keys = keys::list_all(&case.path(), &case.access(with)).unwrap_or_default();
        keys.iter().filter(|key| key.opened).map(|key| key.slot).collect()
    };
    assert!(opened(&secrets("first")).is_empty());
    assert_eq!(opened(&secrets("second")), [0, 2]);
    assert_eq!(opened(&with), [1]);
    assert_eq!(opened(&Secrets { key_file: Some(key_file()), ..secrets("second") }), [0, 1, 2, 4]);
    assert_eq!(opened(&secrets("other")), [3]);
    let keys = keys::list(&case.path(), &case.access(&with_file())).unwrap();
    let labels: Vec<_> = keys.iter().map(|key| key.about.as_ref().unwrap().label.as_str()).collect();
    assert_eq!(labels, ["", "stick", "again", "other", "both"]);
    // Without the budget for a second slot that one keeps the old passphrase, which is reported.
    let tight = UnlockLimits { cost_mib: 1, ..UnlockLimits::default() };
    let changed = change(&secrets("second"), "third", tight);
    assert_eq!((changed.slots, changed.all_tried), (vec![0], false));
    assert_eq!(opened(&secrets("second")), [2]);
}

#[test]
fn keys_of_an_archive_in_use_stay_as_they_are() {
    let case = Case::new();
    let access = secrets("first");
    let held = case.try_open(&access, &case.seen()).unwrap();
    let before = std::fs::read(case.path()).unwrap();
    let add = keys::add(&case.path(), &case.access(&access), &NewKey::KeyFile(&key_file()), "");
    assert!(matches!(add, Err(Error::InUse(_))));
    assert!(matches!(case.rekey(&access, KeepKeys::All), Err(Error::InUse(_))));
    let backup = keys::backup_header(&case.path()).unwrap();
    assert!(matches!(keys::restore_header(&case.path(), &backup, &case.access(&access)), Err(Error::InUse(_))));
    assert!(std::fs::read(case.path()).unwrap() == before);
    held.close().unwrap();
}

/// Creates names hashed under the volume key: many, without collisions, and attributes inline and
/// in pieces.
fn fill(case: &Case) {
    let archive = case.try_open(&secrets("first"), &case.seen()).unwrap();
    let fs = archive.file_system();
    let owner = Creator { uid: 0, gid: 0, umask: None };
    for n in 0..700 {
        let made = fs.make_node(ROOT_INO, format!("file {n}").as_bytes(), mode::REGULAR | 0o644, 0, owner).unwrap();
        fs.write(made.ino, 0, format!("content {n}").repeat(1 + n % 50).as_bytes()).unwrap();
        if n % 7 == 0 {
            fs.set_xattr(made.ino, b"user.short", b"value", XattrMode::Set).unwrap();
            fs.set_xattr(made.ino, b"user.long", &vec![n as u8; 10_000], XattrMode::Set).unwrap();
        }
    }
    fs.set_attributes(ROOT_INO, &SetAttributes::default()).unwrap();
    archive.close().unwrap();
}

fn check_content(case: &Case, with: &Secrets) {
    let archive = case.try_open(with, &case.seen()).unwrap();
    let fs = archive.file_system();
    for n in 0..700 {
        let ino = fs.lookup(ROOT_INO, format!("file {n}").as_bytes()).unwrap().ino;
        let content = format!("content {n}").repeat(1 + n % 50);
        assert_eq!(fs.read(ino, 0, 100_000).unwrap(), content.as_bytes());
        if n % 7 == 0 {
            assert_eq!(fs.xattr(ino, b"user.short").unwrap(), b"value");
            assert_eq!(fs.xattr(ino, b"user.long").unwrap(), vec![n as u8; 10_000]);
        }
    }
    archive.close().unwrap();
}

#[test]
fn a_new_volume_key_is_wrapped_to_every_slot_that_is_kept() {
    let case = Case::new();
    fill(&case);
    let code = RecoveryCode::generate(&SeededEnvironment::new(1)).unwrap();
    let identity = age::x25519::Identity::generate();
    let recipient = Recipient::parse(&identity.to_public().to_string()).unwrap();
    let asked = prompts();
    case.add(&NewKey::KeyFile(&key_file()), "file");
    case.add(&NewKey::KeyFileAndPassphrase(&key_file(), &passphrase("both"), KdfCost::TEST), "both");
    case.add(&NewKey::RecoveryCode(&code), "code");
    case.add(&NewKey::Recipient(&recipient, &asked), "age");
    case.add(&NewKey::Passphrase(&passphrase("leaver"), KdfCost::TEST), "leaver");
    let old_key = keys::unlock_with(&case.path(), &secrets("leaver"), &UnlockLimits::default()).unwrap();
    let old_copy = std::fs::read(case.path()).unwrap();
    let mut by_identity = Secrets::default();
    let text = identity.to_string();
    by_identity
        .identities
        .add(age::secrecy::ExposeSecret::expose_secret(&text).as_bytes(), "identity", &asked)
        .unwrap();
    let kept = [
        secrets("first"),
        with_file(),
        Secrets { key_file: Some(key_file()), ..secrets("both") },
        Secrets { recovery_code: Some(code), ..Secrets::default() },
        by_identity,
    ];

    let report = case.rekey(&secrets("first"), KeepKeys::Drop(vec![KeyName::parse("leaver")])).unwrap();
    assert_eq!(report.kept.iter().map(|key| key.slot).collect::<Vec<_>>(), [0, 1, 2, 3, 4]);
    assert_eq!(report.dropped.iter().map(|key| key.slot).collect::<Vec<_>>(), [5]);
    for secrets in &kept {
        check_content(&case, secrets);
    }
    assert!(matches!(case.try_open(&secrets("leaver"), &case.seen()), Err(Error::WrongKey)));
    assert!(
        Archive::open(&case.path(), &old_key, &OpenOptions::default()).is_err(),
        "the old volume key is worth nothing"
    );
    let keys = keys::list(&case.path(), &case.access(&kept[1])).unwrap();
    assert_eq!(keys[3].about.as_ref().unwrap().label, "code");

    // With another one of the kept keys, only some, and again.
    case.rekey(&kept[3], KeepKeys::Only(vec![KeyName::Slot(0), KeyName::parse("code"), KeyName::parse("age")]))
        .unwrap();
    for (number, secrets) in kept.iter().enumerate() {
        assert_eq!(case.opens(secrets), [0, 3, 4].contains(&number), "{number}");
    }
    check_content(&case, &kept[0]);
    // A re-wrapped passphrase slot accepts a new passphrase like any other.
    keys::change_passphrase(&case.path(), &case.access(&kept[0]), &passphrase("new"), KdfCost::TEST).unwrap();
    assert!(case.opens(&secrets("new")) && !case.opens(&kept[0]));

    // The rollback state was updated: the copy from before is an older one, with a key that still
    // opens it.
    std::fs::write(case.path(), &old_copy).unwrap();
    assert!(matches!(case.try_open(&secrets("first"), &case.seen()), Err(Error::OlderCopy(_))));
}

#[test]
fn a_rekey_that_fails_or_keeps_nothing_leaves_all_as_it_was() {
    let case = Case::new();
    case.add(&NewKey::KeyFile(&key_file()), "file");
    let before = std::fs::read(case.path()).unwrap();
    let access = secrets("first");
    let all = vec![KeyName::Slot(0), KeyName::Slot(1)];
    assert!(refusal(case.rekey(&access, KeepKeys::Drop(all))).contains("no key slot would remain"));
    assert!(refusal(case.rekey(&access, KeepKeys::Only(vec![]))).contains("no key slot would remain"));
    assert!(refusal(case.rekey(&access, KeepKeys::Only(vec![KeyName::parse("nobody")]))).contains("label"));
    let prompts = prompts();
    for stop in [CompactStep::Created, CompactStep::Copied, CompactStep::Verified, CompactStep::Prepared] {
        let options = RekeyOptions { keep: KeepKeys::All, break_links: false, dry_run: false, prompts: &prompts };
        let stopped = Archive::rekey(&case.path(), &case.access(&access), &options, &mut |step| match step == stop {
            true => Err(Error::invalid("stopped")),
            false => Ok(()),
        });
        assert!(refusal(stopped).contains("stopped"));
        assert!(std::fs::read(case.path()).unwrap() == before, "{stop:?}");
        let names = std::fs::read_dir(case.place.path()).unwrap().count();
        assert_eq!(names, 2, "{stop:?}: the archive and what is remembered");
    }
    let options = RekeyOptions { keep: KeepKeys::All, break_links: false, dry_run: true, prompts: &prompts };
    let report = Archive::rekey(&case.path(), &case.access(&access), &options, &mut |_| Ok(())).unwrap();
    assert_eq!((report.kept.len(), report.dropped.len()), (2, 0));
    assert!(std::fs::read(case.path()).unwrap() == before);
}

/// Slots of programs that wrote no description.
#[test]
fn a_slot_without_a_description_is_kept_only_with_its_secret() {
    let case = Case::new();
    case.add(&NewKey::Passphrase(&passphrase("old"), KdfCost::TEST), "label");
    {
        let storage = crate::storage::FileStorage::open(&case.path(), crate::storage::LockMode::Exclusive).unwrap();
        let header = Header::read(&storage).unwrap();
        let key = keys::unlock(&case.path(), &passphrase("old")).unwrap();
        let plain = |slot| {
            let mut block = [0; 4096];
            block.copy_from_slice(header.slot(slot));
            block[632..].fill(0xA5);
            (slot, (SLOT_PASSPHRASE, block))
        };
        header.replace_slots(&storage, &[plain(0), plain(1)], &key.volume_key).unwrap();
    }
    assert!(refusal(case.rekey(&secrets("old"), KeepKeys::All)).contains("key slot 0 was created by an older program"));
    // A change of keys with its secret describes it, like a change of the passphrase.
    let access = secrets("old");
    keys::add(&case.path(), &case.access(&access), &NewKey::KeyFile(&key_file()), "").unwrap();
    let keys = keys::list(&case.path(), &case.access(&with_file())).unwrap();
    assert_eq!(keys.iter().map(|key| key.about.is_some()).collect::<Vec<_>>(), [false, true, true]);
    assert_eq!(keys[1].about.as_ref().unwrap().label, "label");
    let first = secrets("first");
    keys::change_passphrase(&case.path(), &case.access(&first), &passphrase("first"), KdfCost::TEST).unwrap();
    case.rekey(&with_file(), KeepKeys::All).unwrap();
    assert!(case.opens(&secrets("old")) && case.opens(&first) && case.opens(&with_file()));
}

#[test]
fn a_header_backup_opens_an_archive_that_lost_both_copies() {
    let case = Case::new();
    let backup = keys::backup_header(&case.path()).unwrap();
    let access = secrets("first");
    let ruin = || {
        let mut bytes = std::fs::read(case.path()).unwrap();
        for start in HEADER_START {
            let start = (start * BLOCK) as usize;
            bytes[start..start + HEADER_BYTES].fill(0x55);
        }
        std::fs::write(case.path(), bytes).unwrap();
    };
    ruin();
    assert!(keys::unlock(&case.path(), &passphrase("first")).is_err());
    let wrong = secrets("wrong");
    assert!(matches!(keys::restore_header(&case.path(), &backup, &case.access(&wrong)), Err(Error::WrongKey)));
    keys::restore_header(&case.path(), &backup, &case.access(&access)).unwrap();
    assert!(case.opens(&access));

    // Keys that were changed since are not restored without request, also if only the commits
    // record the change.
    case.add(&NewKey::KeyFile(&key_file()), "");
    assert!(case.opens(&access));
    for ruined in [false, true] {
        if ruined {
            ruin();
        }
        let older = keys::restore_header(&case.path(), &backup, &case.access(&access));
        assert!(
            matches!(&older, Err(Error::OlderCopy(reason)) if reason.contains("would open it again") && !reason.contains("accept")),
            "{older:?}"
        );
    }
    let mut accepting = case.access(&access);
    accepting.seen.accept_older = true;
    keys::restore_header(&case.path(), &backup, &accepting).unwrap();
    assert!(case.opens(&access), "what was accepted raises no alarm later");
    assert!(!case.opens(&with_file()));
}

/// A header backup from before the archive had a log (specification 3.7): without a header that
/// declares it, the entries do.
#[test]
fn a_header_backup_without_a_log_does_not_hide_what_the_log_has() {
    let case = Case::new();
    let access = secrets("first");
    let key = keys::unlock(&case.path(), &passphrase("first")).unwrap();
    let backup = {
        let present = Header::of_copy(&keys::backup_header(&case.path()).unwrap()).unwrap();
        let storage = MemoryStorage::from_contents(std::fs::read(case.path()).unwrap());
        let framing = Framing { features: 0, sequence: present.framing().sequence, ..present.framing().clone() };
        header::write_over(&storage, None, &framing, &present.slots(), &key.volume_key).unwrap();
        Header::read(&storage).unwrap().copy_bytes().to_vec()
    };
    case.add(&NewKey::KeyFile(&key_file()), "");
    let archive = case.try_open(&access, &case.seen()).unwrap();
    let fs = archive.file_system();
    let ino = super::sample::put(fs, ROOT_INO, b"file", b"before");
    fs.make_durable().unwrap();
    fs.write(ino, 0, b"after!").unwrap();
    fs.sync().unwrap();
    assert!(fs.usage().log.entries > 0);
    drop(archive);
    let mut bytes = std::fs::read(case.path()).unwrap();
    for start in HEADER_START {
        let start = (start * BLOCK) as usize;
        bytes[start..start + HEADER_BYTES].fill(0x55);
    }
    std::fs::write(case.path(), bytes).unwrap();
    let mut accepting = case.access(&access);
    accepting.seen.accept_older = true;
    keys::restore_header(&case.path(), &backup, &accepting).unwrap();
    let archive = case.try_open(&access, &case.seen()).unwrap();
    assert_eq!(archive.file_system().read(ino, 0, 100).unwrap(), b"after!");
    assert!(archive.check(true, &mut |_| {}).unwrap().findings.is_empty());
}

#[test]
fn a_header_backup_of_another_archive_or_a_damaged_one_is_refused() {
    let (case, other) = (Case::new(), Case::new());
    let access = secrets("first");
    let before = std::fs::read(case.path()).unwrap();
    let restore = |backup: &[u8]| refusal(keys::restore_header(&case.path(), backup, &case.access(&access)));
    let own = keys::backup_header(&case.path()).unwrap();
    assert!(restore(&keys::backup_header(&other.path()).unwrap()).contains("another archive"));
    assert!(restore(&own[1..]).contains("bytes instead of"));
    assert!(restore(&vec![0; own.len()]).contains("does not begin like a header"));
    let mut damaged = own.clone();
    damaged[9000] ^= 1;
    assert!(restore(&damaged).contains("damaged"));
    assert!(std::fs::read(case.path()).unwrap() == before);
    // Without such a header the commits do not open.
    let mut bytes = before.clone();
    for start in HEADER_START {
        bytes[(start * BLOCK) as usize..][..HEADER_BYTES].fill(0);
    }
    std::fs::write(case.path(), &bytes).unwrap();
    assert!(restore(&keys::backup_header(&other.path()).unwrap()).contains("another archive"));
    // From before a change of the volume key.
    std::fs::write(case.path(), &before).unwrap();
    case.rekey(&access, KeepKeys::All).unwrap();
    assert!(restore(&own).contains("new volume key"));
}

#[test]
fn a_header_that_nobody_vouches_for_does_not_keep_the_right_one_out() {
    let (case, other) = (Case::new(), Case::new());
    let access = secrets("first");
    let own = keys::backup_header(&case.path()).unwrap();
    let foreign = keys::backup_header(&other.path()).unwrap();
    // Both copies of another archive, and one of this archive with the highest number and a
    // forgeable checksum.
    let mut forged = Framing { sequence: u64::MAX, ..Header::of_copy(&own).unwrap().framing().clone() };
    forged.copy = 1;
    let forged = crate::format::header::encode(&forged, &Header::of_copy(&own).unwrap().slots());
    for put in [[&foreign[..], &foreign[..]], [&own[..], &forged[..]]] {
        let mut bytes = std::fs::read(case.path()).unwrap();
        for (start, copy) in HEADER_START.iter().zip(put) {
            bytes[(start * BLOCK) as usize..][..HEADER_BYTES].copy_from_slice(copy);
        }
        std::fs::write(case.path(), bytes).unwrap();
        keys::restore_header(&case.path(), &own, &case.access(&access)).unwrap();
        assert!(case.opens(&access));
    }
}

#[test]
fn digits_alone_are_a_slot_and_everything_else_is_a_label() {
    for (text, slot) in [("5", Some(5)), ("31", Some(31)), ("+5", None), ("", None), ("5 ", None), ("300", None)] {
        let expected = slot.map_or_else(|| KeyName::Label(text.into()), KeyName::Slot);
        assert_eq!(KeyName::parse(text), expected, "{text:?}");
    }
}

/// A former user had the volume key, and could change the recipient for which another user's slot
/// is wrapped.
#[test]
fn a_rekey_that_would_lock_its_own_user_out_is_refused() {
    let case = Case::new();
    case.add(&NewKey::KeyFile(&key_file()), "mine");
    {
        let storage = crate::storage::FileStorage::open(&case.path(), crate::storage::LockMode::Exclusive).unwrap();
        let header = Header::read(&storage).unwrap();
        let key = keys::unlock(&case.path(), &passphrase("first")).unwrap();
        let mut altered = slots::description(&header, 1, &key.volume_key).unwrap();
        altered.rewrap = crate::format::header::Rewrap::Public([9; 32]);
        let mut block = [0; 4096];
        block.copy_from_slice(header.slot(1));
        let place = slots::SlotAddress { archive: &header.framing().archive, slot: 1, volume_key: &key.volume_key };
        let kind = header.framing().slots[1];
        let block = slots::describe(&place, kind, block, &altered, &SeededEnvironment::new(3)).unwrap();
        header.replace_slots(&storage, &[(1, (kind, block))], &key.volume_key).unwrap();
    }
    let before = std::fs::read(case.path()).unwrap();
    assert!(refusal(case.rekey(&with_file(), KeepKeys::All)).contains("description was altered"));
    assert!(std::fs::read(case.path()).unwrap() == before);
}

/// HEADER-1 for changes of several slots and of kinds: a power failure at any time leaves the old
/// or the new keys, also if each copy is read alone.
#[test]
fn a_power_cut_anywhere_in_a_change_of_keys_leaves_the_old_or_the_new_ones() {
    let file = key_file();
    let mut cuts = 0;
    for seed in seeds(0..=7) {
        let chance = Arc::new(SeededEnvironment::new(seed));
        let memory = archive(&[(0, "old", KdfCost::TEST)]);
        let place = SlotAddress { archive: &ARCHIVE, slot: 3, volume_key: &key() };
        let added = slots::make(&place, &NewKey::KeyFile(&file), String::new(), &*chance).unwrap();
        let storage = SimulatedStorage::from_contents(&memory.contents());
        let images = crash_images(&storage, &chance, true, 4);
        // One key out, another in.
        Header::read(&*storage).unwrap().replace_slots(&*storage, &[(0, (0, [1; 4096])), (3, added)], &key()).unwrap();
        storage.on_op(Box::new(|_| {}));
        for image in images.lock().drain(..) {
            cuts += 1;
            let by_file = || {
                let header = Header::read(&*image).unwrap();
                slots::unlock(&header, &with_file(), &UnlockLimits::default()).is_ok()
            };
            let new = by_file();
            assert_ne!(new, opens(&*image, "old"), "exactly one of the two opens it");
            Header::read(&*image).unwrap().repair(&*image, &key()).unwrap();
            assert_eq!(by_file(), new);
        }
    }
    assert!(cuts > 100, "only {cuts}");
}

/// HEADER-1 when a header is restored over one with a single valid copy, for either copy.
#[test]
fn a_power_cut_while_a_header_is_put_back_leaves_a_whole_copy() {
    for damaged in 0..2u8 {
        println!("damaged copy {damaged}");
        let chance = Arc::new(SeededEnvironment::new(damaged.into()));
        let memory = archive(&[(0, "word", KdfCost::TEST)]);
        let backup = Header::read(&memory).unwrap();
        flip(&memory, HEADER_START[usize::from(damaged)] * BLOCK + 9000);
        let storage = SimulatedStorage::from_contents(&memory.contents());
        let images = crash_images(&storage, &chance, false, 20);
        let whole = Header::read(&*storage).unwrap().framing().copy;
        assert_eq!(whole, 1 - damaged);
        let framing = Framing { sequence: 7, ..backup.framing().clone() };
        header::write_over(&*storage, Some(whole), &framing, &backup.slots(), &key()).unwrap();
        storage.on_op(Box::new(|_| {}));
        assert!(images.lock().len() > 50);
        for image in images.lock().iter() {
            assert!(opens(&**image, "word"));
        }
        assert_eq!(Header::read(&*storage).unwrap().framing().sequence, 7);
    }
}

/// A crash between the two copies of a change leaves an older one: opening for writing updates it
/// before anything else, reading leaves it unchanged.
#[test]
fn a_writable_open_repairs_an_older_header_copy() {
    for older in 0..2u8 {
        let case = Case::new();
        let unlocked = keys::unlock(&case.path(), &passphrase("first")).unwrap();
        let file = || FileStorage::open(&case.path(), LockMode::Exclusive).unwrap();
        let header = Header::read(&file()).unwrap();
        let mut framing = header.framing().clone();
        framing.sequence += 1;
        header::write_copy(&file(), &framing, &header.slots(), 1 - older, &unlocked.volume_key).unwrap();
        let before = std::fs::read(case.path()).unwrap();
        let open = |read_only| {
            let options = OpenOptions { read_only, ..OpenOptions::default() };
            Archive::open(&case.path(), &unlocked, &options).unwrap()
        };
        drop(open(true));
        assert!(std::fs::read(case.path()).unwrap() == before, "a reader wrote");
        drop(open(false));
        let copies = Header::salvage(&file()).unwrap();
        let sequences: Vec<u64> = copies.iter().map(|copy| copy.framing().sequence).collect();
        assert_eq!(sequences, [framing.sequence; 2], "copy {older} is still the older one");
        copies.iter().for_each(|copy| copy.authenticate(&unlocked.volume_key).unwrap());
    }
}
