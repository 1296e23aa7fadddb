//! Writes dirty nodes bottom-up and settles them.
