//! The commit ring.
pub(crate) struct AuthenticRecord;
