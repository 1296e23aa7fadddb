//! Ciphertext that was uploaded and that no share has taken yet.
//!
//! A request whose answer was lost is sent again, and then gets the same answer: an upload is known by its owner and its digest
//! while it waits, a share by its upload, its owner and its verifier for a minute.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use lockbox_share_protocol::api::{REPEAT_SECONDS, UPLOAD_SECONDS};
use lockbox_share_protocol::message::Created;
use lockbox_share_protocol::token::UploadToken;
use parking_lot::Mutex;

use crate::spool::Spool;
use crate::store::{SpoolEntry, Verifier};

/// Uploads that may wait at a time; the spool's own limit bounds their bytes.
const MOST: usize = 4096;

type Token = [u8; UploadToken::LENGTH];

/// Uploads by their token.
#[derive(Default)]
pub(super) struct Waiting(Mutex<Table>);

#[derive(Default)]
struct Table {
    uploads: HashMap<Token, Upload>,
    /// What became of those that a share took.
    made: HashMap<Token, Made>,
}

struct Upload {
    owner: Verifier,
    entry: SpoolEntry,
    since: Instant,
}

struct Made {
    owner: Verifier,
    auth: Verifier,
    created: Created,
    since: Instant,
}

/// What an upload that arrived came to.
pub(super) struct Arrived {
    pub(super) token: UploadToken,
    pub(super) entry: SpoolEntry,
    /// The same ciphertext waits already; the file of this upload is to be removed.
    pub(super) surplus: Option<[u8; 16]>,
}

impl Waiting {
    /// Whether another upload may be begun.
    pub(super) fn has_room(&self) -> bool {
        self.0.lock().uploads.len() < MOST
    }

    /// Keeps an upload for 15 minutes, under `token` or under that of the same owner's same ciphertext.
    pub(super) fn arrived(&self, token: UploadToken, owner: Verifier, entry: SpoolEntry) -> Arrived {
        let mut table = self.0.lock();
        let same = table.uploads.iter_mut().find(|(_, known)| {
            known.entry.digest == entry.digest && known.entry.length == entry.length && known.owner == owner
        });
        if let Some((token, known)) = same {
            known.since = Instant::now();
            return Arrived { token: UploadToken::new(*token), entry: known.entry, surplus: Some(entry.id) };
        }
        table.uploads.insert(*token.as_bytes(), Upload { owner, entry, since: Instant::now() });
        Arrived { token, entry, surplus: None }
    }

    /// Keeps an upload that a share did not take after all.
    pub(super) fn put_back(&self, token: &UploadToken, owner: Verifier, entry: SpoolEntry) {
        self.0.lock().uploads.insert(*token.as_bytes(), Upload { owner, entry, since: Instant::now() });
    }

    /// Hands an upload to one share.
    pub(super) fn take(&self, token: &UploadToken) -> Option<SpoolEntry> {
        self.0.lock().uploads.remove(token.as_bytes()).map(|upload| upload.entry)
    }

    /// Notes which share took an upload.
    pub(super) fn remember(&self, token: &UploadToken, owner: Verifier, auth: Verifier, created: Created) {
        let mut table = self.0.lock();
        if table.made.len() >= MOST {
            table.made.retain(|_, made| made.is_fresh());
        }
        // More than that in a minute are not remembered: their repeated request is refused, as one that comes too late.
        if table.made.len() < MOST {
            table.made.insert(*token.as_bytes(), Made { owner, auth, created, since: Instant::now() });
        }
    }

    /// The share that took an upload within the last minute, for whoever asks for the same one again.
    pub(super) fn made(&self, token: &UploadToken, owner: &Verifier, auth: &Verifier) -> Option<Created> {
        let table = self.0.lock();
        let made = table.made.get(token.as_bytes()).filter(|made| made.is_fresh())?;
        (made.owner.accepts(owner) && made.auth.accepts(auth)).then(|| made.created.clone())
    }

    /// Blocks for as long as files are removed.
    pub(super) fn discard_overdue(&self, spool: &Spool) {
        self.0.lock().made.retain(|_, made| made.is_fresh());
        self.discard_older(spool, Duration::from_secs(UPLOAD_SECONDS));
    }

    pub(super) fn discard_all(&self, spool: &Spool) {
        self.discard_older(spool, Duration::ZERO);
    }

    fn discard_older(&self, spool: &Spool, age: Duration) {
        let mut table = self.0.lock();
        let overdue: Vec<SpoolEntry> = table
            .uploads
            .extract_if(|_, upload| upload.since.elapsed() >= age)
            .map(|(_, upload)| upload.entry)
            .collect();
        drop(table);
        for entry in overdue {
            spool.remove(&entry.id);
        }
    }
}

impl Made {
    fn is_fresh(&self) -> bool {
        self.since.elapsed() < Duration::from_secs(REPEAT_SECONDS)
    }
}
