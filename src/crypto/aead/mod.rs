//! XAES-256-GCM (C2SP) with a cached AES context, and the messages of a page under a key derived
//! from it (specification 4.2). Of two AES-256 engines aws-lc-rs is used, and pure Rust for the
//! portable build and as a cross-check.

#[cfg(test)]
mod tests;

use std::sync::atomic::{AtomicU64, Ordering};

use zeroize::Zeroizing;

use super::SecretKey;
use crate::error::{Error, Result};
#[cfg(feature = "portable")]
use portable::Portable as Native;
#[cfg(not(feature = "portable"))]
use system::System as Native;

pub(crate) const TAG: usize = 16;
const IV: usize = 12;

/// Primitives for XAES: AES-256 on single blocks for the derivation, AES-256-GCM for the messages.
trait Engine {
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

#[cfg(any(test, not(feature = "portable")))]
mod system {
    //! aws-lc-rs.

    use aws_lc_rs::aead::{AES_256_GCM, Aad, LessSafeKey, Nonce, UnboundKey};
    use aws_lc_rs::cipher::{AES_256, EncryptingKey, EncryptionContext, UnboundCipherKey};

    use super::{Engine, IV, TAG};

    pub(super) struct System;

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
mod portable {
    //! The `aes` and `aes-gcm` crates.

    use aes_gcm::aead::inout::InOutBuf;
    use aes_gcm::aes::Aes256;
    use aes_gcm::aes::cipher::BlockCipherEncrypt;
    use aes_gcm::{AeadInOut, Aes256Gcm, KeyInit};

    use super::{Engine, IV, TAG};

    pub(super) struct Portable;

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

pub(crate) const NONCE: usize = 24;
pub(crate) const MAX_CHUNKS: usize = 32;

/// XAES-256-GCM key with AES context and CMAC subkey computed once.
pub struct XaesKey {
    xaes: Xaes<Native>,
}

/// AES-256-GCM key of one page. Seals each of its messages once: prologue, body or head, and
/// chunks.
pub struct PageKey {
    messages: Messages<Native>,
}

impl XaesKey {
    pub fn new(key: &SecretKey) -> XaesKey {
        XaesKey { xaes: Xaes::new(key.bytes()) }
    }

    /// Seals in place and returns the tag. The nonce must be random, so that it was never used with
    /// this key.
    pub(crate) fn seal(&self, nonce: &[u8; NONCE], aad: &[u8], data: &mut [u8]) -> [u8; TAG] {
        self.xaes.seal(nonce, aad, data)
    }

    /// Opens in place.
    ///
    /// # Errors
    /// `Damaged("authentication failed")`; `data` is then zeroed.
    pub(crate) fn open(&self, nonce: &[u8; NONCE], aad: &[u8], data: &mut [u8], tag: &[u8; TAG]) -> Result<()> {
        self.xaes.open(nonce, aad, data, tag)
    }

    /// Derives the key of the page with this nonce. When sealing, the nonce must be random as for
    /// [`XaesKey::seal`].
    pub fn page_key(&self, nonce: &[u8; NONCE]) -> PageKey {
        PageKey { messages: self.xaes.messages(nonce) }
    }
}

impl PageKey {
    /// Seals message 0 with the IV of the nonce.
    ///
    /// # Panics
    /// When the message was sealed before: two messages under one key and IV would reveal both.
    pub(crate) fn seal_prologue(&self, aad: &[u8], data: &mut [u8]) -> [u8; TAG] {
        self.messages.seal(0, aad, data)
    }

    pub(crate) fn open_prologue(&self, aad: &[u8], data: &mut [u8], tag: &[u8; TAG]) -> Result<()> {
        self.messages.open(0, aad, data, tag)
    }

    /// Seals message 1, the body or the head of a data page, with the IV of the nonce and 1 xored
    /// into its last byte.
    ///
    /// # Panics
    /// Same as [`PageKey::seal_prologue`].
    pub fn seal_body(&self, aad: &[u8], data: &mut [u8]) -> [u8; TAG] {
        self.messages.seal(1, aad, data)
    }

    pub(crate) fn open_body(&self, aad: &[u8], data: &mut [u8], tag: &[u8; TAG]) -> Result<()> {
        self.messages.open(1, aad, data, tag)
    }

    /// Seals message 2 + `chunk`, with the IV of the nonce and that number xored into its last
    /// byte.
    ///
    /// # Panics
    /// Same as [`PageKey::seal_prologue`], and when `chunk` is [`MAX_CHUNKS`] or more.
    pub fn seal_chunk(&self, chunk: usize, aad: &[u8], data: &mut [u8]) -> [u8; TAG] {
        self.messages.seal(chunk_message(chunk), aad, data)
    }

