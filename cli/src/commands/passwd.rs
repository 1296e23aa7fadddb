//! `lockbox passwd`: changes the passphrase of an archive.
use std::path::PathBuf;

use lockbox::keys::{self, KeyAccess};
use lockbox_host::remote::RemoteArgs;

use crate::exit::Failure;
use crate::open_archive::{self, WriterArgs};
use crate::output;
use crate::secrets::{self, KdfArgs, UnlockArgs};

/// Change the passphrase of an archive that is not mounted
#[derive(clap::Args)]
pub(crate) struct Args {
    /// The archive: a file, or an address
    archive: PathBuf,
    #[command(flatten)]
    unlock: UnlockArgs,
    #[command(flatten)]
    remote: RemoteArgs,
    #[command(flatten)]
    writer: WriterArgs,
    /// Read the new passphrase from FILE
    #[arg(long, value_name = "FILE")]
    new_passfile: Option<PathBuf>,
    #[command(flatten)]
    kdf: KdfArgs,
}

pub(crate) fn run(args: &Args) -> Result<(), Failure> {
    let place = open_archive::place_to_change(&args.archive, &args.remote, args.writer)?;
    let (mut given, new) = args.unlock.given_and_new(args.new_passfile.as_deref(), &place)?;
    let kdf = args.kdf.cost(args.unlock.advises())?;
    let change = |access: &KeyAccess<'_>| keys::change_passphrase(place.site(), access, &new, kdf);
    let changed = args.unlock.attempt(&place, &mut given, change)?;
    secrets::forget_kept(place.site());
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
