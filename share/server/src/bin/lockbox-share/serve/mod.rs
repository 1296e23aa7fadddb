//! `lockbox-share serve`: one conversion of the options, one daemon, one end.

mod host;
mod options;
mod run;

pub(crate) use host::{close_inherited, processors, runtime_directory};
pub(crate) use options::{Mode, Serve};
pub(crate) use run::run;
