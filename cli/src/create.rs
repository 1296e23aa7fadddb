//! `lockbox create`: makes an empty archive.
use std::path::{Path, PathBuf};

use lockbox::Error;
use lockbox::archive::{Archive, CreateOptions};
use lockbox::crypto::{Passphrase, RecoveryCode};
use lockbox::fs::Creator;
use lockbox::keys::{self, KeyAccess, NewKey, Secrets};
use lockbox_host::secrets::PassphraseSources;
use lockbox_host::{Working, shown};
use nix::unistd::{getegid, geteuid};

use crate::exit::Failure;
use crate::kdf::KdfArgs;
use crate::key;
use crate::output;
use crate::secrets;
use crate::seen::SeenArgs;

/// Create an empty archive
#[derive(clap::Args)]
pub(crate) struct Args {
    /// The archive file, which must not exist
    archive: PathBuf,
    #[command(flatten)]
    sources: PassphraseSources,
    /// Make a passphrase of six words and print it, once
    #[arg(long, conflicts_with_all = ["passfile", "passfd", "passcommand", "credential", "ask_password"])]
    generate_passphrase: bool,
    /// Make a recovery code too and print it, once
    #[arg(long)]
    generate_recovery_code: bool,
    #[command(flatten)]
    kdf: KdfArgs,
}

pub(crate) fn run(args: &Args) -> Result<(), Failure> {
    let path = &args.archive;
    let exists = || Failure::other(format!("{} exists already; it was left as it is", shown(path)));
    // Before the passphrase is asked for; the creation itself refuses an existing file too.
    if path.symlink_metadata().is_ok() {
        return Err(exists());
    }
    let passphrase = match args.generate_passphrase {
        true => {
            let words = keys::new_passphrase()?;
            // Before there is an archive that nobody could open if this cannot be read.
            output::print(&words)?;
            Passphrase::new(words.as_bytes().to_vec())
        }
        false => secrets::to_set(&args.sources, path)?,
    };
    let sees = args.sources.advises();
    let options = CreateOptions { kdf: args.kdf.cost(sees)?, creator: creator() };
    let working = Working::deriving(sees);
    Archive::create(path, &passphrase, &options).map_err(|error| match error {
        Error::Exists => exists(),
        error => Failure::at(path, &error),
    })?;
    drop(working);
    if args.generate_recovery_code {
        let working = Working::deriving(sees);
        let (slot, code) = add_recovery_code(path, passphrase)?;
        drop(working);
        key::print_recovery_code(path, slot, &code)?;
    }
    if sees {
        let name = shown(path);
        if args.generate_recovery_code {
            output::show("Without its passphrase and the code nobody can open it, neither you nor anybody else.");
        } else {
            output::show(
                "Without its passphrase nobody can open it, neither you nor anybody else: there is no other way in.",
            );
            output::show(&format!("A second way is a recovery code on paper: lockbox key recovery {name}"));
        }
        // Without a suffix there is no name for one beside it.
        let directory = if path.extension().is_some() { "" } else { " DIRECTORY" };
        output::show(&format!("Use it as a folder: lockbox mount {name}{directory}"));
    }
    Ok(())
}

fn add_recovery_code(path: &Path, passphrase: Passphrase) -> Result<(u8, RecoveryCode), Failure> {
    let code = keys::new_recovery_code()?;
    let secrets = Secrets::from(passphrase);
    let limits = lockbox_host::unlock_limits(None);
    let access = KeyAccess { secrets: &secrets, limits, seen: SeenArgs::default().options() };
    let slot = keys::add(path, &access, &NewKey::RecoveryCode(&code), "").map_err(|error| {
        output::complain("the archive is there, without a recovery code: 'lockbox key recovery' adds one");
        Failure::at(path, &error)
    })?;
    Ok((slot, code))
}

/// Whoever runs the program owns what it makes.
pub(crate) fn creator() -> Creator {
    Creator { uid: geteuid().as_raw(), gid: getegid().as_raw(), umask: None }
}
