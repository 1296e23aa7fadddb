//! Makes key slots of every kind, with a description for holders of the volume key, and wraps
//! another volume key to existing ones.

use std::sync::Arc;

use super::{
    CLEAR, Description, KdfCost, KeyFile, KeySlot, Passphrase, REWRAPPED, RecoveryCode, Rewrap, SLOT_AGE,
    SLOT_KEY_FILE, SLOT_PASSPHRASE, SLOT_RECOVERY, agreed_key, associated_data, from_code, from_file, joined,
    rewrap_secret,
};
use crate::crypto::identity::Recipient;
use crate::crypto::kdf::{argon2id, rewrap_public, x25519_shared};
use crate::crypto::wrap::{self, SlotSecret};
use crate::crypto::{Prompts, SecretKey};
use crate::env::Environment;
use crate::error::{Error, Result, Timestamp};
use crate::format::header::{
    DESCRIPTION_AT, KdfParameters, MAX_AGE_FILE, PassphraseSlot, SEALED_KEY, encode_passphrase_slot,
};
use crate::format::{ArchiveId, BLOCK};
use crate::keys::header::{Header, SlotBlock};

/// Tries until an age file fits: the crate adds a line of random length. One in a thousand lines is
/// too long for the largest recipients.
const TRIES: usize = 16;

/// Secret of a new key slot.
pub enum NewKey<'a> {
    Passphrase(&'a Passphrase, KdfCost),
    KeyFile(&'a KeyFile),
    KeyFileAndPassphrase(&'a KeyFile, &'a Passphrase, KdfCost),
    RecoveryCode(&'a RecoveryCode),
    /// The prompts are for plugins.
    Recipient(&'a Recipient, &'a Arc<dyn Prompts>),
}

/// Location of a slot, and the key that it is to hold.
pub(crate) struct SlotAddress<'a> {
    pub(crate) archive: &'a ArchiveId,
    pub(crate) slot: usize,
    pub(crate) volume_key: &'a SecretKey,
}

impl SlotAddress<'_> {
    fn aad(&self, kind: u8, clear: &[u8]) -> Vec<u8> {
        associated_data(b"lockbox/v1/slot", self.archive, self.slot, kind, clear)
    }
}

/// Returns kind and content of a slot for `new`. Errors: `Invalid` for a label that is too long, a
/// plugin that fails and a recipient too large for a slot; `Io` without randomness.
pub(crate) fn make(
    address: &SlotAddress<'_>,
    new: &NewKey<'_>,
    label: String,
    environment: &dyn Environment,
) -> Result<(u8, SlotBlock)> {
    let created = environment.now();
    let salt = random::<32>(environment)?;
    let parameters = |kdf: &KdfCost| KdfParameters { memory_kib: kdf.memory_kib, passes: kdf.passes, lanes: kdf.lanes };
    let (kind, kek, kdf) = match new {
        NewKey::Passphrase(passphrase, kdf) => {
            let kek = argon2id(passphrase, &salt, *kdf)?;
            let block = passphrase_slot(address, &kek, salt, parameters(kdf), (created, &label), environment)?;
            let rewrap = Rewrap::Public(rewrap_public(&rewrap_secret(&kek, address.archive)));
            let description = Description { created, label, rewrap };
            return Ok((SLOT_PASSPHRASE, describe(address, SLOT_PASSPHRASE, block, &description, environment)?));
        }
        NewKey::KeyFile(file) => (SLOT_KEY_FILE, from_file(file, &salt), None),
        NewKey::KeyFileAndPassphrase(file, passphrase, kdf) => {
            (SLOT_KEY_FILE, argon2id(&joined(file, passphrase), &salt, *kdf)?, Some(parameters(kdf)))
        }
        NewKey::RecoveryCode(code) => (SLOT_RECOVERY, from_code(code, &salt), None),
        NewKey::Recipient(recipient, prompts) => {
            let description = Description { created, label, rewrap: Rewrap::Recipient(recipient.text().to_owned()) };
            return age_slot(address, recipient, prompts, &description, environment);
        }
    };
    let rewrap = Rewrap::Public(rewrap_public(&rewrap_secret(&kek, address.archive)));
    let blank = Blank { salt, kdf, ephemeral: random(environment)?, age: Vec::new() };
    finish(address, kind, blank, &kek, &Description { created, label, rewrap }, environment)
}

/// Wraps `address.volume_key` to the slot that `old` is, without its secret; the description is
/// kept. None of it is secret from a holder of the volume key of `header`. Errors: like [`make`];
/// `Damaged` when the slot does not decode.
pub(crate) fn rewrap(
    address: &SlotAddress<'_>,
    header: &Header,
    description: &Description,
    prompts: &Arc<dyn Prompts>,
    environment: &dyn Environment,
) -> Result<(u8, SlotBlock)> {
    let Some(old) = super::parse(header, address.slot)? else {
        return Err(Error::damaged(format!("key slot {} is of an unknown kind", address.slot)));
    };
    let public = match &description.rewrap {
        Rewrap::Recipient(text) => {
            let recipient = Recipient::parse(text)?;
            return age_slot(address, &recipient, prompts, description, environment);
        }
        Rewrap::Public(public) => public,
    };
    let (salt, kdf) = match &old.parsed {
        super::Parsed::Passphrase(slot) => (slot.salt, Some(slot.kdf)),
        super::Parsed::Other(slot) => (slot.salt, slot.kdf),
    };
    let secret = SecretKey::new(random(environment)?);
    let ephemeral = rewrap_public(&secret);
    let kek = agreed_key(&x25519_shared(&secret, public)?, address.archive, &ephemeral, public);
    let blank = Blank { salt, kdf, ephemeral, age: Vec::new() };
    finish(address, old.kind | REWRAPPED, blank, &kek, description, environment)
}

