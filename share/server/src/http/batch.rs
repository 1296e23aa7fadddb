//! Many requests in one message: all begin before the first is awaited, so that they share their barrier, and each has its result.

use std::future::Future;

use hyper::body::Incoming;
use hyper::{Request, StatusCode};
use lockbox_share_protocol::message::{Batch, MAX_BATCH, Outcome, Results};
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::message::{self, MANY};
use super::reply::{self, Refusal, Reply};
use super::{Daemon, see_through};
use crate::limiter::Client;

/// Batches that may be under way at a time. A message has up to 1.6 MiB, and so have its items and its results: 64 of them hold
/// at most 320 MiB, where 20,000 connections could ask for 100 GiB.
pub(super) const MAX_BATCHES: usize = 64;
/// Of these, batches of one client: who sends slowly holds its places for up to the time of a message.
pub(super) const MAX_BATCHES_OF_CLIENT: usize = 16;

/// Serves a batch: `begin` starts the change of one item, `end` waits for it. What was begun ends also without the client, and holds its
/// place until then.
pub(super) async fn serve<T, U, O, F>(
    daemon: &Daemon,
    client: Client,
    request: Request<Incoming>,
    begin: impl Fn(T) -> U + Send + 'static,
    end: impl Fn(U) -> F + Send + 'static,
) -> Result<Reply, Refusal>
where
    T: DeserializeOwned + Send + 'static,
    U: Send + 'static,
    O: Serialize + Send + 'static,
    F: Future<Output = Result<O, Refusal>> + Send + 'static,
{
    let place = daemon
        .batches
        .take(client)
        .ok_or_else(|| Refusal::unavailable("too many batches are under way at this time"))?;
    let batch: Batch<T> = message::json(request, MANY, daemon.settings.body_timeout).await?;
    let count = batch.items.len();
    if count == 0 {
        return Err(Refusal::malformed("the batch is empty"));
    }
    if count > MAX_BATCH {
        return Err(Refusal::malformed("the batch has more than 100 items"));
    }
    daemon.limiter.admit(client, count as u32).map_err(|wait| Refusal::limited(wait.0))?;
    let work = async move {
        let _place = place;
        let begun: Vec<U> = batch.items.into_iter().map(begin).collect();
        let mut results = Vec::with_capacity(count);
        for item in begun {
            let ending = end(item);
            results.push(match ending.await {
                Ok(ok) => Outcome::Done { ok },
                Err(refusal) => Outcome::Failed(refusal.failure()),
            });
        }
        Ok(Results { results })
    };
    Ok(reply::json(StatusCode::OK, &see_through(work).await?))
}
