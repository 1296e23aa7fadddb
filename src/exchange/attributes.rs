//! Metadata of host files in the archive: copies extended attributes, including access control
//! lists, in both directions, and compares an object with its host file.

use std::collections::BTreeMap;
use std::ffi::CString;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};

use rustix::fs::{CWD, Stat, XattrFlags};
use rustix::io::Errno;

use super::host::{descriptor_path, device_number, host_error};
use super::skipped::{SECURITY, SkippedItems, TRUSTED};
use crate::error::{Error, Result, Timestamp};
use crate::format::Ino;
use crate::fs::{Attributes, FileSystem, XattrMode, mode};

/// Kernel limit in bytes of one value and of the list of names.
const MAX_VALUE: usize = 64 << 10;
/// Needs a writable file, so these are set before the mode. Other attributes are set after owner
/// and mode, which would change them.
const USER: &[u8] = b"user.";
const ACCESS_LISTS: [&[u8]; 2] = [b"system.posix_acl_access", b"system.posix_acl_default"];

/// Attribute values by name.
pub(crate) type XattrMap = BTreeMap<Vec<u8>, Vec<u8>>;

/// Host file, for reading or setting its attributes.
pub(crate) enum XattrObject<'a> {
    Open(BorrowedFd<'a>),
    /// Opened with `O_PATH`. Attribute calls do not accept such a descriptor, so the path below
    /// /proc is used.
    Held(BorrowedFd<'a>),
    /// Name in a directory (or a path), for objects that cannot be opened. With `follow` a symbolic
    /// link stands for its target.
    Named {
        directory: BorrowedFd<'a>,
        name: &'a [u8],
        follow: bool,
    },
}

impl<'a> XattrObject<'a> {
    pub(crate) fn open(file: &'a impl AsFd) -> XattrObject<'a> {
        XattrObject::Open(file.as_fd())
    }

    /// Returns a path to a named object. There are no attribute calls relative to a directory, so
    /// the path goes through its descriptor.
    fn path(directory: BorrowedFd<'_>, name: &[u8]) -> Vec<u8> {
        match directory.as_raw_fd() {
            fd if fd == CWD.as_raw_fd() => name.to_vec(),
            fd => [format!("/proc/self/fd/{fd}/").as_bytes(), name].concat(),
        }
    }

    /// Returns the target of a symbolic link.
    pub(crate) fn link_target(&self) -> Result<Vec<u8>> {
        let target = match *self {
            XattrObject::Open(file) | XattrObject::Held(file) => rustix::fs::readlinkat(file, "", Vec::new()),
            XattrObject::Named { directory, name, .. } => rustix::fs::readlinkat(directory, name, Vec::new()),
        };
        target.map(CString::into_bytes).map_err(host_error("cannot read the link"))
    }

    fn list(&self, names: &mut [u8]) -> rustix::io::Result<usize> {
        match *self {
            XattrObject::Open(file) => rustix::fs::flistxattr(file, names),
            XattrObject::Held(file) => rustix::fs::listxattr(descriptor_path(file), names),
            XattrObject::Named { directory, name, follow: true } => {
                rustix::fs::listxattr(XattrObject::path(directory, name), names)
            }
            XattrObject::Named { directory, name, .. } => {
                rustix::fs::llistxattr(XattrObject::path(directory, name), names)
            }
        }
    }

    fn get(&self, attribute: &[u8], value: &mut [u8]) -> rustix::io::Result<usize> {
        match *self {
            XattrObject::Open(file) => rustix::fs::fgetxattr(file, attribute, value),
            XattrObject::Held(file) => rustix::fs::getxattr(descriptor_path(file), attribute, value),
            XattrObject::Named { directory, name, follow: true } => {
                rustix::fs::getxattr(XattrObject::path(directory, name), attribute, value)
            }
            XattrObject::Named { directory, name, .. } => {
                rustix::fs::lgetxattr(XattrObject::path(directory, name), attribute, value)
            }
        }
    }

    fn set(&self, attribute: &[u8], value: &[u8]) -> rustix::io::Result<()> {
        let flags = XattrFlags::empty();
        match *self {
            XattrObject::Open(file) => rustix::fs::fsetxattr(file, attribute, value, flags),
            XattrObject::Held(file) => rustix::fs::setxattr(descriptor_path(file), attribute, value, flags),
            // The name may denote another object by now.
            XattrObject::Named { .. } => Err(Errno::BADF),
        }
    }
}

/// Copies every attribute of a host file that the caller may read to `ino`.
pub(crate) fn import(
    object: &XattrObject<'_>,
    fs: &FileSystem,
    ino: Ino,
    path: &[u8],
    skipped: &mut SkippedItems,
) -> Result<()> {
    for (name, value) in read(object)? {
        match fs.set_xattr(ino, &name, &value, XattrMode::Set) {
            // A host-specific attribute, or an access control list that Linux could not read back.
            Err(error @ (Error::Unsupported(_) | Error::AttributeTooLarge | Error::NotPermitted)) => {
                skipped.attributes.add(path, &name, &error);
            }
            other => other?,
        }
    }
    Ok(())
}

/// Returns every attribute of a host file that the caller may read.
pub(crate) fn read(object: &XattrObject<'_>) -> Result<XattrMap> {
    let failed = host_error("cannot read the extended attributes");
    let mut names = vec![0; 1024];
    let length = loop {
        match object.list(&mut names) {
            Ok(length) => break length,
            Err(Errno::RANGE) if names.len() < MAX_VALUE => names.resize(MAX_VALUE, 0),
            Err(Errno::NOTSUP) => return Ok(XattrMap::new()),
            Err(errno) => return Err(failed(errno)),
        }
    };
    let mut found = XattrMap::new();
    let mut value = Vec::new();
    for name in names[..length].split(|&b| b == 0).filter(|name| !name.is_empty()) {
        value.resize(MAX_VALUE, 0);
        match object.get(name, &mut value) {
            Ok(length) => found.insert(name.to_vec(), value[..length].to_vec()),
            // Removed since it was listed, or not readable for the caller.
            Err(Errno::NODATA | Errno::PERM | Errno::ACCESS | Errno::NOTSUP) => continue,
            Err(errno) => return Err(failed(errno)),
        };
    }
    Ok(found)
}

/// Returns whether `ino` has the same attributes as a host file, as far as archives store them.
pub(crate) fn is_equal(object: &XattrObject<'_>, fs: &FileSystem, ino: Ino) -> Result<bool> {
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

/// Copies the attributes of a host file to `ino` and removes all others.
pub(crate) fn update(
    object: &XattrObject<'_>,
    fs: &FileSystem,
    ino: Ino,
    path: &[u8],
    skipped: &mut SkippedItems,
) -> Result<()> {
    let host = read(object)?;
    for name in comparable_names(fs, ino)? {
        if !host.contains_key(&name) {
            fs.remove_xattr(ino, &name)?;
        }
    }
    import(object, fs, ino, path, skipped)
}

/// Returns the names of stored attributes that the host would also list for the caller: `trusted.`
/// ones only for root.
fn comparable_names(fs: &FileSystem, ino: Ino) -> Result<Vec<Vec<u8>>> {
    let root = nix::unistd::geteuid().is_root();
    let names = fs.list_xattrs(ino)?;
    let names = names.split(|&b| b == 0).filter(|name| !name.is_empty() && (root || !name.starts_with(TRUSTED)));
    Ok(names.map(<[u8]>::to_vec).collect())
}

fn is_kept(name: &[u8]) -> bool {
    name.starts_with(USER) || name.starts_with(TRUSTED) || name.starts_with(SECURITY) || ACCESS_LISTS.contains(&name)
}

/// Removes the access control lists of an existing object, because a copy sets its own permissions.
pub(crate) fn remove_access_lists(fs: &FileSystem, ino: Ino) -> Result<()> {
    ACCESS_LISTS.into_iter().try_for_each(|name| fs.remove_xattr(ino, name))
}

/// Order of setting attributes on an extracted object, relative to its mode.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Phase {
    BeforeMode,
    AfterMode,
}

/// Sets the attributes of one phase on a host file; counts refused ones.
pub(crate) fn set_for_phase(
    xattrs: &[(Vec<u8>, Vec<u8>)],
    object: &XattrObject<'_>,
    phase: Phase,
    path: &[u8],
    skipped: &mut SkippedItems,
) {
    for (name, value) in xattrs.iter().filter(|(name, _)| name.starts_with(USER) == (phase == Phase::BeforeMode)) {
        if skipped.withholds_attribute(path, name) {
            continue;
        }
        if let Err(errno) = object.set(name, value) {
            skipped.attributes.add(path, name, &std::io::Error::from(errno));
        }
    }
}

/// Copies the attributes of one phase from `ino` to a host file.
pub(crate) fn extract(
    fs: &FileSystem,
    ino: Ino,
    object: &XattrObject<'_>,
    phase: Phase,
    path: &[u8],
    skipped: &mut SkippedItems,
) -> Result<()> {
    for name in fs.list_xattrs(ino)?.split(|&b| b == 0).filter(|name| !name.is_empty()) {
        if name.starts_with(USER) != (phase == Phase::BeforeMode) || skipped.withholds_attribute(path, name) {
            continue;
        }
        // ENOSPC may also mean that only the space for attributes is exhausted, and the file's
        // content is complete by now.
        if let Err(errno) = object.set(name, &fs.xattr(ino, name)?) {
            skipped.attributes.add(path, name, &std::io::Error::from(errno));
        }
    }
    Ok(())
}

/// Update that a copy has to make.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum FileDifference {
    None,
    /// Owner, mode, times or attributes differ; the content is unchanged.
    Metadata,
    /// Type, size, modification time, link target or device number differs.
    Content,
}

/// Compares a host file with its copy in the archive. Equal size and equal modification time to the
/// nanosecond count as unchanged content. The access time is ignored.
pub(super) fn compare_with_host(
    fs: &FileSystem,
    existing: &Attributes,
    stat: &Stat,
    object: &XattrObject<'_>,
) -> Result<FileDifference> {
    let kind = stat.st_mode & mode::TYPE;
    if existing.mode & mode::TYPE != kind {
        return Ok(FileDifference::Content);
    }
    let modified = Timestamp { seconds: stat.st_mtime, nanos: stat.st_mtime_nsec as u32 }; // below 10^9
    let content_differs = match kind {
        mode::REGULAR => u64::try_from(stat.st_size).ok() != Some(existing.size) || modified != existing.mtime,
        mode::SYMLINK => fs.read_link(existing.ino)? != object.link_target()?,
        mode::BLOCK | mode::CHARACTER => {
            existing.rdev != device_number(rustix::fs::major(stat.st_rdev), rustix::fs::minor(stat.st_rdev))
        }
        _ => false,
    };
    if content_differs {
        return Ok(FileDifference::Content);
    }
    // A symbolic link has no mode.
    let same_mode = kind == mode::SYMLINK || (existing.mode ^ stat.st_mode) & mode::PERMISSIONS == 0;
    let same_owner = (existing.uid, existing.gid) == (stat.st_uid, stat.st_gid);
    if same_mode && same_owner && modified == existing.mtime && is_equal(object, fs, existing.ino)? {
        return Ok(FileDifference::None);
    }
    Ok(FileDifference::Metadata)
}
