//! Connection to the server, and the durability that it can provide.

use std::time::Duration;

use crate::store::error::{Result, StoreError};
use crate::store::random::random;
use crate::store::share::Key;
use crate::store::spool;

/// The server must answer in this time.
pub(super) const TIMEOUT: Duration = Duration::from_secs(5);
/// Where the server keeps the key of handles.
pub(super) const SECRET: &str = "lockbox:share:secret";
/// Written only so that it is waited for.
pub(super) const FENCE: &str = "lockbox:share:fence";

/// The name of a share.
pub(super) fn share_name(key: &Key) -> String {
    format!("lockbox:share:{}", spool::name(&key.0))
}

/// Stands on the server as long as the payload is needed.
pub(super) fn payload_name(id: &[u8; 16]) -> String {
    format!("lockbox:payload:{}", spool::name(id))
}

/// How a change becomes durable before its reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum DurabilityMethod {
    /// Nothing is promised.
    Nothing,
    /// The server syncs before each reply.
    Always,
    /// WAITAOF after the changes.
    Wait,
}

pub(super) fn connect(client: &redis::Client) -> std::result::Result<redis::Connection, redis::RedisError> {
    let connection = client.get_connection_with_timeout(TIMEOUT)?;
    // WAITAOF itself may take its whole time.
    connection.set_read_timeout(Some(TIMEOUT * 2))?;
    connection.set_write_timeout(Some(TIMEOUT))?;
    Ok(connection)
}

pub(super) fn open(client: &redis::Client) -> Result<redis::Connection> {
    connect(client).map_err(unavailable)
}

pub(super) fn unavailable(error: redis::RedisError) -> StoreError {
    StoreError::Unavailable(format!("the store's server: {error}"))
}

/// How the server can make a change durable before its reply.
pub(super) fn durability_method(connection: &mut redis::Connection) -> Result<DurabilityMethod> {
    let waited: std::result::Result<(u64, u64), _> = redis::cmd("WAITAOF").arg(1).arg(0).arg(1000).query(connection);
    if waited.is_ok() {
        return Ok(DurabilityMethod::Wait);
    }
    let mut setting = |name: &str| -> Result<String> {
        let answer: Vec<String> = redis::cmd("CONFIG").arg("GET").arg(name).query(connection).map_err(unavailable)?;
        Ok(answer.into_iter().nth(1).unwrap_or_default())
    };
    if setting("appendonly")? == "yes" && setting("appendfsync")? == "always" {
        return Ok(DurabilityMethod::Always);
    }
    Err(StoreError::Unavailable(
        "durability commit needs a server with WAITAOF, or with appendonly yes and appendfsync always".into(),
    ))
}

/// The key of handles, which the first daemon makes for all.
pub(super) fn shared_secret(connection: &mut redis::Connection) -> Result<[u8; 16]> {
    let fresh: [u8; 16] = random()?;
    redis::cmd("SETNX").arg(SECRET).arg(&fresh[..]).query::<bool>(connection).map_err(unavailable)?;
    let kept: Vec<u8> = redis::cmd("GET").arg(SECRET).query(connection).map_err(unavailable)?;
    kept.try_into().map_err(|_| StoreError::Unavailable(format!("{SECRET} on the store's server has been changed")))
}
