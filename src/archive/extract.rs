//! Copies files of an archive out to the host.

/// How to extract.
#[derive(Default)]
pub struct ExtractOptions {}

/// What was extracted.
#[derive(Default)]
pub struct ExtractReport {}
