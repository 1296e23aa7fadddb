//! Model tests of the file system.

mod crash;
mod model;
mod names;
mod support;
