//! What the client and the daemon of one-time links say to each other: handles, capsules and messages, and who can open a link. No keys, no input and output.

#![forbid(unsafe_code)]

pub mod age;
pub mod api;
pub mod capsule;
pub mod handle;
pub mod link_scope;
pub mod message;
mod text;
pub mod token;
