//! Compares an object of the archive with its host file, without reading content.

use rustix::fs::Stat;

use super::attributes::{self, XattrObject};
use super::host::device_number;
use crate::error::{Result, Timestamp};
use crate::fs::{Attributes, FileSystem, mode};

/// Update that a copy has to make.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Difference {
    None,
    /// Owner, mode, times or attributes differ; the content is unchanged.
    Metadata,
    /// Type, size, modification time, link target or device number differs.
    Content,
}

/// Compares a host file with its copy in the archive. Equal size and equal modification time to the
/// nanosecond count as unchanged content. The access time is ignored.
pub(super) fn difference(
    fs: &FileSystem,
    existing: &Attributes,
    stat: &Stat,
    object: &XattrObject<'_>,
) -> Result<Difference> {
    let kind = stat.st_mode & mode::TYPE;
    if existing.mode & mode::TYPE != kind {
        return Ok(Difference::Content);
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
        return Ok(Difference::Content);
    }
    // A symbolic link has no mode.
    let same_mode = kind == mode::SYMLINK || (existing.mode ^ stat.st_mode) & mode::PERMISSIONS == 0;
    let same_owner = (existing.uid, existing.gid) == (stat.st_uid, stat.st_gid);
    if same_mode && same_owner && modified == existing.mtime && attributes::is_equal(object, fs, existing.ino)? {
        return Ok(Difference::None);
    }
    Ok(Difference::Metadata)
}
