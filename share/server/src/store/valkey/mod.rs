//! Keeps shares in a Valkey (or Redis) server, for daemons on several machines that serve the same links.
//!
//! A share is one hash with its version and its record. A change reads it, decides here, and writes by a script that compares the
//! version first (Store rule 1); a request that comes second decides again. Requests that wait together share their round trips. Time is the
//! daemons' own, so their machines must agree on it; a failover of the server may lose what its replica did not have yet.

mod job;
mod payloads;
mod pipeline;
mod server;
mod store;
#[cfg(test)]
mod tests;

pub use store::{ValkeySettings, ValkeyStore};
