//! Tries secrets on the key slots of a header, the cheapest first, within one cost budget; derives
//! the keys of several at once where memory and processors allow it.

mod make;

pub use make::NewKey;
pub(crate) use make::{SlotAddress, describe, description, make, rewrap};

use std::num::NonZero;
use std::panic::resume_unwind;
use std::thread::{self, Builder};

use super::header::Header;
use crate::crypto::identity::is_for_ssh;
use crate::crypto::kdf::{self, KdfCost, argon2id, constant_time_eq, hkdf, hkdf_with, rewrap_public, x25519_shared};
use crate::crypto::{Identities, KeyFile, Passphrase, RecoveryCode, SecretKey, wrap};
use crate::error::{Error, Refusal, Result, Timestamp};
use crate::format::header::{
    CLEAR, Description, KdfParameters, KeySlot, PassphraseSlot, REWRAPPED, Rewrap, SLOT_AGE, SLOT_EMPTY, SLOT_KEY_FILE,
    SLOT_PASSPHRASE, SLOT_RECOVERY, decode_passphrase_slot, is_key_slot,
};
use crate::format::{ArchiveId, FORMAT_VERSION, KEY_SLOTS};

/// Secrets to try on an archive: each alone, and the key file together with the passphrase.
#[derive(Default)]
pub struct Secrets {
    pub passphrase: Option<Passphrase>,
    pub key_file: Option<KeyFile>,
    pub recovery_code: Option<RecoveryCode>,
    pub identities: Identities,
}

impl From<Passphrase> for Secrets {
    fn from(passphrase: Passphrase) -> Secrets {
        Secrets { passphrase: Some(passphrase), ..Secrets::default() }
    }
}

impl Secrets {
    /// Adds typed text as a passphrase, which may be a recovery code. Returns the reason why text
    /// that looks like a recovery code is not one.
    pub fn add_typed(&mut self, typed: Passphrase) -> Option<Error> {
        let mistyped = match RecoveryCode::parse(typed.bytes()) {
            Ok(code) => {
                self.recovery_code = Some(code);
                None
            }
            Err(error) => RecoveryCode::is_code_like(typed.bytes()).then_some(error),
        };
        self.passphrase = Some(typed);
        mistyped
    }
}

/// Cost limits of unlocking, enforced against hostile headers.
#[derive(Clone, Copy, Debug)]
pub struct UnlockLimits {
    /// MiB times passes, over all slots that are tried.
    pub cost_mib: u64,
    /// MiB of one derivation.
    pub memory_mib: u32,
    /// Memory in MiB of all concurrent derivations. A single one may take more. Only programs know
    /// the memory that a machine can spare, so derivations run one after the other by default.
    pub together_mib: u64,
}

impl UnlockLimits {
    /// For archives that are trusted: any memory that the format allows.
    pub fn raised(cost_mib: u64) -> UnlockLimits {
        UnlockLimits { cost_mib, memory_mib: 4096, together_mib: 0 }
    }
}

impl Default for UnlockLimits {
    /// Eight slots of 1 GiB and 3 passes each, the least that a calibrated slot has, and a second
    /// or two each on common machines: a hostile header with 32 slots costs as much as that and no
    /// more. 1 GiB is the most that a calibrated slot asks for.
    fn default() -> Self {
        UnlockLimits { cost_mib: 8 * 3 * 1024, memory_mib: 1024, together_mib: 0 }
    }
}

/// Kind of secret that a slot accepts; readable without a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KeyKind {
    Passphrase,
    KeyFile,
    KeyFileAndPassphrase,
    RecoveryCode,
    Age,
    /// An age recipient that is an SSH key.
    SshKey,
    /// A slot of a newer program, or a malformed one.
    Unknown(u8),
}

impl KeyKind {
    /// Returns the name for users.
    pub fn name(self) -> &'static str {
        match self {
            KeyKind::Passphrase => "passphrase",
            KeyKind::KeyFile => "key file",
            KeyKind::KeyFileAndPassphrase => "key file and passphrase",
            KeyKind::RecoveryCode => "recovery code",
            KeyKind::Age => "age recipient",
            KeyKind::SshKey => "SSH key",
            KeyKind::Unknown(_) => "unknown",
        }
    }

    pub(crate) fn has_passphrase(self) -> bool {
        matches!(self, KeyKind::Passphrase | KeyKind::KeyFileAndPassphrase)
    }
}

