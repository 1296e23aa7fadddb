//! What `man/lockbox-semantics.7` says, proved on real mounts: each of its paragraphs is the doc comment of a test.
//!
//! Needs root and /dev/fuse. Each test has an archive and a mount of its own.

#![allow(
    clippy::unwrap_used,
    clippy::print_stderr,
    clippy::disallowed_methods,
    reason = "tests end at the first thing that is not as it should be"
)]

mod absent;
mod acl;
mod attributes;
mod directories;
mod durability;
mod files;
mod handles;
mod locks;
mod manual;
mod names;
mod ranges;
mod renaming;
mod snapshots;
mod space;
mod support;
mod times;
