//! Tar import and export: writes the POSIX pax format, reads everything that GNU tar and bsdtar
//! write.
//!
//! Supported are directories, files with holes, hard and symbolic links, devices, FIFOs, times in
//! nanoseconds, extended attributes and access control lists. Headers are decoded with the crate
//! `tar`; the framing is read here, because sizes in a stream are untrusted until they are bounded.

mod export;
mod header;
mod members;
mod pax;
mod unpack;

pub use export::{PackReport, TarExport, export_tar, export_tree, pack_tree};
pub use unpack::{TarImport, TarImportOptions, UnpackReport, import_tar, unpack_tar};

/// Unit of a tar stream, in bytes.
const BLOCK: usize = 512;
/// Streams are padded to a multiple of this, as tape drives required and GNU tar still does.
const RECORD: u64 = 20 * BLOCK as u64;
/// Maximum size of a set of pax records, in bytes; it contains all attributes of a file. More than
/// any real tar has; read into memory.
const MAX_RECORDS: u64 = 64 << 20;
/// Prefix of an extended attribute's record.
const XATTR: &str = "SCHILY.xattr.";
const ACLS: [(&str, &[u8]); 2] =
    [("SCHILY.acl.access", b"system.posix_acl_access"), ("SCHILY.acl.default", b"system.posix_acl_default")];
