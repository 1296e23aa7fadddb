//! Caches keys of archives in the kernel's keyring of the user for a limited time.
//!
//! The cached secret is the volume key, never a passphrase, which may open other things too; its
//! name is made of the archive's id. Only processes with the file system uid of the key's owner can
//! see, read or drop it.
//!
//! The possessor has no rights: possession is granted by the session keyring, which su(1), sudo(8),
//! runuser(1) and setpriv(1) pass to processes of other users. The key is created in the keyring of
//! this process, gets its permissions and its timeout there, and only then is linked into the
//! user's keyring, so there is no moment at which it has no timeout.

use std::ffi::OsString;
use std::time::Duration;

use clap::Args;
use linux_keyutils::{Key, KeyError, KeyPermissionsBuilder, KeyRing, KeyRingIdentifier, KeySerialId, Permission};
use zeroize::Zeroizing;

use super::{Bytes, Error, Result};

/// Caching of keys in the kernel's keyring
#[derive(Args, Clone, Debug, Default, PartialEq, Eq)]
pub struct Cache {
    /// Keep the key of the archive in the kernel's keyring for TIME, such as 10m; commands and mounts use it before they ask
    #[arg(long, value_name = "TIME", value_parser = parse_timeout)]
    pub keyring_cache: Option<Duration>,
}

impl Cache {
    /// Returns the same options for the command line of another program of lockbox.
    pub fn arguments(&self) -> Option<OsString> {
        self.keyring_cache.map(|timeout| format!("--keyring-cache={}s", timeout.as_secs()).into())
    }
}

/// Begins the description of every key that is kept.
const PREFIX: &str = "lockbox:";

/// Upper bound; the secrets of programs are shorter: an archive id and a volume key.
const MOST_BYTES: usize = 256;

/// A longer time is a mistake, and the kernel's counter has a limit too.
const LONGEST: Duration = Duration::from_secs(30 * 24 * 3600);

/// The keyring of this user, in the possession of this process.
pub struct Keyring {
    user: KeyRing,
    own: KeyRing,
}

impl Keyring {
    /// # Errors
    /// One sentence when the kernel, or the container around this process, has no keyrings.
    pub fn open() -> Result<Keyring> {
        let none =
            |error| Error::source(format!("the kernel's keyring is not available to this process: {}", reason(error)));
        let user = KeyRing::from_special_id(KeyRingIdentifier::User, true).map_err(none)?;
        let own = KeyRing::from_special_id(KeyRingIdentifier::Process, true).map_err(none)?;
        // Possession requires a link from a keyring of the process; sessions that did not begin
        // with a login have none to the user's.
        own.link_keyring(user).map_err(none)?;
        Ok(Keyring { user, own })
    }

    /// Caches `secret` for the archive with this id, in place of an earlier one, until `timeout`
    /// has passed.
    ///
    /// # Errors
    /// One sentence when the kernel refuses, such as for a quota.
    pub fn keep(&self, archive: &[u8; 16], secret: &[u8], timeout: Duration) -> Result<()> {
        let failed = |error| Error::source(format!("cannot store the key in the kernel's keyring: {}", reason(error)));
        let key = self.own.add_key(&name(archive), secret).map_err(failed)?;
        let kept = (|| {
            key.set_timeout(usize::try_from(timeout.as_secs()).unwrap_or(usize::MAX).max(1))?;
            let owner_only = KeyPermissionsBuilder::builder().user(Permission::ALL).build();
            key.set_perms(owner_only)?;
            self.user.link_key(key)
        })();
        kept.map_err(|error| {
            let _ = key.invalidate();
            failed(error)
        })
    }

    /// Returns the cached secret of the archive with this id.
    pub fn kept(&self, archive: &[u8; 16]) -> Option<Bytes> {
        let key = self.user.search(&name(archive)).ok()?;
        let mut bytes = Zeroizing::new(vec![0; MOST_BYTES]);
        // The result is the length of the key, regardless of the size of the buffer.
        let length = key.read(&mut *bytes).ok().filter(|&length| (1..=MOST_BYTES).contains(&length))?;
        bytes.truncate(length);
        Some(bytes)
    }

    /// Removes the cached secret of the archive with this id; returns whether there was one.
    ///
    /// # Errors
    /// One sentence when the kernel refuses.
    pub fn forget(&self, archive: &[u8; 16]) -> Result<bool> {
        match self.user.search(&name(archive)) {
            Ok(key) => key.invalidate().map(|()| true).map_err(refused),
            Err(KeyError::KeyDoesNotExist | KeyError::KeyExpired | KeyError::KeyRevoked) => Ok(false),
            Err(error) => Err(refused(error)),
        }
    }

    /// Drops everything that is kept for this user; answers how many keys there were.
    ///
    /// # Errors
    /// One sentence when the kernel refuses.
    pub fn forget_all(&self) -> Result<usize> {
        // The list shows this process every key that its user owns, wherever the key is linked.
        let list = std::fs::read_to_string("/proc/keys")
            .map_err(|e| Error::host("cannot read the list of the kernel's keys", &e))?;
        let ours: Vec<Key> = list.lines().filter_map(of_list).collect();
        let mut failure = None;
        for key in &ours {
            match key.invalidate() {
                // It ended meanwhile.
                Ok(()) | Err(KeyError::KeyDoesNotExist | KeyError::KeyExpired | KeyError::KeyRevoked) => {}
                // The others are dropped all the same.
                Err(error) => failure = Some(refused(error)),
            }
        }
        failure.map_or(Ok(ours.len()), Err)
    }
}

