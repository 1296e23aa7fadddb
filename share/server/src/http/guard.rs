//! Ends a connection when its client accepts too little of a response.

use std::future::Future;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::{Sleep, sleep};

use super::admission::ConnectionSlot;

/// A client that takes less in a second, over the time that a write may wait, counts as taking
/// nothing: otherwise a byte now and then would hold a download's place for ever.
const LEAST_RATE: u64 = 1024;

/// Stream whose writes fail when the client does not accept enough of them in time. Reads may wait:
/// hyper and the handlers have timers for those.
pub(super) struct StallGuard<S> {
    stream: S,
    patience: Duration,
    /// Runs from the first write that waits until enough was taken, so that an idle connection has
    /// no timer here.
    waiting: Option<Pin<Box<Sleep>>>,
    /// Bytes that were taken while it runs.
    taken: u64,
    /// Is notified when everything was handed over.
    slot: Option<Arc<ConnectionSlot>>,
}

impl<S> StallGuard<S> {
    pub(super) fn new(stream: S, patience: Duration, slot: Option<Arc<ConnectionSlot>>) -> StallGuard<S> {
        StallGuard { stream, patience, waiting: None, taken: 0, slot }
    }

    fn wrote(&mut self, cx: &mut Context<'_>, result: Poll<io::Result<usize>>) -> Poll<io::Result<usize>> {
        if let (Poll::Ready(Ok(bytes)), true) = (&result, self.waiting.is_some()) {
            self.taken += *bytes as u64;
            if self.taken >= LEAST_RATE * self.patience.as_secs() {
                self.waiting = None;
            }
        }
        self.judge(cx, result)
    }

    /// Everything that was written is gone, or the stream is over.
    fn flushed(&mut self, cx: &mut Context<'_>, result: Poll<io::Result<()>>) -> Poll<io::Result<()>> {
        if result.is_ready() {
            self.waiting = None;
            if let Some(slot) = &self.slot {
                slot.flushed();
            }
        }
        self.judge(cx, result)
    }

    fn judge<T>(&mut self, cx: &mut Context<'_>, result: Poll<io::Result<T>>) -> Poll<io::Result<T>> {
        if result.is_ready() {
            return result;
        }
        if self.waiting.is_none() {
            self.taken = 0;
        }
        let patience = self.patience;
        let timer = self.waiting.get_or_insert_with(|| Box::pin(sleep(patience)));
        match timer.as_mut().poll(cx) {
            Poll::Ready(()) => Poll::Ready(Err(io::ErrorKind::TimedOut.into())),
            Poll::Pending => Poll::Pending,
        }
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for StallGuard<S> {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(cx, buffer)
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for StallGuard<S> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let result = Pin::new(&mut self.stream).poll_write(cx, bytes);
        self.wrote(cx, result)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let result = Pin::new(&mut self.stream).poll_write_vectored(cx, slices);
        self.wrote(cx, result)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let result = Pin::new(&mut self.stream).poll_flush(cx);
        self.flushed(cx, result)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let result = Pin::new(&mut self.stream).poll_shutdown(cx);
        self.flushed(cx, result)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::io::AsyncWriteExt;

    #[tokio::test(start_paused = true)]
    async fn a_client_that_does_not_read_is_left_after_its_time() {
        let (mine, _theirs) = tokio::io::duplex(16);
        let mut guarded = StallGuard::new(mine, Duration::from_secs(60), None);
        let error = guarded.write_all(&[0; 100]).await.unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
    }

    /// Takes `bytes` every 5 seconds while 1 MiB is written to it.
    async fn taking(bytes: usize) -> io::Result<()> {
        use tokio::io::AsyncReadExt;
        let (mine, mut theirs) = tokio::io::duplex(16 * 1024);
        let reader = tokio::spawn(async move {
            let mut taken = vec![0; bytes];
            loop {
                sleep(Duration::from_secs(5)).await;
                if theirs.read_exact(&mut taken).await.is_err() {
                    return;
                }
            }
        });
        let mut guarded = StallGuard::new(mine, Duration::from_secs(60), None);
        let written = guarded.write_all(&[0; 1 << 20]).await;
        drop(guarded);
        reader.await.unwrap();
        written
    }

    #[tokio::test(start_paused = true)]
    async fn a_slow_client_is_served_and_one_that_only_holds_its_place_is_not() {
        taking(8 * 1024).await.unwrap();
        assert_eq!(taking(100).await.unwrap_err().kind(), io::ErrorKind::TimedOut);
    }

    /// A pause between two answers is no slowness.
    #[tokio::test(start_paused = true)]
    async fn the_time_ends_when_everything_was_taken() {
        use tokio::io::AsyncReadExt;
        let (mine, mut theirs) = tokio::io::duplex(16);
        let mut guarded = StallGuard::new(mine, Duration::from_secs(60), None);
        let mut taken = [0; 20];
        for _ in 0..5 {
            let (written, read) = tokio::join!(
                async {
                    guarded.write_all(&[0; 20]).await?;
                    guarded.flush().await
                },
                theirs.read_exact(&mut taken)
            );
            written.unwrap();
            read.unwrap();
            sleep(Duration::from_secs(50)).await;
        }
    }
}
