//! What a user remembers of the shares they made: one owner token for each server, handles and labels.

use std::fs::File;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use lockbox_share_protocol::handle::Handle;
use lockbox_share_protocol::message::UnixSeconds;
use lockbox_share_protocol::token::OwnerToken;
use lockbox_terminal::quantity::Span;
use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};
use crate::http::Server;
use crate::state;

const VERSION: u32 = 1;
/// A server tells about a share for a day after its end; the user sees for a week that there was one.
const KEPT: u64 = 7 * 86_400;

/// One share that this user made.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Entry {
    /// Its public name.
    pub handle: Handle,
    /// Where it is, as [`Book::server`] reads it.
    server: String,
    /// What the user calls it. The file's name is not kept: it may be a secret of the archive it came from.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub label: Option<String>,
    /// When it was made.
    pub created_at: UnixSeconds,
    /// When it ends by itself.
    pub expires_at: UnixSeconds,
    /// For how long it was made, as its user named it; programs of before did not note it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    lifetime: Option<String>,
}

impl Entry {
    /// Where it is.
    pub fn server(&self) -> Server {
        named(&self.server)
    }

    /// For how long it was made, when that is known.
    pub fn lifetime(&self) -> Option<Span> {
        Span::parse(self.lifetime.as_deref()?)
    }
}

#[derive(Serialize, Deserialize)]
struct Owner {
    server: String,
    token: OwnerToken,
    /// User that listened at the socket when this user named it; none noted for other sockets, and
    /// by earlier programs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    listener: Option<u32>,
}

#[derive(Serialize, Deserialize)]
struct Pages {
    version: u32,
    owners: Vec<Owner>,
    shares: Vec<Entry>,
}

/// The remembered shares, locked against other programs of this user while it is open.
pub struct Book {
    path: PathBuf,
    pages: Pages,
    _lock: File,
}

fn name(server: &Server) -> String {
    match server {
        Server::Url(url) => url.clone(),
        Server::Socket(path) => format!("unix:{}", path.display()),
    }
}

fn named(name: &str) -> Server {
    match name.strip_prefix("unix:") {
        Some(path) => Server::Socket(path.into()),
        None => Server::Url(name.to_owned()),
    }
}

impl Book {
    /// Opens the book in a directory of this user, and makes both when they are missing.
    ///
    /// # Errors
    /// When the host fails, or the file is not understood.
    pub fn open(directory: &Path) -> Result<Book> {
        state::make_directory(directory)?;
        let lock_path = directory.join("shares.lock");
        let failed = || Error::io(format!("cannot lock {}", lock_path.display()));
        let lock = File::options().create(true).append(true).mode(0o600).open(&lock_path).map_err(failed())?;
        lock.lock().map_err(failed())?;
        let path = directory.join("shares.json");
        let pages = state::read::<Pages>(&path)?;
        let pages = pages.unwrap_or(Pages { version: VERSION, owners: Vec::new(), shares: Vec::new() });
        if pages.version != VERSION {
            let shown = path.display();
            return Err(Error::Invalid(format!("{shown} was written by a newer program (version {})", pages.version)));
        }
        Ok(Book { path, pages, _lock: lock })
    }

    /// The token by which a server knows this user, made at first use. Each server has its own: none can speak for the user at another.
    ///
    /// # Errors
    /// When the system has no randomness or the token cannot be saved.
    pub fn owner(&mut self, server: &Server) -> Result<&OwnerToken> {
        let at = self.entry_of(server)?;
        Ok(&self.pages.owners[at].token)
    }

    /// The user noted for a server's socket.
    pub fn listener(&self, server: &Server) -> Option<u32> {
        let server = name(server);
        self.pages.owners.iter().find(|owner| owner.server == server)?.listener
    }

    /// Notes the user that listens at a server's socket: from now on no other user but this one
    /// gets requests with the owner token.
    ///
    /// # Errors
    /// As of [`Book::owner`].
    pub fn note_listener(&mut self, server: &Server, user: u32) -> Result<()> {
        let at = self.entry_of(server)?;
        self.pages.owners[at].listener = Some(user);
        state::write(&self.path, &self.pages)
    }

    /// Returns the index of a server among the servers that know this user, with a new token where
    /// it does not.
    fn entry_of(&mut self, server: &Server) -> Result<usize> {
        let server = name(server);
        if let Some(known) = self.pages.owners.iter().position(|owner| owner.server == server) {
            return Ok(known);
        }
        let mut token = zeroize::Zeroizing::new([0; OwnerToken::LENGTH]);
        getrandom::fill(&mut token[..]).map_err(|_| Error::NoRandomness)?;
        self.pages.owners.push(Owner { server, token: OwnerToken::new(*token), listener: None });
        state::write(&self.path, &self.pages)?;
        Ok(self.pages.owners.len() - 1)
    }