    /// Opens a chunk in place.
    ///
    /// # Panics
    /// When `chunk` is [`MAX_CHUNKS`] or more.
    pub(crate) fn open_chunk(&self, chunk: usize, aad: &[u8], data: &mut [u8], tag: &[u8; TAG]) -> Result<()> {
        self.messages.open(chunk_message(chunk), aad, data, tag)
    }
}

/// XAES over either engine, so that tests can compare them.
struct Xaes<E: Engine> {
    block: E::Block,
    /// CMAC subkey K1 of RFC 4493. Both derivation messages are whole blocks, so K2 is never
    /// needed.
    subkey: Zeroizing<[u8; 16]>,
}

/// Derived key with the IVs of a page.
struct Messages<E: Engine> {
    gcm: E::Gcm,
    iv: [u8; IV],
    /// Bit i is set when message i was sealed.
    sealed: AtomicU64,
}

impl<E: Engine> Xaes<E> {
    fn new(key: &[u8; 32]) -> Self {
        let block = E::block(key);
        let mut zero = Zeroizing::new([0; 32]);
        E::encrypt(&block, &mut zero);
        // Doubling in GF(2^128), without a branch on the secret bit.
        let mut subkey = Zeroizing::new([0; 16]);
        for i in 0..15 {
            subkey[i] = zero[i] << 1 | zero[i + 1] >> 7;
        }
        subkey[15] = zero[15] << 1 ^ (0x87 & (zero[0] >> 7).wrapping_neg());
        Xaes { block, subkey }
    }

    /// Derives the AES-256-GCM key of a nonce: AES(M1 ^ K1) || AES(M2 ^ K1), Mi = 00 i 'X' 00 ||
    /// N[0..12].
    fn derive(&self, nonce: &[u8; NONCE]) -> E::Gcm {
        let mut key = Zeroizing::new([0; 32]);
        for (index, half) in key.chunks_exact_mut(16).enumerate() {
            half[..4].copy_from_slice(&[0, index as u8 + 1, b'X', 0]);
            half[4..].copy_from_slice(&nonce[..12]);
            half.iter_mut().zip(self.subkey.iter()).for_each(|(byte, mask)| *byte ^= mask);
        }
        E::encrypt(&self.block, &mut key);
        E::gcm(&key)
    }

    fn seal(&self, nonce: &[u8; NONCE], aad: &[u8], data: &mut [u8]) -> [u8; TAG] {
        E::seal(&self.derive(nonce), &iv(nonce), aad, data)
    }

    fn open(&self, nonce: &[u8; NONCE], aad: &[u8], data: &mut [u8], tag: &[u8; TAG]) -> Result<()> {
        open_or_clear::<E>(&self.derive(nonce), &iv(nonce), aad, data, tag)
    }

    fn messages(&self, nonce: &[u8; NONCE]) -> Messages<E> {
        Messages { gcm: self.derive(nonce), iv: iv(nonce), sealed: AtomicU64::new(0) }
    }
}

impl<E: Engine> Messages<E> {
    fn message_iv(&self, message: u8) -> [u8; IV] {
        let mut iv = self.iv;
        // Xored rather than set: otherwise those bits of the nonce could be altered undetected.
        iv[IV - 1] ^= message;
        iv
    }

    fn seal(&self, message: u8, aad: &[u8], data: &mut [u8]) -> [u8; TAG] {
        let before = self.sealed.fetch_or(1 << message, Ordering::Relaxed);
        assert!(before & 1 << message == 0, "a message of a page is sealed once");
        E::seal(&self.gcm, &self.message_iv(message), aad, data)
    }

    fn open(&self, message: u8, aad: &[u8], data: &mut [u8], tag: &[u8; TAG]) -> Result<()> {
        open_or_clear::<E>(&self.gcm, &self.message_iv(message), aad, data, tag)
    }
}

fn chunk_message(chunk: usize) -> u8 {
    assert!(chunk < MAX_CHUNKS, "a page has at most {MAX_CHUNKS} chunks");
    chunk as u8 + 2
}

fn iv(nonce: &[u8; NONCE]) -> [u8; IV] {
    let mut iv = [0; IV];
    iv.copy_from_slice(&nonce[12..]);
    iv
}

fn open_or_clear<E: Engine>(gcm: &E::Gcm, iv: &[u8; IV], aad: &[u8], data: &mut [u8], tag: &[u8; TAG]) -> Result<()> {
    if E::open(gcm, iv, aad, data, tag) {
        return Ok(());
    }
    data.fill(0); // unauthentic plaintext must not be looked at, not even by mistake
    Err(Error::damaged("authentication failed"))
}
