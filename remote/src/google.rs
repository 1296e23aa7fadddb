//! Names of Google's store: an HMAC key signs a request as Amazon's do (`signing.rs`), with other
//! words.

pub(crate) const ENDPOINT: &str = "https://storage.googleapis.com";
/// Any is taken; this is what Google's libraries say.
pub(crate) const LOCATION: &str = "auto";
/// With 0: on the condition that there is no object of the name.
pub(crate) const IF_GENERATION: &str = "x-goog-if-generation-match";
