//! Volume key wrapping under a key-encryption key, with a key commitment (specification 3.2, sealed
//! part; 4.2, rows "slot").

use zeroize::Zeroizing;

use super::SecretKey;
use super::aead::{TAG, XaesKey};
use super::kdf::hkdf;
use crate::error::{Error, Result};

/// Length of the sealed part with its tag.
pub(crate) const WRAPPED: usize = 528;

const PLAIN: usize = WRAPPED - TAG;
/// Longest label in bytes.
const MAX_LABEL: usize = 255;
/// Offset of the label: after volume key 32, public half 32, time 12, zero 2, label length 2.
const LABEL: usize = 80;

/// Content of the sealed part of a slot.
pub(crate) struct SlotSecret {
    pub volume_key: SecretKey,
    pub rewrap_public: [u8; 32],
    pub created_seconds: i64,
    pub created_nanos: u32,
    /// Label of at most 255 bytes; [`wrap`] truncates a longer one.
    pub label: String,
}

/// Returns the commitment of a KEK: HKDF(KEK, `lockbox/v1/slot/commit`).
pub(crate) fn commitment(kek: &SecretKey, archive: &[u8; 16]) -> [u8; 32] {
    *hkdf(kek, archive, "lockbox/v1/slot/commit").bytes()
}

fn wrapping_key(kek: &SecretKey, archive: &[u8; 16]) -> XaesKey {
    XaesKey::new(&hkdf(kek, archive, "lockbox/v1/slot/wrap"))
}

/// Seals the slot secret; the caller builds `aad` from the clear part of the slot.
pub(crate) fn wrap(kek: &SecretKey, archive: &[u8; 16], nonce: &[u8; 24], aad: &[u8], secret: &SlotSecret) -> Vec<u8> {
    let label = &secret.label.as_bytes()[..secret.label.floor_char_boundary(MAX_LABEL)];
    // The plaintext is sealed in place, so no copy of the volume key is left; a panic in between
    // aborts.
    let mut out = vec![0; WRAPPED];
    out[..32].copy_from_slice(secret.volume_key.bytes());
    out[32..64].copy_from_slice(&secret.rewrap_public);
    out[64..72].copy_from_slice(&secret.created_seconds.to_le_bytes());
    out[72..76].copy_from_slice(&secret.created_nanos.to_le_bytes());
    out[78..LABEL].copy_from_slice(&(label.len() as u16).to_le_bytes());
    out[LABEL..LABEL + label.len()].copy_from_slice(label);
    let (plain, tag) = out.split_at_mut(PLAIN);
    tag.copy_from_slice(&wrapping_key(kek, archive).seal(nonce, aad, plain));
    out
}

/// Opens the sealed part of a slot.
///
/// # Errors
/// `Damaged` when the seal does not open although the commitment matched.
pub(crate) fn unwrap(
    kek: &SecretKey,
    archive: &[u8; 16],
    nonce: &[u8; 24],
    aad: &[u8],
    sealed: &[u8],
) -> Result<SlotSecret> {
    let malformed = |flaw: &str| Error::damaged(format!("key slot: {flaw}"));
    let Some((sealed, tag)) = sealed.split_last_chunk::<TAG>() else { return Err(malformed("sealed part is short")) };
    let Ok(sealed) = <&[u8; PLAIN]>::try_from(sealed) else { return Err(malformed("sealed part has a wrong length")) };
    let mut plain = Zeroizing::new(*sealed);
    wrapping_key(kek, archive).open(nonce, aad, &mut plain[..], tag).map_err(|_| malformed("authentication failed"))?;

    let mut volume_key = Zeroizing::new([0; 32]);
    volume_key.copy_from_slice(&plain[..32]);
    let mut rewrap_public = [0; 32];
    rewrap_public.copy_from_slice(&plain[32..64]);
    let mut seconds = [0; 8];
    seconds.copy_from_slice(&plain[64..72]);
    let mut nanos = [0; 4];
    nanos.copy_from_slice(&plain[72..76]);
    let created_nanos = u32::from_le_bytes(nanos);
    let length = usize::from(u16::from_le_bytes([plain[78], plain[79]]));
    if length > MAX_LABEL || created_nanos >= 1_000_000_000 {
        return Err(malformed("field out of bounds"));
    }
    let (label, padding) = plain[LABEL..].split_at(length);
    if plain[76..78].iter().chain(padding).any(|&byte| byte != 0) {
        return Err(malformed("reserved field is not zero"));
    }
    Ok(SlotSecret {
        volume_key: SecretKey::new(*volume_key),
        rewrap_public,
        created_seconds: i64::from_le_bytes(seconds),
        created_nanos,
        label: std::str::from_utf8(label).map_err(|_| malformed("label is not UTF-8"))?.to_string(),
    })
}

pub(crate) const WRAPPED_KEY: usize = 32 + TAG;

