//! Archives as tar streams: POSIX pax format out, everything that GNU tar and bsdtar write in. Directories, files with their holes, hard and
//! symbolic links, devices, FIFOs, times in nanoseconds, extended attributes and access control lists. Headers are those of the crate `tar`;
//! the framing is read here, because what a stream claims about sizes is not to be believed before it is bounded.

mod acl;
mod export;
mod extended_header;
mod header;
mod import;
mod install;
mod member_type;
mod members;
mod pack;
mod pax;
mod sparse;
mod unpack;

pub use export::{Packed, TarExport, export_tar, export_tree};
pub use import::{TarImport, TarImportOptions, import_tar};
pub use pack::pack_tree;
pub use unpack::{Unpacked, unpack_tar};

/// Unit of a tar stream, in bytes.
const BLOCK: usize = 512;
/// Streams end at a multiple of this, as tape drives wanted it and GNU tar still writes it.
const RECORD: u64 = 20 * BLOCK as u64;
/// Largest set of pax records, in bytes: all attributes of a file are in it. More than any tar of real files has; read into memory.
const MAX_RECORDS: u64 = 64 << 20;
/// Prefix of an extended attribute's record.
const XATTR: &str = "SCHILY.xattr.";
const ACLS: [(&str, &[u8]); 2] =
    [("SCHILY.acl.access", b"system.posix_acl_access"), ("SCHILY.acl.default", b"system.posix_acl_default")];
