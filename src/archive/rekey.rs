//! Rewrites an archive under a new volume key, and wraps that for every kept key slot, without the
//! secrets of these.

use std::sync::Arc;

use super::Archive;
use super::compact::{self, CompactOptions, CompactReport, CompactStep, CompactTarget, with_log};
use super::create::random_key;
use crate::crypto::kdf::constant_time_eq;
use crate::crypto::{Prompts, SecretKey};
use crate::env::{Environment, SystemEnvironment};
use crate::error::{Error, Refusal, Result};
use crate::format::KEY_SLOTS;
use crate::format::header::{Framing, SLOT_EMPTY, encode};
use crate::keys::header::{self, Header, SlotBlock, empty_slots};
use crate::keys::slots::{self, OpenedSlot, SlotAddress};
use crate::keys::{KeyAccess, KeyInfo, KeyKind, KeyName, UnlockedKey, listed, open_header};
use crate::storage::ArchiveSource;

/// Selection of the keys that open the archive afterwards.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum KeepKeys {
    All,
    Only(Vec<KeyName>),
    Drop(Vec<KeyName>),
}

/// Options of a rekey.
pub struct RekeyOptions<'a> {
    pub keep: KeepKeys,
    /// As for a compaction; `seen` is that of the access.
    pub break_links: bool,
    /// Only report which keys would be kept.
    pub dry_run: bool,
    /// Prompts for the plugins of age recipients.
    pub prompts: &'a Arc<dyn Prompts>,
}

/// Result of a rekey.
#[derive(Clone, Debug)]
pub struct RekeyReport {
    pub kept: Vec<KeyInfo>,
    pub dropped: Vec<KeyInfo>,
    pub sizes: CompactReport,
}

impl Archive {
    /// Rewrites the archive under a new volume key, verifies it and replaces the old one, as
    /// [`Archive::compact`] does.
    ///
    /// # Errors
    /// As [`Archive::compact`] and [`crate::keys::unlock_with`]; `Invalid` when no key would be
    /// kept, and for a slot that cannot be wrapped: one of an unknown kind, without a description,
    /// or of a plugin that fails. Everything is unchanged then.
    pub fn rekey<'a>(
        site: impl Into<ArchiveSource<'a>>,
        access: &KeyAccess<'_>,
        options: &RekeyOptions<'_>,
        step: &mut dyn FnMut(CompactStep) -> Result<()>,
    ) -> Result<RekeyReport> {
        let site = site.into();
        let (header, opened) = open_header(site, access.secrets, &access.limits)?;
        let (kept, dropped) = choose(&header, &opened, &options.keep)?;
        let sequence = header.framing().sequence;
        let key = UnlockedKey {
            archive: header.framing().archive,
            volume_key: SecretKey::new(*opened.volume_key.bytes()),
            by_recipient: slots::is_recipient(&header, opened.slot),
        };
        let compaction =
            CompactOptions { dry_run: options.dry_run, break_links: options.break_links, seen: access.seen.clone() };
        let mut prepare = |header: &Header, _: &UnlockedKey| {
            // The slots were chosen from this header, which can no longer change because the file
            // is locked.
            if header.framing().sequence != sequence {
                return Err(Error::InUse("its keys were changed meanwhile; try again".into()));
            }
            target(header, &opened, &kept, access, options.prompts)
        };
        let sizes = compact::rewrite(site, &key, &compaction, &mut prepare, step)?;
        Ok(RekeyReport { kept, dropped, sizes })
    }
}

fn choose(header: &Header, opened: &OpenedSlot, keep: &KeepKeys) -> Result<(Vec<KeyInfo>, Vec<KeyInfo>)> {
    let keys = listed(header, &opened.volume_key, std::slice::from_ref(opened));
    let found = |names: &[KeyName]| names.iter().map(|name| name.find(&keys)).collect::<Result<Vec<_>>>();
    let keeps: Box<dyn Fn(usize) -> bool> = match keep {
        KeepKeys::All => Box::new(|_| true),
        KeepKeys::Only(names) => {
            let slots = found(names)?;
            Box::new(move |slot| slots.contains(&slot))
        }
        KeepKeys::Drop(names) => {
            let slots = found(names)?;
            Box::new(move |slot| !slots.contains(&slot))
        }
    };
    let (kept, dropped): (Vec<KeyInfo>, Vec<KeyInfo>) =
        keys.iter().cloned().partition(|key| keeps(usize::from(key.slot)));
    if kept.is_empty() {
        return Err(Error::invalid("no key slot would be kept: nobody could open the archive"));
    }
    for key in &kept {
        if matches!(key.kind, KeyKind::Unknown(_)) {
            return Err(Error::Refused(Refusal::UnknownKey { slot: key.slot.into() }));
        }
        if key.about.is_none() {
            return Err(Error::Refused(Refusal::UndescribedKey { slot: key.slot.into() }));
        }
    }
    Ok((kept, dropped))
}

fn target(
    header: &Header,
    opened: &OpenedSlot,
    kept: &[KeyInfo],
    access: &KeyAccess<'_>,
    prompts: &Arc<dyn Prompts>,
) -> Result<CompactTarget> {
    let environment = SystemEnvironment;
    let archive = header.framing().archive;
    let volume_key = random_key(&environment)?;
    let mut blocks = empty_slots();
    for block in blocks.iter_mut() {
        environment.fill_random(block)?;
    }
    let mut framing = Framing {
        sequence: header.framing().sequence + 1,
        commitment: header::commitment(&volume_key, &archive),
        slots: [SLOT_EMPTY; 32],
        ..with_log(header.framing())
    };
    for key in kept {
        let slot = usize::from(key.slot);
        // The slot's own description, under its own key, is preferred to the one that any holder of
        // the volume key may have written.
        let own = opened.own.clone().filter(|_| opened.slot == slot);
        let description = own.or_else(|| slots::description(header, slot, &opened.volume_key));
        let description = description.ok_or_else(|| Error::damaged(format!("key slot {slot} lost its description")))?;
        let address = SlotAddress { archive: &archive, slot, volume_key: &volume_key };
        let wrapped = slots::rewrap(&address, header, &description, prompts, &environment);
        (framing.slots[slot], blocks[slot]) = wrapped.map_err(|error| match error {
            Error::Invalid(reason) => Error::Refused(Refusal::UnkeptKey { slot, reason }),
            error => error,
        })?;
    }
    if framing.slots[opened.slot] != SLOT_EMPTY {
        prove_opens(&framing, &blocks, opened.slot, access, &volume_key)?;
    }
    Ok(CompactTarget { key: UnlockedKey { archive, volume_key, by_recipient: false }, framing, slots: blocks })
}

/// Checks that the given secret opens the new slot, before anything is written: a holder of the
/// volume key could have altered the data for which it is wrapped.
fn prove_opens(
    framing: &Framing,
    blocks: &[SlotBlock; KEY_SLOTS],
    slot: usize,
    access: &KeyAccess<'_>,
    volume_key: &SecretKey,
) -> Result<()> {
    let made = Header::of_copy(&encode(framing, blocks))?;
    match slots::unlock(&made, access.secrets, &access.limits) {
        Ok(opened) if constant_time_eq(opened.volume_key.bytes(), volume_key.bytes()) => Ok(()),
        Ok(_) | Err(Error::WrongKey) => Err(Error::damaged(format!(
            "key slot {slot} would not open with its own secret after the change: its description was altered; nothing was changed"
        ))),
        Err(error) => Err(error),
    }
}
