//! Speaks HTTP with owners and claimants: one call of the store and one reply for each request.
//!
//! `listen` makes the sockets, `worker` accepts on them, `slots` says who may stay, `route` sends each request to its handler (`create`, `owners`,
//! `claim`, `upload`, `download`, `page`, each alone or by `batch`), `reply` writes the answer, `transfer` holds it to its lease while it goes out.
//! Handlers decide nothing about shares: the store does. What all of them share is the `daemon`.

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
