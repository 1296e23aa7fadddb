//! The library and the program `lockbox` as their users meet them.

mod cli_errors;
mod import_extract;
mod support;
