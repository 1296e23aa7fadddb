//! Loads and stores inode values; counts open handles.
pub(crate) struct OpenHandles;
