//! Objects whose requests are counted.

use super::objects::{Barred, Created, Listed, Objects, Part};
use crate::metrics::Counted;
use crate::range_source::Trouble;

type Answer<T> = Result<T, Trouble>;

impl Objects for Counted<dyn Objects> {
    fn create(&self, name: &str, bytes: &[u8]) -> Answer<Created> {
        self.counts.answered(self.inner.create(name, bytes))
    }

    fn hides(&self) -> bool {
        self.inner.hides()
    }

    fn get(&self, name: &str, part: Part) -> Answer<Vec<u8>> {
        self.counts.read(self.inner.get(name, part), Vec::len)
    }

    fn list(&self, prefix: &str, after: &str, most: usize) -> Answer<Vec<Listed>> {
        self.counts.list(self.inner.list(prefix, after, most))
    }

    fn list_what_can_be(&self, prefix: &str, after: &str, most: usize, barred: &mut Barred<'_>) -> Answer<Vec<Listed>> {
        self.counts.list(self.inner.list_what_can_be(prefix, after, most, barred))
    }

    fn sweep(&self, above: &str) -> Answer<()> {
        self.inner.sweep(above)
    }

    fn remove(&self, name: &str) -> Answer<()> {
        self.counts.answered(self.inner.remove(name))
    }
}
