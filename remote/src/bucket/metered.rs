//! Object store that counts its requests.

use super::objects::{CreateReply, ListedObject, ObjectRange, ObjectStore, UnreadableDir};
use crate::metrics::Metered;
use crate::range_source::RemoteResult;

impl ObjectStore for Metered<dyn ObjectStore> {
    fn create(&self, name: &str, bytes: &[u8]) -> RemoteResult<CreateReply> {
        self.metrics.record_outcome(self.inner.create(name, bytes))
    }

    fn can_hide_missing(&self) -> bool {
        self.inner.can_hide_missing()
    }

    fn get(&self, name: &str, part: ObjectRange) -> RemoteResult<Vec<u8>> {
        self.metrics.count_read(self.inner.get(name, part), Vec::len)
    }

    fn list(&self, prefix: &str, after: &str, most: usize) -> RemoteResult<Vec<ListedObject>> {
        self.metrics.count_list(self.inner.list(prefix, after, most))
    }

    fn list_tolerant(
        &self,
        prefix: &str,
        after: &str,
        most: usize,
        on_unreadable: &mut UnreadableDir<'_>,
    ) -> RemoteResult<Vec<ListedObject>> {
        self.metrics.count_list(self.inner.list_tolerant(prefix, after, most, on_unreadable))
    }

    fn sweep(&self, above: &str) -> RemoteResult<()> {
        self.inner.sweep(above)
    }

    fn remove(&self, name: &str) -> RemoteResult<()> {
        self.metrics.record_outcome(self.inner.remove(name))
    }
}
