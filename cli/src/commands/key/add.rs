//! `lockbox key add` and `lockbox key recovery`: one more key that opens an archive.
use std::io;
use std::path::{Path, PathBuf};

use lockbox::archive::KdfCost;
use lockbox::crypto::RecoveryCode;
use lockbox::crypto::identity::Recipient;
use lockbox::keys::{self, KeyAccess, NewKey};
use lockbox::storage::HostEntry;
use lockbox_host::remote::ArchiveLocation;
use lockbox_host::secrets::Sources;
use lockbox_host::{Credentials, Prompter, shown};
use serde_json::json;

use super::ChangeArgs;
use crate::exit::{Failure, Lockbox};
use crate::output::{self, Output};
use crate::secrets::KdfArgs;

/// Add a key: a passphrase, or what one of the options names
#[derive(clap::Args)]
pub(crate) struct Args {
    #[command(flatten)]
    change: ChangeArgs,
    /// Read the new passphrase from FILE
    #[arg(long, value_name = "FILE")]
    new_passfile: Option<PathBuf>,
    /// Add the key file FILE, of 32 bytes to 64 MiB
    #[arg(long, value_name = "FILE", conflicts_with_all = ["recipient", "recipient_file"])]
    new_keyfile: Option<PathBuf>,
    /// Make the new key file of random bytes first; it must not exist
    #[arg(long, requires = "new_keyfile")]
    generate: bool,
    /// Ask for a new passphrase as well, so that both are needed
    #[arg(long, requires = "new_keyfile")]
    with_passphrase: bool,
    /// Add an age recipient (age1...) or an SSH public key
    // A private key that is given by mistake begins with dashes: as an unexpected argument it would
    // be shown.
    #[arg(long, value_name = "RECIPIENT", allow_hyphen_values = true, conflicts_with_all = ["recipient_file", "new_passfile"])]
    recipient: Option<String>,
    /// Add the age recipient or SSH public key in FILE
    #[arg(long, value_name = "FILE", conflicts_with = "new_passfile")]
    recipient_file: Option<PathBuf>,
    /// What the key is called in the archive; only those who open it see that
    #[arg(long, value_name = "TEXT", default_value = "")]
    label: String,
    #[command(flatten)]
    kdf: KdfArgs,
}

/// Add a recovery code and print it, once
#[derive(clap::Args)]
pub(crate) struct RecoveryArgs {
    #[command(flatten)]
    change: ChangeArgs,
    /// What the key is called in the archive
    #[arg(long, value_name = "TEXT", default_value = "")]
    label: String,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(args: &Args) -> Result<(), Failure> {
    let place = args.change.place()?;
    if let Some(recipient) = args.recipient()? {
        return args.add_recipient(&place, &recipient);
    }
    let unlock = &args.change.key.unlock;
    let Some(file) = &args.new_keyfile else {
        let (given, new) = unlock.given_and_new(args.new_passfile.as_deref(), &place)?;
        return tell(args.add(&place, given, &NewKey::Passphrase(&new, args.cost()?))?);
    };
    if args.new_passfile.is_some() && !args.with_passphrase {
        return Err(Failure::usage(
            "--new-passfile with --new-keyfile needs --with-passphrase: both together will open",
        ));
    }
    if !args.generate {
        let file = unlock.new_key_file(file)?;
        return tell(args.add_file(&place, &file)?);
    }
    generate(file)?;
    // A file whose key may have been added stays, even after another failure.
    tell(unlock.new_key_file(file).and_then(|read| args.add_file(&place, &read))?)
}

impl Args {
    fn cost(&self) -> Result<KdfCost, Failure> {
        self.kdf.cost(self.change.key.unlock.advises())
    }

    fn recipient(&self) -> Result<Option<Recipient>, Failure> {
        let text = match (&self.recipient, &self.recipient_file) {
            (Some(text), _) if !text.is_empty() && Path::new(text).is_file() => {
                return Err(Failure::usage(format!(
                    "--recipient takes the recipient itself; --recipient-file reads it from {}",
                    shown(Path::new(text))
                )));
            }
            (Some(text), _) => text.clone(),
            (None, Some(file)) => first_line(file)?,
            (None, None) => return Ok(None),
        };
        Ok(Some(Recipient::parse(&text)?))
    }

