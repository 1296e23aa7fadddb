//! Log entry encryption: binds each entry to its location, and its head and body to each other
//! (specification 4.2 and 9.4).

use super::cipher::{PageCipher, field, put_location};
use crate::crypto::aead::{NONCE, PageKey, TAG, XaesKey};
use crate::error::{Error, Result};
use crate::format::log::{ENTRY_HEAD, EntryHead, entry_capacity};
use crate::format::{LOG, Tag};

/// Offset of the body: after nonce, sealed head and its tag.
const BODY: usize = NONCE + ENTRY_HEAD + TAG;
/// Length of the associated data of a head: label 19, version 4, archive 16, block 8.
const PLACE: usize = 47;

/// Sealed entry ready to be written.
pub(crate) struct SealedEntry {
    pub(crate) tag: Tag,
    pub(crate) bytes: Vec<u8>,
}

/// Start of an entry: the decrypted head.
pub(crate) struct EntryStart {
    pub(crate) head: EntryHead,
    plain: [u8; ENTRY_HEAD],
    key: PageKey,
}

fn head_aad(cipher: &PageCipher, address: u64) -> [u8; PLACE] {
    let mut aad = [0; PLACE];
    aad[..19].copy_from_slice(b"lockbox/v1/log/head");
    put_location(&mut aad[19..], cipher.archive(), address);
    aad
}

fn body_aad(cipher: &PageCipher, address: u64, head: &[u8; ENTRY_HEAD]) -> [u8; PLACE + ENTRY_HEAD] {
    let mut aad = [0; PLACE + ENTRY_HEAD];
    aad[..19].copy_from_slice(b"lockbox/v1/log/body");
    put_location(&mut aad[19..], cipher.archive(), address);
    aad[PLACE..].copy_from_slice(head);
    aad
}

impl PageCipher {
    fn log_key(&self) -> Result<&XaesKey> {
        self.log().ok_or_else(|| Error::invalid("the archive has no log"))
    }

    /// Seals an entry for the blocks from `address` on; `head` has their number and the length of
    /// `body`.
    ///
    /// # Errors
    /// `Io` when there is no randomness, `Invalid` for an archive without a log or lengths that
    /// contradict `head`.
    pub(crate) fn seal_entry(&self, head: &EntryHead, address: u64, body: &[u8]) -> Result<SealedEntry> {
        let room = entry_capacity(head.blocks.into());
        if head.length as usize != body.len() || body.len() > room {
            return Err(Error::invalid(format!("log entry of {} bytes sealed for {} blocks", body.len(), head.blocks)));
        }
        self.seal_entry_parts(&head.encode(), address, body, room)
    }

    /// Seals the given head bytes without validation, and `body` zero-padded to `room` bytes.
    pub(crate) fn seal_entry_parts(
        &self,
        plain: &[u8; ENTRY_HEAD],
        address: u64,
        body: &[u8],
        room: usize,
    ) -> Result<SealedEntry> {
        let nonce = self.nonce()?;
        let key = self.log_key()?.page_key(&nonce);
        let mut bytes = Vec::with_capacity(BODY + room + TAG);
        bytes.extend_from_slice(&nonce);
        bytes.extend_from_slice(plain);
        let tag = key.seal_prologue(&head_aad(self, address), &mut bytes[NONCE..]);
        bytes.extend_from_slice(&tag);
        bytes.extend_from_slice(body);
        bytes.resize(BODY + room, 0);
        let tag = key.seal_body(&body_aad(self, address, plain), &mut bytes[BODY..]);
        bytes.extend_from_slice(&tag);
        Ok(SealedEntry { tag, bytes })
    }

    /// Opens the head in the first block of an entry; `None` when it is not an entry of this
    /// archive at this address.
    ///
    /// # Errors
    /// `Damaged` for an authentic head that does not decode or whose entry exceeds the log: only a
    /// key holder can have created it.
    pub(crate) fn open_entry_head(&self, address: u64, bytes: &[u8]) -> Result<Option<EntryStart>> {
        let key = self.log_key()?.page_key(&field(bytes, 0));
        let mut plain: [u8; ENTRY_HEAD] = field(bytes, NONCE);
        let tag = field(bytes, NONCE + ENTRY_HEAD);
        if key.open_prologue(&head_aad(self, address), &mut plain, &tag).is_err() {
            return Ok(None);
        }
        let head = EntryHead::decode(&plain)?;
        if address + u64::from(head.blocks) > LOG.1 {
            return Err(Error::damaged(format!("log entry reaches beyond the log: block={address}")));
        }
        Ok(Some(EntryStart { head, plain, key }))
    }

    /// Opens the body of an entry from its blocks `bytes`; returns body and tag, or `None` when it
    /// fails authentication.
    ///
    /// # Errors
    /// `Damaged` for non-zero padding.
    pub(crate) fn open_entry_body(
        &self,
        start: &EntryStart,
        address: u64,
        mut bytes: Vec<u8>,
    ) -> Result<Option<(Vec<u8>, Tag)>> {
        let end = BODY + entry_capacity(start.head.blocks.into());
        let tag: Tag = field(&bytes, end);
        let aad = body_aad(self, address, &start.plain);
        if start.key.open_body(&aad, &mut bytes[BODY..end], &tag).is_err() {
            return Ok(None);
        }
        let stored = BODY + start.head.length as usize;
        if bytes[stored..end].iter().any(|byte| *byte != 0) {
            return Err(Error::damaged(format!("log entry has padding that is not zero: block={address}")));
        }
        bytes.truncate(stored);
        bytes.drain(..BODY);
        Ok(Some((bytes, tag)))
    }
}
