//! Metadata that a copy omits: attributes that the target refused, and anything that grants
//! privileges.
//!
//! An archive can contain any owner and any mode, regardless of its author. A set-user-ID program,
//! a device or a file with capabilities grants the process that runs or opens it the privileges
//! that the archive names: any user's when root extracts it, otherwise the extracting user's, to
//! every user with access to the file. The archive does not show whether its author is trusted; its
//! file may belong to root only because root received it. These objects are therefore created only
//! on request, as by tar(1). Even then an ordinary user does not set set-ID bits on files of
//! another owner (`host::apply`), and the kernel refuses devices and most of the attributes.
//!
//! Directories keep their bits: set-group-ID and set-user-ID grant nothing there, and without the
//! sticky bit every user could remove the files of others in a directory that is writable for all.

use std::fmt::Write;

use lockbox_terminal::display;

use crate::fs::{Attributes, mode};

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
    /// Creates the record of an extraction, with or without privileges.
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
