//! POSIX access control lists: the kernel's xattr format, and their relation to modes. Pure.
//!
//! # Invariants
//! ACL-1  A stored list is valid (POSIX 1003.1e draft 17): one entry each for owner, group and
//!     others, at most one mask, and a mask whenever a user or a group is named.
//! ACL-2  A stored access list is one that no mode can express, so it has a mask; the permission
//!     bits of the mode are its owner, mask and others entries. A list that a mode can express is
//!     stored as that mode and nothing else.
//! ACL-3  Default lists are on directories only, and symbolic links have no list at all.

use crate::error::{Error, Result};

/// The only version in existence.
const VERSION: u32 = 2;
const HEAD: usize = 4;
const ENTRY: usize = 8;
/// Maximum bytes of a list. The kernel reads and writes lists through one page of memory, and the
/// smallest page is 4 KiB: a longer list could be stored on some machines and would make its file
/// inaccessible on others.
pub(crate) const MAX_BYTES: usize = 4096;
/// Id of entries without a number; invalid in named entries.
const UNDEFINED: u32 = u32::MAX;
const PERMISSIONS: u32 = 0o7;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum AclKind {
    /// Permissions of the object.
    Access,
    /// Initial permissions of objects created in a directory.
    Default,
}

impl AclKind {
    pub(crate) fn of_name(name: &[u8]) -> Option<AclKind> {
        [AclKind::Access, AclKind::Default].into_iter().find(|kind| kind.name() == name)
    }

