//! Age recipients and identities: wraps a key-encryption key for a recipient and unwraps it with
//! identities (specification 3.7).

use std::io::{Read, Write};
use std::sync::Arc;

use age::secrecy::SecretString;
use age::{Callbacks, DecryptError, Decryptor, EncryptError, Encryptor, IdentityFile, plugin, ssh, tag, tagpq, x25519};
use zeroize::Zeroizing;

use super::{Passphrase, SecretKey};
use crate::error::{Error, Refusal, Result};

const MAX_IDENTITY_BYTES: usize = 1 << 20;
const MAX_IDENTITIES: usize = 64;

const PUBLIC_KEYS: [&str; 3] = ["ssh-", "ecdsa-", "sk-"];

/// Prompts of plugins and protected identities, implemented by the calling program. `None` means
/// that no user can be prompted.
pub trait Prompts: Send + Sync {
    fn message(&self, text: &str);
    fn confirm(&self, question: &str, yes: &str, no: Option<&str>) -> Option<bool>;
    /// Prompts with visible input.
    fn public(&self, question: &str) -> Option<String>;
    /// Prompts without echo.
    fn secret(&self, question: &str) -> Option<Passphrase>;
}

#[cfg(any(test, debug_assertions))]
pub(crate) struct NoPrompts;

#[cfg(any(test, debug_assertions))]
impl Prompts for NoPrompts {
    fn message(&self, _: &str) {}

    fn confirm(&self, _: &str, _: &str, _: Option<&str>) -> Option<bool> {
        None
    }

    fn public(&self, _: &str) -> Option<String> {
        None
    }

    fn secret(&self, _: &str) -> Option<Passphrase> {
        None
    }
}

/// Adapter from [`Prompts`] to the callbacks of the age crate; sanitizes plugin messages for the
/// terminal.
#[derive(Clone)]
struct AgeCallbacks(Arc<dyn Prompts>);

impl Callbacks for AgeCallbacks {
    fn display_message(&self, message: &str) {
        self.0.message(&printable(message));
    }

    fn confirm(&self, message: &str, yes: &str, no: Option<&str>) -> Option<bool> {
        self.0.confirm(&printable(message), &printable(yes), no.map(printable).as_deref())
    }

    fn request_public_string(&self, description: &str) -> Option<String> {
        self.0.public(&printable(description))
    }

    fn request_passphrase(&self, description: &str) -> Option<SecretString> {
        secret_string(&self.0.secret(&printable(description))?)
    }
}

fn secret_string(passphrase: &Passphrase) -> Option<SecretString> {
    Some(SecretString::from(std::str::from_utf8(passphrase.bytes()).ok()?.to_owned()))
}

fn printable(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { ' ' } else { c }).take(400).collect::<String>().trim().to_owned()
}

/// Identities to try on age slots.
#[derive(Default)]
pub struct Identities {
    all: Vec<Box<dyn age::Identity + Send + Sync>>,
}

impl Identities {
    pub fn is_empty(&self) -> bool {
        self.all.is_empty()
    }

    /// Adds the identities of a file: lines of `AGE-SECRET-KEY-1...` and `AGE-PLUGIN-...`, or one
    /// OpenSSH private key, whose passphrase is requested through `prompts`. `name` is for messages
    /// only.
    ///
    /// # Errors
    /// `Invalid` for any other content, a missing plugin and a wrong passphrase; the content is not
    /// quoted.
    pub fn add(&mut self, content: &[u8], name: &str, prompts: &Arc<dyn Prompts>) -> Result<()> {
        if content.len() > MAX_IDENTITY_BYTES {
            return Err(Error::invalid(format!("{name}: an identity file has at most 1 MiB")));
        }
        if content.starts_with(b"age-encryption.org/") || content.starts_with(b"-----BEGIN AGE") {
            return Err(Error::Refused(Refusal::EncryptedIdentity { name: name.to_owned() }));
        }
        if let Some(what) = public_key_reason(content) {
            return Err(Error::invalid(format!("{name}: {what}")));
        }
        if content.trim_ascii_start().starts_with(b"-----BEGIN") {
            self.all.push(Box::new(ssh_identity(content, name, prompts)?));
        } else {
            let file = IdentityFile::from_buffer(content)
                .map_err(|_| Error::invalid(format!("{name}: a line is not an age identity")))?;
            let identities = file.with_callbacks(AgeCallbacks(prompts.clone())).into_identities();
            self.all.extend(identities.map_err(|error| Error::invalid(format!("{name}: {}", reason(&error))))?);
        }
        match self.all.len() {
            0 => Err(Error::invalid(format!("{name}: no identity is in it"))),
            1..=MAX_IDENTITIES => Ok(()),
            count => Err(Error::invalid(format!("{name}: {count} identities are too many, at most {MAX_IDENTITIES}"))),
        }
    }

