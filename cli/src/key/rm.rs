//! `lockbox key rm`: removes a key.
use lockbox::keys::{self, KeyName};
use lockbox::storage::LockMode;

use super::{KeyArgs, name_of};
use crate::exit::Failure;
use crate::opening;
use crate::output;
use crate::secrets;

/// Remove a key, by the number of its slot or by its label
#[derive(clap::Args)]
pub(crate) struct Args {
    #[command(flatten)]
    key: KeyArgs,
    /// Number or label of the key slot
    slot: String,
}

pub(crate) fn run(args: &Args) -> Result<(), Failure> {
    let path = &args.key.archive;
    opening::probe(path, LockMode::Exclusive)?;
    let name = KeyName::parse(&args.slot);
    let removed = args.key.unlock.with_access(path, |access| keys::remove(path, access, &name))?;
    secrets::forget_kept(path);
    output::print(&format!(
        "Key slot {} is removed. Older copies of the archive still open with it, and who opened it before may have kept the volume key: \
         'lockbox key rekey' writes the archive under a new one.",
        name_of(&removed)
    ))
}
