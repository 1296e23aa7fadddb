//! Reply that resolves when the change that it reports is durable.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Wake, Waker};
use std::thread::Thread;

use super::barrier_group::BarrierTicket;
use super::error::{Result, StoreError};

/// Await it on any runtime, or [`PendingReply::wait`] for it without one. The change was made when
/// the call returned; dropping this neither undoes nor hastens it.
#[must_use = "an answer may be given only after it was awaited"]
pub struct PendingReply<T>(ReplyState<T>);

enum ReplyState<T> {
    /// None after it was taken.
    Ready(Option<Result<T>>),
    Durable(Option<Result<T>>, BarrierTicket),
    Remote(Pin<Box<dyn Future<Output = Result<T>> + Send>>),
}

impl<T> PendingReply<T> {
    pub fn ready(answer: Result<T>) -> PendingReply<T> {
        PendingReply(ReplyState::Ready(Some(answer)))
    }

    /// An answer, errors with it, that is given after the barrier of `ticket`.
    pub(crate) fn after(answer: Result<T>, ticket: Option<BarrierTicket>) -> PendingReply<T> {
        match ticket {
            Some(ticket) => PendingReply(ReplyState::Durable(Some(answer), ticket)),
            None => PendingReply::ready(answer),
        }
    }

    pub fn remote(answer: impl Future<Output = Result<T>> + Send + 'static) -> PendingReply<T> {
        PendingReply(ReplyState::Remote(Box::pin(answer)))
    }

    /// Blocks the thread until the reply; for programs without a runtime.
    ///
    /// # Errors
    /// The errors of the call.
    pub fn wait(mut self) -> Result<T>
    where
        T: Unpin,
    {
        struct Unpark(Thread);
        impl Wake for Unpark {
            fn wake(self: Arc<Self>) {
                self.0.unpark();
            }
        }
        if let ReplyState::Ready(answer) = &mut self.0 {
            return answer.take().unwrap_or_else(|| Err(polled_twice()));
        }
        let waker = Waker::from(Arc::new(Unpark(std::thread::current())));
        let mut context = Context::from_waker(&waker);
        loop {
            if let Poll::Ready(answer) = Pin::new(&mut self).poll(&mut context) {
                return answer;
            }
            std::thread::park();
        }
    }
}

impl<T: Unpin> Future for PendingReply<T> {
    type Output = Result<T>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Result<T>> {
        match &mut self.0 {
            ReplyState::Ready(answer) => Poll::Ready(answer.take().unwrap_or_else(|| Err(polled_twice()))),
            ReplyState::Durable(answer, ticket) => match ticket.poll(context) {
                Poll::Pending => Poll::Pending,
                Poll::Ready(Ok(())) => Poll::Ready(answer.take().unwrap_or_else(|| Err(polled_twice()))),
                Poll::Ready(Err(error)) => Poll::Ready(Err(error)),
            },
            ReplyState::Remote(answer) => answer.as_mut().poll(context),
        }
    }
}

fn polled_twice() -> StoreError {
    StoreError::Unavailable("an answer was asked for twice".into())
}
