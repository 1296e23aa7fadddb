//! `lockbox key`, `header`, `forget`: keys in an archive, in a copy of its header, in the keyring.
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use lockbox::archive::{Archive, KdfCost, KeepKeys, RekeyOptions};
use lockbox::crypto::RecoveryCode;
use lockbox::crypto::identity::Recipient;
use lockbox::error::Timestamp;
use lockbox::keys::{self, KeyAccess, KeyInfo, KeyName, NewKey, Restored};
use lockbox::storage::{ArchiveSource, HostEntry};
use lockbox_host::remote::{ArchiveLocation, RemoteArgs};
use lockbox_host::secrets::{Keyring, Sources};
use lockbox_host::{Credentials, Program, Prompter, shown};
use lockbox_terminal::display;
use serde_json::{Value, json};

use crate::commands::compact::{self, Watch};
use crate::exit::{Failure, Lockbox};
use crate::open_archive::{self, WriterArgs};
use crate::output::{self, Output, Reader, rfc3339};
use crate::secrets::{self, KdfArgs, UnlockArgs};

/// Add, list, remove and renew the keys that open an archive
#[derive(clap::Subcommand)]
pub(crate) enum Command {
    Add(AddKeyArgs),
    Ls(KeyLsArgs),
    Rm(KeyRmArgs),
    Test(TestArgs),
    Recovery(RecoveryArgs),
    Rekey(RekeyArgs),
}

pub(crate) fn run(command: &Command) -> Result<(), Failure> {
    match command {
        Command::Add(args) => add(args),
        Command::Ls(args) => ls(args),
        Command::Rm(args) => rm(args),
        Command::Test(args) => test(args),
        Command::Recovery(args) => recovery(args),
        Command::Rekey(args) => rekey(args),
    }
}

/// The archive and its unlocking options
#[derive(clap::Args)]
pub(crate) struct KeyArgs {
    /// The archive: a file, or an address
    archive: PathBuf,
    #[command(flatten)]
    pub(crate) unlock: UnlockArgs,
    #[command(flatten)]
    remote: RemoteArgs,
}

/// The archive, its unlocking options, and its other writers
#[derive(clap::Args)]
pub(crate) struct ChangeArgs {
    #[command(flatten)]
    pub(crate) key: KeyArgs,
    #[command(flatten)]
    writer: WriterArgs,
}

impl ChangeArgs {
    pub(crate) fn place(&self) -> Result<ArchiveLocation, Failure> {
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

/// Add a key: a passphrase, or the key that an option names
#[derive(clap::Args)]
pub(crate) struct AddKeyArgs {
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
    /// Name of the key in the archive; visible only after unlocking it
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
    /// Name of the key in the archive
    #[arg(long, value_name = "TEXT", default_value = "")]
    label: String,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

fn add(args: &AddKeyArgs) -> Result<(), Failure> {
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
    if args.generate {
        generate(file)?;
    }
    // A new file whose key may have been added stays, even after another failure.
    let file = unlock.new_key_file(file)?;
    if !args.with_passphrase {
        return tell(args.add(&place, unlock.given(&place)?, &NewKey::KeyFile(&file))?);
    }
    let (given, new) = unlock.given_and_new(args.new_passfile.as_deref(), &place)?;
    tell(args.add(&place, given, &NewKey::KeyFileAndPassphrase(&file, &new, args.cost()?))?)
}

impl AddKeyArgs {
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
                "note: an attacker with this recipient and a copy of the archive can tell that it opens the archive; only X25519 recipients hide that",
            );
        }
        Ok(())
    }

    fn add(&self, place: &ArchiveLocation, mut given: Credentials, new: &NewKey<'_>) -> Result<u8, Failure> {
        let unlock = &self.change.key.unlock;
        unlock.attempt(place, &mut given, |access| keys::add(place.source(), access, new, &self.label))
    }
}

fn tell(slot: u8) -> Result<(), Failure> {
    output::print(&format!("Key slot {slot} opens the archive as well."))
}

fn recovery(args: &RecoveryArgs) -> Result<(), Failure> {
    let place = args.change.place()?;
    let code = keys::new_recovery_code()?;
    let add = |access: &KeyAccess<'_>| keys::add(place.source(), access, &NewKey::RecoveryCode(&code), &args.label);
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
            "{} already exists and was not changed: without --generate the existing file is added",
            shown(path)
        )),
        _ => Failure::host(format!("cannot create the key file {}", shown(path)), &e),
    })
}

