//! Archive format: total decoders and encoders, without I/O. Mirrors `format-spec/format.md`
//! chapter by chapter.

pub mod data_head;
pub mod header;
pub mod ids;
pub mod key_slot;
pub mod log;
pub mod node;
pub mod page;
pub mod record;
pub mod space;
pub mod values;

mod codec;
#[cfg(test)]
pub(crate) mod strategies;
#[cfg(test)]
mod vectors;

pub use ids::*;
