//! Removes spool payloads that no share on the server needs.

use std::time::Duration;

use super::pipeline::ValkeyEngine;
use super::server::{SECRET, open, payload_name, unavailable};
use crate::store::error::{Result, StoreError};
use crate::store::spool::Spool;

/// How often payloads that no share needs are looked for.
const SPOOL_SWEEP: Duration = Duration::from_secs(30);
/// A payload is younger than its share: it is not looked for before the share must be there.
const YOUNG: Duration = Duration::from_secs(lockbox_share_protocol::api::UPLOAD_SECONDS + 300);

impl ValkeyEngine {
    /// Runs the spool sweeper until the store is closed.
    pub(super) fn sweep_in_background(&self, spool: &Spool) {
        loop {
            {
                let mut queue = self.queue.lock();
                if !queue.stopped {
                    self.ended.wait_for(&mut queue, SPOOL_SWEEP);
                }
                if queue.stopped {
                    return;
                }
            }
            if let Err(error) = self.sweep_spool(spool, YOUNG) {
                tracing::warn!("the spool was not swept: {error}");
            }
        }
    }

    pub(super) fn sweep_spool(&self, spool: &Spool, young: Duration) -> Result<()> {
        spool.remove_abandoned()?;
        let ids = spool.older_than(young)?;
        if ids.is_empty() {
            return Ok(());
        }
        let mut connection = open(&self.client)?;
        // A server that came back empty, or another one, needs no payload at all: that is no reason
        // to remove them.
        let secret: Option<Vec<u8>> = redis::cmd("GET").arg(SECRET).query(&mut connection).map_err(unavailable)?;
        if secret.as_deref() != Some(&self.secret[..]) {
            return Err(StoreError::Unavailable("the server is not the one that these shares are on".into()));
        }
        for ids in ids.chunks(1000) {
            let mut asked = redis::Pipeline::with_capacity(ids.len());
            for id in ids {
                asked.cmd("EXISTS").arg(payload_name(id));
            }
            let needed: Vec<bool> = asked.query(&mut connection).map_err(unavailable)?;
            ids.iter().zip(needed).filter(|(_, needed)| !needed).for_each(|(id, _)| spool.remove(id));
        }
        Ok(())
    }
}
