//! HTTP interface for owners and claimants: one store call and one response per request.
//!
//! `listen` opens the sockets, `worker` accepts connections, `admission` limits them, `route`
//! passes each request to its handler (`create`, `share_handlers`, `claim`, `upload`, `download`,
//! `page`, each alone or through `batch`), `reply` builds the response, and `transfer` binds a
//! running response to its lease. Handlers decide nothing about shares: the store does. `daemon`
//! holds the shared state.

pub mod admin;
mod admission;
mod batch;
mod claim;
mod client_addr;
#[cfg(test)]
mod client_disconnect;
mod create;
mod csrf;
mod daemon;
mod download;
mod file;
#[cfg(any(test, fuzzing))]
pub mod fuzzing;
mod guard;
mod leases;
pub mod listen;
mod notify;
mod page;
mod pending_uploads;
mod permits;
mod range;
mod refusal;
mod reply;
mod request;
mod route;
pub mod server;
mod share_handlers;
pub mod tls;
mod transfer;
mod upload;
mod worker;

pub use client_addr::{Network, is_loopback_authority};
pub use daemon::{CreatorPolicy, Daemon, DaemonSettings, LINGERING, LOCAL_CONNECTIONS};
