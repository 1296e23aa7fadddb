//! Pipeline of two threads: one reads and seals pages of file data, the other builds the trees that
//! name them, which takes about as long.

use std::sync::mpsc;
use std::thread;

use crate::error::{Error, Result};

/// Maximum parts in the queue.
const WAITING: usize = 16;

/// Passes each part from `read` to `write`, in order, on a separate thread.
///
/// # Errors
/// That of `write`, else that of `read`; either ends both. Parts passed on before `read` failed are
/// written.
pub(super) fn relay<T: Send>(
    read: impl FnOnce(&mut dyn FnMut(T) -> Result<()>) -> Result<()>,
    write: impl FnMut(T) -> Result<()> + Send,
) -> Result<()> {
    thread::scope(|scope| {
        let (sender, parts) = mpsc::sync_channel(WAITING);
        let writer = thread::Builder::new()
            .name("relay".into())
            .spawn_scoped(scope, || parts.into_iter().try_for_each(write))
            .map_err(|error| Error::io("cannot start a thread", error))?;
        let was_read = read(&mut |part| {
            // The queue is closed when the writer has failed; then the writer's error is returned.
            sender.send(part).map_err(|_| Error::Invalid("nobody takes what is handed on".into()))
        });
        drop(sender);
        let written = writer.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        written.and(was_read)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_come_in_order_and_all_of_them() {
        let mut seen = Vec::new();
        let read = |hand_on: &mut dyn FnMut(u32) -> Result<()>| (0..100).try_for_each(hand_on);
        relay(read, |part| {
            seen.push(part);
            Ok(())
        })
        .unwrap();
        assert_eq!(seen, (0..100).collect::<Vec<_>>());
    }

    #[test]
    fn an_error_of_either_ends_both_and_that_of_the_writer_is_told() {
        let failed = |what: &str| Error::Invalid(what.into());
        let mut handed_on = 0;
        let read = |hand_on: &mut dyn FnMut(u32) -> Result<()>| {
            loop {
                hand_on(0)?;
                handed_on += 1;
            }
        };
        let error = relay(read, |_| Err(failed("writer"))).unwrap_err();
        assert!(error.to_string().contains("writer"), "{error}");
        assert!(handed_on <= WAITING + 1);

        let mut written = 0;
        let read = |hand_on: &mut dyn FnMut(u32) -> Result<()>| {
            hand_on(1)?;
            Err(failed("reader"))
        };
        let error = relay(read, |_| {
            written += 1;
            Ok(())
        })
        .unwrap_err();
        assert!(error.to_string().contains("reader") && written == 1, "{error}");
    }
}
