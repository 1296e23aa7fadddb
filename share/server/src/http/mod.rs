//! Speaks HTTP with owners and claimants: one call of the store and one reply for each request.
//!
//! `listen` makes the sockets, `worker` accepts on them, `seats` says who may stay, `route` sends each request to its handler (`create`, `owners`,
//! `claim`, `upload`, `download`, `page`, each alone or by `batch`), `reply` writes the answer, `transfer` holds it to its lease while it goes out.
//! Handlers decide nothing about shares: the store does. What all of them share is the `daemon`.

pub mod admin;
mod batch;
mod changes;
mod claim;
mod create;
mod daemon;
mod download;
mod file;
#[cfg(any(test, fuzzing))]
pub mod fuzzing;
mod guard;
mod leases;
pub mod listen;
#[cfg(test)]
mod lost;
mod message;
mod origin;
mod owners;
mod page;
mod permits;
mod range;
mod refusal;
mod reply;
mod route;
pub mod running;
mod seats;
mod site;
pub mod tls;
mod transfer;
mod upload;
mod waiting;
mod worker;

pub use daemon::{Creators, Daemon, LINGERING, LOCAL_CONNECTIONS, Settings};
pub use origin::{Network, is_loopback_authority};
