//! Model tests of the file system.

mod crash;
mod data;
mod model;
mod names;
mod racing;
mod ranges;
pub(super) mod support;
