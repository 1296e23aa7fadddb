//! The operations, one file per family; each is one core call of an adapter.

mod attributes;
mod create;
mod data;
mod links;
mod listing;
mod rename;
mod statistics;
mod sync;
mod xattr;
