//! `lockbox key rm`: removes a key.
use lockbox::keys::{self, KeyName};

use super::{ChangeArgs, name_of};
use crate::exit::Failure;
use crate::output;
use crate::secrets;

/// Remove a key, by the number of its slot or by its label
#[derive(clap::Args)]
pub(crate) struct Args {
    #[command(flatten)]
    change: ChangeArgs,
    /// Number or label of the key slot
    slot: String,
}

pub(crate) fn run(args: &Args) -> Result<(), Failure> {
    let place = args.change.place()?;
    let name = KeyName::parse(&args.slot);
    let removed = args.change.key.unlock.with_access(&place, |access| keys::remove(place.site(), access, &name))?;
    secrets::forget_kept(place.site());
    output::print(&format!(
        "Key slot {} is removed. Older copies of the archive still open with it, and who opened it before may have kept the volume key: \
         'lockbox key rekey' writes the archive under a new one.",
        name_of(&removed)
    ))
}
