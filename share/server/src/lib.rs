//! The share daemon: keeps sealed files and gives each of them away once. It has no key and depends
//! on nothing that opens.

#![forbid(unsafe_code)]

pub mod http;
pub mod limiter;
pub mod metrics;
#[cfg(test)]
pub(crate) mod seeded;
pub mod store;
