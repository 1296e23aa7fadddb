//! The daemon as its clients meet it: a real process, real sockets, a state directory of its own.

#![allow(clippy::unwrap_used)] // a failed step fails the test

mod abuse;
mod api;
mod claims;
mod daemon;
mod downloads;
mod running;
mod wire;
