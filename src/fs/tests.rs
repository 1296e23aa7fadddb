//! Model tests of the file system.

mod data;
