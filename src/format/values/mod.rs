//! Encoding of tree record values (specification sections 7 and 8).

mod directory;
mod extent;
mod global;
mod inode;
mod xattr;

pub use directory::{
    IndexEntry, ListEntry, decode_index, decode_list, encode_index, encode_list, find_in_index, is_valid_name,
};
pub use extent::Extent;
pub use global::{DeadValue, HistoryValue, ReferenceValue, SnapshotValue};
pub use inode::{InodeValue, NO_TRIM, inode_flags};
pub use xattr::{MAX_XATTR, XATTR_PIECE, XattrEntry, decode_xattrs, encode_xattrs};
