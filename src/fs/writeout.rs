//! Turns staged data into pages and extents.
