//! FUSE front end of lockbox: the adapter between kernel requests and the file system, and the
//! mount daemon.

pub mod adapter;
mod auto_unmount;
mod control_handler;
mod convert;
pub mod daemon;
mod dbus;
mod deadlock_watchdog;
pub mod event_loop;
pub mod exit;
pub mod fetcher;
mod filter;
pub mod kernel;
pub mod kernel_cache;
pub mod logging;
pub mod mount;
pub mod mount8;
pub mod mount_agent;
pub mod options;
mod replica;
mod sandbox;
pub mod session;
mod shutdown;
mod snapshot_requests;
mod ticker;
