//! Store in a Valkey (or Redis) server, for daemons on several machines that serve the same links.
//!
//! A share is one hash with its version and its record. A change reads it, decides in this process,
//! and writes with a script that compares the version first (Store rule 1); a request that loses
//! the race decides again. Requests that wait together share their round trips. Time is that of the
//! daemons, so the clocks of their machines must agree; a failover of the server may lose changes
//! that its replica had not received.

mod pipeline;
mod store;
#[cfg(test)]
mod tests;

pub use store::{ValkeySettings, ValkeyStore};