    /// Returns the key-encryption key in an age file; `None` when no identity matches. Errors:
    /// `Invalid` when an identity or a plugin fails, `Damaged` when the file was not created by
    /// [`Recipient::seal`].
    pub(crate) fn open(&self, file: &[u8]) -> Result<Option<SecretKey>> {
        let damaged = || Error::damaged("key slot: its age file does not open");
        drop(Decryptor::new_buffered(file).map_err(|_| damaged())?);
        let mut failed = None;
        for identity in &self.all {
            // One at a time: a failing identity must not prevent the next attempt.
            let Ok(decryptor) = Decryptor::new_buffered(file) else { break };
            match decryptor.decrypt(std::iter::once(&**identity as &dyn age::Identity)) {
                Ok(reader) => return read_key(reader).map(Some).ok_or_else(damaged),
                Err(DecryptError::NoMatchingKeys) => {}
                Err(error) => {
                    failed = failed.or(Some(Error::invalid(format!("an identity failed: {}", reason(&error)))))
                }
            }
        }
        failed.map_or(Ok(None), Err)
    }
}

/// Returns whether an identity file contains a public key, which is not secret and opens nothing.
pub fn is_public_key(content: &[u8]) -> bool {
    public_key_reason(content).is_some()
}

fn public_key_reason(content: &[u8]) -> Option<&'static str> {
    let mut lines = content.split(|&byte| byte == b'\n').map(<[u8]>::trim_ascii);
    let first = lines.find(|line| !line.is_empty() && !line.starts_with(b"#"))?;
    if first.starts_with(b"age1") {
        return Some("it is a recipient, which cannot decrypt: pass the identity (AGE-SECRET-KEY-1...)");
    }
    PUBLIC_KEYS
        .iter()
        .any(|kind| first.starts_with(kind.as_bytes()))
        .then_some("it is a public key, which cannot decrypt: pass the private key")
}

/// Returns whether an age file is sealed to an SSH key, as its plaintext header shows.
pub(crate) fn is_for_ssh(file: &[u8]) -> bool {
    let mut lines = file.split(|&byte| byte == b'\n');
    lines.nth(1).is_some_and(|stanza| stanza.starts_with(b"-> ssh-"))
}

fn read_key(mut reader: impl Read) -> Option<SecretKey> {
    let mut key = Zeroizing::new([0; 32]);
    reader.read_exact(&mut *key).ok()?;
    // The last chunk is authenticated when its end is reached.
    (reader.read(&mut [0]).ok()? == 0).then(|| SecretKey::new(*key))
}

fn ssh_identity(content: &[u8], name: &str, prompts: &Arc<dyn Prompts>) -> Result<ssh::Identity> {
    let identity = ssh::Identity::from_buffer(content, Some(name.to_owned()))
        .map_err(|_| Error::invalid(format!("{name}: not an OpenSSH private key")))?;
    match identity {
        ssh::Identity::Unencrypted(_) => Ok(identity),
        // Decrypted once here: the crate would prompt for every line of every slot.
        ssh::Identity::Encrypted(key) => {
            let answer = prompts.secret(&format!("Passphrase of the SSH key {name}: "));
            let passphrase = answer.as_ref().and_then(secret_string);
            let passphrase = passphrase
                .ok_or_else(|| Error::invalid(format!("{name}: cannot ask for the passphrase of the SSH key")))?;
            let opened = key.decrypt(passphrase);
            let opened = opened.map_err(|_| Error::invalid(format!("{name}: wrong passphrase of the SSH key")))?;
            Ok(ssh::Identity::Unencrypted(opened))
        }
        ssh::Identity::Unsupported(_) => Err(Error::invalid(format!(
            "{name}: this kind of SSH key cannot be used: RSA and Ed25519 keys in OpenSSH's format can"
        ))),
    }
}

/// Recipient that a slot is sealed to.
pub struct Recipient {
    kind: Kind,
    text: String,
}

enum Kind {
    X25519(x25519::Recipient),
    Tag(tag::Recipient),
    TagPq(Box<tagpq::Recipient>),
    Ssh(Box<ssh::Recipient>),
    Plugin(plugin::Recipient),
}

impl Recipient {
    /// Parses a recipient.
    ///
    /// # Errors
    /// `Invalid` with the accepted kinds; secrets passed by mistake are not quoted.
    pub fn parse(text: &str) -> Result<Recipient> {
        let text = text.trim();
        // Case-insensitive, like identities.
        let begins = |prefix: &str| text.get(..prefix.len()).is_some_and(|start| start.eq_ignore_ascii_case(prefix));
        if begins("AGE-SECRET-KEY-") || begins("AGE-PLUGIN-") {
            return Err(Error::invalid(
                "this is an identity, which is secret: pass its recipient (age1...), which 'age-keygen -y' prints",
            ));
        }
        if text.starts_with("-----BEGIN") {
            return Err(Error::invalid(
                "this is a private key, which is secret: pass its public key, usually the file of the same name with .pub",
            ));
        }
        if PUBLIC_KEYS.iter().any(|kind| text.starts_with(kind)) {
            return ssh_recipient(text);
        }
        let kind = if let Ok(recipient) = text.parse::<x25519::Recipient>() {
            Kind::X25519(recipient)
        } else if let Ok(recipient) = text.parse::<tag::Recipient>() {
            Kind::Tag(recipient)
        } else if let Ok(recipient) = text.parse::<tagpq::Recipient>() {
            Kind::TagPq(Box::new(recipient))
        } else if let Ok(recipient) = text.parse::<plugin::Recipient>() {
            Kind::Plugin(recipient)
        } else if begins("age1") {
            return Err(Error::invalid(
                "not an age recipient: its checksum is wrong; it was not copied completely or exactly",
            ));
        } else {
            return Err(Error::invalid(
                "no age recipient: it begins with age1, or is an SSH public key (ssh-ed25519 or ssh-rsa)",
            ));
        };
        Ok(Recipient { kind, text: text.to_owned() })
    }

