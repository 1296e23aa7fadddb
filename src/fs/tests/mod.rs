//! Model tests of the file system.

mod acl;
mod bulk;
mod bulk_read;
mod crash;
mod data;
mod directories;
mod dirty;
mod faults;
mod growth;
mod host;
mod listings;
mod log;
mod model;
mod names;
mod promise;
mod racing;
mod ranges;
mod readahead;
mod shortage;
mod snapshots;
pub(super) mod support;
mod writeback;
