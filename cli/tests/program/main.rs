//! The program `lockbox` as its users meet it.

#![allow(clippy::unwrap_used)] // a test that cannot go on fails

mod backups;
mod cli_errors;
mod compaction;
mod damage;
mod damaged_copies;
mod directory_backups;
mod editing;
mod elsewhere;
mod golden;
mod import_extract;
mod interrupted;
mod later_versions;
mod living_elsewhere;
mod mirroring;
mod older_copies;
mod other_archives;
mod paths;
mod privileges;
mod renewed_elsewhere;
mod running;
mod sharing;
mod snapshots;
mod support;
mod tars;
mod terminal;
mod web_servers;
mod wrong_usages;
