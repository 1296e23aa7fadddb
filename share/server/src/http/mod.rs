//! HTTP interface for owners and claimants: one store call and one response per request.
//!
//! `listen` opens the sockets, `worker` accepts connections, `admission` limits them, `route`
//! passes each request to its handler (`create`, `share_handlers`, `download`), `reply` builds the
//! response, and `transfer` binds a running response to its lease. Handlers decide nothing about
//! shares: the store does. `daemon` holds the shared state.

mod admission;
mod client_addr;
#[cfg(test)]
mod client_disconnect;
mod create;
mod csrf;
mod daemon;
mod download;
#[cfg(any(test, fuzzing))]
pub mod fuzzing;
mod leases;
pub mod listen;
mod pending_uploads;
mod reply;
mod request;
mod route;
pub mod server;
mod share_handlers;
mod transfer;
mod worker;

pub use client_addr::{Network, is_loopback_authority};
pub use daemon::{CreatorPolicy, Daemon, DaemonSettings, LINGERING, LOCAL_CONNECTIONS};
