//! `lockbox passwd`: changes the passphrase of an archive.
use std::path::PathBuf;

use lockbox::keys;
use lockbox::storage::LockMode;
use lockbox_host::Program;

use crate::exit::{Failure, Lockbox};
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
    let failed = |error| Lockbox::failure(path, error);
    opening::probe(path, LockMode::Exclusive)?;
    let (old, new) = args.unlock.secrets_and_new(args.new_passfile.as_deref(), path)?;
    let kdf = args.kdf.cost()?;
    let changed = keys::change_passphrase(path, &args.unlock.access(&old), &new, kdf).map_err(failed)?;
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
