//! Passphrase slots: makes one, and tries a passphrase on those of a header within one cost budget.

use super::UnlockLimits;
use super::header::{Header, SlotBlock};
use crate::crypto::kdf::{KdfCost, argon2id, equal, hkdf, rewrap_public};
use crate::crypto::wrap::{self, SlotSecret};
use crate::crypto::{Passphrase, SecretKey};
use crate::env::Environment;
use crate::error::{Error, Result};
use crate::format::header::{
    KdfParameters, PassphraseSlot, SLOT_PASSPHRASE, decode_passphrase_slot, encode_passphrase_slot,
};
use crate::format::{ArchiveId, FORMAT_VERSION, KEY_SLOTS};

/// Bytes of a slot that its associated data covers: salt, parameters and commitment.
const CLEAR: usize = 80;

/// A slot that a passphrase opened.
pub(super) struct OpenedSlot {
    pub(super) slot: usize,
    pub(super) secret: SlotSecret,
}

/// Tries `passphrase` on every passphrase slot, the cheapest first.
///
/// # Errors
/// `WrongKey`; `Unsupported` when a slot that was left out for its cost may be the right one; `Damaged` when a slot matches but does
/// not open.
pub(super) fn unlock(header: &Header, passphrase: &Passphrase, limits: &UnlockLimits) -> Result<OpenedSlot> {
    let archive = header.framing().archive;
    let mut slots = Vec::new();
    let mut damage = None;
    for slot in (0..KEY_SLOTS).filter(|&slot| header.framing().slots[slot] == SLOT_PASSPHRASE) {
        match decode_passphrase_slot(header.slot(slot)) {
            Ok(parsed) => slots.push((slot, parsed)),
            Err(error) => damage = Some(error),
        }
    }
    slots.sort_by_key(|(_, parsed)| cost(&parsed.kdf));
    let mut spent = 0u64;
    for (slot, parsed) in slots {
        spent = spent.saturating_add(cost(&parsed.kdf));
        if spent > limits.cost_mib || parsed.kdf.memory_kib.div_ceil(1024) > limits.memory_mib {
            return Err(Error::Unsupported(format!(
                "deriving the key of slot {slot} costs more than the limit: memory={} MiB passes={} limit={} MiB x passes, \
                 {} MiB; raise the limit (--kdf-limit, or kdf-limit= of a mount) if you trust the archive",
                parsed.kdf.memory_kib / 1024,
                parsed.kdf.passes,
                limits.cost_mib,
                limits.memory_mib
            )));
        }
        let kek = match derive(passphrase, &parsed) {
            Ok(kek) => kek,
            Err(error) => {
                damage = Some(error);
                continue;
            }
        };
        if equal(&wrap::commitment(&kek, &archive), &parsed.commitment) {
            let aad = associated_data(&archive, slot, &header.slot(slot)[..CLEAR]);
            let secret = wrap::unwrap(&kek, &archive, &parsed.nonce, &aad, &parsed.sealed)?;
            return Ok(OpenedSlot { slot, secret });
        }
    }
    Err(damage.unwrap_or(Error::WrongKey))
}

/// Wraps `volume_key` for slot number `slot`.
pub(super) fn make(
    archive: &ArchiveId,
    slot: usize,
    passphrase: &Passphrase,
    kdf: KdfCost,
    volume_key: &SecretKey,
    label: String,
    environment: &dyn Environment,
) -> Result<SlotBlock> {
    let mut salt = [0; 32];
    let mut nonce = [0; 24];
    let mut padding = [0; 3464];
    for random in [&mut salt[..], &mut nonce[..], &mut padding[..]] {
        environment.fill_random(random)?;
    }
    let kek = argon2id(passphrase, &salt, kdf)?;
    let parameters = KdfParameters { memory_kib: kdf.memory_kib, passes: kdf.passes, lanes: kdf.lanes };
    let now = environment.now();
    let secret = SlotSecret {
        volume_key: SecretKey::new(*volume_key.bytes()),
        rewrap_public: rewrap_public(&hkdf(&kek, archive, "lockbox/v1/slot/rewrap")),
        created_seconds: now.seconds,
        created_nanos: now.nanos,
        label,
    };
    let commitment = wrap::commitment(&kek, archive);
    let mut parsed = PassphraseSlot { salt, kdf: parameters, commitment, nonce, sealed: vec![0; wrap::WRAPPED] };
    // The associated data are the first bytes of the block itself, so the clear part is encoded first.
    let clear = encode_passphrase_slot(&parsed, &padding);
    let aad = associated_data(archive, slot, &clear[..CLEAR]);
    parsed.sealed = wrap::wrap(&kek, archive, &nonce, &aad, &secret);
    Ok(encode_passphrase_slot(&parsed, &padding))
}

fn derive(passphrase: &Passphrase, slot: &PassphraseSlot) -> Result<SecretKey> {
    let kdf = KdfCost { memory_kib: slot.kdf.memory_kib, passes: slot.kdf.passes, lanes: slot.kdf.lanes };
    argon2id(passphrase, &slot.salt, kdf)
}

/// MiB times passes, rounded up: what the time of a derivation is proportional to.
fn cost(kdf: &KdfParameters) -> u64 {
    u64::from(kdf.memory_kib).div_ceil(1024) * u64::from(kdf.passes)
}

/// `lockbox/v1/slot` || version u32 || archive id || slot number u8 || kind u8 || bytes 0..80 of the slot.
fn associated_data(archive: &ArchiveId, slot: usize, clear: &[u8]) -> Vec<u8> {
    let mut aad = b"lockbox/v1/slot".to_vec();
    aad.extend_from_slice(&FORMAT_VERSION.to_le_bytes());
    aad.extend_from_slice(archive);
    aad.extend_from_slice(&[slot as u8, SLOT_PASSPHRASE]); // slot < 32
    aad.extend_from_slice(clear);
    aad
}
