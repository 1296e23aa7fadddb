//! BufferPool for plain file data, kept from one read to the next, and wiped when their content is to
//! be forgotten.
//!
//! They are kept because zeroing one costs as much as opening the page that goes into it. After a
//! read they hold content that may be deleted and purged meanwhile, or that is not to be in memory
//! while the machine sleeps. So they belong to the archive and not to a thread, the memory of which
//! no other thread could reach: [`BufferPool::wipe`] takes all that are not in use, and the ones in
//! use are wiped by their user, before they are kept again.

use parking_lot::Mutex;
use zeroize::Zeroize;

#[derive(Default)]
pub(crate) struct BufferPool(Mutex<PoolState>);

#[derive(Default)]
struct PoolState {
    free: Vec<Vec<u8>>,
    wipes: u64,
}

impl BufferPool {
    /// Runs `f` with a buffer of its own. Its content, from an earlier use, means nothing.
    pub(crate) fn with_buffer<R>(&self, f: impl FnOnce(&mut Vec<u8>) -> R) -> R {
        let (wipes, buffer) = {
            let mut state = self.0.lock();
            (state.wipes, state.free.pop())
        };
        let mut buffer = buffer.unwrap_or_default();
        let done = f(&mut buffer);
        let mut state = self.0.lock();
        if state.wipes == wipes {
            state.free.push(buffer);
        } else {
            drop(state);
            buffer.zeroize();
        }
        done
    }

    /// Wipes the data of earlier reads; memory goes back to the host. Reads that run meanwhile wipe
    /// their buffers when they end.
    pub(crate) fn wipe(&self) {
        let mut buffers = {
            let mut state = self.0.lock();
            state.wipes += 1;
            std::mem::take(&mut state.free)
        };
        buffers.zeroize();
    }
}

/// The first `length` bytes of a buffer, which grows when needed: its old content is not left
/// behind in memory that it gives back.
pub(crate) fn grow_to(buffer: &mut Vec<u8>, length: usize) -> &mut [u8] {
    if buffer.len() < length {
        if buffer.capacity() < length {
            buffer.zeroize();
        }
        buffer.resize(length, 0);
    }
    &mut buffer[..length]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_buffer_is_used_again_until_what_was_read_is_wiped() {
        let buffers = BufferPool::default();
        buffers.with_buffer(|buffer| grow_to(buffer, 6).copy_from_slice(b"secret"));
        buffers.with_buffer(|buffer| assert_eq!(buffer, b"secret", "it is neither allocated nor zeroed again"));
        buffers.wipe();
        buffers.with_buffer(|buffer| assert_eq!(buffer.capacity(), 0));
    }

    #[test]
    fn a_read_that_runs_meanwhile_wipes_its_buffer_itself() {
        let buffers = BufferPool::default();
        buffers.with_buffer(|buffer| {
            grow_to(buffer, 6).copy_from_slice(b"secret");
            buffers.wipe();
            assert_eq!(buffer, b"secret", "it is in use");
        });
        buffers.with_buffer(|buffer| assert_eq!(buffer.capacity(), 0, "it was not kept"));
    }

    #[test]
    fn two_reads_at_once_have_buffers_of_their_own() {
        let buffers = BufferPool::default();
        buffers.with_buffer(|one| {
            grow_to(one, 1)[0] = 1;
            buffers.with_buffer(|two| grow_to(two, 1)[0] = 2);
            assert_eq!(one, &[1]);
        });
        assert_eq!(buffers.0.lock().free.len(), 2);
    }
}
