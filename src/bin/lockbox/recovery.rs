//! `lockbox recovery`: opens an archive with a recovery code and sets a new passphrase.

use std::io::IsTerminal;
use std::path::{Path, PathBuf};

use lockbox::archive::{Archive, KeyAccess, KeyName, Secrets};
use lockbox::crypto::{Passphrase, RecoveryCode};
use lockbox::storage::LockMode;
use lockbox_secrets::{Bytes, PassphraseSources};

use crate::exit::{Failure, shown};
use crate::kdf::KdfArgs;
use crate::opening;
use crate::output::Output;
use crate::secrets::LimitArgs;
use crate::seen::SeenArgs;
use crate::unlocking;

/// Set a new passphrase with a recovery code
#[derive(clap::Args)]
pub(crate) struct Args {
    /// The archive file
    archive: PathBuf,
    /// Read the recovery code from FILE; without it from standard input, or a prompt
    #[arg(long, value_name = "FILE")]
    recovery_code: Option<PathBuf>,
    /// Read the new passphrase from FILE; without it from standard input behind the code, or a prompt
    #[arg(long, value_name = "FILE")]
    new_passfile: Option<PathBuf>,
    /// Accept files with secrets that others may read
    #[arg(long)]
    passfile_any: bool,
    /// The key slot that is to get the passphrase, by number or label; without it the only one with a passphrase
    #[arg(long, value_name = "SLOT")]
    slot: Option<String>,
    #[command(flatten)]
    limit: LimitArgs,
    #[command(flatten)]
    seen: SeenArgs,
    #[command(flatten)]
    kdf: KdfArgs,
}

pub(crate) fn run(args: &Args) -> Result<(), Failure> {
    let path = &args.archive;
    opening::probe(path, LockMode::Exclusive)?;
    let (code, new) = args.code_and_new(path)?;
    let secrets = Secrets { recovery_code: Some(code), ..Secrets::default() };
    let failed = |error| unlocking::failure(path, error);
    // A wrong code is told before a second is spent on the new passphrase.
    Archive::unlock_with(path, &secrets, &args.limit.limits()).map_err(failed)?;
    let access = KeyAccess { secrets: &secrets, limits: args.limit.limits(), seen: args.seen.options() };
    let name = args.slot.as_deref().map(KeyName::parse);
    let slot = Archive::set_passphrase(path, &access, name.as_ref(), &new, args.kdf.cost()?).map_err(failed)?;
    let mut out = Output::new();
    out.line(&format!(
        "Key slot {slot} has the new passphrase. The recovery code still opens the archive: remove it with 'lockbox key rm' if others saw it."
    ))?;
    out.finish()
}

impl Args {
    fn code_and_new(&self, path: &Path) -> Result<(RecoveryCode, Passphrase), Failure> {
        let secret = PassphraseSources { passfile_any: self.passfile_any, ..PassphraseSources::default() };
        let new_one = |file: Option<&Path>| Ok::<_, Failure>(Passphrase::from(secret.new_one(file, path)?));
        let terminal = std::io::stdin().is_terminal();
        if let Some(file) = &self.recovery_code {
            let code = RecoveryCode::parse(&secret.bytes(file)?)?;
            return Ok((code, new_one(self.new_passfile.as_deref())?));
        }
        if terminal {
            let question = format!("Recovery code of {}: ", shown(path));
            let code = RecoveryCode::parse(&lockbox_secrets::ask_secretly(&question)?)?;
            return Ok((code, new_one(self.new_passfile.as_deref())?));
        }
        let input = secret.bytes(Path::new("-"))?;
        if let Some(file) = &self.new_passfile {
            return Ok((RecoveryCode::parse(&input)?, new_one(Some(file))?));
        }
        let Some(end) = input.iter().position(|&byte| byte == b'\n') else {
            return Err(Failure::other(
                "standard input must have the recovery code and the new passphrase, one a line",
            ));
        };
        let code = RecoveryCode::parse(&input[..end])?;
        Ok((code, PassphraseSources::checked(Bytes::new(input[end + 1..].to_vec()))?.into()))
    }
}
