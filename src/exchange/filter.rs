//! Which names of a tree a copy leaves out, as a program decided.

use std::fmt;
use std::sync::Arc;

type LeavesOut = dyn Fn(&[u8], bool) -> bool + Send + Sync;

/// Answers for a path below a source (without the source's own name and a leading slash) and whether it is a directory. A directory that is
/// left out is left out with everything below it.
#[derive(Clone, Default)]
pub struct Filter(Option<Arc<LeavesOut>>);

impl Filter {
    pub fn new(leaves_out: impl Fn(&[u8], bool) -> bool + Send + Sync + 'static) -> Filter {
        Filter(Some(Arc::new(leaves_out)))
    }

    pub(super) fn leaves_out(&self, path: &[u8], is_directory: bool) -> bool {
        self.0.as_ref().is_some_and(|leaves_out| leaves_out(path, is_directory))
    }
}

impl fmt::Debug for Filter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.0.is_some() { "Filter(some)" } else { "Filter(none)" })
    }
}