    /// Adds a share, and forgets those that ended more than a week before `now`.
    ///
    /// # Errors
    /// When it cannot be saved.
    pub fn add(
        &mut self,
        server: &Server,
        handle: Handle,
        label: Option<&str>,
        created_at: UnixSeconds,
        expires_at: UnixSeconds,
        lifetime: Span,
    ) -> Result<()> {
        self.pages.shares.retain(|entry| entry.expires_at.saturating_add(KEPT) > created_at);
        let label = label.map(str::to_owned);
        let lifetime = Some(lifetime.to_string());
        self.pages.shares.push(Entry { handle, server: name(server), label, created_at, expires_at, lifetime });
        state::write(&self.path, &self.pages)
    }

    /// All shares, newest first.
    pub fn entries(&self) -> impl Iterator<Item = &Entry> {
        self.pages.shares.iter().rev()
    }

    /// The one share with this handle or, if no other has it, this label.
    ///
    /// # Errors
    /// When there is none or more than one.
    pub fn find(&self, wanted: &str) -> Result<&Entry> {
        let by_handle = |entry: &&Entry| entry.handle.to_string() == wanted;
        if let Some(entry) = self.entries().find(by_handle) {
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

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::os::unix::fs::PermissionsExt;

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
        let book = Book::open(place.path()).unwrap();
        assert_eq!(book.entries().map(Entry::lifetime).collect::<Vec<_>>(), [None]);
    }

    #[test]
    fn a_book_remembers_and_forgets() {
        let place = tempfile::tempdir().unwrap();
        let directory = place.path().join("a/b");
        let socket = Server::Socket("/run/x.sock".into());
        let url = Server::Url("https://example.org".into());
        let token = {
            let mut book = Book::open(&directory).unwrap();
            let token = book.owner(&socket).unwrap().to_text();
            assert_ne!(book.owner(&url).unwrap().to_text(), token);
            book.add(&socket, handle("1000000000001"), Some("tax"), 100, 200, day()).unwrap();
            book.add(&url, handle("1000000000002"), Some("tax"), 101, 200, day()).unwrap();
            book.add(&url, handle("1000000000003"), Some("keys"), 102, 200, day()).unwrap();
            token
        };
        let mut book = Book::open(&directory).unwrap();
        assert!(book.entries().all(|entry| entry.lifetime() == Some(day())));
        assert_eq!(book.owner(&socket).unwrap().to_text(), token);
        assert_eq!(book.listener(&socket), None);
        book.note_listener(&socket, 998).unwrap();
        drop(book);
        let mut book = Book::open(&directory).unwrap();
        assert_eq!((book.listener(&socket), book.listener(&url)), (Some(998), None));
        assert_eq!(book.owner(&socket).unwrap().to_text(), token);
        assert_eq!(book.entries().next().unwrap().handle, handle("1000000000003"));
        assert_eq!(book.find("1000000000001").unwrap().server(), socket);
        assert_eq!(book.find("keys").unwrap().server(), url);
        assert!(book.find("tax").unwrap_err().to_string().contains("more than one"));
        assert!(book.find("none").unwrap_err().to_string().contains("no share none"));
        book.add(&url, handle("1000000000004"), None, 201 + KEPT, 300 + KEPT, day()).unwrap();
        assert_eq!(book.entries().count(), 1);
        // A server may say anything of the time.
        book.add(&url, handle("1000000000005"), None, 202 + KEPT, u64::MAX, day()).unwrap();
        book.add(&url, handle("1000000000006"), None, 203 + KEPT, 300 + KEPT, day()).unwrap();
        assert_eq!(book.entries().count(), 3);
    }

    #[test]
    fn a_book_is_private_and_damage_is_told() {
        let place = tempfile::tempdir().unwrap();
        Book::open(place.path()).unwrap().owner(&Server::Url("https://x".into())).unwrap();
        let path = place.path().join("shares.json");
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        fs::write(&path, "{\"version\":1,\"owners\":[{\"server\":\"x\",\"token\":\"sesame\"}]}").unwrap();
        let told = Book::open(place.path()).map(drop).unwrap_err().to_string();
        assert!(told.contains("is damaged") && !told.contains("sesame"), "{told}");
        fs::write(&path, "{\"version\":2,\"owners\":[],\"shares\":[]}").unwrap();
        assert!(Book::open(place.path()).map(drop).unwrap_err().to_string().contains("newer program"));
    }
}
