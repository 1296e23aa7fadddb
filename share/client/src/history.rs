//! Share history of one user: an owner token per server, and the handles and labels of the created
//! shares; and the private files in which it and the notes of downloads are kept, replaced whole
//! and never half written.

use std::fs::{self, DirBuilder, File};
use std::io::{self, Read, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use lockbox_share_protocol::message::UnixSeconds;
use lockbox_share_protocol::token::{Handle, OwnerToken};
use lockbox_terminal::quantity::Span;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use zeroize::Zeroizing;

use crate::http::ServerAddress;
use crate::{Error, Result};

const VERSION: u32 = 1;
/// A server reports a share for a day after its end; its user sees for a week that it existed.
const RETENTION: u64 = 7 * 86_400;

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct HistoryEntry {
    pub handle: Handle,
    /// Server key, as [`HistoryEntry::server`] reads it.
    server: String,
    /// Label set by the user. The file's name is not stored: it may be a secret of its archive.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub label: Option<String>,
    pub created_at: UnixSeconds,
    pub expires_at: UnixSeconds,
    /// Lifetime as the user wrote it; earlier versions did not store it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    lifetime: Option<String>,
}

impl HistoryEntry {
    pub fn server(&self) -> ServerAddress {
        match self.server.strip_prefix("unix:") {
            Some(path) => ServerAddress::Socket(path.into()),
            None => ServerAddress::Url(self.server.clone()),
        }
    }

    pub fn lifetime(&self) -> Option<Span> {
        Span::parse(self.lifetime.as_deref()?)
    }
}

#[derive(Serialize, Deserialize)]
struct OwnerRecord {
    server: String,
    token: OwnerToken,
    /// User that listened at the socket when this user named it; none in other and in old records.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    listener: Option<u32>,
}

#[derive(Serialize, Deserialize)]
struct HistoryFile {
    version: u32,
    owners: Vec<OwnerRecord>,
    shares: Vec<HistoryEntry>,
}

/// The remembered shares, locked against other programs of this user while it is open.
pub struct ShareHistory {
    path: PathBuf,
    file: HistoryFile,
    _lock: File,
}

fn server_key(server: &ServerAddress) -> String {
    match server {
        ServerAddress::Url(url) => url.clone(),
        ServerAddress::Socket(path) => format!("unix:{}", path.display()),
    }
}

impl ShareHistory {
    /// Opens the history in a directory of this user, and creates both if they are missing.
    ///
    /// # Errors
    /// When the host fails, or the file is not understood.
    pub fn open(directory: &Path) -> Result<ShareHistory> {
        create_private_directory(directory)?;
        let lock_path = directory.join("shares.lock");
        let failed = || Error::io(format!("cannot lock {}", lock_path.display()));
        let lock = File::options().create(true).append(true).mode(0o600).open(&lock_path).map_err(failed())?;
        lock.lock().map_err(failed())?;
        let path = directory.join("shares.json");
        let file =
            read_json(&path)?.unwrap_or(HistoryFile { version: VERSION, owners: Vec::new(), shares: Vec::new() });
        if file.version != VERSION {
            let shown = path.display();
            return Err(Error::Invalid(format!("{shown} was written by a newer program (version {})", file.version)));
        }
        Ok(ShareHistory { path, file, _lock: lock })
    }

    /// The token by which a server knows this user, made at first use. Each server has its own:
    /// none can speak for the user at another.
    ///
    /// # Errors
    /// When the system has no randomness or the token cannot be saved.
    pub fn owner_token(&mut self, server: &ServerAddress) -> Result<&OwnerToken> {
        let at = self.owner_index(server)?;
        Ok(&self.file.owners[at].token)
    }

    pub fn listener_uid(&self, server: &ServerAddress) -> Option<u32> {
        let server = server_key(server);
        self.file.owners.iter().find(|owner| owner.server == server)?.listener
    }

    /// Notes the user that listens at a server's socket; no other user gets the owner token then.
    ///
    /// # Errors
    /// As for [`ShareHistory::owner_token`].
    pub fn record_listener(&mut self, server: &ServerAddress, user: u32) -> Result<()> {
        let at = self.owner_index(server)?;
        self.file.owners[at].listener = Some(user);
        write_json(&self.path, &self.file)
    }

    /// Returns the index of the server's record; creates the record with a new token if it is
    /// missing.
    fn owner_index(&mut self, server: &ServerAddress) -> Result<usize> {
        let server = server_key(server);
        if let Some(known) = self.file.owners.iter().position(|owner| owner.server == server) {
            return Ok(known);
        }
        let mut token = Zeroizing::new([0; OwnerToken::LENGTH]);
        getrandom::fill(&mut token[..]).map_err(|_| Error::NoRandomness)?;
        self.file.owners.push(OwnerRecord { server, token: OwnerToken::new(*token), listener: None });
        write_json(&self.path, &self.file)?;
        Ok(self.file.owners.len() - 1)
    }

    /// Adds a share, and removes shares that ended more than a week before `created_at`.
    ///
    /// # Errors
    /// When it cannot be saved.
    pub fn add(
        &mut self,
        server: &ServerAddress,
        handle: Handle,
        label: Option<&str>,
        created_at: UnixSeconds,
        expires_at: UnixSeconds,
        lifetime: Span,
    ) -> Result<()> {
        self.file.shares.retain(|entry| entry.expires_at.saturating_add(RETENTION) > created_at);
        let (server, label) = (server_key(server), label.map(str::to_owned));
        let lifetime = Some(lifetime.to_string());
        self.file.shares.push(HistoryEntry { handle, server, label, created_at, expires_at, lifetime });
        write_json(&self.path, &self.file)
    }

    /// Newest first.
    pub fn entries(&self) -> impl Iterator<Item = &HistoryEntry> {
        self.file.shares.iter().rev()
    }

    /// The one share with this handle or, if no other has it, this label.
    ///
    /// # Errors
    /// When there is none or more than one.
    pub fn find(&self, wanted: &str) -> Result<&HistoryEntry> {
        if let Some(entry) = self.entries().find(|entry| entry.handle.to_string() == wanted) {
            return Ok(entry);
        }
        let mut labelled = self.entries().filter(|entry| entry.label.as_deref() == Some(wanted));
        match (labelled.next(), labelled.next()) {
            (Some(entry), None) => Ok(entry),
            (Some(_), Some(_)) => Err(Error::Invalid(format!(
                "more than one share is labelled {wanted}; use the ID that 'lockbox share ls' shows"
            ))),
            (None, _) => Err(Error::Invalid(format!("no share {wanted} is known here; 'lockbox share ls' shows all"))),
        }
    }
}

/// A file of this kind has some hundred bytes for each share.
const MAX_BYTES: u64 = 16 << 20;
/// Retention of the note of a claimed link. By default a share lives for at most a week.
pub(crate) const NOTE_RETENTION: Duration = Duration::from_secs(30 * 86_400);

pub(crate) fn create_private_directory(path: &Path) -> Result<()> {
    let made = DirBuilder::new().recursive(true).mode(0o700).create(path);
    made.map_err(Error::io(format!("cannot create the directory {}", path.display())))
}

/// Removes files that were not modified for `age`; a failed removal is retried by the next call.
pub(crate) fn sweep(directory: &Path, age: Duration) {
    let Ok(entries) = fs::read_dir(directory) else { return };
    for entry in entries.flatten() {
        let modified = entry.metadata().and_then(|metadata| metadata.modified());
        if modified.is_ok_and(|modified| modified.elapsed().is_ok_and(|elapsed| elapsed > age)) {
            let _ = fs::remove_file(entry.path());
        }
    }
}

/// Reads a file; `None` when it does not exist.
pub(crate) fn read_json<T: DeserializeOwned>(path: &Path) -> Result<Option<T>> {
    let shown = path.display();
    let file = match File::open(path) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(Error::io(format!("cannot open {shown}"))(error)),
    };
    let mut text = Zeroizing::new(Vec::with_capacity(64 << 10));
    file.take(MAX_BYTES).read_to_end(&mut text).map_err(Error::io(format!("cannot read {shown}")))?;
    // The parser's message may repeat what it read, and that is secret.
    let value = serde_json::from_slice(&text);
    value.map(Some).map_err(|_| Error::Invalid(format!("{shown} is damaged; move it away to start a new one")))
}