pub(crate) struct OpenedSlot {
    pub(crate) slot: usize,
    pub(crate) volume_key: SecretKey,
    /// Description inside a passphrase slot, used without a separate one: older programs wrote
    /// none.
    pub(crate) own: Option<Description>,
}

enum Parsed {
    Passphrase(PassphraseSlot),
    Other(KeySlot),
}

/// A slot that the given secrets may open.
struct Candidate {
    slot: usize,
    kind: u8,
    parsed: Parsed,
}

impl Candidate {
    fn kdf(&self) -> Option<&KdfParameters> {
        match &self.parsed {
            Parsed::Passphrase(slot) => Some(&slot.kdf),
            Parsed::Other(slot) => slot.kdf.as_ref(),
        }
    }

    fn price(&self) -> Option<Price> {
        self.kdf().map(|kdf| Price { cost: cost(kdf), memory_kib: kdf.memory_kib })
    }

    fn key_kind(&self) -> KeyKind {
        match (self.kind & !REWRAPPED, &self.parsed) {
            (SLOT_PASSPHRASE, _) => KeyKind::Passphrase,
            (SLOT_KEY_FILE, _) if self.kdf().is_some() => KeyKind::KeyFileAndPassphrase,
            (SLOT_KEY_FILE, _) => KeyKind::KeyFile,
            (SLOT_RECOVERY, _) => KeyKind::RecoveryCode,
            (SLOT_AGE, Parsed::Other(slot)) if is_for_ssh(&slot.age) => KeyKind::SshKey,
            (SLOT_AGE, _) => KeyKind::Age,
            _ => KeyKind::Unknown(self.kind),
        }
    }

    /// Returns the trial order: free slots first, then slots that may start a plugin, then key
    /// derivations.
    fn rank(&self) -> (u8, u64) {
        match self.kdf() {
            Some(kdf) => (2, cost(kdf)),
            None => (u8::from(self.kind == SLOT_AGE), 0),
        }
    }

    fn fits(&self, secrets: &Secrets) -> bool {
        let (file, passphrase) = (secrets.key_file.is_some(), secrets.passphrase.is_some());
        match self.key_kind() {
            KeyKind::Passphrase => passphrase,
            KeyKind::KeyFile => file,
            KeyKind::KeyFileAndPassphrase => file && passphrase,
            KeyKind::RecoveryCode => secrets.recovery_code.is_some(),
            KeyKind::Age | KeyKind::SshKey => !secrets.identities.is_empty(),
            KeyKind::Unknown(_) => false,
        }
    }

    /// Returns the slot's key-encryption key, if it is these secrets' slot; None when the secret
    /// for it is missing.
    fn key(&self, secrets: &Secrets) -> Result<Option<SecretKey>> {
        match &self.parsed {
            Parsed::Passphrase(parsed) => {
                let derive = |passphrase| argon2id(passphrase, &parsed.salt, kdf_cost(&parsed.kdf));
                secrets.passphrase.as_ref().map(derive).transpose()
            }
            Parsed::Other(parsed) => key_encryption_key(self.kind, parsed, secrets),
        }
    }

    /// The slot's content, when this is its key.
    fn open(&self, header: &Header, mut kek: SecretKey) -> Result<Option<OpenedSlot>> {
        let archive = header.framing().archive;
        let aad = associated_data(b"lockbox/v1/slot", &archive, self.slot, self.kind, &header.slot(self.slot)[..CLEAR]);
        match &self.parsed {
            Parsed::Passphrase(parsed) => {
                if !constant_time_eq(&wrap::commitment(&kek, &archive), &parsed.commitment) {
                    return Ok(None);
                }
                let secret = wrap::unwrap(&kek, &archive, &parsed.nonce, &aad, &parsed.sealed)?;
                let own = Description {
                    created: Timestamp { seconds: secret.created_seconds, nanos: secret.created_nanos },
                    label: secret.label,
                    rewrap: Rewrap::Public(secret.rewrap_public),
                };
                Ok(Some(OpenedSlot { slot: self.slot, volume_key: secret.volume_key, own: Some(own) }))
            }
            Parsed::Other(parsed) => {
                if self.kind & REWRAPPED != 0 {
                    kek = received(&kek, &archive, &parsed.ephemeral)?;
                }
                if !constant_time_eq(&wrap::commitment(&kek, &archive), &parsed.commitment) {
                    return Ok(None);
                }
                let volume_key = wrap::unwrap_key(&kek, &archive, &parsed.nonce, &aad, &parsed.sealed)?;
                Ok(Some(OpenedSlot { slot: self.slot, volume_key, own: None }))
            }
        }
    }
}

