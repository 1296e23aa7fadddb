//! `lockbox key`: the keys that open an archive.

mod add;
mod ls;
mod rekey;
mod rm;

pub(crate) use add::print_recovery_code;

use std::path::PathBuf;

use lockbox::error::Timestamp;
use lockbox::keys::KeyInfo;
use lockbox_host::remote::{ArchiveLocation, RemoteArgs};
use lockbox_terminal::display;
use serde_json::{Value, json};

use crate::exit::Failure;
use crate::open_archive::{self, WriterArgs};
use crate::output::{Reader, rfc3339};
use crate::secrets::UnlockArgs;

/// Add, list, remove and renew the keys that open an archive
#[derive(clap::Subcommand)]
pub(crate) enum Command {
    Add(add::Args),
    Ls(ls::Args),
    Rm(rm::Args),
    Test(ls::TestArgs),
    Recovery(add::RecoveryArgs),
    Rekey(rekey::Args),
}

pub(crate) fn run(command: &Command) -> Result<(), Failure> {
    match command {
        Command::Add(args) => add::run(args),
        Command::Ls(args) => ls::run(args),
        Command::Rm(args) => rm::run(args),
        Command::Test(args) => ls::test(args),
        Command::Recovery(args) => add::recovery(args),
        Command::Rekey(args) => rekey::run(args),
    }
}

/// The archive and what opens it
#[derive(clap::Args)]
struct KeyArgs {
    /// The archive: a file, or an address
    archive: PathBuf,
    #[command(flatten)]
    unlock: UnlockArgs,
    #[command(flatten)]
    remote: RemoteArgs,
}

/// The archive, what opens it, and who else writes to it
#[derive(clap::Args)]
struct ChangeArgs {
    #[command(flatten)]
    key: KeyArgs,
    #[command(flatten)]
    writer: WriterArgs,
}

impl ChangeArgs {
    fn place(&self) -> Result<ArchiveLocation, Failure> {
        open_archive::place_to_change(&self.key.archive, &self.key.remote, self.writer)
    }
}

fn json_of(key: &KeyInfo) -> Value {
    let about = key.about.as_ref();
    json!({
        "slot": key.slot,
        "kind": key.kind.name(),
        "label": about.map(|about| about.label.clone()),
        "created": about.map(|about| rfc3339(about.created)),
        "recipient": about.and_then(|about| about.recipient.clone()),
        "opened": key.opened,
    })
}

pub(crate) fn row(key: &KeyInfo, reader: Reader) -> String {
    let (created, label) = match &key.about {
        Some(about) => (reader.time(about.created), display(about.label.as_bytes())),
        None => ("-".to_owned(), "(known to its own secret only)".to_owned()),
    };
    let width = reader.time(Timestamp::default()).len();
    format!("{:>2}  {:<24} {created:<width$}  {label}", key.slot, key.kind.name()).trim_end().to_owned()
}

/// Formats the key like `3 key file "usb stick"`.
pub(crate) fn name_of(key: &KeyInfo) -> String {
    let label = key.label().map(|label| format!(" \"{}\"", display(label.as_bytes()))).unwrap_or_default();
    format!("{} {}{label}", key.slot, key.kind.name())
}
