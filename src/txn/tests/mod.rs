//! Tests of transactions: model, space states, recovery and crashes.

mod ancestry;
mod crash;
mod gaps;
mod group;
mod model;
mod publication;
mod recovery;
mod refused;
mod snapshots;
mod space;
mod space_wait;
mod support;