/// Parts of a slot that are chosen before its key is known.
struct Blank {
    salt: [u8; 32],
    kdf: Option<KdfParameters>,
    ephemeral: [u8; 32],
    age: Vec<u8>,
}

fn finish(
    address: &SlotAddress<'_>,
    kind: u8,
    blank: Blank,
    kek: &SecretKey,
    description: &Description,
    environment: &dyn Environment,
) -> Result<(u8, SlotBlock)> {
    let Blank { salt, kdf, ephemeral, age } = blank;
    let (commitment, nonce) = (wrap::commitment(kek, address.archive), random(environment)?);
    let mut slot = KeySlot { salt, kdf, commitment, nonce, sealed: [0; SEALED_KEY], ephemeral, age };
    let aad = address.aad(kind, &slot.clear(kind));
    slot.sealed = wrap::wrap_key(kek, address.archive, &nonce, &aad, address.volume_key);
    let block = slot.encode(kind, &random(environment)?);
    Ok((kind, describe(address, kind, block, description, environment)?))
}

fn age_slot(
    address: &SlotAddress<'_>,
    recipient: &Recipient,
    prompts: &Arc<dyn Prompts>,
    description: &Description,
    environment: &dyn Environment,
) -> Result<(u8, SlotBlock)> {
    for _ in 0..TRIES {
        let kek = SecretKey::new(random(environment)?);
        let age = recipient.seal(&kek, prompts)?;
        if age.len() <= MAX_AGE_FILE {
            let (salt, ephemeral) = (random(environment)?, random(environment)?);
            let blank = Blank { salt, kdf: None, ephemeral, age };
            return finish(address, SLOT_AGE, blank, &kek, description, environment);
        }
    }
    Err(Error::invalid(format!(
        "the age file for the recipient is too long for a key slot; the limit is {MAX_AGE_FILE} bytes"
    )))
}

fn passphrase_slot(
    address: &SlotAddress<'_>,
    kek: &SecretKey,
    salt: [u8; 32],
    kdf: KdfParameters,
    (created, label): (Timestamp, &str),
    environment: &dyn Environment,
) -> Result<SlotBlock> {
    let (nonce, padding) = (random::<24>(environment)?, random::<3464>(environment)?);
    let secret = SlotSecret {
        volume_key: SecretKey::new(*address.volume_key.bytes()),
        rewrap_public: rewrap_public(&rewrap_secret(kek, address.archive)),
        created_seconds: created.seconds,
        created_nanos: created.nanos,
        label: label.to_owned(),
    };
    let commitment = wrap::commitment(kek, address.archive);
    let mut parsed = PassphraseSlot { salt, kdf, commitment, nonce, sealed: vec![0; wrap::WRAPPED] };
    // The associated data are the first bytes of the block itself, so the clear part is encoded
    // first.
    let clear = encode_passphrase_slot(&parsed, &padding);
    parsed.sealed = wrap::wrap(kek, address.archive, &nonce, &address.aad(SLOT_PASSPHRASE, &clear[..CLEAR]), &secret);
    Ok(encode_passphrase_slot(&parsed, &padding))
}

/// The slot with `description` at its end, sealed under the volume key. Errors: `Invalid` when it
/// does not fit.
pub(crate) fn describe(
    address: &SlotAddress<'_>,
    kind: u8,
    mut block: SlotBlock,
    description: &Description,
    environment: &dyn Environment,
) -> Result<SlotBlock> {
    let nonce = random::<24>(environment)?;
    let aad = description_aad(address.archive, address.slot, kind, &block);
    let mut plain = description.encode()?;
    let tag = wrap::description_key(address.volume_key, address.archive).seal(&nonce, &aad, &mut plain);
    let sealed_at = DESCRIPTION_AT + nonce.len();
    block[DESCRIPTION_AT..sealed_at].copy_from_slice(&nonce);
    block[sealed_at..sealed_at + plain.len()].copy_from_slice(&plain);
    block[sealed_at + plain.len()..].copy_from_slice(&tag);
    Ok(block)
}

/// The description of a slot; None for one of an older program.
pub(crate) fn description(header: &Header, slot: usize, volume_key: &SecretKey) -> Option<Description> {
    let archive = &header.framing().archive;
    let aad = description_aad(archive, slot, header.framing().slots[slot], header.slot(slot));
    let (nonce, sealed) = header.slot(slot)[DESCRIPTION_AT..].split_first_chunk::<24>()?;
    let (sealed, tag) = sealed.split_last_chunk::<16>()?;
    let mut plain = sealed.to_vec();
    wrap::description_key(volume_key, archive).open(nonce, &aad, &mut plain, tag).ok()?;
    Description::decode(&plain).ok()
}

fn description_aad(archive: &ArchiveId, slot: usize, kind: u8, block: &[u8]) -> Vec<u8> {
    associated_data(b"lockbox/v1/slot/description", archive, slot, kind, &block[..CLEAR])
}

fn random<const N: usize>(environment: &dyn Environment) -> Result<[u8; N]> {
    let mut bytes = [0; N];
    environment.fill_random(&mut bytes)?;
    Ok(bytes)
}

const _: () = assert!(wrap::WRAPPED_KEY == SEALED_KEY && BLOCK == 4096);
