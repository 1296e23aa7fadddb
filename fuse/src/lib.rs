//! Mounts lockbox archives through FUSE: the adapter between kernel requests and the file system, and the daemon.

pub mod adapter;
mod answers;
pub mod callers;
pub mod daemon;
mod dbus;
mod ending;
pub mod errno;
pub mod exit;
pub mod fstab;
mod idle;
pub mod journal;
pub mod kernel;
mod login;
pub mod mount;
pub mod mountinfo;
pub mod notify;
pub mod options;
pub mod pace;
pub mod remount;
pub mod runtime;
mod sandbox;
pub mod session;
mod stop;
mod suspend;
mod ticker;
pub mod unlock;
pub mod unmounter;