    fn add_recipient(&self, place: &ArchiveLocation, recipient: &Recipient) -> Result<(), Failure> {
        let prompts = Prompter::<Lockbox>::prompts(&Sources::default());
        let given = self.change.key.unlock.given(place)?;
        tell(self.add(place, given, &NewKey::Recipient(recipient, &prompts))?)?;
        if recipient.is_identifiable() {
            output::complain(
                "note: who knows this recipient can tell from a copy of the archive that it may open it; only X25519 recipients hide that",
            );
        }
        Ok(())
    }

    fn add_file(&self, place: &ArchiveLocation, file: &lockbox::crypto::KeyFile) -> Result<u8, Failure> {
        let unlock = &self.change.key.unlock;
        if !self.with_passphrase {
            return self.add(place, unlock.given(place)?, &NewKey::KeyFile(file));
        }
        let (given, new) = unlock.given_and_new(self.new_passfile.as_deref(), place)?;
        self.add(place, given, &NewKey::KeyFileAndPassphrase(file, &new, self.cost()?))
    }

    fn add(&self, place: &ArchiveLocation, mut given: Credentials, new: &NewKey<'_>) -> Result<u8, Failure> {
        let unlock = &self.change.key.unlock;
        unlock.attempt(place, &mut given, |access| keys::add(place.site(), access, new, &self.label))
    }
}

fn tell(slot: u8) -> Result<(), Failure> {
    output::print(&format!("Key slot {slot} opens the archive as well."))
}

pub(crate) fn recovery(args: &RecoveryArgs) -> Result<(), Failure> {
    let place = args.change.place()?;
    let code = keys::new_recovery_code()?;
    let add = |access: &KeyAccess<'_>| keys::add(place.site(), access, &NewKey::RecoveryCode(&code), &args.label);
    let slot = args.change.key.unlock.with_access(&place, add)?;
    if !args.json {
        return print_recovery_code(place.path(), slot, &code);
    }
    output::print_json(&json!({"slot": slot, "recovery_code": &**code.text()}))
}

pub(crate) fn print_recovery_code(path: &Path, slot: u8, code: &RecoveryCode) -> Result<(), Failure> {
    let mut out = Output::new();
    out.line(&format!("Recovery code of {} (key slot {slot}):", shown(path)))?;
    out.line("")?;
    out.line(&format!("    {}", &**code.text()))?;
    out.line("")?;
    out.line("Write it down: it is not shown again. 'lockbox recovery' sets a new passphrase with it.")?;
    out.finish()
}

/// Writes the key file. The slot will be durable, so the file must have its name by then; half a
/// key is useless, and would block the next try.
fn generate(path: &Path) -> Result<(), Failure> {
    let bytes = keys::new_key_file()?;
    let made = HostEntry::of(path).and_then(|entry| entry.write_new(&*bytes));
    made.map_err(|e| match e.kind() {
        io::ErrorKind::AlreadyExists => Failure::other(format!(
            "{} exists already; it was left as it is: without --generate it is added as it is",
            shown(path)
        )),
        _ => Failure::host(format!("cannot make the key file {}", shown(path)), &e),
    })
}

/// Returns the first line that is not a comment.
fn first_line(path: &Path) -> Result<String, Failure> {
    const MOST: u64 = 64 << 10;
    let failed = |e: std::io::Error| Failure::host(format!("cannot read the recipient from {}", shown(path)), &e);
    let file = std::fs::File::open(path).map_err(failed)?;
    let text = std::io::read_to_string(std::io::Read::take(file, MOST)).map_err(failed)?;
    if text.trim_start().starts_with("-----BEGIN") {
        // Text of several lines; its parser reports the error.
        return Ok(text);
    }
    let mut lines = text.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with('#'));
    let line = lines.next().ok_or_else(|| Failure::other(format!("{} has no recipient", shown(path))))?;
    match lines.next() {
        Some(_) => Err(Failure::other(format!("{} has several recipients: add them one by one", shown(path)))),
        None => Ok(line.to_owned()),
    }
}
