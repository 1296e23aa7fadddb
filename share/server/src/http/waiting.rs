//! Ciphertext that was uploaded and that no share has taken yet.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use lockbox_share_protocol::api::UPLOAD_SECONDS;
use lockbox_share_protocol::token::UploadToken;
use parking_lot::Mutex;

use crate::spool::Spool;
use crate::store::SpoolEntry;

/// Uploads that may wait at a time; the spool's own limit bounds their bytes.
const MOST: usize = 4096;

/// Uploads by their token.
#[derive(Default)]
pub(super) struct Waiting(Mutex<HashMap<[u8; UploadToken::LENGTH], (SpoolEntry, Instant)>>);

impl Waiting {
    /// Whether another upload may be begun.
    pub(super) fn has_room(&self) -> bool {
        self.0.lock().len() < MOST
    }

    /// Keeps an upload for 15 minutes.
    pub(super) fn put(&self, token: &UploadToken, entry: SpoolEntry) {
        self.0.lock().insert(*token.as_bytes(), (entry, Instant::now()));
    }

    /// Hands an upload to one share.
    pub(super) fn take(&self, token: &UploadToken) -> Option<SpoolEntry> {
        self.0.lock().remove(token.as_bytes()).map(|(entry, _)| entry)
    }

    /// Blocks for as long as files are removed.
    pub(super) fn discard_overdue(&self, spool: &Spool) {
        self.discard_older(spool, Duration::from_secs(UPLOAD_SECONDS));
    }

    pub(super) fn discard_all(&self, spool: &Spool) {
        self.discard_older(spool, Duration::ZERO);
    }

    fn discard_older(&self, spool: &Spool, age: Duration) {
        let overdue: Vec<SpoolEntry> =
            self.0.lock().extract_if(|_, (_, since)| since.elapsed() >= age).map(|(_, (entry, _))| entry).collect();
        for entry in overdue {
            spool.remove(&entry.id);
        }
    }
}
