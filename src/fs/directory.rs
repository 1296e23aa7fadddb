//! Edits and searches the two records of a directory entry (specification 7).
