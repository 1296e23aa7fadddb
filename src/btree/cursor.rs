//! Descends and scans without copying values.
