//! Model tests of the file system.

mod crash;
mod data;
mod faults;
mod host;
mod model;
mod names;
mod racing;
mod support;
