//! Metadata of host files: copies extended attributes, including access control lists, in both
//! directions; reads and sets owner, mode, times and device numbers by descriptor; and compares an
//! object with its host file.
//!
//! # Metadata that a copy omits
//!
//! These are attributes that the target refused, and anything that grants privileges.
//!
//! An archive can contain any owner and any mode, regardless of its author. A set-user-ID program,
//! a device or a file with capabilities grants the process that runs or opens it the privileges
//! that the archive names: any user's when root extracts it, otherwise the extracting user's, to
//! every user with access to the file. The archive does not show whether its author is trusted; its
//! file may belong to root only because root received it. These objects are therefore created only
//! on request, as by tar(1). Even then an ordinary user does not set set-ID bits on files of
//! another owner (`apply`), and the kernel refuses devices and most of the attributes.
//!
//! Directories keep their bits: set-group-ID and set-user-ID grant nothing there, and without the
//! sticky bit every user could remove the files of others in a directory that is writable for all.

use std::collections::BTreeMap;
use std::ffi::CString;
use std::fmt::Write;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use rustix::fs::{AtFlags, CWD, Gid, Mode, OFlags, Stat, Timespec, Timestamps, Uid, XattrFlags};
use rustix::io::Errno;
use rustix::thread::{CapabilitySet, capabilities};

use lockbox_terminal::display;

use crate::error::{Error, Result, Timestamp};
use crate::format::Ino;
use crate::fs::{Attributes, Creator, FileSystem, SetAttributes, SetTime, XattrMode, mode};
use crate::storage::FileIdentity;

/// Kernel limit in bytes of one value and of the list of names.
const MAX_VALUE: usize = 64 << 10;
/// Needs a writable file, so these are set before the mode. Other attributes are set after owner
/// and mode, which would change them.
const USER: &[u8] = b"user.";
const ACCESS_LISTS: [&[u8]; 2] = [b"system.posix_acl_access", b"system.posix_acl_default"];
/// Inode number of the initial user namespace, fixed by the kernel (`PROC_USER_INIT_INO`).
const INITIAL_USER_NAMESPACE: u64 = 0xEFFF_FFFD;

/// Attribute values by name.
pub(crate) type XattrMap = BTreeMap<Vec<u8>, Vec<u8>>;

