//! Creates an archive.
