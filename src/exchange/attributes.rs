//! Extended attributes of host files, access control lists among them, copied in and out.

use std::collections::BTreeMap;
use std::ffi::CString;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};

use rustix::fs::{CWD, XattrFlags};
use rustix::io::Errno;

use super::host::{descriptor_path, host_error};
use super::skipped::{LeftOut, SECURITY, TRUSTED};
use crate::error::{Error, Result};
use crate::format::Ino;
use crate::fs::{FileSystem, XattrMode};

/// The kernel's limit of one value and of all names.
const MAX_VALUE: usize = 64 << 10;
/// Needs a writable file, so these are set before the mode; the others are set after owner and mode, which would change them.
const USER: &[u8] = b"user.";
const ACCESS_LISTS: [&[u8]; 2] = [b"system.posix_acl_access", b"system.posix_acl_default"];

/// Names and values.
pub(crate) type Attributes = BTreeMap<Vec<u8>, Vec<u8>>;

/// A host file whose attributes are read or set.
pub(crate) enum Object<'a> {
    Open(BorrowedFd<'a>),
    /// Held by its path, without being opened: no call for attributes takes such a descriptor, so they go by what /proc calls it.
    Held(BorrowedFd<'a>),
    /// A name in a directory (or a path): what cannot be opened. `follow` says whether a symbolic link stands for its target.
    Named {
        directory: BorrowedFd<'a>,
        name: &'a [u8],
        follow: bool,
    },
}

impl<'a> Object<'a> {
    pub(crate) fn open(file: &'a impl AsFd) -> Object<'a> {
        Object::Open(file.as_fd())
    }

    /// A path to a named object. There are no system calls for attributes by directory, so the path goes through the descriptor.
    fn path(directory: BorrowedFd<'_>, name: &[u8]) -> Vec<u8> {
        match directory.as_raw_fd() {
            fd if fd == CWD.as_raw_fd() => name.to_vec(),
            fd => [format!("/proc/self/fd/{fd}/").as_bytes(), name].concat(),
        }
    }

    /// The target of a symbolic link that is named.
    pub(crate) fn link_target(&self) -> Result<Vec<u8>> {
        let target = match *self {
            Object::Open(file) | Object::Held(file) => rustix::fs::readlinkat(file, "", Vec::new()),
            Object::Named { directory, name, .. } => rustix::fs::readlinkat(directory, name, Vec::new()),
        };
        target.map(CString::into_bytes).map_err(host_error("cannot read the link"))
    }

    fn list(&self, names: &mut [u8]) -> rustix::io::Result<usize> {
        match *self {
            Object::Open(file) => rustix::fs::flistxattr(file, names),
            Object::Held(file) => rustix::fs::listxattr(descriptor_path(file), names),
            Object::Named { directory, name, follow: true } => {
                rustix::fs::listxattr(Object::path(directory, name), names)
            }
            Object::Named { directory, name, .. } => rustix::fs::llistxattr(Object::path(directory, name), names),
        }
    }

    fn get(&self, attribute: &[u8], value: &mut [u8]) -> rustix::io::Result<usize> {
        match *self {
            Object::Open(file) => rustix::fs::fgetxattr(file, attribute, value),
            Object::Held(file) => rustix::fs::getxattr(descriptor_path(file), attribute, value),
            Object::Named { directory, name, follow: true } => {
                rustix::fs::getxattr(Object::path(directory, name), attribute, value)
            }
            Object::Named { directory, name, .. } => {
                rustix::fs::lgetxattr(Object::path(directory, name), attribute, value)
            }
        }
    }

    fn set(&self, attribute: &[u8], value: &[u8]) -> rustix::io::Result<()> {
        let flags = XattrFlags::empty();
        match *self {
            Object::Open(file) => rustix::fs::fsetxattr(file, attribute, value, flags),
            Object::Held(file) => rustix::fs::setxattr(descriptor_path(file), attribute, value, flags),
            // What a name means may have changed.
            Object::Named { .. } => Err(Errno::BADF),
        }
    }
}

/// Gives `ino` every attribute of a host file that the caller may read.
pub(crate) fn import(object: &Object<'_>, fs: &FileSystem, ino: Ino, path: &[u8], left: &mut LeftOut) -> Result<()> {
    for (name, value) in read(object)? {
        match fs.set_xattr(ino, &name, &value, XattrMode::Set) {
            // Of the host's own kind, or a list that no Linux could read back.
            Err(error @ (Error::Unsupported(_) | Error::AttributeTooLarge | Error::NotPermitted)) => {
                left.attributes.add(path, &name, &error);
            }
            other => other?,
        }
    }
    Ok(())
}

/// Every attribute of a host file that the caller may read.
pub(crate) fn read(object: &Object<'_>) -> Result<Attributes> {
    let failed = host_error("cannot read the extended attributes");
    let mut names = vec![0; 1024];
    let length = loop {
        match object.list(&mut names) {
            Ok(length) => break length,
            Err(Errno::RANGE) if names.len() < MAX_VALUE => names.resize(MAX_VALUE, 0),
            Err(Errno::NOTSUP) => return Ok(Attributes::new()),
            Err(errno) => return Err(failed(errno)),
        }
    };
    let mut found = Attributes::new();
    let mut value = Vec::new();
    for name in names[..length].split(|&b| b == 0).filter(|name| !name.is_empty()) {
        value.resize(MAX_VALUE, 0);
        match object.get(name, &mut value) {
            Ok(length) => found.insert(name.to_vec(), value[..length].to_vec()),
            // Removed since it was listed, or not for the caller to read.
            Err(Errno::NODATA | Errno::PERM | Errno::ACCESS | Errno::NOTSUP) => continue,
            Err(errno) => return Err(failed(errno)),
        };
    }
    Ok(found)
}

/// Whether `ino` has the attributes of a host file, as far as archives keep them.
pub(crate) fn same(object: &Object<'_>, fs: &FileSystem, ino: Ino) -> Result<bool> {
    let mut host = read(object)?;
    host.retain(|name, _| is_kept(name));
    let stored = comparable_names(fs, ino)?;
    if stored.len() != host.len() {
        return Ok(false);
    }
    for name in stored {
        if host.get(&name) != Some(&fs.xattr(ino, &name)?) {
            return Ok(false);
        }
    }
    Ok(true)
}

/// Gives `ino` the attributes of a host file, and takes away what that one does not have.
pub(crate) fn renew(object: &Object<'_>, fs: &FileSystem, ino: Ino, path: &[u8], left: &mut LeftOut) -> Result<()> {
    let host = read(object)?;
    for name in comparable_names(fs, ino)? {
        if !host.contains_key(&name) {
            fs.remove_xattr(ino, &name)?;
        }
    }
    import(object, fs, ino, path, left)
}

/// Names of stored attributes that the host would have shown to the caller: `trusted.` ones it shows to root alone.
fn comparable_names(fs: &FileSystem, ino: Ino) -> Result<Vec<Vec<u8>>> {
    let root = nix::unistd::geteuid().is_root();
    let names = fs.list_xattrs(ino)?;
    let names = names.split(|&b| b == 0).filter(|name| !name.is_empty() && (root || !name.starts_with(TRUSTED)));
    Ok(names.map(<[u8]>::to_vec).collect())
}

fn is_kept(name: &[u8]) -> bool {
    name.starts_with(USER) || name.starts_with(TRUSTED) || name.starts_with(SECURITY) || ACCESS_LISTS.contains(&name)
}

/// Takes the lists away that an existing object has: a copy brings its own permissions.
pub(crate) fn forget_lists(fs: &FileSystem, ino: Ino) -> Result<()> {
    ACCESS_LISTS.into_iter().try_for_each(|name| fs.remove_xattr(ino, name))
}

/// When an attribute is set on an extracted object: before its mode, or after.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Phase {
    BeforeMode,
    AfterMode,
}

/// Gives a host file those attributes that are set in this phase; what the host refuses is counted.
pub(crate) fn put(xattrs: &[(Vec<u8>, Vec<u8>)], object: &Object<'_>, phase: Phase, path: &[u8], left: &mut LeftOut) {
    for (name, value) in xattrs.iter().filter(|(name, _)| name.starts_with(USER) == (phase == Phase::BeforeMode)) {
        if left.withholds_attribute(path, name) {
            continue;
        }
        if let Err(errno) = object.set(name, value) {
            left.attributes.add(path, name, &std::io::Error::from(errno));
        }
    }
}

/// Gives a host file the attributes of `ino` that are set in this phase.
pub(crate) fn extract(
    fs: &FileSystem,
    ino: Ino,
    object: &Object<'_>,
    phase: Phase,
    path: &[u8],
    left: &mut LeftOut,
) -> Result<()> {
    for name in fs.list_xattrs(ino)?.split(|&b| b == 0).filter(|name| !name.is_empty()) {
        if name.starts_with(USER) != (phase == Phase::BeforeMode) || left.withholds_attribute(path, name) {
            continue;
        }
        // A full disk shows as well where there is no room for attributes only, and files as such are complete by now.
        if let Err(errno) = object.set(name, &fs.xattr(ino, name)?) {
            left.attributes.add(path, name, &std::io::Error::from(errno));
        }
    }
    Ok(())
}