/// Replaces a file atomically: writes a temporary file, syncs it and renames it.
pub(crate) fn write_json(path: &Path, value: &impl Serialize) -> Result<()> {
    let failed = || Error::io(format!("cannot write {}", path.display()));
    let text = serde_json::to_vec_pretty(value).map(Zeroizing::new);
    let text = text.map_err(|error| Error::Invalid(error.to_string()))?;
    let temporary = path.with_extension("new");
    let _ = fs::remove_file(&temporary);
    let mut file = File::options().write(true).create_new(true).mode(0o600).open(&temporary).map_err(failed())?;
    file.write_all(&text).and_then(|()| file.sync_all()).map_err(failed())?;
    fs::rename(&temporary, path).map_err(failed())?;
    match path.parent() {
        Some(directory) => File::open(directory).and_then(|directory| directory.sync_all()).map_err(failed()),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;
    use std::time::SystemTime;

    fn handle(text: &str) -> Handle {
        text.parse().unwrap()
    }

    fn day() -> Span {
        Span::parse("1d").unwrap()
    }

    #[test]
    fn a_book_of_a_program_of_before_is_read() {
        let place = tempfile::tempdir().unwrap();
        let entry = r#"{"handle":"1000000000001","server":"https://x","created_at":1,"expires_at":2}"#;
        let text = format!(r#"{{"version":1,"owners":[],"shares":[{entry}]}}"#);
        fs::write(place.path().join("shares.json"), text).unwrap();
        let book = ShareHistory::open(place.path()).unwrap();
        assert_eq!(book.entries().map(HistoryEntry::lifetime).collect::<Vec<_>>(), [None]);
    }

    #[test]
    fn a_book_remembers_and_forgets() {
        let place = tempfile::tempdir().unwrap();
        let directory = place.path().join("a/b");
        let socket = ServerAddress::Socket("/run/x.sock".into());
        let url = ServerAddress::Url("https://example.org".into());
        let token = {
            let mut book = ShareHistory::open(&directory).unwrap();
            let token = book.owner_token(&socket).unwrap().to_text();
            assert_ne!(book.owner_token(&url).unwrap().to_text(), token);
            book.add(&socket, handle("1000000000001"), Some("tax"), 100, 200, day()).unwrap();
            book.add(&url, handle("1000000000002"), Some("tax"), 101, 200, day()).unwrap();
            book.add(&url, handle("1000000000003"), Some("keys"), 102, 200, day()).unwrap();
            token
        };
        let mut book = ShareHistory::open(&directory).unwrap();
        assert!(book.entries().all(|entry| entry.lifetime() == Some(day())));
        assert_eq!(book.owner_token(&socket).unwrap().to_text(), token);
        assert_eq!(book.listener_uid(&socket), None);
        book.record_listener(&socket, 998).unwrap();
        drop(book);
        let mut book = ShareHistory::open(&directory).unwrap();
        assert_eq!((book.listener_uid(&socket), book.listener_uid(&url)), (Some(998), None));
        assert_eq!(book.owner_token(&socket).unwrap().to_text(), token);
        assert_eq!(book.entries().next().unwrap().handle, handle("1000000000003"));
        assert_eq!(book.find("1000000000001").unwrap().server(), socket);
        assert_eq!(book.find("keys").unwrap().server(), url);
        assert!(book.find("tax").unwrap_err().to_string().contains("more than one"));
        assert!(book.find("none").unwrap_err().to_string().contains("no share none"));
        book.add(&url, handle("1000000000004"), None, 201 + RETENTION, 300 + RETENTION, day()).unwrap();
        assert_eq!(book.entries().count(), 1);
        // A server may say anything of the time.
        book.add(&url, handle("1000000000005"), None, 202 + RETENTION, u64::MAX, day()).unwrap();
        book.add(&url, handle("1000000000006"), None, 203 + RETENTION, 300 + RETENTION, day()).unwrap();
        assert_eq!(book.entries().count(), 3);
    }

    #[test]
    fn a_book_is_private_and_damage_is_told() {
        let place = tempfile::tempdir().unwrap();
        ShareHistory::open(place.path()).unwrap().owner_token(&ServerAddress::Url("https://x".into())).unwrap();
        let path = place.path().join("shares.json");
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        fs::write(&path, "{\"version\":1,\"owners\":[{\"server\":\"x\",\"token\":\"sesame\"}]}").unwrap();
        let told = ShareHistory::open(place.path()).map(drop).unwrap_err().to_string();
        assert!(told.contains("is damaged") && !told.contains("sesame"), "{told}");
        fs::write(&path, "{\"version\":2,\"owners\":[],\"shares\":[]}").unwrap();
        assert!(ShareHistory::open(place.path()).map(drop).unwrap_err().to_string().contains("newer program"));
    }

    #[test]
    fn only_old_files_are_swept() {
        let place = tempfile::tempdir().unwrap();
        let day = Duration::from_secs(86_400);
        for (name, days) in [("old", 9), ("new", 7)] {
            write_json(&place.path().join(name), &1).unwrap();
            let file = File::options().write(true).open(place.path().join(name)).unwrap();
            file.set_modified(SystemTime::now() - day * days).unwrap();
        }
        sweep(place.path(), day * 8);
        assert_eq!(read_json::<u8>(&place.path().join("old")).unwrap(), None);
        assert_eq!(read_json::<u8>(&place.path().join("new")).unwrap(), Some(1));
    }
}
