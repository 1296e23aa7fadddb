//! Uploaded ciphertext that no share uses yet.
//!
//! A request can be repeated after its response was lost, and gets the same response: a pending
//! upload is identified by its owner and its digest, and for a minute a share by its upload, its
//! owner and its verifier.
//!
//! At any time an upload is in one state: it is pending, or a share is being created from it, or
//! the share exists. The request that takes an upload must report its result afterwards, also when
//! its client has disconnected; until then other requests for the upload are asked to retry.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use lockbox_share_protocol::api::{REPEAT_SECONDS, UPLOAD_SECONDS};
use lockbox_share_protocol::message::CreateReply;
use lockbox_share_protocol::token::{UploadToken, Verifier};
use parking_lot::Mutex;

use crate::store::SpoolEntry;
use crate::store::spool::Spool;

/// Uploads that may wait at a time; the spool's own limit bounds their bytes.
const MOST: usize = 4096;

type Token = [u8; UploadToken::LENGTH];

/// Uploads by their token.
#[derive(Default)]
pub(super) struct PendingUploads(Mutex<Table>);

#[derive(Default)]
struct Table {
    uploads: HashMap<Token, PendingUpload>,
    /// Uploads of which a share is being created.
    making: HashMap<Token, PendingUpload>,
    /// Shares that were created from uploads.
    made: HashMap<Token, CreatedUpload>,
}

struct PendingUpload {
    owner: Verifier,
    entry: SpoolEntry,
    since: Instant,
}

/// Result of taking an upload for a new share.
pub(super) enum TakeOutcome {
    /// The caller has it now, and says with [`PendingUploads::complete`] or
    /// [`PendingUploads::release`] how that ended.
    Entry(SpoolEntry),
    /// An earlier message has it, and it is not known yet how that ends.
    InProgress,
    /// The share that an earlier message made of it within the last minute.
    Made(CreateReply),
    /// There is no such upload, or it is another's, or another share has it.
    Unknown,
}

struct CreatedUpload {
    owner: Verifier,
    auth: Verifier,
    created: CreateReply,
    since: Instant,
}

/// Result of adding an upload.
pub(super) struct AddedUpload {
    pub(super) token: UploadToken,
    pub(super) entry: SpoolEntry,
    /// File to remove, when the same ciphertext is pending already.
    pub(super) surplus: Option<[u8; 16]>,
}

impl PendingUploads {
    /// Returns whether another upload may begin.
    pub(super) fn has_room(&self) -> bool {
        let table = self.0.lock();
        table.uploads.len() + table.making.len() < MOST
    }

    /// Keeps an upload for 15 minutes, under `token` or under that of the same owner's same
    /// ciphertext.
    pub(super) fn add(&self, token: UploadToken, owner: Verifier, entry: SpoolEntry) -> AddedUpload {
        let mut table = self.0.lock();
        let same = table.uploads.iter_mut().find(|(_, known)| {
            known.entry.digest == entry.digest && known.entry.length == entry.length && known.owner == owner
        });
        if let Some((token, known)) = same {
            known.since = Instant::now();
            return AddedUpload { token: UploadToken::new(*token), entry: known.entry, surplus: Some(entry.id) };
        }
        table.uploads.insert(*token.as_bytes(), PendingUpload { owner, entry, since: Instant::now() });
        AddedUpload { token, entry, surplus: None }
    }

    /// Hands an upload of `owner` to the share that has the verifier `auth`.
    pub(super) fn take(&self, token: &UploadToken, owner: &Verifier, auth: &Verifier) -> TakeOutcome {
        let key = token.as_bytes();
        let mut table = self.0.lock();
        if table.uploads.get(key).is_some_and(|upload| upload.owner.accepts(owner))
            && let Some(upload) = table.uploads.remove(key)
        {
            let entry = upload.entry;
            table.making.insert(*key, upload);
            return TakeOutcome::Entry(entry);
        }
        if table.making.get(key).is_some_and(|upload| upload.owner.accepts(owner)) {
            return TakeOutcome::InProgress;
        }
        let made = table.made.get(key).filter(|made| made.is_fresh());
        let same = made.filter(|made| made.owner.accepts(owner) && made.auth.accepts(auth));
        same.map_or(TakeOutcome::Unknown, |made| TakeOutcome::Made(made.created.clone()))
    }

    /// Keeps an upload that a share did not take after all, for its owner.
    pub(super) fn release(&self, token: &UploadToken) {
        let mut table = self.0.lock();
        if let Some(upload) = table.making.remove(token.as_bytes()) {
            table.uploads.insert(*token.as_bytes(), PendingUpload { since: Instant::now(), ..upload });
        }
    }

    /// Notes which share took an upload.
    pub(super) fn complete(&self, token: &UploadToken, owner: Verifier, auth: Verifier, created: CreateReply) {
        let mut table = self.0.lock();
        table.making.remove(token.as_bytes());
        if table.made.len() >= MOST {
            table.made.retain(|_, made| made.is_fresh());
        }
        // More than that in a minute are not remembered: their repeated request is refused, as one
        // that comes too late.
        if table.made.len() < MOST {
            table.made.insert(*token.as_bytes(), CreatedUpload { owner, auth, created, since: Instant::now() });
        }
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

impl CreatedUpload {
    fn is_fresh(&self) -> bool {
        self.since.elapsed() < Duration::from_secs(REPEAT_SECONDS)
    }
}

#[cfg(test)]
mod tests {
    use lockbox_share_protocol::token::Digest;

    use super::*;

    const OWNER: Verifier = Verifier::new([1; 32]);
    const AUTH: Verifier = Verifier::new([2; 32]);
    const OTHER: Verifier = Verifier::new([3; 32]);

    #[test]
    fn an_upload_is_given_to_its_owner_alone_and_to_one_share_at_a_time() {
        let pending_uploads = PendingUploads::default();
        let entry = SpoolEntry { id: [4; 16], length: 5, digest: Digest::new([6; 32]) };
        let token = UploadToken::new([7; UploadToken::LENGTH]);
        pending_uploads.add(UploadToken::new([7; UploadToken::LENGTH]), OWNER, entry);
        let take = |owner, auth| pending_uploads.take(&token, owner, auth);
        assert!(matches!(take(&OTHER, &AUTH), TakeOutcome::Unknown));
        assert!(matches!(take(&OWNER, &AUTH), TakeOutcome::Entry(taken) if taken == entry));
        // Of any share: which one has it is not known before it is there.
        assert!(matches!(take(&OWNER, &AUTH), TakeOutcome::InProgress));
        assert!(matches!(take(&OWNER, &OTHER), TakeOutcome::InProgress));
        assert!(matches!(take(&OTHER, &AUTH), TakeOutcome::Unknown));
        pending_uploads.release(&token);
        assert!(matches!(take(&OTHER, &AUTH), TakeOutcome::Unknown));
        assert!(matches!(take(&OWNER, &AUTH), TakeOutcome::Entry(taken) if taken == entry));
        let handle = "1482719382210".parse().unwrap();
        pending_uploads.complete(&token, OWNER, AUTH, CreateReply { handle, url: String::new(), expires_at: 8 });
        assert!(matches!(take(&OWNER, &AUTH), TakeOutcome::Made(made) if made.handle == handle));
        assert!(matches!(take(&OWNER, &OTHER), TakeOutcome::Unknown));
        assert!(matches!(take(&OTHER, &AUTH), TakeOutcome::Unknown));
        // It is spent.
        pending_uploads.release(&token);
        assert!(matches!(take(&OWNER, &OTHER), TakeOutcome::Unknown));
    }
}
