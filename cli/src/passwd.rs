//! `lockbox passwd`: changes the passphrase of an archive.
use std::path::PathBuf;

use lockbox::keys::{self, KeyAccess};
use lockbox::storage::LockMode;

use crate::exit::Failure;
use crate::kdf::KdfArgs;
use crate::opening;
use crate::output;
use crate::secrets;
use crate::unlocking::UnlockArgs;

/// Change the passphrase of an archive that is not mounted
#[derive(clap::Args)]
pub(crate) struct Args {
    /// The archive file
    archive: PathBuf,
    #[command(flatten)]
    unlock: UnlockArgs,
    /// Read the new passphrase from FILE
    #[arg(long, value_name = "FILE")]
    new_passfile: Option<PathBuf>,
    #[command(flatten)]
    kdf: KdfArgs,
}

pub(crate) fn run(args: &Args) -> Result<(), Failure> {
    let path = &args.archive;
    opening::probe(path, LockMode::Exclusive)?;
    let (mut given, new) = args.unlock.given_and_new(args.new_passfile.as_deref(), path)?;
    let kdf = args.kdf.cost(args.unlock.advises())?;
    let change = |access: &KeyAccess<'_>| keys::change_passphrase(path, access, &new, kdf);
    let changed = args.unlock.attempt(path, &mut given, change)?;
    secrets::forget_kept(path);
    let several = match &changed.slots[..] {
        [] | [_] => String::new(),
        [most @ .., last] => {
            let most: Vec<String> = most.iter().map(u8::to_string).collect();
            format!(" in key slots {} and {last}, which all had the old one", most.join(", "))
        }
    };
    output::print(&format!(
        "The passphrase is changed{several}. Older copies of the archive still open with the old one."
    ))?;
    if !changed.all_tried {
        output::complain(
            "other key slots cost too much to be tried and may still have the old passphrase: raise the limit with --kdf-limit, and try again",
        );
    }
    Ok(())
}
