//! Model tests of the file system.
