//! What was left out of a copy: attributes that were refused where they were to go, and what would lend somebody's rights.
//!
//! An archive names any owner and any mode, whoever wrote it. A program with its set-user-ID bit, a
//! device or a file with capabilities gives the process that runs or opens it the rights that the
//! archive names: those of any user when root makes it, those of the user when an ordinary user
//! does, to everybody who reaches the file. The archive cannot tell whether its author is to be
//! trusted with that; its file may belong to root only because root received it. So nobody makes
//! these unless told to, as with tar(1). Not even then does an ordinary user get set-ID bits on
//! files that the archive gives to somebody else (`host::apply`), and the kernel refuses devices
//! and most of the attributes.
//!
//! Directories keep their bits: set-group-ID and set-user-ID lend nothing there, and without the
//! sticky bit everybody could remove what others put into a directory that is open to all.

use std::fmt::Write;

use lockbox_terminal::display;

use crate::fs::{Attributes, mode};

/// Attributes by which the kernel gives rights begin with these.
pub(super) const TRUSTED: &[u8] = b"trusted.";
pub(super) const SECURITY: &[u8] = b"security.";

/// How many things of one kind were left out.
#[derive(Debug, Default)]
pub struct Left {
    pub count: u64,
    /// The first one and why, for people.
    pub first: String,
}

impl Left {
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

/// What was left out of a copy.
#[derive(Debug, Default)]
pub struct LeftOut {
    /// Extended attributes that were refused.
    pub attributes: Left,
    /// Set-ID and sticky bits of all but directories, devices, and attributes by which the kernel
    /// gives rights.
    pub privileges: Left,
    /// Whether privileges are left out.
    withholds: bool,
}

impl LeftOut {
    /// For a copy out of an archive, with what lends rights or without.
    pub(crate) fn extracting(privileges: bool) -> LeftOut {
        LeftOut { withholds: !privileges, ..LeftOut::default() }
    }

    /// Returns the attributes that a copy gets.
    pub(crate) fn granted(&mut self, path: &[u8], attributes: &Attributes) -> Attributes {
        let mut granted = *attributes;
        let bits = attributes.mode & (mode::SET_UID | mode::SET_GID | mode::STICKY);
        // The mode of a symbolic link means nothing.
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
