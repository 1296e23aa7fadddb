//! What was left out of a copy: attributes that were refused where they were to go, and what would lend somebody's rights.
//!
//! An archive names any owner and any mode, whoever wrote it. A program with its set-user-id bit, a device or a file with capabilities that root
//! makes of it gives whoever runs or opens that the rights that the archive names. Whether the writer is to be trusted with that
//! is nothing that the archive can say: its file may belong to root because root received it. So root makes these only when told
//! to. Others have no rights to lend but their own: the kernel refuses them the rest, and they get set-id bits for files of their own alone.

use std::fmt::Write;

use lockbox_terminal::display;

use super::host::is_root;
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
    /// Set-id bits, devices, and attributes by which the kernel gives rights.
    pub privileges: Left,
    /// Whether privileges are left out.
    withholds: bool,
}

impl LeftOut {
    /// For a copy out of an archive, with what lends rights or without.
    pub(crate) fn extracting(privileges: bool) -> LeftOut {
        LeftOut { withholds: !privileges && is_root(), ..LeftOut::default() }
    }

    /// The attributes that a copy gets. Of a directory the bits lend nothing to anybody.
    pub(crate) fn granted(&mut self, path: &[u8], attributes: &Attributes) -> Attributes {
        let mut granted = *attributes;
        let bits = attributes.mode & (mode::SET_UID | mode::SET_GID);
        if self.withholds && bits != 0 && !attributes.is_directory() {
            granted.mode &= !bits;
            let which = if bits & mode::SET_UID != 0 { "set-user-ID" } else { "set-group-ID" };
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
