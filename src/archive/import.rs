//! Copies files of the host into an archive.

/// How to import.
#[derive(Default)]
pub struct ImportOptions {}

/// What was imported.
#[derive(Default)]
pub struct ImportReport {}
