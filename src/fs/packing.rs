//! Placement of small files: inline in the tree, or packed on a page shared by files of one owner
//! and one compression setting, in the order of arrival.

use std::collections::BTreeMap;

use super::types::FsOptions;
use crate::format::MAX_DATA;
use crate::format::values::inode_flags;

/// Files up to this many bytes are packed: with four or more on a page, sharing saves the rounding
/// up to blocks.
pub(super) const PACK: u64 = 32 * 1024;

/// Files up to this many bytes are stored inline in the tree. To be decided by measurement (design
/// 3.2): a packed file costs an extent of 73 bytes and a share of a page, an inline one its bytes
/// in every walk over the inodes.
pub(super) const INLINE: u64 = 256;

/// Items of one packed page (specification 5.3 bounds the page, `write_packed` the number).
pub(super) const PACK_FILES: usize = 256;

pub(super) fn compresses(options: &FsOptions, flags: u32) -> bool {
    options.compress && flags & inode_flags::NO_COMPRESS == 0
}

pub(super) fn packs(options: &FsOptions, flags: u32) -> bool {
    options.pack && flags & inode_flags::NO_PACK == 0
}

/// Items that share a page.
pub(super) struct SharedPage<T> {
    pub(super) items: Vec<T>,
    pub(super) bytes: usize,
    pub(super) compress: bool,
}

pub(super) type SharedPages<T> = Vec<SharedPage<T>>;

/// Groups items into shared pages.
pub(super) struct Packer<T> {
    options: FsOptions,
    /// Maximum items of one page.
    most: usize,
    /// Keyed by owner and compression: the contents of one page are read, and lost, together.
    open: BTreeMap<(u32, bool), SharedPage<T>>,
    full: Vec<SharedPage<T>>,
}

impl<T> Packer<T> {
    pub(super) fn new(options: FsOptions) -> Packer<T> {
        Packer::with_max_items(options, PACK_FILES)
    }

    /// Like `new`, with `most` as the maximum number of items on a page.
    pub(super) fn with_max_items(options: FsOptions, most: usize) -> Packer<T> {
        Packer { options, most, open: BTreeMap::new(), full: Vec::new() }
    }

    /// Adds an item of `bytes` bytes (at most `MAX_DATA`) of a file with this owner and these
    /// flags.
    pub(super) fn add(&mut self, uid: u32, flags: u32, bytes: usize, item: T) {
        let compress = compresses(&self.options, flags);
        let empty = || SharedPage { items: Vec::new(), bytes: 0, compress };
        if !packs(&self.options, flags) {
            self.full.push(SharedPage { items: vec![item], bytes, compress });
            return;
        }
        let page = self.open.entry((uid, compress)).or_insert_with(empty);
        if page.items.len() == self.most || page.bytes + bytes > MAX_DATA {
            self.full.push(std::mem::replace(page, empty()));
        }
        page.items.push(item);
        page.bytes += bytes;
    }

    pub(super) fn pages(self) -> SharedPages<T> {
        self.full.into_iter().chain(self.open.into_values()).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fs::SyncProfile;

    #[test]
    fn a_page_is_shared_by_files_of_one_owner_and_setting_as_far_as_it_goes() {
        let options = FsOptions { max_dirty_bytes: 0, sync: SyncProfile::Periodic, pack: true, compress: true };
        let mut packer = Packer::new(options);
        let third = MAX_DATA / 3;
        let alone = inode_flags::NO_PACK;
        let plain = inode_flags::NO_COMPRESS;
        let files =
            [(1, 0, third), (2, 0, 100), (1, plain, 100), (1, 0, third), (1, alone, 100), (1, 0, third + 3), (1, 0, 1)];
        for (number, (uid, flags, bytes)) in files.into_iter().enumerate() {
            packer.add(uid, flags, bytes, number);
        }
        (0..=PACK_FILES).for_each(|number| packer.add(3, 0, 1, 100 + number));
        let pages: Vec<_> = packer.pages().into_iter().map(|page| (page.items, page.bytes, page.compress)).collect();
        let many: Vec<usize> = (100..100 + PACK_FILES).collect();
        let expected = [
            (vec![4], 100, true),
            (vec![0, 3], 2 * third, true),
            (many, PACK_FILES, true),
            (vec![2], 100, false),
            (vec![5, 6], third + 4, true),
            (vec![1], 100, true),
            (vec![100 + PACK_FILES], 1, true),
        ];
        assert_eq!(pages, expected);
    }
}
