//! Mounts lockbox archives through FUSE: the adapter between kernel requests and the file system, and the daemon.

pub mod adapter;
pub mod errno;
pub mod exit;
pub mod kernel;
pub mod mount;
pub mod mountinfo;
