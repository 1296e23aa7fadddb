//! Speaks HTTP with owners and claimants.

pub mod range;
