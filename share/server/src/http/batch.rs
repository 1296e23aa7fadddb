//! Many requests in one message: all begin before the first is awaited, so that they share their
//! barrier, and each has its result.

use std::future::Future;

use hyper::body::Incoming;
use hyper::{Request, StatusCode};
use lockbox_share_protocol::message::{Batch, BatchResults, ItemResult, MAX_BATCH};
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::daemon::{Daemon, see_through};
use super::refusal::Refusal;
use super::reply::{self, Reply};
use super::request::{self, MANY};
use crate::limiter::ClientId;

/// Serves a batch: `begin` starts the change of one item, `end` waits for it. Started changes
/// complete also after the client disconnected, and hold their permit until then.
pub(super) async fn serve<T, U, O, F>(
    daemon: &Daemon,
    client: ClientId,
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
    let batch: Batch<T> = request::json(request, MANY, daemon.settings.body_timeout).await?;
    let count = batch.items.len();
    if count == 0 {
        return Err(Refusal::malformed("the batch is empty"));
    }
    if count > MAX_BATCH {
        return Err(Refusal::malformed("the batch has more than 100 items"));
    }
    daemon.limiter.admit(client, count as u32)?;
    let work = async move {
        let _place = place;
        let begun: Vec<U> = batch.items.into_iter().map(begin).collect();
        let mut results = Vec::with_capacity(count);
        for item in begun {
            let ending = end(item);
            results.push(match ending.await {
                Ok(ok) => ItemResult::Done { ok },
                Err(refusal) => ItemResult::Failed(refusal.failure()),
            });
        }
        Ok(BatchResults { results })
    };
    Ok(reply::json(StatusCode::OK, &see_through(work).await?))
}
