//! Archives that are no files of this host: how programs name them, and how they are read.
//!
//! What is behind an address is the work of `lockbox_remote`. A program that was built without it knows an address when it sees one, and says so.

use std::io;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use lockbox::storage::{Site, Storage};
use lockbox::{Error, Result};
use lockbox_terminal::quantity;
use serde::{Deserialize, Serialize};

/// What a user says of how servers are asked.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Remote {
    allow_http: bool,
    allow_private: bool,
    /// Most bytes that are kept on disk.
    cache_bytes: Option<u64>,
    timeout: Option<Patience>,
}

/// How long a read waits for a server that does not answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
enum Patience {
    Until(Duration),
    ForEver,
}

impl Remote {
    /// The same, with nothing kept on disk: for a process that hands over to another one, which is to have the cache.
    pub fn without_cache(&self) -> Remote {
        Remote { cache_bytes: Some(0), ..self.clone() }
    }

    /// Takes a word of a list of options; whether it is one of these.
    ///
    /// # Errors
    /// A sentence about a value that cannot be.
    pub fn set(&mut self, name: &str, value: Option<&str>) -> std::result::Result<bool, String> {
        match (name, value) {
            ("allow-http" | "allow_http", None) => self.allow_http = true,
            ("allow-private" | "allow_private", None) => self.allow_private = true,
            ("cache-size" | "cache_size", Some(value)) => {
                let bytes = quantity::size(value)
                    .ok_or_else(|| format!("{name}= takes a size, such as 4G or 0, not '{value}'"))?;
                self.cache_bytes = Some(bytes);
            }
            ("timeout", Some("hard")) => self.timeout = Some(Patience::ForEver),
            ("timeout", Some(value)) => {
                let time = quantity::time(value).filter(|time| !time.is_zero());
                let time = time.ok_or_else(|| format!("timeout= takes a time, such as 30s, or hard, not '{value}'"))?;
                self.timeout = Some(Patience::Until(time));
            }
            _ => return Ok(false),
        }
        Ok(true)
    }
}

/// Where an archive is, and what is open of one that is no file of this host.
pub struct Place {
    path: PathBuf,
    elsewhere: Option<Arc<dyn Storage>>,
}

impl Place {
    /// A file, which whoever opens the archive opens.
    pub fn file(path: &Path) -> Place {
        Place { path: path.to_owned(), elsewhere: None }
    }

    /// What is at an address, opened for reading.
    ///
    /// # Errors
    /// As of [`lockbox_remote::open`].
    pub fn at(address: &Path, how: &Remote) -> Result<Place> {
        open(address, how).map(|storage| Place { elsewhere: Some(storage), ..Place::file(address) })
    }

    /// The same by a process of its own, which `command` starts and [`fetch`] is.
    ///
    /// # Errors
    /// As of [`Place::at`], and of starting the process.
    pub fn apart(command: &mut Command, address: &Path, how: &Remote) -> Result<Place> {
        open_apart(command, address, how).map(|storage| Place { elsewhere: Some(storage), ..Place::file(address) })
    }

    pub fn site(&self) -> Site<'_> {
        self.elsewhere.as_ref().map_or(Site::File(&self.path), Site::Opened)
    }

    pub fn is_elsewhere(&self) -> bool {
        self.elsewhere.is_some()
    }
}

/// `--remote LIST`, as a program's command line has it.
#[derive(clap::Args, Clone, Debug, Default)]
pub struct RemoteArgs {
    /// How the server of an archive at an address is asked: allow-http, allow-private, cache-size=SIZE, timeout=TIME
    #[arg(long, value_name = "LIST", value_parser = parse_list, default_value = "", hide_default_value = true)]
    pub remote: Remote,
}

fn parse_list(list: &str) -> std::result::Result<Remote, String> {
    let mut remote = Remote::default();
    for option in list.split(',').filter(|option| !option.is_empty()) {
        let (name, value) = option.split_once('=').map_or((option, None), |(name, value)| (name, Some(value)));
        if !remote.set(name, value)? {
            return Err(format!("'{option}' says nothing about how servers are asked"));
        }
    }
    Ok(remote)
}

#[cfg(feature = "remote")]
mod built {
    use super::*;

    use lockbox_remote::{Address, Bucket, Names, Options};

