//! `lockbox passwd` and `recovery`: set a new passphrase, with the old one or with a recovery code.
use std::io::{self, IsTerminal};
use std::path::{Path, PathBuf};

use lockbox::crypto::{Passphrase, RecoveryCode};
use lockbox::keys::{self, KeyAccess, KeyInfo, KeyKind, KeyName, Secrets};
use lockbox_host::remote::RemoteArgs;
use lockbox_host::secrets::PassphraseSources;
use lockbox_host::{Spinner, shown};

use crate::commands::key::{ChangeArgs, name_of, row};
use crate::exit::Failure;
use crate::open_archive::{self, WriterArgs};
use crate::output::{self, Reader};
use crate::secrets::{self, KdfArgs, LimitArgs, SeenArgs};

/// Change the passphrase of an archive that is not mounted
#[derive(clap::Args)]
pub(crate) struct Args {
    #[command(flatten)]
    change: ChangeArgs,
    /// Read the new passphrase from FILE
    #[arg(long, value_name = "FILE")]
    new_passfile: Option<PathBuf>,
    #[command(flatten)]
    kdf: KdfArgs,
}

pub(crate) fn run(args: &Args) -> Result<(), Failure> {
    let place = args.change.place()?;
    let unlock = &args.change.key.unlock;
    let (mut given, new) = unlock.given_and_new(args.new_passfile.as_deref(), &place)?;
    let kdf = args.kdf.cost(unlock.advises())?;
    let change = |access: &KeyAccess<'_>| keys::change_passphrase(place.source(), access, &new, kdf);
    let changed = unlock.attempt(&place, &mut given, change)?;
    secrets::forget_kept(place.source());
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

/// Set a new passphrase with a recovery code
#[derive(clap::Args)]
pub(crate) struct RecoverArgs {
    /// The archive: a file, or an address
    archive: PathBuf,
    #[command(flatten)]
    remote: RemoteArgs,
    #[command(flatten)]
    writer: WriterArgs,
    /// Read the recovery code from FILE; without it from standard input, or a prompt
    #[arg(long, value_name = "FILE")]
    recovery_code: Option<PathBuf>,
    /// Read the new passphrase from FILE; without it from standard input behind the code, or a prompt
    #[arg(long, value_name = "FILE")]
    new_passfile: Option<PathBuf>,
    /// Accept files with secrets that others may read
    #[arg(long)]
    passfile_any: bool,
    /// Suppress hints and progress
    #[arg(long)]
    quiet: bool,
    /// The key slot that gets the passphrase, by number or label; by default the only one with a passphrase, when that has no
    /// label; asked for when the new passphrase is asked for
    #[arg(long, value_name = "SLOT")]
    slot: Option<String>,
    #[command(flatten)]
    limit: LimitArgs,
    #[command(flatten)]
    seen: SeenArgs,
    #[command(flatten)]
    kdf: KdfArgs,
}

pub(crate) fn recovery(args: &RecoverArgs) -> Result<(), Failure> {
    let path = &args.archive;
    let place = open_archive::place_to_change(path, &args.remote, args.writer)?;
    let (code, new) = args.code_and_new(path)?;
    let given = Secrets { recovery_code: Some(code), ..Secrets::default() };
    let failed = |error| secrets::failure(&place, error);
    // A wrong code is reported before the next prompt, and before a second is spent on the new
    // passphrase.
    let access = KeyAccess { secrets: &given, limits: args.limit.limits(), seen: args.seen.options(path) };
    let keys = keys::list(place.source(), &access).map_err(failed)?;
    let (name, new) = match new {
        Some(new) => (args.slot(&keys, false)?, new),
        None => (args.slot(&keys, true)?, args.new_passphrase(path)?),
    };
    let sees = args.sources().advises();
    let kdf = args.kdf.cost(sees)?;
    let working = Spinner::deriving(sees);
    let slot = keys::set_passphrase(place.source(), &access, name.as_ref(), &new, kdf).map_err(failed)?;
    drop(working);
    secrets::forget_kept(place.source());
    let shown = keys.iter().find(|key| key.slot == slot).map_or_else(|| format!("{slot} passphrase"), name_of);
    output::print(&format!(
        "Key slot {shown} has the new passphrase. The recovery code still opens the archive: remove it with 'lockbox key rm' if others saw it."
    ))
}

impl RecoverArgs {
    /// Returns the recovery code; and the new passphrase when its source is not a prompt.
    fn code_and_new(&self, path: &Path) -> Result<(RecoveryCode, Option<Passphrase>), Failure> {
        let secret = self.sources();
        let terminal = io::stdin().is_terminal();
        if let Some(file) = &self.recovery_code {
            let code = RecoveryCode::parse(&secret.bytes(file)?)?;
            // A complete command line is not interrupted by a prompt.
            let asks = terminal && self.new_passfile.is_none();
            return Ok((code, if asks { None } else { Some(self.new_passphrase(path)?) }));
        }
        if terminal {
            let question = format!("Recovery code of {}: ", shown(path));
            return Ok((RecoveryCode::parse(&lockbox_host::secrets::ask_secretly(&question)?)?, None));
        }
        let input = secret.bytes(Path::new("-"))?;
        if self.new_passfile.is_some() {
            return Ok((RecoveryCode::parse(&input)?, Some(self.new_passphrase(path)?)));
        }
        const BOTH: &str = "standard input must have the recovery code and the new passphrase, one a line";
        let end = input.iter().position(|&byte| byte == b'\n').ok_or_else(|| Failure::other(BOTH))?;
        let code = RecoveryCode::parse(&input[..end])?;
        let new = lockbox_host::secrets::last_line(&input[end + 1..], BOTH)?;
        Ok((code, Some(new.into())))
    }

    fn new_passphrase(&self, path: &Path) -> Result<Passphrase, Failure> {
        Ok(self.sources().new_one(self.new_passfile.as_deref(), path)?.into())
    }

    fn sources(&self) -> PassphraseSources {
        PassphraseSources { passfile_any: self.passfile_any, quiet: self.quiet, ..PassphraseSources::default() }
    }

    /// Returns the slot whose passphrase is replaced; None for a new slot. A slot with a name given
    /// by a user is never taken without confirmation.
    fn slot(&self, keys: &[KeyInfo], ask: bool) -> Result<Option<KeyName>, Failure> {
        if let Some(given) = &self.slot {
            return Ok(Some(KeyName::parse(given)));
        }
        let with: Vec<&KeyInfo> = keys.iter().filter(|key| key.kind == KeyKind::Passphrase).collect();
        match &with[..] {
            // The library reports the remedy when a key file is required with it.
            [] => Ok(None),
            [one] if one.label().is_none() => Ok(Some(KeyName::Slot(one.slot))),
            [one] if ask => {
                let question = format!("Replace the passphrase of key slot {}? [y, n] ", name_of(one));
                let answer = lockbox_host::secrets::ask_openly(&question).unwrap_or_default();
                if !lockbox_host::secrets::is_yes(&answer) {
                    return Err(Failure::other(
                        "nothing was changed; 'lockbox key add --recovery-code FILE' adds a passphrase and leaves the others",
                    ));
                }
                Ok(Some(KeyName::Slot(one.slot)))
            }
            several if ask => choose(several),
            several => {
                let names: Vec<String> = several.iter().map(|key| name_of(key)).collect();
                Err(Failure::other(format!(
                    "name with --slot the key slot to change ({}), or add a passphrase with 'lockbox key add --recovery-code FILE'",
                    names.join(", ")
                )))
            }
        }
    }
}

fn choose(keys: &[&KeyInfo]) -> Result<Option<KeyName>, Failure> {
    output::complain("several key slots have a passphrase:");
    for key in keys {
        output::show(&row(key, Reader::of(&io::stderr())));
    }
    let answer = lockbox_host::secrets::ask_openly("Number or label of the one to be replaced: ").unwrap_or_default();
    let name = KeyName::parse(answer.trim());
    let named = |key: &&&KeyInfo| match &name {
        KeyName::Slot(slot) => key.slot == *slot,
        KeyName::Label(label) => key.label() == Some(label.as_str()),
    };
    match keys.iter().filter(named).count() {
        1 => Ok(Some(name)),
        _ => Err(Failure::other("the answer is none of these key slots; nothing was changed")),
    }
}
