//! Key derivation: HKDF-SHA-256 with labels, HMAC and SHA-256 for headers, X25519, and Argon2id
//! with bounded parameters.

use argon2::{Algorithm, Argon2, Block, Params, Version};
use hkdf::Hkdf;
use hmac::{Hmac, KeyInit, Mac};
use sha2::{Digest, Sha256};
use subtle::ConstantTimeEq;
use x25519_dalek::{PublicKey, StaticSecret};
use zeroize::{Zeroize, Zeroizing};

use super::{Passphrase, SecretKey};
use crate::error::{Error, Result};

/// Cost of one Argon2id derivation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KdfCost {
    pub memory_kib: u32,
    pub passes: u32,
    pub lanes: u32,
}

impl KdfCost {
    /// Minimum cost that `create` writes: the second choice of RFC 9106.
    pub const FLOOR: KdfCost = KdfCost { memory_kib: 64 * 1024, passes: 3, lanes: 1 };
    /// Minimum cost that the reader accepts; for tests only.
    pub const TEST: KdfCost = KdfCost { memory_kib: 8, passes: 1, lanes: 1 };
}

// Bounds of the reader, specification 3.2.
const MIN_KIB_PER_LANE: u32 = 8;
const MAX_KIB: u32 = 4 * 1024 * 1024;
const MAX_PASSES: u32 = 64;
const MAX_LANES: u32 = 16;

/// Maximum memory that `create` chooses on any machine: the archive must open on a smaller one.
const MAX_CALIBRATED_KIB: u32 = 1024 * 1024;

/// Derives 32 bytes by HKDF-SHA-256 with `salt` and info `label`.
pub(crate) fn hkdf(key: &SecretKey, salt: &[u8], label: &str) -> SecretKey {
    hkdf_with(key, salt, label.as_bytes())
}

pub(crate) fn hkdf_with(key: &SecretKey, salt: &[u8], info: &[u8]) -> SecretKey {
    let mut out = Zeroizing::new([0; 32]);
    // HKDF fails only for outputs beyond 255 times the hash's 32 bytes.
    Hkdf::<Sha256>::new(Some(salt), key.bytes()).expand(info, &mut *out).expect("32 bytes are one hash");
    SecretKey::new(*out)
}

/// Derives 32 bytes by Argon2id v1.3. Checks the bounds before any allocation: memory 8 KiB x
/// lanes..=4 GiB, passes 1..=64, lanes 1..=16.
///
/// # Errors
/// `Damaged` with the violated bound, `Invalid` when the machine lacks the memory.
pub(crate) fn argon2id(passphrase: &Passphrase, salt: &[u8; 32], cost: KdfCost) -> Result<SecretKey> {
    check_cost(cost)?;
    let refused = |error: argon2::Error| Error::invalid(format!("argon2id: {error}"));
    let params = Params::new(cost.memory_kib, cost.passes, cost.lanes, Some(32)).map_err(refused)?;
    let count = params.block_count();
    // Allocated here so that a machine without the memory gets an error, and so that the blocks can
    // be zeroized.
    let mut memory: Vec<Block> = Vec::new();
    if memory.try_reserve_exact(count).is_err() {
        return Err(Error::invalid(format!("not enough memory for argon2id: memory_kib={}", cost.memory_kib)));
    }
    memory.resize(count, Block::new());
    let mut out = Zeroizing::new([0; 32]);
    let argon = Argon2::new(Algorithm::Argon2id, Version::V0x13, params);
    let result = argon.hash_password_into_with_memory(passphrase.bytes(), salt, &mut *out, &mut memory);
    memory.zeroize();
    result.map_err(refused)?;
    Ok(SecretKey::new(*out))
}

/// Checks the parameters against the bounds of the format.
///
/// # Errors
/// `Damaged` with the violated bound.
pub(crate) fn check_cost(cost: KdfCost) -> Result<()> {
    let bound = |name: &str, value: u32, least: u32, most: u32| {
        if (least..=most).contains(&value) {
            return Ok(());
        }
        Err(Error::damaged(format!("argon2id {name} out of bounds: {value} is not in {least}..={most}")))
    };
    bound("lanes", cost.lanes, 1, MAX_LANES)?;
    bound("passes", cost.passes, 1, MAX_PASSES)?;
    bound("memory_kib", cost.memory_kib, MIN_KIB_PER_LANE * cost.lanes, MAX_KIB)
}

/// Returns a cost that takes about `millis` on this machine, at least [`KdfCost::FLOOR`], at most 1
/// GiB and `memory_limit_kib` (the caller passes half of the machine's memory). `measure` runs one
/// derivation and returns its milliseconds.
///
/// Memory is doubled first, because memory is the scarcest resource of an attacker's hardware,
/// until a derivation takes more than half of the time or the limit is reached. Passes fill the
/// rest.
pub(crate) fn calibrate(millis: u64, memory_limit_kib: u32, mut measure: impl FnMut(KdfCost) -> u64) -> KdfCost {
    let limit = memory_limit_kib.min(MAX_CALIBRATED_KIB);
    let mut cost = KdfCost::FLOOR;
    let mut taken = measure(cost).max(1);
    while taken <= millis / 2 && cost.memory_kib <= limit / 2 {
        cost.memory_kib *= 2;
        taken = measure(cost).max(1);
    }
    let passes = u64::from(cost.passes).saturating_mul(millis) / taken;
    cost.passes = passes.clamp(KdfCost::FLOOR.passes.into(), MAX_PASSES.into()) as u32;
    cost
}

