//! Tests of transactions: model, space states, recovery and crashes.

mod crash;
mod lineage;
mod gaps;
mod model;
mod recovery;
mod space;
mod support;
