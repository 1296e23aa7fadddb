//! AES-256 engines behind one interface: aws-lc-rs, and pure Rust for the portable build and as a
//! cross-check.

/// Length of a tag.
pub const TAG: usize = 16;
pub(super) const IV: usize = 12;

/// Primitives for XAES: AES-256 on single blocks for the derivation, AES-256-GCM for the messages.
pub(super) trait Engine {
    /// Expanded AES-256 key for encrypting blocks; zeroized on drop.
    type Block;
    /// AES-256-GCM key; zeroized on drop.
    type Gcm;

    fn block(key: &[u8; 32]) -> Self::Block;
    /// Encrypts two blocks independently.
    fn encrypt(block: &Self::Block, data: &mut [u8; 32]);
    fn gcm(key: &[u8; 32]) -> Self::Gcm;
    fn seal(gcm: &Self::Gcm, iv: &[u8; IV], aad: &[u8], data: &mut [u8]) -> [u8; TAG];
    /// Decrypts in place. Returns false when the tag is wrong; `data` is then unspecified.
    fn open(gcm: &Self::Gcm, iv: &[u8; IV], aad: &[u8], data: &mut [u8], tag: &[u8; TAG]) -> bool;
}

#[cfg(feature = "portable")]
pub(super) use self::portable::Portable as Native;
#[cfg(not(feature = "portable"))]
pub(super) use self::system::System as Native;

#[cfg(any(test, not(feature = "portable")))]
pub(super) mod system {
    //! aws-lc-rs.

    use aws_lc_rs::aead::{AES_256_GCM, Aad, LessSafeKey, Nonce, UnboundKey};
    use aws_lc_rs::cipher::{AES_256, EncryptingKey, EncryptionContext, UnboundCipherKey};

    use super::{Engine, IV, TAG};

    pub(in crate::crypto) struct System;

    // The library fails only for a key length other than the algorithm's, for ECB input that is not
    // a multiple of a block, and for messages beyond 64 GiB (a page has at most 256 KiB). The types
    // exclude the first two.
    const FITS: &str = "lengths are fixed by types";

    impl Engine for System {
        type Block = EncryptingKey;
        type Gcm = LessSafeKey;

        fn block(key: &[u8; 32]) -> EncryptingKey {
            EncryptingKey::ecb(UnboundCipherKey::new(&AES_256, key).expect(FITS)).expect(FITS)
        }

        fn encrypt(block: &EncryptingKey, data: &mut [u8; 32]) {
            block.less_safe_encrypt(data, EncryptionContext::None).expect(FITS);
        }

        fn gcm(key: &[u8; 32]) -> LessSafeKey {
            LessSafeKey::new(UnboundKey::new(&AES_256_GCM, key).expect(FITS))
        }

        fn seal(gcm: &LessSafeKey, iv: &[u8; IV], aad: &[u8], data: &mut [u8]) -> [u8; TAG] {
            let nonce = Nonce::assume_unique_for_key(*iv);
            let sealed = gcm.seal_in_place_separate_tag(nonce, Aad::from(aad), data).expect(FITS);
            let mut tag = [0; TAG];
            tag.copy_from_slice(sealed.as_ref());
            tag
        }

        fn open(gcm: &LessSafeKey, iv: &[u8; IV], aad: &[u8], data: &mut [u8], tag: &[u8; TAG]) -> bool {
            let nonce = Nonce::assume_unique_for_key(*iv);
            gcm.open_in_place_separate_tag(nonce, Aad::from(aad), tag, data).is_ok()
        }
    }
}

#[cfg(any(test, feature = "portable"))]
pub(super) mod portable {
    //! The `aes` and `aes-gcm` crates.

    use aes_gcm::aead::inout::InOutBuf;
    use aes_gcm::aes::Aes256;
    use aes_gcm::aes::cipher::BlockCipherEncrypt;
    use aes_gcm::{AeadInOut, Aes256Gcm, KeyInit};

    use super::{Engine, IV, TAG};

    pub(in crate::crypto) struct Portable;

    impl Engine for Portable {
        type Block = Aes256;
        type Gcm = Aes256Gcm;

        fn block(key: &[u8; 32]) -> Aes256 {
            Aes256::new(&(*key).into())
        }

        fn encrypt(block: &Aes256, data: &mut [u8; 32]) {
            for piece in data.chunks_exact_mut(16) {
                let mut one = [0; 16];
                one.copy_from_slice(piece);
                let mut one = one.into();
                block.encrypt_block(&mut one);
                piece.copy_from_slice(&one);
            }
        }

        fn gcm(key: &[u8; 32]) -> Aes256Gcm {
            Aes256Gcm::new(&(*key).into())
        }

        fn seal(gcm: &Aes256Gcm, iv: &[u8; IV], aad: &[u8], data: &mut [u8]) -> [u8; TAG] {
            // Fails only beyond 64 GiB; a page has at most 256 KiB.
            gcm.encrypt_inout_detached(&(*iv).into(), aad, InOutBuf::from(data)).expect("a page is short").into()
        }

        fn open(gcm: &Aes256Gcm, iv: &[u8; IV], aad: &[u8], data: &mut [u8], tag: &[u8; TAG]) -> bool {
            gcm.decrypt_inout_detached(&(*iv).into(), aad, InOutBuf::from(data), &(*tag).into()).is_ok()
        }
    }
}