pub(crate) fn hmac_sha256(key: &SecretKey, data: &[u8]) -> [u8; 32] {
    // HMAC accepts keys of any length.
    let mut mac = <Hmac<Sha256> as KeyInit>::new_from_slice(key.bytes()).expect("any length is a key");
    mac.update(data);
    mac.finalize().into_bytes().into()
}

pub(crate) fn sha256(data: &[u8]) -> [u8; 32] {
    Sha256::digest(data).into()
}

pub(crate) fn constant_time_eq(a: &[u8], b: &[u8]) -> bool {
    a.ct_eq(b).into()
}

/// Returns the public half of the re-wrap key pair with this secret (X25519, clamped).
pub(crate) fn rewrap_public(secret: &SecretKey) -> [u8; 32] {
    PublicKey::from(&StaticSecret::from(*secret.bytes())).to_bytes()
}

/// Computes the X25519 shared secret of a secret and a peer's public half.
///
/// # Errors
/// `Damaged` for a public half of low order, whose shared secret would be publicly known.
pub(crate) fn x25519_shared(secret: &SecretKey, public: &[u8; 32]) -> Result<SecretKey> {
    let shared = StaticSecret::from(*secret.bytes()).diffie_hellman(&PublicKey::from(*public));
    if !shared.was_contributory() {
        return Err(Error::damaged("key slot: the public half is invalid"));
    }
    Ok(SecretKey::new(shared.to_bytes()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hex(bytes: &[u8]) -> String {
        bytes.iter().map(|b| format!("{b:02x}")).collect()
    }

    #[test]
    fn hashes_and_macs_as_published() {
        assert_eq!(hex(&sha256(b"abc")), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
        // RFC 4231 case 1 has the 20-byte key 0b..; zeros up to the block length do not change an
        // HMAC key.
        let mut key = [0; 32];
        key[..20].fill(0x0b);
        let mac = hmac_sha256(&SecretKey::new(key), b"Hi There");
        assert_eq!(hex(&mac), "b0344c61d8db38535ca8afceaf0bf12b881dc200c9833da726e9376c2e32cff7");
    }

    #[test]
    fn derives_as_rfc_5869_says() {
        // Extract and expand written out with HMAC, which the test above ties to its RFC.
        let (key, salt) = (SecretKey::new([5; 32]), [6; 32]);
        let extracted = hmac_sha256(&SecretKey::new(salt), key.bytes());
        let expanded = hmac_sha256(&SecretKey::new(extracted), b"lockbox/v1/page\x01");
        assert_eq!(hkdf(&key, &salt, "lockbox/v1/page").bytes(), &expanded);
        assert_ne!(hkdf(&key, &salt, "lockbox/v1/commit").bytes(), &expanded);
    }

    #[test]
    fn the_public_half_agrees_with_rfc_7748() {
        // Section 6.1, Alice.
        let secret = *b"\x77\x07\x6d\x0a\x73\x18\xa5\x7d\x3c\x16\xc1\x72\x51\xb2\x66\x45\
            \xdf\x4c\x2f\x87\xeb\xc0\x99\x2a\xb1\x77\xfb\xa5\x1d\xb9\x2c\x2a";
        let public = "8520f0098930a754748b7ddcb43ef75a0dbf3a0d26381af4eba4a98eaa9b4e6a";
        assert_eq!(hex(&rewrap_public(&SecretKey::new(secret))), public);
    }

    #[test]
    fn both_sides_agree_and_a_point_of_low_order_is_refused() {
        let (one, other) = (SecretKey::new([3; 32]), SecretKey::new([5; 32]));
        let shared = x25519_shared(&one, &rewrap_public(&other)).unwrap();
        assert_eq!(shared.bytes(), x25519_shared(&other, &rewrap_public(&one)).unwrap().bytes());
        let mut low = [0; 32];
        assert!(matches!(x25519_shared(&one, &low), Err(Error::Damaged(_))));
        low[0] = 1;
        assert!(matches!(x25519_shared(&one, &low), Err(Error::Damaged(_))));
    }

    /// RFC 9106, section 5.3, with secret and associated data, which slots do not use. It tests the
    /// library.
    #[test]
    fn argon2id_agrees_with_rfc_9106() {
        let mut params = argon2::ParamsBuilder::new();
        params.m_cost(32).t_cost(3).p_cost(4).output_len(32);
        params.data(argon2::AssociatedData::new(&[4; 12]).unwrap());
        let params = params.build().unwrap();
        let argon = Argon2::new_with_secret(&[3; 8], Algorithm::Argon2id, Version::V0x13, params).unwrap();
        let mut out = [0; 32];
        argon.hash_password_into(&[1; 32], &[2; 16], &mut out).unwrap();
        assert_eq!(hex(&out), "0d640df58d78766c08c037a34a8b53c9d01ef0452d75b65eb52520e96b01e659");
    }

    /// Key of a slot, computed with another implementation (the Python package `cryptography`,
    /// which calls OpenSSL).
    #[test]
    fn a_slot_derives_what_another_implementation_does() {
        let cost = KdfCost { memory_kib: 64, passes: 3, lanes: 4 };
        let kek = argon2id(&Passphrase::new(b"correct horse".to_vec()), &[7; 32], cost).unwrap();
        assert_eq!(hex(kek.bytes()), "c87dac0ed6ac676171b33f6b5842f904410b32cb99e040895795058efb4d1b97");
    }

    /// The published cases of RFC 5869 have other key lengths, so this one was also computed with
    /// the Python package.
    #[test]
    fn hkdf_agrees_with_another_implementation() {
        let derived = hkdf(&SecretKey::new([0x0b; 32]), &[0xa5; 16], "lockbox/v1/slot/wrap");
        assert_eq!(hex(derived.bytes()), "f0b035ee777de2659e976802d4b2be642d8b26325912040c6595ed1549d2c5c2");
    }

    #[test]
    fn argon2id_depends_on_every_input() {
        let derive = |word: &[u8], salt: u8, cost| {
            *argon2id(&Passphrase::new(word.to_vec()), &[salt; 32], cost).unwrap().bytes()
        };
        let base = derive(b"word", 1, KdfCost::TEST);
        assert_eq!(base, derive(b"word", 1, KdfCost::TEST));
        assert_ne!(base, derive(b"wore", 1, KdfCost::TEST));
        assert_ne!(base, derive(b"word", 2, KdfCost::TEST));
        assert_ne!(base, derive(b"word", 1, KdfCost { passes: 2, ..KdfCost::TEST }));
        assert_ne!(base, derive(b"word", 1, KdfCost { memory_kib: 16, ..KdfCost::TEST }));
        assert_ne!(base, derive(b"word", 1, KdfCost { memory_kib: 16, lanes: 2, ..KdfCost::TEST }));
    }

    #[test]
    fn parameters_out_of_bounds_are_refused_before_any_work() {
        let test = KdfCost::TEST;
        for (cost, name) in [
            (KdfCost { memory_kib: 7, ..test }, "memory_kib"),
            (KdfCost { memory_kib: 31, lanes: 4, ..test }, "memory_kib"),
            (KdfCost { memory_kib: u32::MAX, ..test }, "memory_kib"),
            (KdfCost { memory_kib: MAX_KIB + 1, ..test }, "memory_kib"),
            (KdfCost { passes: 0, ..test }, "passes"),
            (KdfCost { passes: 65, ..test }, "passes"),
            (KdfCost { lanes: 0, ..test }, "lanes"),
            (KdfCost { lanes: u32::MAX, ..test }, "lanes"),
        ] {
            match argon2id(&Passphrase::new(vec![]), &[0; 32], cost) {
                Err(Error::Damaged(text)) => assert!(text.contains(name), "{text}"),
                _ => panic!("accepted {cost:?}"),
            }
        }
    }

    #[test]
    fn calibration_raises_memory_first_and_keeps_its_bounds() {
        let speed = |mib_passes_per_second: u64| {
            move |cost: KdfCost| {
                u64::from(cost.memory_kib) / 1024 * u64::from(cost.passes) * 1000 / mib_passes_per_second
            }
        };
        // Slow machine: the floor, however long it takes.
        assert_eq!(calibrate(1000, 8 << 20, speed(100)), KdfCost::FLOOR);
        // Medium machine: 512 MiB x 3 take 0.75 s, 4 passes a second.
        assert_eq!(calibrate(1000, 8 << 20, speed(2048)), KdfCost { memory_kib: 512 << 10, passes: 4, lanes: 1 });
        // Fast machine: 1 GiB is the memory limit.
        assert_eq!(calibrate(1000, 8 << 20, speed(20 << 10)), KdfCost { memory_kib: 1 << 20, passes: 20, lanes: 1 });
        // Little memory: only passes grow.
        assert_eq!(calibrate(1000, 100 << 10, speed(640)), KdfCost { memory_kib: 64 << 10, passes: 10, lanes: 1 });
        // A clock that does not advance.
        assert_eq!(calibrate(1000, 8 << 20, |_| 0), KdfCost { memory_kib: 1 << 20, passes: MAX_PASSES, lanes: 1 });
    }

    #[test]
    fn comparison_sees_length_and_content() {
        assert!(constant_time_eq(b"abc", b"abc"));
        assert!(!constant_time_eq(b"abc", b"abd") && !constant_time_eq(b"abc", b"ab"));
    }
}