/// Tries `secrets` on every slot that they may open. Errors: `WrongKey`; `Refused` when a slot that
/// was left out for its cost may be the right one; `Damaged` when a slot matches but does not open;
/// `Invalid` when an identity fails and nothing else opens.
pub(crate) fn unlock(header: &Header, secrets: &Secrets, limits: &UnlockLimits) -> Result<OpenedSlot> {
    let mut opened = None;
    attempts(header, secrets, limits, &mut |slot| {
        opened = Some(slot);
        false
    })?;
    opened.ok_or(Error::WrongKey)
}

/// Like [`unlock`] for all slots; returns also whether every slot that the secrets may open was
/// tried, or some would have cost too much. Errors: like [`unlock`].
pub(crate) fn unlock_all(header: &Header, secrets: &Secrets, limits: &UnlockLimits) -> Result<(Vec<OpenedSlot>, bool)> {
    let mut opened = Vec::new();
    let tried = attempts(header, secrets, limits, &mut |slot| {
        opened.push(slot);
        true
    })?;
    if opened.is_empty() { Err(Error::WrongKey) } else { Ok((opened, tried)) }
}

/// Passes each slot that opens to `found` until that returns false. Returns false when slots were
/// left out for their cost.
fn attempts(
    header: &Header,
    secrets: &Secrets,
    limits: &UnlockLimits,
    found: &mut dyn FnMut(OpenedSlot) -> bool,
) -> Result<bool> {
    let mut failure = None;
    let mut candidates = Vec::new();
    for slot in 0..KEY_SLOTS {
        match parse(header, slot) {
            Ok(Some(candidate)) if candidate.fits(secrets) => candidates.push(candidate),
            Ok(_) => {}
            Err(error) => failure = Some(error),
        }
    }
    candidates.sort_by_key(Candidate::rank);
    let mut spent = 0u64;
    let mut costly = None;
    let mut affordable = Vec::with_capacity(candidates.len());
    for candidate in candidates {
        if let Some(kdf) = candidate.kdf() {
            // A slot that nothing can open counts for nothing, or it could keep the others from
            // being tried.
            if let Err(error) = kdf::check_cost(kdf_cost(kdf)) {
                failure = Some(error);
                continue;
            }
            spent = spent.saturating_add(cost(kdf));
            if spent > limits.cost_mib || kdf.memory_kib.div_ceil(1024) > limits.memory_mib {
                costly = Some(Error::Refused(Refusal::KdfCost {
                    slot: candidate.slot,
                    memory: kdf.memory_kib / 1024,
                    passes: kdf.passes,
                    most_cost: limits.cost_mib,
                    most_memory: limits.memory_mib,
                }));
                break;
            }
        }
        affordable.push(candidate);
    }
    let mut any = false;
    let mut trials = Trials::new(&affordable, Candidate::price, limits.together_mib.saturating_mul(1024));
    while let Some(tried) = trials.next(|candidate| candidate.key(secrets)) {
        for (candidate, key) in tried {
            match key.and_then(|key| key.map_or(Ok(None), |key| candidate.open(header, key))) {
                Ok(Some(slot)) => {
                    any = true;
                    if !found(slot) {
                        return Ok(true);
                    }
                }
                Ok(None) => {}
                Err(error) => failure = Some(error),
            }
        }
    }
    match (costly, failure) {
        // Slots opened before were within the limit, and are reported.
        (Some(_), _) if any => Ok(false),
        (Some(error), _) => Err(error),
        (None, Some(error)) if !any => Err(error),
        _ => Ok(true),
    }
}

