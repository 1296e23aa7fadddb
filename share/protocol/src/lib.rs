//! Protocol between the client and the daemon of one-time links: handles, capsules, messages, and
//! the scope of a link. No keys, no I/O.

#![forbid(unsafe_code)]

pub mod api;
pub mod capsule;
pub mod link_scope;
pub mod message;
pub mod token;
