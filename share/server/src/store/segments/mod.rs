//! The built-in store: append-only files by shard and minute of expiry, found through an index on
//! disk.
//!
//! Everything about a share stands in the file that goes when the share is over, so that expiry is
//! an unlink. A change appends one record; the newest record of a share counts. Memory holds a few
//! words for each file and a cache of fixed size for the index.

#[cfg(test)]
mod crash;
mod meta_files;
#[cfg(any(test, fuzzing))]
pub(crate) mod fuzzing {
    //! A forged head of a file.

    use super::scan::{SegmentClass, SegmentHeader};

    pub(crate) fn head(nonce: u64, minute: u64, audit: bool, shard: u8) -> Vec<u8> {
        let class = if audit { SegmentClass::Audit } else { SegmentClass::Content };
        SegmentHeader { nonce, minute, class, shard }.encode().to_vec()
    }
}
mod engine;
mod index;
mod scan;
mod shard;
mod store;
mod sweep;
#[cfg(test)]
mod tests;

pub use store::{SegmentSettings, SegmentStore};
