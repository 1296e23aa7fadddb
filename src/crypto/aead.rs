//! XAES-256-GCM (C2SP) with a cached AES context, and the two-part page seal derived from it (specification 4.2).

use super::secret::SecretKey;
use crate::error::Result;

pub const NONCE: usize = 24;
pub const TAG: usize = 16;

/// Key of XAES-256-GCM with its AES context and CMAC subkey computed once.
pub struct XaesKey {}

/// AES-256-GCM key of one page; seals exactly two messages, the prologue and the body.
pub struct PageKey {}

impl XaesKey {
    pub fn new(key: &SecretKey) -> XaesKey {
        let _ = key;
        todo!()
    }

    /// Seals in place and returns the tag.
    pub fn seal(&self, nonce: &[u8; NONCE], aad: &[u8], data: &mut [u8]) -> [u8; TAG] {
        let _ = (nonce, aad, data);
        todo!()
    }

    /// Opens in place.
    ///
    /// # Errors
    /// `Damaged("authentication failed")`; `data` is then zeroed.
    pub fn open(&self, nonce: &[u8; NONCE], aad: &[u8], data: &mut [u8], tag: &[u8; TAG]) -> Result<()> {
        let _ = (nonce, aad, data, tag);
        todo!()
    }

    /// Derives the key of the page with this nonce.
    pub fn page_key(&self, nonce: &[u8; NONCE]) -> PageKey {
        let _ = nonce;
        todo!()
    }
}

impl PageKey {
    /// Message 0: lowest bit of the IV's last byte 0.
    pub fn seal_prologue(&self, aad: &[u8], data: &mut [u8]) -> [u8; TAG] {
        let _ = (aad, data);
        todo!()
    }

    pub fn open_prologue(&self, aad: &[u8], data: &mut [u8], tag: &[u8; TAG]) -> Result<()> {
        let _ = (aad, data, tag);
        todo!()
    }

    /// Message 1: lowest bit of the IV's last byte 1.
    pub fn seal_body(&self, aad: &[u8], data: &mut [u8]) -> [u8; TAG] {
        let _ = (aad, data);
        todo!()
    }

    pub fn open_body(&self, aad: &[u8], data: &mut [u8], tag: &[u8; TAG]) -> Result<()> {
        let _ = (aad, data, tag);
        todo!()
    }
}
