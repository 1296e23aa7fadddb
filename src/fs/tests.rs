//! Model tests of the file system.

mod model;
mod names;
mod support;