    pub(crate) fn name(self) -> &'static [u8] {
        match self {
            AclKind::Access => b"system.posix_acl_access",
            AclKind::Default => b"system.posix_acl_default",
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum AclQualifier {
    Owner,
    User(u32),
    Group,
    NamedGroup(u32),
    Mask,
    Others,
}

impl AclQualifier {
    fn tag_and_id(self) -> (u16, u32) {
        match self {
            AclQualifier::Owner => (0x01, UNDEFINED),
            AclQualifier::User(id) => (0x02, id),
            AclQualifier::Group => (0x04, UNDEFINED),
            AclQualifier::NamedGroup(id) => (0x08, id),
            AclQualifier::Mask => (0x10, UNDEFINED),
            AclQualifier::Others => (0x20, UNDEFINED),
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct AclEntry {
    qualifier: AclQualifier,
    /// Read 4, write 2, execute 1.
    permissions: u32,
}

/// A valid list (ACL-1).
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Acl {
    entries: Vec<AclEntry>,
}

impl Acl {
    /// Parses a list; `None` for a value without entries, which means that there is no list.
    /// Errors: `Invalid` for a malformed or invalid list, `AttributeTooLarge`.
    pub(crate) fn parse(value: &[u8]) -> Result<Option<Acl>> {
        if value.is_empty() {
            return Ok(None);
        }
        if value.len() > MAX_BYTES {
            return Err(Error::AttributeTooLarge);
        }
        let malformed = |flaw: &str| Error::invalid(format!("an access control list {flaw}"));
        let Some((head, rest)) = value.split_first_chunk::<HEAD>() else { return Err(malformed("is cut off")) };
        if u32::from_le_bytes(*head) != VERSION {
            return Err(malformed("is of an unknown version"));
        }
        let (entries, cut_off) = rest.as_chunks::<ENTRY>();
        if !cut_off.is_empty() {
            return Err(malformed("is cut off"));
        }
        if entries.is_empty() {
            return Ok(None);
        }
        let entries: Option<Vec<AclEntry>> = entries.iter().map(decode).collect();
        let acl = Acl { entries: entries.ok_or_else(|| malformed("has an impossible entry"))? };
        if !acl.is_valid() {
            return Err(malformed("lacks entries or has them out of order"));
        }
        Ok(Some(acl))
    }

    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(HEAD + self.entries.len() * ENTRY);
        out.extend_from_slice(&VERSION.to_le_bytes());
        for entry in &self.entries {
            let (tag, id) = entry.qualifier.tag_and_id();
            out.extend_from_slice(&tag.to_le_bytes());
            // Three bits.
            out.extend_from_slice(&(entry.permissions as u16).to_le_bytes());
            out.extend_from_slice(&id.to_le_bytes());
        }
        out
    }

    /// Checks ACL-1, with the entries in the kernel's order, which is that of the tags: owner,
    /// users, group, groups, mask, others.
    fn is_valid(&self) -> bool {
        let tags: Vec<u16> = self.entries.iter().map(|entry| entry.qualifier.tag_and_id().0).collect();
        let count = |wanted: u16| tags.iter().filter(|&&tag| tag == wanted).count();
        let (named, masks) = (count(0x02) + count(0x08) > 0, count(0x10));
        tags.is_sorted()
            && [0x01, 0x04, 0x20].into_iter().all(|required| count(required) == 1)
            && masks <= 1
            && (masks == 1 || !named)
    }

    /// Returns whether a mode can express the list.
    pub(crate) fn is_minimal(&self) -> bool {
        self.entries.len() == 3
    }

    /// Returns the nine permission bits of the list (ACL-2).
    pub(crate) fn mode_bits(&self) -> u32 {
        let group_class = self.group_class();
        let bits = |entry: &AclEntry| match entry.qualifier {
            AclQualifier::Owner => entry.permissions << 6,
            AclQualifier::Others => entry.permissions,
            qualifier if qualifier == group_class => entry.permissions << 3,
            _ => 0,
        };
        self.entries.iter().map(bits).fold(0, |all, bits| all | bits)
    }

    /// Returns the qualifier of the entry that the group bits of the mode are tied to.
    fn group_class(&self) -> AclQualifier {
        if self.entries.iter().any(|entry| entry.qualifier == AclQualifier::Mask) {
            AclQualifier::Mask
        } else {
            AclQualifier::Group
        }
    }

    /// Sets each entry that is tied to the mode to `change(entry_permissions, mode_permissions)`.
    fn update_tied(&mut self, mode: u32, change: impl Fn(u32, u32) -> u32) {
        let group_class = self.group_class();
        for entry in &mut self.entries {
            let of_mode = match entry.qualifier {
                AclQualifier::Owner => mode >> 6,
                AclQualifier::Others => mode,
                qualifier if qualifier == group_class => mode >> 3,
                _ => continue,
            };
            entry.permissions = change(entry.permissions, of_mode & PERMISSIONS);
        }
    }

    /// Applies chmod: the mode sets owner, others and the mask (without one, the group).
    pub(crate) fn set_mode(&mut self, mode: u32) {
        self.update_tied(mode, |_, of_mode| of_mode);
    }

    /// Returns the access list and the nine permission bits of an object created with `mode` under
    /// this default list: the permissions that both allow. The list is `None` if the bits express
    /// all of it.
    pub(crate) fn inherit(&self, mode: u32) -> (Option<Acl>, u32) {
        let mut access = self.clone();
        access.update_tied(mode, |permissions, of_mode| permissions & of_mode);
        let bits = access.mode_bits();
        ((!access.is_minimal()).then_some(access), bits)
    }
}

fn decode(entry: &[u8; ENTRY]) -> Option<AclEntry> {
    let [t0, t1, p0, p1, id @ ..] = *entry;
    let (tag, permissions, id) = (u16::from_le_bytes([t0, t1]), u16::from_le_bytes([p0, p1]), u32::from_le_bytes(id));
    let permissions = u32::from(permissions);
    let qualifier = match tag {
        0x01 => AclQualifier::Owner,
        0x02 if id != UNDEFINED => AclQualifier::User(id),
        0x04 => AclQualifier::Group,
        0x08 if id != UNDEFINED => AclQualifier::NamedGroup(id),
        0x10 => AclQualifier::Mask,
        0x20 => AclQualifier::Others,
        _ => return None,
    };
    (permissions <= PERMISSIONS).then_some(AclEntry { qualifier, permissions })
}

#[cfg(test)]
mod tests;
