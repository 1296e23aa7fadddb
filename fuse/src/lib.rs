//! Mounts lockbox archives through FUSE: the adapter between kernel requests and the file system, and the daemon.

pub mod adapter;
pub mod callers;
pub mod daemon;
pub mod errno;
pub mod exit;
pub mod journal;
pub mod kernel;
pub mod mount;
pub mod mountinfo;
pub mod options;
pub mod pace;
pub mod remount;
pub mod runtime;
mod sandbox;
pub mod session;
mod stop;
mod ticker;
pub mod unlock;
pub mod unmounter;
