//! Constants of Google Cloud Storage. HMAC signing is Amazon's with other names (`signing.rs`).

pub(crate) const ENDPOINT: &str = "https://storage.googleapis.com";
/// Location in signatures: any is accepted; Google's libraries send this one.
pub(crate) const LOCATION: &str = "auto";
/// Header that, with 0, makes a request conditional on the absence of the object.
pub(crate) const IF_GENERATION: &str = "x-goog-if-generation-match";