    /// Returns the stored form, without a comment.
    pub(crate) fn text(&self) -> &str {
        &self.text
    }

    /// Returns whether an attacker who knows the recipient can tell from a copy of the archive that
    /// it may open it.
    pub fn is_identifiable(&self) -> bool {
        !matches!(self.kind, Kind::X25519(_))
    }

    /// Seals `key` into an age file. Errors: `Invalid` when a plugin is missing or fails.
    pub(crate) fn seal(&self, key: &SecretKey, prompts: &Arc<dyn Prompts>) -> Result<Vec<u8>> {
        let failed = |error: EncryptError| Error::invalid(format!("cannot seal to the recipient: {}", refusal(&error)));
        match &self.kind {
            Kind::X25519(recipient) => seal_to(recipient, key),
            Kind::Tag(recipient) => seal_to(recipient, key),
            Kind::TagPq(recipient) => seal_to(&**recipient, key),
            Kind::Ssh(recipient) => seal_to(&**recipient, key),
            Kind::Plugin(recipient) => {
                let all = std::slice::from_ref(recipient);
                plugin::RecipientPluginV1::new(recipient.plugin(), all, &[], AgeCallbacks(prompts.clone()))
                    .map_err(EncryptError::PluginResolve)
                    .and_then(|plugin| seal_to(&plugin, key))
            }
        }
        .map_err(failed)
    }
}

fn seal_to(recipient: &dyn age::Recipient, key: &SecretKey) -> std::result::Result<Vec<u8>, EncryptError> {
    let mut out = Vec::new();
    let mut writer = Encryptor::with_recipients(std::iter::once(recipient))?.wrap_output(&mut out)?;
    writer.write_all(key.bytes())?;
    writer.finish()?;
    Ok(out)
}

fn ssh_recipient(text: &str) -> Result<Recipient> {
    let refused = |why: &str| Error::invalid(format!("not an SSH recipient: {why}"));
    match text.parse::<ssh::Recipient>() {
        Ok(recipient) => Ok(Recipient { text: recipient.to_string(), kind: Kind::Ssh(Box::new(recipient)) }),
        Err(ssh::ParseRecipientKeyError::RsaModulusTooLarge) => Err(refused("the RSA key is too large")),
        Err(ssh::ParseRecipientKeyError::RsaModulusTooSmall) => Err(refused("RSA keys below 2048 bits are weak")),
        Err(ssh::ParseRecipientKeyError::Unsupported(kind)) => {
            Err(refused(&format!("keys of type {} cannot be sealed to; ssh-ed25519 and ssh-rsa can", printable(&kind))))
        }
        Err(_) => Err(refused("the public key is malformed")),
    }
}

/// Returns a one-line reason; the crate's messages have several lines.
fn reason(error: &DecryptError) -> String {
    match error {
        DecryptError::PluginResolve(error) => missing(error),
        DecryptError::Plugin(errors) => errors.first().map_or_else(|| "the plugin failed".to_owned(), said),
        DecryptError::Io(error) => died(error),
        DecryptError::KeyDecryptionFailed => "the identity is protected, and its passphrase is wrong or missing".into(),
        _ => "it does not decrypt a file sealed to it".into(),
    }
}

fn refusal(error: &EncryptError) -> String {
    match error {
        EncryptError::PluginResolve(error) => missing(error),
        EncryptError::Plugin(errors) => errors.first().map_or_else(|| "the plugin failed".to_owned(), said),
        EncryptError::Io(error) => died(error),
        _ => "the recipient refuses".into(),
    }
}

fn missing(error: &plugin::ResolveError) -> String {
    match error {
        plugin::ResolveError::MissingPlugin { binary_name } => {
            format!("{binary_name} is not installed, or not in PATH")
        }
        _ => "the name of the plugin is malformed".into(),
    }
}

fn said(error: &impl std::fmt::Display) -> String {
    printable(&error.to_string())
}

fn died(error: &std::io::Error) -> String {
    match error.kind() {
        std::io::ErrorKind::ConnectionAborted | std::io::ErrorKind::BrokenPipe => "the plugin ended early".into(),
        _ => printable(&format!("the plugin failed: {error}")),
    }
}