/// Parses a line of /proc/keys, if it is a valid key of ours: id, flags, usage, end, permissions,
/// uid, gid, type, description.
fn of_list(line: &str) -> Option<Key> {
    let fields: Vec<&str> = line.split_ascii_whitespace().collect();
    let [id, flags, _, _, _, owner, _, kind, description, ..] = fields[..] else { return None };
    let id = i32::from_str_radix(id, 16).ok()?;
    // Keys of other users may be listed too.
    let ours = owner == nix::unistd::geteuid().to_string() && kind == "user" && description.starts_with(PREFIX);
    // R: revoked, i: invalidated, D: dead; they wait for the collector.
    (ours && !flags.contains(['R', 'i', 'D'])).then(|| Key::from_id(KeySerialId(id)))
}

fn name(archive: &[u8; 16]) -> String {
    format!("{PREFIX}{}", lockbox_terminal::hex(archive))
}

fn refused(error: KeyError) -> Error {
    Error::source(format!("cannot drop a key from the kernel's keyring: {}", reason(error)))
}

fn reason(error: KeyError) -> String {
    match error {
        KeyError::QuotaExceeded => "the user's quota of keys is used up".into(),
        KeyError::PermissionDenied | KeyError::AccessDenied => "not permitted here, as in many containers".into(),
        KeyError::OperationNotSupported => "not supported".into(),
        KeyError::Unknown(number) => nix::errno::Errno::from_raw(number).desc().into(),
        other => format!("{other:?}"),
    }
}

/// Parses a time for which a key may be cached. Errors: a sentence for the command line.
pub(crate) fn parse_timeout(text: &str) -> std::result::Result<Duration, String> {
    lockbox_terminal::quantity::time(text)
        .filter(|timeout| !timeout.is_zero() && *timeout <= LONGEST)
        .ok_or_else(|| format!("takes a time such as 90s, 10m or 12h, up to 30d, not '{}'", text.escape_default()))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns None on a machine without keyrings, and prints that.
    fn keyring() -> Option<Keyring> {
        Keyring::open().map_err(|error| println!("not tested: {error}")).ok()
    }

    fn id(number: u8) -> [u8; 16] {
        let mut id = [number; 16];
        id[..4].copy_from_slice(&std::process::id().to_le_bytes());
        id
    }

    #[test]
    fn what_is_kept_is_found_replaced_and_forgotten() {
        let Some(keyring) = keyring() else { return };
        let archive = id(1);
        assert!(keyring.kept(&archive).is_none());
        for secret in [&[7; 48][..], &[8; 48]] {
            keyring.keep(&archive, secret, Duration::from_secs(60)).unwrap();
            assert_eq!(&**keyring.kept(&archive).unwrap(), secret);
            // Another process would open it again.
            assert_eq!(&**Keyring::open().unwrap().kept(&archive).unwrap(), secret);
        }
        assert!(keyring.kept(&id(2)).is_none());
        assert!(keyring.forget(&archive).unwrap());
        assert!(keyring.kept(&archive).is_none());
        assert!(!keyring.forget(&archive).unwrap());
    }

    #[test]
    fn a_kept_key_has_an_end_and_its_owner_alone_has_rights_whoever_possesses_it() {
        let Some(keyring) = keyring() else { return };
        // The tests of `unlock.rs` use the ids up to 3 in the same keyring.
        let archive = id(4);
        keyring.keep(&archive, &[7; 48], Duration::from_secs(3600)).unwrap();
        let list = std::fs::read_to_string("/proc/keys").unwrap();
        let line = list.lines().find(|line| line.contains(&name(&archive))).unwrap();
        let fields: Vec<&str> = line.split_ascii_whitespace().collect();
        assert_eq!(fields[4], "003f0000", "{line}");
        // Full units of time that are left, so never the hour itself.
        assert!(matches!(fields[3], "59m" | "60m" | "1h"), "{line}");
        assert!(keyring.forget(&archive).unwrap());
    }

    #[test]
    fn times_have_units_and_bounds() {
        for (text, seconds) in [("90", 90), ("90s", 90), ("10m", 600), ("12h", 43_200), ("30d", 2_592_000)] {
            assert_eq!(parse_timeout(text), Ok(Duration::from_secs(seconds)), "{text}");
        }
        for text in ["", "m", "0", "0m", "31d", "10 m", "-1", "1.5h", "10M", "99999999999999999999", "\u{1f4a3}"] {
            assert!(parse_timeout(text).is_err(), "{text:?}");
        }
    }

    #[test]
    fn lines_of_other_keys_are_passed_over() {
        let line = |flags: &str, kind: &str, description: &str| {
            of_list(&format!("0d16ca06 {flags}     1  10m 003f0000     0     0 {kind}      {description}: 48"))
        };
        assert_eq!(line("I--Q---", "user", "lockbox:ab"), Some(Key::from_id(KeySerialId(0x0d16_ca06))));
        for (flags, kind, description) in [
            ("I--Q---", "keyring", "lockbox:ab"),
            ("I--Q---", "user", "other:lockbox:ab"),
            ("I--Q--i", "user", "lockbox:ab"),
            ("IR-Q---", "user", "lockbox:ab"),
        ] {
            assert_eq!(line(flags, kind, description), None);
        }
        assert_eq!(of_list(""), None);
    }
}