/// Returns the first line that is not a comment.
fn first_line(path: &Path) -> Result<String, Failure> {
    const MOST: u64 = 64 << 10;
    let failed = |e: io::Error| Failure::host(format!("cannot read the recipient from {}", shown(path)), &e);
    let file = std::fs::File::open(path).map_err(failed)?;
    let text = io::read_to_string(file.take(MOST)).map_err(failed)?;
    if text.trim_start().starts_with("-----BEGIN") {
        // Text of several lines; its parser reports the error.
        return Ok(text);
    }
    let mut lines = text.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with('#'));
    match (lines.next(), lines.next()) {
        (None, _) => Err(Failure::other(format!("{} has no recipient", shown(path)))),
        (Some(line), None) => Ok(line.to_owned()),
        _ => Err(Failure::other(format!("{} has several recipients: add them one by one", shown(path)))),
    }
}

/// List the keys of an archive, with their labels
#[derive(clap::Args)]
pub(crate) struct KeyLsArgs {
    #[command(flatten)]
    key: KeyArgs,
    /// Print JSON, one object a line
    #[arg(long)]
    json: bool,
}

/// Say which keys of an archive the given secrets are
#[derive(clap::Args)]
pub(crate) struct TestArgs {
    #[command(flatten)]
    key: KeyArgs,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

fn ls(args: &KeyLsArgs) -> Result<(), Failure> {
    let keys = keys(&args.key, |site, access| keys::list(site, access))?;
    let mut out = Output::new();
    for key in &keys {
        if args.json { out.json(&json_of(key))? } else { out.line(&row(key, out.reader))? }
    }
    out.finish()
}

fn test(args: &TestArgs) -> Result<(), Failure> {
    let keys = keys(&args.key, |site, access| keys::list_all(site, access))?;
    let opened: Vec<&KeyInfo> = keys.iter().filter(|key| key.opened).collect();
    let mut out = Output::new();
    if args.json {
        out.json(&json!({"opened": opened.iter().map(|key| json_of(key)).collect::<Vec<_>>()}))?;
    } else {
        for key in opened {
            out.line(&format!("opens key slot {}", name_of(key)))?;
        }
    }
    out.finish()
}

type Lister = fn(ArchiveSource<'_>, &KeyAccess<'_>) -> lockbox::Result<Vec<KeyInfo>>;

fn keys(args: &KeyArgs, list: Lister) -> Result<Vec<KeyInfo>, Failure> {
    let place = open_archive::place(&args.archive, &args.remote)?;
    keys::identify(place.source()).map_err(|error| secrets::failure(&place, error))?;
    args.unlock.with_access(&place, |access| list(place.source(), access))
}

/// Remove a key, by the number of its slot or by its label
#[derive(clap::Args)]
pub(crate) struct KeyRmArgs {
    #[command(flatten)]
    change: ChangeArgs,
    /// Number or label of the key slot
    slot: String,
}

fn rm(args: &KeyRmArgs) -> Result<(), Failure> {
    let place = args.change.place()?;
    let name = KeyName::parse(&args.slot);
    let removed = args.change.key.unlock.with_access(&place, |access| keys::remove(place.source(), access, &name))?;
    secrets::forget_kept(place.source());
    output::print(&format!(
        "Key slot {} is removed. Older copies of the archive still open with it, and users that opened it before may have kept the volume key: \
         'lockbox key rekey' writes the archive under a new one.",
        name_of(&removed)
    ))
}

/// Write an archive under a new volume key, so that removed keys are useless for its content from now on
#[derive(clap::Args)]
pub(crate) struct RekeyArgs {
    #[command(flatten)]
    change: ChangeArgs,
    /// Keep only these keys, by slot or label; may be given several times
    #[arg(long, value_name = "SLOT", conflicts_with = "drop")]
    only: Vec<String>,
    /// Keep all keys but these; may be given several times
    #[arg(long, value_name = "SLOT")]
    drop: Vec<String>,
    /// Only list the keys that would be kept
    #[arg(long)]
    dry_run: bool,
    /// Go on although the file has further names (hard links), which will keep the old file
    #[arg(long)]
    break_links: bool,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

fn rekey(args: &RekeyArgs) -> Result<(), Failure> {
    let KeyArgs { archive: path, unlock, .. } = &args.change.key;
    let place = args.change.place()?;
    let given = unlock.verified(&place)?;
    let prompts = Prompter::<Lockbox>::prompts(&Sources::default());
    let names = |given: &[String]| given.iter().map(|text| KeyName::parse(text)).collect();
    let keep = match (&args.only[..], &args.drop[..]) {
        ([], []) => KeepKeys::All,
        ([], drop) => KeepKeys::Drop(names(drop)),
        (only, _) => KeepKeys::Only(names(only)),
    };
    let options = RekeyOptions { keep, break_links: args.break_links, dry_run: args.dry_run, prompts: &prompts };
    let watch = Watch::start(unlock.bar())?;
    let access = unlock.access(&given.secrets, &place);
    let done = Archive::rekey(place.source(), &access, &options, &mut |step| watch.step(step));
    drop(watch);
    let report = done.map_err(|error| compact::failure(&place, error))?;
    if !args.dry_run {
        secrets::forget_kept(place.source());
    }
    let mut out = Output::new();
    if args.json {
        out.json(&json!({
            "dry_run": args.dry_run,
            "kept": report.kept.iter().map(json_of).collect::<Vec<_>>(),
            "dropped": report.dropped.iter().map(json_of).collect::<Vec<_>>(),
            "disk_before": report.sizes.disk_before,
            "disk_after": report.sizes.disk_after,
        }))?;
        return out.finish();
    }
    for (what, keys) in [("kept", &report.kept), ("dropped", &report.dropped)] {
        for key in keys {
            out.line(&format!("{what:<8} {}", name_of(key)))?;
        }
    }
    if args.dry_run {
        out.line("Nothing was written.")?;
    } else {
        out.line(&format!(
            "The archive has a new volume key ({} {} before, {} after). {} still open with the old keys.",
            out.reader.size(report.sizes.disk_before),
            compact::where_it_is(path),
            out.reader.size(report.sizes.disk_after),
            if place.is_remote() {
                "Copies made before, its objects of before, which stay for the grace period, and versions of them that the store keeps"
            } else {
                "Copies made before"
            }
        ))?;
    }
    out.finish()
}

/// Back up and restore the header of an archive, which holds the keys
#[derive(clap::Subcommand)]
pub(crate) enum HeaderCommand {
    Backup(BackupArgs),
    Restore(Box<RestoreArgs>),
}

/// Copy the header, which holds the keys, to a new file
#[derive(clap::Args)]
pub(crate) struct BackupArgs {
    /// The archive: a file, or an address
    archive: PathBuf,
    /// The copy, which must not exist
    file: PathBuf,
    #[command(flatten)]
    remote: RemoteArgs,
}

/// Put a header back that was backed up
#[derive(clap::Args)]
pub(crate) struct RestoreArgs {
    #[command(flatten)]
    change: ChangeArgs,
    /// The copy of its header
    file: PathBuf,
}

/// More than a header has.
const MAX_HEADER: u64 = 1 << 20;

pub(crate) fn header(command: &HeaderCommand) -> Result<(), Failure> {
    match command {
        HeaderCommand::Backup(args) => backup(args),
        HeaderCommand::Restore(args) => restore(args),
    }
}

fn backup(args: &BackupArgs) -> Result<(), Failure> {
    let place = open_archive::place(&args.archive, &args.remote)?;
    let bytes = keys::backup_header(place.source()).map_err(|error| secrets::failure(&place, error))?;
    let failed = |e: io::Error| match e.kind() {
        io::ErrorKind::AlreadyExists => {
            Failure::other(format!("{} already exists and was not changed", shown(&args.file)))
                .advised(": choose another name")
        }
        _ => Failure::host(format!("cannot write {}", shown(&args.file)), &e),
    };
    HostEntry::of(&args.file).and_then(|entry| entry.write_new(&bytes)).map_err(failed)?;
    output::print(
        "The backup opens with the keys of today, also after they were changed or removed: keep it as safe as the archive, and make a new \
         one after each change of the keys.",
    )
}

fn restore(args: &RestoreArgs) -> Result<(), Failure> {
    let failed = |e: io::Error| Failure::host(format!("cannot read {}", shown(&args.file)), &e);
    let mut bytes = Vec::new();
    std::fs::File::open(&args.file).and_then(|file| file.take(MAX_HEADER).read_to_end(&mut bytes)).map_err(failed)?;
    let ChangeArgs { key: KeyArgs { archive, unlock, remote }, writer } = &args.change;
    let place = open_archive::place_to_restore(archive, remote, *writer)?;
    let Restored { backup, known } =
        unlock.with_access(&place, |access| keys::restore_header(place.source(), &bytes, access))?;
    secrets::forget_kept(place.source());
    output::print(match backup < known {
        true => "The header is restored. Keys that were removed or changed since the backup open the archive again.",
        false => "The header is restored.",
    })
}

/// Drop the keys of archives from the kernel's keyring
#[derive(clap::Args)]
pub(crate) struct ForgetArgs {
    /// The archive files
    #[arg(value_name = "ARCHIVE", required_unless_present = "all")]
    archives: Vec<PathBuf>,
    /// Drop the keys of all archives of this user
    #[arg(long, conflicts_with = "archives")]
    all: bool,
}

pub(crate) fn forget(args: &ForgetArgs) -> Result<(), Failure> {
    let keyring = Keyring::open()?;
    let mut out = Output::new();
    if args.all {
        match keyring.forget_all()? {
            1 => out.line("1 key is forgotten.")?,
            count => out.line(&format!("{count} keys are forgotten."))?,
        }
    }
    for path in &args.archives {
        open_archive::of_host(path)?;
        let archive = keys::identify(path).map_err(|error| Lockbox::failure(path, error))?;
        let outcome = if keyring.forget(&archive)? { "is forgotten" } else { "was not kept" };
        out.line(&format!("The key of {} {outcome}.", shown(path)))?;
    }
    out.finish()
}
