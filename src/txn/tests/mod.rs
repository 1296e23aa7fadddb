//! Tests of transactions: model, space states, recovery and crashes.

mod crash;
mod gaps;
mod group;
mod lineage;
mod model;
mod publication;
mod recovery;
mod refused;
mod shortage;
mod snapshots;
mod space;
mod support;