/// Host file, for reading or setting its attributes.
pub(crate) enum XattrObject<'a> {
    Open(BorrowedFd<'a>),
    /// Opened with `O_PATH`: attribute calls need the path below /proc in place of the descriptor.
    Held(BorrowedFd<'a>),
    /// For objects that cannot be opened.
    Named(HostName<'a>),
}

impl<'a> XattrObject<'a> {
    pub(crate) fn open(file: &'a impl AsFd) -> XattrObject<'a> {
        XattrObject::Open(file.as_fd())
    }

    /// Returns a path to the object. There are no attribute calls relative to a directory, so the
    /// path of a name goes through the directory's descriptor.
    fn path(&self) -> Vec<u8> {
        match *self {
            XattrObject::Open(file) | XattrObject::Held(file) => descriptor_path(file).into_bytes(),
            XattrObject::Named(HostName { directory, name, .. }) => match directory.as_raw_fd() {
                fd if fd == CWD.as_raw_fd() => name.to_vec(),
                _ => [descriptor_path(directory).as_bytes(), b"/", name].concat(),
            },
        }
    }

    fn list(&self, names: &mut [u8]) -> rustix::io::Result<usize> {
        match self {
            XattrObject::Open(file) => rustix::fs::flistxattr(file, names),
            XattrObject::Named(HostName { follow: false, .. }) => rustix::fs::llistxattr(self.path(), names),
            XattrObject::Held(_) | XattrObject::Named(_) => rustix::fs::listxattr(self.path(), names),
        }
    }

    fn get(&self, attribute: &[u8], value: &mut [u8]) -> rustix::io::Result<usize> {
        match self {
            XattrObject::Open(file) => rustix::fs::fgetxattr(file, attribute, value),
            XattrObject::Named(HostName { follow: false, .. }) => rustix::fs::lgetxattr(self.path(), attribute, value),
            XattrObject::Held(_) | XattrObject::Named(_) => rustix::fs::getxattr(self.path(), attribute, value),
        }
    }

    fn set(&self, attribute: &[u8], value: &[u8]) -> rustix::io::Result<()> {
        let flags = XattrFlags::empty();
        match self {
            XattrObject::Open(file) => rustix::fs::fsetxattr(file, attribute, value, flags),
            XattrObject::Held(_) => rustix::fs::setxattr(self.path(), attribute, value, flags),
            // The name may denote another object by now.
            XattrObject::Named(_) => Err(Errno::BADF),
        }
    }
}

/// Name in a host directory, or a path. With `follow` a symbolic link stands for its target.
#[derive(Clone, Copy)]
pub(crate) struct HostName<'a> {
    pub(crate) directory: BorrowedFd<'a>,
    pub(crate) name: &'a [u8],
    pub(crate) follow: bool,
}

impl HostName<'_> {
    pub(crate) fn stat(&self) -> rustix::io::Result<Stat> {
        let flags = if self.follow { AtFlags::empty() } else { AtFlags::SYMLINK_NOFOLLOW };
        rustix::fs::statat(self.directory, self.name, flags)
    }

    pub(crate) fn open(&self, kind: OFlags) -> rustix::io::Result<OwnedFd> {
        let follow = if self.follow { OFlags::empty() } else { OFlags::NOFOLLOW };
        // Opening a FIFO that replaced the file must not block.
        let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK | follow | kind;
        rustix::fs::openat(self.directory, self.name, flags, Mode::empty())
    }

    pub(crate) fn link_target(&self) -> Result<Vec<u8>> {
        let target = rustix::fs::readlinkat(self.directory, self.name, Vec::new());
        target.map(CString::into_bytes).map_err(host_error("cannot read the link"))
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
    for name in split_names(&names[..length]) {
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

/// Splits a list of attribute names, each of which ends with a NUL.
pub(super) fn split_names(list: &[u8]) -> impl Iterator<Item = &[u8]> {
    list.split(|&byte| byte == 0).filter(|name| !name.is_empty())
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

/// Copies the stored attributes that the host does not list for the caller to the object that
/// replaces theirs.
pub(crate) fn keep_unlisted(fs: &FileSystem, replaced: Ino, ino: Ino) -> Result<()> {
    if can_list_trusted() {
        return Ok(());
    }
    let names = fs.list_xattrs(replaced)?;
    split_names(&names)
        .filter(|name| name.starts_with(TRUSTED))
        .try_for_each(|name| fs.set_xattr(ino, name, &fs.xattr(replaced, name)?, XattrMode::Set))
}

/// Returns stored names that the host would list for the caller too.
fn comparable_names(fs: &FileSystem, ino: Ino) -> Result<Vec<Vec<u8>>> {
    let names = fs.list_xattrs(ino)?;
    let is_listed = |name: &&[u8]| !name.starts_with(TRUSTED) || can_list_trusted();
    Ok(split_names(&names).filter(is_listed).map(<[u8]>::to_vec).collect())
}

/// Returns whether the kernel lists `trusted.` attributes for the caller. It demands CAP_SYS_ADMIN
/// in the initial user namespace, which root in a container or in a service may lack.
fn can_list_trusted() -> bool {
    capabilities(None).is_ok_and(|sets| sets.effective.contains(CapabilitySet::SYS_ADMIN))
        && rustix::fs::stat("/proc/self/ns/user").is_ok_and(|found| found.st_ino == INITIAL_USER_NAMESPACE)
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
    for name in split_names(&fs.list_xattrs(ino)?) {
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
    let (_, modified) = timestamps(stat);
    let content_differs = match kind {
        mode::REGULAR => u64::try_from(stat.st_size).ok() != Some(existing.size) || modified != existing.mtime,
        mode::SYMLINK => match object {
            XattrObject::Named(link) => fs.read_link(existing.ino)? != link.link_target()?,
            // A symbolic link cannot be opened.
            XattrObject::Open(_) | XattrObject::Held(_) => true,
        },
        mode::BLOCK | mode::CHARACTER => existing.rdev != rdev_of(stat),
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

/// Encodes a device number as the archive stores it (specification 7.1).
pub fn device_number(major: u32, minor: u32) -> u32 {
    major << 20 | minor & 0xF_FFFF
}

pub(super) fn rdev_of(stat: &Stat) -> u32 {
    device_number(rustix::fs::major(stat.st_rdev), rustix::fs::minor(stat.st_rdev))
}

/// Decodes a stored device number into major and minor number.
pub fn split_device_number(rdev: u32) -> (u32, u32) {
    (rdev >> 20, rdev & 0xF_FFFF)
}

/// Returns a conversion from errno with this context. A file that exceeds the host's size limit is
/// an error of that file alone, not a full disk.
pub(crate) fn host_error(context: &str) -> impl Fn(Errno) -> Error + '_ {
    move |errno| match errno {
        Errno::FBIG => Error::FileTooLarge,
        errno => Error::io(context, errno.into()),
    }
}

/// Returns a path of an open file, for calls that do not accept its descriptor.
pub(crate) fn descriptor_path(file: impl AsFd) -> String {
    format!("/proc/self/fd/{}", file.as_fd().as_raw_fd())
}

/// Returns the times of last access and last modification.
pub(crate) fn timestamps(stat: &Stat) -> (Timestamp, Timestamp) {
    let time = |seconds: i64, nanos: u64| Timestamp { seconds, nanos: nanos as u32 }; // below 10^9
    (time(stat.st_atime, stat.st_atime_nsec), time(stat.st_mtime, stat.st_mtime_nsec))
}

/// Returns the creator of an imported object: the owner of its host file.
pub(super) fn creator_of(stat: &Stat) -> Creator {
    Creator { uid: stat.st_uid, gid: stat.st_gid, umask: None }
}

/// Version of a host file, which differs after any change of it. That of a later file with the
/// inode number of a removed one differs as well. The change time counts, because programs can set
/// the modification time back.
pub(super) type HostVersion = (FileIdentity, i64, [(i64, u64); 2]);

pub(super) fn version(stat: &Stat) -> HostVersion {
    (FileIdentity::from(stat), stat.st_size, [(stat.st_mtime, stat.st_mtime_nsec), (stat.st_ctime, stat.st_ctime_nsec)])
}

/// Reads into the buffer and returns the number of bytes, 0 at the end of the file.
pub(super) fn read_at(file: impl AsFd, buffer: &mut [u8], offset: u64) -> Result<usize> {
    loop {
        match rustix::io::pread(&file, &mut *buffer, offset) {
            Err(Errno::INTR) => {}
            other => return other.map_err(host_error("cannot read")),
        }
    }
}

/// Returns the metadata to copy from a host file, without the size. A symbolic link has no mode.
pub(super) fn attributes_of(stat: &Stat) -> SetAttributes {
    let (atime, mtime) = timestamps(stat);
    SetAttributes {
        mode: (stat.st_mode & mode::TYPE != mode::SYMLINK).then_some(stat.st_mode & mode::PERMISSIONS),
        uid: Some(stat.st_uid),
        gid: Some(stat.st_gid),
        atime: Some(SetTime::To(atime)),
        mtime: Some(SetTime::To(mtime)),
        ..SetAttributes::default()
    }
}

/// Sets owner, mode and times of an open host file, in the order in which no call undoes another.
pub(crate) fn apply(file: impl AsFd, attributes: &Attributes) -> Result<()> {
    let owned = is_root();
    if owned {
        let (uid, gid) = owner(attributes);
        rustix::fs::fchown(&file, uid, gid).map_err(host_error("cannot set the owner"))?;
    }
    rustix::fs::fchmod(&file, permissions(attributes, owned)).map_err(host_error("cannot set the mode"))?;
    rustix::fs::futimens(&file, &times(attributes.atime, attributes.mtime)).map_err(host_error("cannot set the times"))
}

/// Sets owner, mode and times of an object opened with `O_PATH`: symbolic links (which have no
/// mode), FIFOs, sockets and devices. `name` is used for the times only, which are harmless if it
/// denotes another object by now.
pub(crate) fn apply_at(held: impl AsFd, directory: impl AsFd, name: &[u8], attributes: &Attributes) -> Result<()> {
    let owned = is_root();
    if owned {
        let (uid, gid) = owner(attributes);
        rustix::fs::chownat(&held, "", uid, gid, AtFlags::EMPTY_PATH).map_err(host_error("cannot set the owner"))?;
    }
    if attributes.mode & mode::TYPE != mode::SYMLINK {
        rustix::fs::chmod(descriptor_path(&held), permissions(attributes, owned))
            .map_err(host_error("cannot set the mode"))?;
    }
    let times = times(attributes.atime, attributes.mtime);
    rustix::fs::utimensat(&directory, name, &times, AtFlags::SYMLINK_NOFOLLOW)
        .map_err(host_error("cannot set the times"))
}

fn owner(attributes: &Attributes) -> (Option<Uid>, Option<Gid>) {
    // chown(2) interprets the greatest number as "unchanged".
    let uid = (attributes.uid != u32::MAX).then(|| Uid::from_raw(attributes.uid));
    let gid = (attributes.gid != u32::MAX).then(|| Gid::from_raw(attributes.gid));
    (uid, gid)
}

/// Returns the permissions to set, without set-ID bits for another owner, which would grant the
/// privileges of the extracting user.
fn permissions(attributes: &Attributes, owned: bool) -> Mode {
    let set_id = mode::SET_UID | mode::SET_GID;
    let own = owned
        || (attributes.uid == nix::unistd::geteuid().as_raw() && attributes.gid == nix::unistd::getegid().as_raw());
    Mode::from_raw_mode(attributes.mode & mode::PERMISSIONS & if own { u32::MAX } else { !set_id })
}

pub(super) fn times(accessed: Timestamp, modified: Timestamp) -> Timestamps {
    let time = |time: Timestamp| Timespec { tv_sec: time.seconds, tv_nsec: time.nanos.into() };
    Timestamps { last_access: time(accessed), last_modification: time(modified) }
}

pub(crate) fn is_root() -> bool {
    nix::unistd::geteuid().is_root()
}

/// Prefixes of attributes by which the kernel grants privileges.
pub(super) const TRUSTED: &[u8] = b"trusted.";
pub(super) const SECURITY: &[u8] = b"security.";

/// Number of skipped items of one kind.
#[derive(Debug, Default)]
pub struct SkippedCount {
    pub count: u64,
    /// First item with the reason, for messages.
    pub first: String,
}

impl SkippedCount {
    pub(crate) fn add(&mut self, path: &[u8], name: &[u8], reason: &dyn std::fmt::Display) {
        self.say(path, format_args!("{}: {reason}", display(name)));
    }

    fn say(&mut self, path: &[u8], what: std::fmt::Arguments<'_>) {
        if self.count == 0 {
            // Writing to a String does not fail.
            let _ = write!(self.first, "{}: {what}", display(path));
        }
        self.count += 1;
    }
}

/// Items that a copy skipped.
#[derive(Debug, Default)]
pub struct SkippedItems {
    /// Extended attributes that were refused.
    pub attributes: SkippedCount,
    /// Set-ID and sticky bits of non-directories, devices, and attributes by which the kernel
    /// grants privileges.
    pub privileges: SkippedCount,
    /// Privileges are skipped.
    withholds: bool,
}

impl SkippedItems {
    pub(crate) fn extracting(privileges: bool) -> SkippedItems {
        SkippedItems { withholds: !privileges, ..SkippedItems::default() }
    }

    /// Returns the attributes that a copy gets.
    pub(crate) fn granted(&mut self, path: &[u8], attributes: &Attributes) -> Attributes {
        let mut granted = *attributes;
        let bits = attributes.mode & (mode::SET_UID | mode::SET_GID | mode::STICKY);
        // The mode of a symbolic link has no effect.
        let has_mode = !attributes.is_directory() && attributes.mode & mode::TYPE != mode::SYMLINK;
        if self.withholds && bits != 0 && has_mode {
            granted.mode &= !bits;
            let which = match bits {
                _ if bits & mode::SET_UID != 0 => "set-user-ID",
                _ if bits & mode::SET_GID != 0 => "set-group-ID",
                _ => "sticky",
            };
            self.privileges.say(path, format_args!("its {which} bit"));
        }
        granted
    }

    pub(crate) fn withholds_object(&mut self, path: &[u8], file_mode: u32) -> bool {
        let device = self.withholds && matches!(file_mode & mode::TYPE, mode::CHARACTER | mode::BLOCK);
        if device {
            self.privileges.say(path, format_args!("a device"));
        }
        device
    }

    pub(crate) fn withholds_attribute(&mut self, path: &[u8], name: &[u8]) -> bool {
        let withheld = self.withholds && (name.starts_with(SECURITY) || name.starts_with(TRUSTED));
        if withheld {
            self.privileges.say(path, format_args!("{}", display(name)));
        }
        withheld
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use rustix::thread::set_capabilities;

    use super::*;
    use crate::crypto::SecretKey;
    use crate::env::{Environment, SeededEnvironment};
    use crate::format::ROOT_INO;
    use crate::frame::PageCipher;
    use crate::fs::{Compression, FsOptions, SyncProfile};
    use crate::storage::MemoryStorage;
    use crate::txn::Volume;

    fn file_system() -> Arc<FileSystem> {
        let environment: Arc<dyn Environment> = Arc::new(SeededEnvironment::new(1));
        let cipher = PageCipher::new(&SecretKey::new([1; 32]), [2; 16], false, environment.clone());
        let volume = Volume::create(Arc::new(MemoryStorage::new()), cipher, environment.clone(), 1).unwrap();
        let options = FsOptions {
            max_dirty_bytes: 8 << 20,
            sync: SyncProfile::Periodic,
            pack: true,
            compression: Compression::Default,
        };
        let fs = FileSystem::new(volume, environment, [3; 16], options).unwrap();
        fs.format(Creator { uid: 0, gid: 0, umask: None }).unwrap();
        fs
    }

    /// As root in a service or a container, which has no CAP_SYS_ADMIN.
    #[test]
    fn without_the_capability_to_list_trusted_attributes_stored_ones_are_equal_and_stay() {
        let fs = file_system();
        for name in [b"trusted.overlay.opaque".as_slice(), b"user.mark"] {
            fs.set_xattr(ROOT_INO, name, b"y", XattrMode::Set).unwrap();
        }
        let file = tempfile::tempfile().unwrap();
        let object = XattrObject::open(&file);
        let update = || update(&object, &fs, ROOT_INO, b"file", &mut SkippedItems::default()).unwrap();
        let is_stored = |name: &[u8]| split_names(&fs.list_xattrs(ROOT_INO).unwrap()).any(|stored| stored == name);
        // The kernel keeps capabilities for each thread.
        let without_capability = || {
            let mut sets = capabilities(None).unwrap();
            sets.effective.remove(CapabilitySet::SYS_ADMIN);
            set_capabilities(None, sets).unwrap();
            assert!(!is_equal(&object, &fs, ROOT_INO).unwrap());
            update();
            assert!(is_equal(&object, &fs, ROOT_INO).unwrap());
        };
        std::thread::scope(|scope| scope.spawn(without_capability).join().unwrap());
        assert!(is_stored(b"trusted.overlay.opaque") && !is_stored(b"user.mark"));
        if can_list_trusted() {
            assert!(!is_equal(&object, &fs, ROOT_INO).unwrap());
            update();
            assert!(!is_stored(b"trusted.overlay.opaque"));
        }
    }

    #[test]
    fn a_device_number_keeps_both_halves() {
        for (major, minor) in [(0, 0), (8, 1), (4095, 0xF_FFFF), (259, 70_000)] {
            assert_eq!(split_device_number(device_number(major, minor)), (major, minor));
        }
    }
}