/// Seals the volume key alone; the slot's description is sealed under the volume key (see
/// [`description_key`]).
pub(crate) fn wrap_key(
    kek: &SecretKey,
    archive: &[u8; 16],
    nonce: &[u8; 24],
    aad: &[u8],
    volume_key: &SecretKey,
) -> [u8; WRAPPED_KEY] {
    let mut out = [0; WRAPPED_KEY];
    out[..32].copy_from_slice(volume_key.bytes());
    let (plain, tag) = out.split_at_mut(32);
    tag.copy_from_slice(&wrapping_key(kek, archive).seal(nonce, aad, plain));
    out
}

/// Opens a sealed volume key.
///
/// # Errors
/// `Damaged` when the seal does not open although the commitment matched.
pub(crate) fn unwrap_key(
    kek: &SecretKey,
    archive: &[u8; 16],
    nonce: &[u8; 24],
    aad: &[u8],
    sealed: &[u8; WRAPPED_KEY],
) -> Result<SecretKey> {
    let (sealed, tag) = sealed.split_at(32);
    let mut tagged = [0; TAG];
    tagged.copy_from_slice(tag);
    let mut plain = Zeroizing::new([0; 32]);
    plain.copy_from_slice(sealed);
    let opened = wrapping_key(kek, archive).open(nonce, aad, &mut plain[..], &tagged);
    opened.map_err(|_| Error::damaged("key slot: authentication failed"))?;
    Ok(SecretKey::new(*plain))
}

pub(crate) fn description_key(volume_key: &SecretKey, archive: &[u8; 16]) -> XaesKey {
    XaesKey::new(&hkdf(volume_key, archive, "lockbox/v1/slot/description"))
}

#[cfg(test)]
mod tests {
    use super::*;

    const ARCHIVE: [u8; 16] = [3; 16];
    const SLOT_NONCE: [u8; 24] = [4; 24];

    fn secret(label: &str) -> SlotSecret {
        SlotSecret {
            volume_key: SecretKey::new([1; 32]),
            rewrap_public: [2; 32],
            created_seconds: -5,
            created_nanos: 999_999_999,
            label: label.to_string(),
        }
    }

    fn open(kek: u8, archive: &[u8; 16], aad: &[u8], sealed: &[u8]) -> Result<SlotSecret> {
        unwrap(&SecretKey::new([kek; 32]), archive, &SLOT_NONCE, aad, sealed)
    }

    fn seal(secret: &SlotSecret) -> Vec<u8> {
        wrap(&SecretKey::new([7; 32]), &ARCHIVE, &SLOT_NONCE, b"aad", secret)
    }

    #[test]
    fn unwraps_what_was_wrapped() {
        let sealed = seal(&secret("laptop é"));
        assert_eq!(sealed.len(), WRAPPED);
        let opened = open(7, &ARCHIVE, b"aad", &sealed).unwrap();
        assert_eq!((opened.volume_key.bytes(), opened.rewrap_public), (&[1; 32], [2; 32]));
        assert_eq!((opened.created_seconds, opened.created_nanos), (-5, 999_999_999));
        assert_eq!(opened.label, "laptop é");
    }

    #[test]
    fn another_key_archive_slot_or_byte_does_not_unwrap() {
        let sealed = seal(&secret(""));
        assert!(open(8, &ARCHIVE, b"aad", &sealed).is_err());
        assert!(open(7, &[0; 16], b"aad", &sealed).is_err());
        assert!(open(7, &ARCHIVE, b"aae", &sealed).is_err());
        for length in [0, 15, 16, 527] {
            assert!(open(7, &ARCHIVE, b"aad", &sealed[..length]).is_err());
        }
        for at in 0..WRAPPED {
            let mut altered = sealed.clone();
            altered[at] ^= 0x10;
            assert!(open(7, &ARCHIVE, b"aad", &altered).is_err());
        }
    }

    #[test]
    fn a_volume_key_alone_opens_with_the_same_key_and_place_only() {
        let (kek, key) = (SecretKey::new([7; 32]), SecretKey::new([1; 32]));
        let sealed = wrap_key(&kek, &ARCHIVE, &SLOT_NONCE, b"aad", &key);
        let open = |kek: u8, aad: &[u8], sealed: &[u8; WRAPPED_KEY]| {
            unwrap_key(&SecretKey::new([kek; 32]), &ARCHIVE, &SLOT_NONCE, aad, sealed).ok().map(|key| *key.bytes())
        };
        assert_eq!(open(7, b"aad", &sealed), Some([1; 32]));
        assert_eq!((open(8, b"aad", &sealed), open(7, b"aae", &sealed)), (None, None));
        for at in 0..WRAPPED_KEY {
            let mut altered = sealed;
            altered[at] ^= 1;
            assert_eq!(open(7, b"aad", &altered), None);
        }
    }

    #[test]
    fn a_long_label_is_cut_at_a_character() {
        let opened = open(7, &ARCHIVE, b"aad", &seal(&secret(&"é".repeat(200)))).unwrap();
        assert_eq!(opened.label, "é".repeat(127));
    }

    #[test]
    fn the_commitment_names_key_and_archive() {
        let of = |key, archive| commitment(&SecretKey::new([key; 32]), &[archive; 16]);
        assert_eq!(of(1, 1), of(1, 1));
        assert_ne!(of(1, 1), of(2, 1));
        assert_ne!(of(1, 1), of(1, 2));
    }
}
