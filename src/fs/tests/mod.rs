//! Model tests of the file system.

mod acl;
mod ahead;
mod bulk;
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
mod moments;
mod names;
mod promise;
mod racing;
mod ranges;
mod shortage;
pub(super) mod support;
mod writeout;