/// None for an empty slot and for a kind of a newer program.
fn parse(header: &Header, slot: usize) -> Result<Option<Candidate>> {
    let kind = header.framing().slots[slot];
    let parsed = match kind {
        SLOT_PASSPHRASE => Parsed::Passphrase(decode_passphrase_slot(header.slot(slot))?),
        kind if is_key_slot(kind) => Parsed::Other(KeySlot::decode(header.slot(slot), kind)?),
        _ => return Ok(None),
    };
    Ok(Some(Candidate { slot, kind, parsed }))
}

pub(crate) fn kinds(header: &Header) -> Vec<(u8, KeyKind)> {
    let used = (0..KEY_SLOTS).filter(|&slot| header.framing().slots[slot] != SLOT_EMPTY);
    used.map(|slot| (slot as u8, kind_of(header, slot))).collect()
}

pub(crate) fn kind_of(header: &Header, slot: usize) -> KeyKind {
    match parse(header, slot) {
        Ok(Some(candidate)) => candidate.key_kind(),
        _ => KeyKind::Unknown(header.framing().slots[slot]),
    }
}

/// Returns whether a public key is enough to make a slot that the same secret opens.
pub(crate) fn is_recipient(header: &Header, slot: usize) -> bool {
    matches!(kind_of(header, slot), KeyKind::Age | KeyKind::SshKey)
}

fn kdf_cost(kdf: &KdfParameters) -> KdfCost {
    KdfCost { memory_kib: kdf.memory_kib, passes: kdf.passes, lanes: kdf.lanes }
}

/// Returns MiB times passes, rounded up; the time of a derivation is proportional to it.
fn cost(kdf: &KdfParameters) -> u64 {
    u64::from(kdf.memory_kib).div_ceil(1024) * u64::from(kdf.passes)
}

/// Returns the KEK that the slot's secret gives; None when that secret is missing, or fits no part
/// of the slot.
fn key_encryption_key(kind: u8, slot: &KeySlot, secrets: &Secrets) -> Result<Option<SecretKey>> {
    match (kind & !REWRAPPED, &slot.kdf) {
        (SLOT_PASSPHRASE, Some(kdf)) => {
            secrets.passphrase.as_ref().map(|passphrase| argon2id(passphrase, &slot.salt, kdf_cost(kdf))).transpose()
        }
        (SLOT_KEY_FILE, Some(kdf)) => match (&secrets.key_file, &secrets.passphrase) {
            (Some(file), Some(passphrase)) => argon2id(&joined(file, passphrase), &slot.salt, kdf_cost(kdf)).map(Some),
            _ => Ok(None),
        },
        (SLOT_KEY_FILE, None) => Ok(secrets.key_file.as_ref().map(|file| from_file(file, &slot.salt))),
        (SLOT_RECOVERY, _) => Ok(secrets.recovery_code.as_ref().map(|code| from_code(code, &slot.salt))),
        (SLOT_AGE, _) => secrets.identities.open(&slot.age),
        _ => Ok(None),
    }
}

/// Input of Argon2id for both: the file's hash has a fixed length, so no two pairs give the same.
fn joined(file: &KeyFile, passphrase: &Passphrase) -> Passphrase {
    // Allocated at once: a vector that grows leaves copies behind.
    let mut both = Vec::with_capacity(32 + passphrase.bytes().len());
    both.extend_from_slice(file.digest().bytes());
    both.extend_from_slice(passphrase.bytes());
    Passphrase::new(both)
}

fn from_file(file: &KeyFile, salt: &[u8; 32]) -> SecretKey {
    hkdf(file.digest(), salt, "lockbox/v1/slot/keyfile")
}

fn from_code(code: &RecoveryCode, salt: &[u8; 32]) -> SecretKey {
    hkdf(&code.material(), salt, "lockbox/v1/slot/recovery")
}

fn rewrap_secret(kek: &SecretKey, archive: &ArchiveId) -> SecretKey {
    hkdf(kek, archive, "lockbox/v1/slot/rewrap")
}