    impl Remote {
        fn options(&self) -> Options {
            let default = Options::default();
            Options {
                allow_http: self.allow_http,
                allow_private: self.allow_private,
                cache_bytes: self.cache_bytes,
                timeout: match self.timeout {
                    None => default.timeout,
                    Some(Patience::Until(time)) => Some(time),
                    Some(Patience::ForEver) => None,
                },
                ..default
            }
        }
    }

    /// Whether this is the address of an archive and not the path of one.
    pub fn is_elsewhere(name: &Path) -> bool {
        Address::is_meant(name.as_os_str())
    }

    fn address(name: &Path) -> Result<Address> {
        Address::parse(name.as_os_str())?.ok_or_else(|| Error::invalid("that is no address"))
    }

    pub(super) fn open(name: &Path, how: &Remote) -> Result<Arc<dyn Storage>> {
        lockbox_remote::open(&address(name)?, &how.options())
    }

    pub(super) fn open_apart(command: &mut Command, name: &Path, how: &Remote) -> Result<Arc<dyn Storage>> {
        Ok(Arc::new(lockbox_remote::open_apart(command, &address(name)?, &how.options())?))
    }

    /// Comes as a writer to the archive at an address, or to a place for one. `is_ours`: nobody else gives names there.
    ///
    /// # Errors
    /// As of [`lockbox_remote::write`].
    pub fn write(name: &Path, how: &Remote, take_over: bool, is_ours: bool) -> Result<Bucket> {
        let names = if is_ours { Names::Ours } else { Names::Theirs };
        lockbox_remote::write(&address(name)?, &how.options(), take_over, names)
    }

    /// The directory that an address is of, when it is of one.
    pub fn directory(name: &Path) -> Option<PathBuf> {
        match address(name) {
            Ok(Address::Directory(url)) => url.to_file_path().ok(),
            _ => None,
        }
    }

    /// Serves [`Place::apart`] of the process at the other end, until that is gone.
    ///
    /// # Errors
    /// When nothing asks there that can be understood.
    pub fn fetch(control: UnixStream) -> io::Result<()> {
        lockbox_remote::serve(control)
    }
}

#[cfg(not(feature = "remote"))]
mod built {
    use super::*;

    /// Whether this is the address of an archive and not the path of one.
    pub fn is_elsewhere(name: &Path) -> bool {
        ["https://", "http://", "s3://", "file://"]
            .iter()
            .any(|scheme| name.as_os_str().as_encoded_bytes().starts_with(scheme.as_bytes()))
    }

    fn lacking() -> Error {
        Error::Unsupported("this program was built without archives on servers".into())
    }

    pub(super) fn open(_name: &Path, _how: &Remote) -> Result<Arc<dyn Storage>> {
        Err(lacking())
    }

    pub(super) fn open_apart(_command: &mut Command, _name: &Path, _how: &Remote) -> Result<Arc<dyn Storage>> {
        Err(lacking())
    }

    /// What nobody has here.
    pub enum Bucket {}

    impl Bucket {
        pub fn existing(&mut self) -> Result<Option<Arc<dyn Storage>>> {
            match *self {}
        }

        pub fn fresh(&mut self) -> Result<Arc<dyn Storage>> {
            match *self {}
        }

        pub fn publish(self) -> Result<()> {
            match self {}
        }
    }

    /// # Errors
    /// Always.
    pub fn write(_name: &Path, _how: &Remote, _take_over: bool, _is_ours: bool) -> Result<Bucket> {
        Err(lacking())
    }

    /// None: nothing is read there.
    pub fn directory(_name: &Path) -> Option<PathBuf> {
        None
    }

    /// # Errors
    /// Always.
    pub fn fetch(_control: UnixStream) -> io::Result<()> {
        Err(io::ErrorKind::Unsupported.into())
    }
}

pub use built::{directory, fetch, is_elsewhere, write};
use built::{open, open_apart};

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_say_how_servers_are_asked() {
        let all = parse_list("allow-http,allow-private,cache-size=4G,timeout=2m").unwrap();
        let wanted = Remote {
            allow_http: true,
            allow_private: true,
            cache_bytes: Some(4 << 30),
            timeout: Some(Patience::Until(Duration::from_secs(120))),
        };
        assert_eq!(all, wanted);
        assert_eq!(parse_list("timeout=hard").unwrap().timeout, Some(Patience::ForEver));
        assert_eq!(parse_list("").unwrap(), Remote::default());
        for wrong in ["allow-all", "timeout=0", "timeout=x", "cache-size=-1", "allow-http=yes"] {
            assert!(parse_list(wrong).is_err(), "{wrong}");
        }
    }
}
