//! Reusable buffers for plain file data, wiped when their content must be forgotten.
//!
//! They are reused because zeroing a buffer costs as much as decrypting the page that goes into it.
//! After a read a buffer holds content that may be deleted and purged later, or that must not stay
//! in memory while the machine sleeps. The pool therefore belongs to the archive and not to a
//! thread, which could not be made to wipe its memory: [`BufferPool::wipe`] wipes all idle buffers,
//! and each user of a buffer wipes it on return if `wipe` was called in between.

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
    /// Runs `f` with an exclusive buffer. Its content is left over from an earlier use and has no
    /// meaning.
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

    /// Wipes all idle buffers and returns their memory to the host. Concurrent reads wipe theirs on
    /// return.
    pub(crate) fn wipe(&self) {
        let mut buffers = {
            let mut state = self.0.lock();
            state.wipes += 1;
            std::mem::take(&mut state.free)
        };
        buffers.zeroize();
    }
}

/// Returns the first `length` bytes of `buffer`, growing it if needed. Wipes the old allocation
/// before it is replaced.
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
    fn a_buffer_is_reused_until_wiped() {
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