/// Returns the KEK of a re-wrapped slot from its secret.
fn received(kek: &SecretKey, archive: &ArchiveId, ephemeral: &[u8; 32]) -> Result<SecretKey> {
    let secret = rewrap_secret(kek, archive);
    Ok(agreed_key(&x25519_shared(&secret, ephemeral)?, archive, ephemeral, &rewrap_public(&secret)))
}

fn agreed_key(shared: &SecretKey, archive: &ArchiveId, ephemeral: &[u8; 32], public: &[u8; 32]) -> SecretKey {
    hkdf_with(shared, archive, &[b"lockbox/v1/slot/rewrapped", &ephemeral[..], public].concat())
}

/// label || version u32 || archive id || slot number u8 || kind u8 || bytes 0..80 of the slot.
fn associated_data(label: &[u8], archive: &ArchiveId, slot: usize, kind: u8, clear: &[u8]) -> Vec<u8> {
    let mut aad = label.to_vec();
    aad.extend_from_slice(&FORMAT_VERSION.to_le_bytes());
    aad.extend_from_slice(archive);
    aad.extend_from_slice(&[slot as u8, kind]); // slot < 32
    aad.extend_from_slice(clear);
    aad
}

#[derive(Clone, Copy)]
struct Price {
    /// In proportion to its time.
    cost: u64,
    memory_kib: u32,
}

/// Trials that are left, the cheapest first.
struct Trials<'a, T> {
    left: &'a [T],
    /// Returns None for a trial without a derivation: it runs alone, since it may prompt the user.
    price: fn(&T) -> Option<Price>,
    /// Memory of all derivations that run side by side.
    together_kib: u64,
    processors: usize,
    /// True after the first derivation was tried.
    begun: bool,
    /// Cost that ran concurrently with other cost so far.
    ahead: u64,
}

impl<'a, T: Sync> Trials<'a, T> {
    fn new(all: &'a [T], price: fn(&T) -> Option<Price>, together_kib: u64) -> Trials<'a, T> {
        let processors = thread::available_parallelism().map_or(1, NonZero::get);
        Trials { left: all, price, together_kib, processors, begun: false, ahead: 0 }
    }

    /// Tries the next group, as many as may run at once, and returns each with its result.
    fn next<R: Send>(&mut self, attempt: impl Fn(&T) -> R + Sync) -> Option<Vec<(&'a T, R)>> {
        let (first, others) = self.group()?.split_first()?;
        let attempt = &attempt;
        Some(thread::scope(|scope| {
            let start = |one| Builder::new().name("derivation".into()).spawn_scoped(scope, move || attempt(one));
            let started: Vec<_> = others.iter().map(|one| (one, start(one))).collect();
            let mut tried = vec![(first, attempt(first))];
            tried.extend(started.into_iter().map(|(one, thread)| match thread {
                Ok(thread) => (one, thread.join().unwrap_or_else(|panic| resume_unwind(panic))),
                Err(_) => (one, attempt(one)),
            }));
            tried
        }))
    }

    /// Takes the next group to run. A derivation cannot be stopped, so a right secret waits for its
    /// whole group. The group contains only derivations that end by the time at which the first one
    /// would end if all ran one after the other.
    ///
    /// The first of all runs alone: concurrent derivations share the memory bandwidth and take
    /// longer each, and most archives are opened by the first.
    fn group(&mut self) -> Option<&'a [T]> {
        let mut count = 1;
        if let Some(first) = (self.price)(self.left.first()?) {
            let mut memory = 0;
            let mut fits = |price: Price| {
                memory += u64::from(price.memory_kib);
                memory <= self.together_kib && price.cost <= first.cost + self.ahead
            };
            let most = if self.begun { self.processors } else { 1 };
            self.begun = true;
            let beside = self.left.iter().take(most).map_while(self.price);
            count = beside.take_while(|price| fits(*price)).count().max(1);
        }
        let (group, left) = self.left.split_at(count);
        let costs = group.iter().filter_map(self.price).map(|price| price.cost);
        // The dearest is the last one.
        self.ahead += costs.rev().skip(1).sum::<u64>();
        self.left = left;
        Some(group)
    }
}

#[cfg(test)]
mod tests;
