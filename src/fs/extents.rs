//! Maps file ranges to extents: lookup, insert with split, removal, with reference counts kept right.
