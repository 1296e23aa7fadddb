//! Extended headers before a member: pax records, long name and long link target.

use super::header::ChecksummedHeader;
use super::{ACLS, XATTR, acl, pax};
use crate::error::{Error, Result, Timestamp};
use crate::exchange::host::device_number;

/// Attributes by name, and names of access control lists that could not be parsed.
type HeaderXattrs = (Vec<(Vec<u8>, Vec<u8>)>, Vec<&'static [u8]>);

/// Contents of the extended headers before a member.
#[derive(Default)]
pub(super) struct ExtendedHeader {
    pub(super) records: pax::Records,
    pub(super) name: Option<Vec<u8>>,
    pub(super) link: Option<Vec<u8>>,
}

impl ExtendedHeader {
    /// Returns the last record of a key, which takes precedence.
    pub(super) fn value(&self, key: &str) -> Option<&[u8]> {
        self.records.iter().rev().find(|(name, _)| name == key.as_bytes()).map(|(_, value)| &value[..])
    }

    pub(super) fn number<T: TryFrom<u64>>(&self, key: &str) -> Result<Option<T>> {
        let Some(value) = self.value(key) else { return Ok(None) };
        let number = pax::decimal(value).and_then(|number| T::try_from(number).ok());
        number.map(Some).ok_or_else(|| Error::invalid(format!("its record {key} is no number")))
    }

    pub(super) fn time(&self, key: &str) -> Result<Option<Timestamp>> {
        let Some(value) = self.value(key) else { return Ok(None) };
        pax::parse_time(value).map(Some).ok_or_else(|| Error::invalid(format!("its record {key} is no time")))
    }

    pub(super) fn device(&self, header: &ChecksummedHeader) -> Result<u32> {
        let (major, minor) = match (self.number("SCHILY.devmajor")?, self.number("SCHILY.devminor")?) {
            (Some(major), Some(minor)) => (major, minor),
            _ => header.device()?,
        };
        if major >= 1 << 12 || minor >= 1 << 20 {
            return Err(Error::invalid("its device number is none of this system"));
        }
        Ok(device_number(major, minor))
    }

    /// Returns the attributes in records, and the names of lists that could not be parsed.
    pub(super) fn attributes(&self) -> HeaderXattrs {
        let (mut found, mut strange) = (Vec::new(), Vec::new());
        for (key, value) in &self.records {
            if let Some(name) = key.strip_prefix(XATTR.as_bytes()) {
                found.push((pax::unescaped(name), value.clone()));
            } else if let Some((_, name)) = ACLS.iter().find(|(word, _)| key == word.as_bytes()) {
                match acl::from_text(value) {
                    Some(list) => found.push((name.to_vec(), list)),
                    None => strange.push(*name),
                }
            }
        }
        (found, strange)
    }
}
