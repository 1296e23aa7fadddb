//! Model tests of the file system.

mod crash;
mod data;
mod directories;
mod model;
mod names;
mod racing;
mod support;
