//! The runtime directory of this process's user, where control sockets live.

use std::ffi::OsString;
use std::fs::DirBuilder;
use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::path::PathBuf;

use lockbox::control::{self, Place, Runtime};
use nix::unistd::geteuid;

use crate::exit::Failure;

fn given() -> Option<OsString> {
    std::env::var_os("XDG_RUNTIME_DIR")
}

/// Where daemons of this user may be; those of other users are not asked.
pub fn places() -> Vec<Place> {
    places_of(geteuid().as_raw())
}

/// Where daemons of this one may be; nowhere for one whom this process's user may not ask.
pub fn places_of(owner: u32) -> Vec<Place> {
    let mut places = control::places(given().as_deref(), geteuid().as_raw());
    places.retain(|place| place.owner == owner);
    places
}

/// That of the next mount, made if it is not there.
pub fn directory() -> Result<PathBuf, Failure> {
    let chosen = || control::runtime(given().as_deref(), geteuid().as_raw());
    if let Runtime::Missing(path) = chosen() {
        match DirBuilder::new().mode(0o700).create(&path) {
            Err(e) if e.kind() != io::ErrorKind::AlreadyExists => {
                return Err(Failure::other(format!("cannot create {}: {e}", path.display())));
            }
            _ => {}
        }
    }
    match chosen() {
        Runtime::Ready(path) => Ok(path),
        Runtime::Missing(path) | Runtime::NotPrivate(path) => {
            Err(Failure::other(format!("{} is not a private directory of this user", path.display())))
        }
    }
}
