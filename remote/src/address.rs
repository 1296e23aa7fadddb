//! Addresses of archives, as users write them.

use std::ffi::OsStr;
use std::fmt;
use std::os::unix::ffi::OsStrExt;

use lockbox::{Error, Result};
use lockbox_terminal::display;
use url::Url;

/// Where an archive is that is no file of this host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Address {
    /// `https://host/path`, or `http://`.
    Web(Url),
    /// `s3://bucket/key`: a file, or the objects of an archive below `key/`.
    Bucket { bucket: String, key: String },
    /// `file:///path`: the objects of an archive in a directory.
    Directory(Url),
}

impl Address {
    /// The address that `text` is; None for the path of a file.
    ///
    /// # Errors
    /// `Invalid` for an address that cannot be used, in a sentence.
    pub fn parse(text: &OsStr) -> Result<Option<Address>> {
        let Some((scheme, rest)) = split(text) else { return Ok(None) };
        let refused = |why: &str| Error::invalid(format!("{}: {why}", display(text.as_bytes())));
        let known = match scheme {
            "https" | "http" => Address::web(text),
            "s3" => Address::bucket(rest),
            "file" => Address::directory(text),
            "gs" | "az" => Err("archives on this kind of storage cannot be read yet"),
            _ => Err("addresses of archives begin with https://, s3:// or file://"),
        };
        known.map(Some).map_err(refused)
    }

    /// A place where archives may lie, as `text` has it: an address that may be a whole bucket or end with a slash.
    ///
    /// # Errors
    /// `Invalid`, in a sentence.
    pub fn place(text: &OsStr) -> Result<Address> {
        if let Some(("s3", rest)) = split(text)
            && let Some(bucket) = rest.strip_suffix(b"/").or(Some(rest)).filter(|rest| !rest.contains(&b'/'))
        {
            // Its name is looked at with one in it.
            let text = [b"s3://", bucket, b"/x"].concat();
            return match Address::parse(OsStr::from_bytes(&text))? {
                Some(Address::Bucket { bucket, .. }) => Ok(Address::Bucket { bucket, key: String::new() }),
                _ => Err(Error::invalid("that is no address")),
            };
        }
        let trimmed = OsStr::from_bytes(text.as_bytes().strip_suffix(b"/").unwrap_or(text.as_bytes()));
        let parsed =
            Address::parse(if split(trimmed).is_some_and(|(_, rest)| !rest.is_empty()) { trimmed } else { text })?;
        match parsed {
            Some(address @ (Address::Bucket { .. } | Address::Directory(_))) => Ok(address),
            _ => Err(Error::invalid(format!(
                "{}: archives are listed in s3://BUCKET, s3://BUCKET/NAME or file:///DIRECTORY",
                display(text.as_bytes())
            ))),
        }
    }

    /// Whether `text` is meant as an address and not as the path of a file.
    pub fn is_meant(text: &OsStr) -> bool {
        split(text).is_some()
    }

    /// What [`Address::parse`] reads as this one.
    pub(crate) fn text(&self) -> String {
        match self {
            Address::Web(url) | Address::Directory(url) => url.as_str().to_owned(),
            Address::Bucket { bucket, key } => format!("s3://{bucket}/{key}"),
        }
    }

    fn web(text: &OsStr) -> std::result::Result<Address, &'static str> {
        let text = text.to_str().ok_or("an address is UTF-8")?;
        let url = Url::parse(text).map_err(|_| "this is no address of a web server")?;
        // Arguments are seen by every user of the machine, and the kernel's table of mounts by every program.
        if !url.username().is_empty() || url.password().is_some() {
            return Err("a password in an address is seen by everybody on this machine");
        }
        if url.query().is_some() || url.fragment().is_some() {
            return Err(
                "an address ends with the path of the file: what follows '?' or '#' may be a secret, and would be seen by everybody",
            );
        }
        if url.host().is_none() || url.path().ends_with('/') {
            return Err("an address has a host and the path of a file");
        }
        Ok(Address::Web(url))
    }

    fn directory(text: &OsStr) -> std::result::Result<Address, &'static str> {
        let url = text.to_str().and_then(|text| Url::parse(text).ok()).ok_or("this is no address of a directory")?;
        let is_whole = url.query().is_none() && url.fragment().is_none() && url.to_file_path().is_ok();
        if !is_whole || url.host().is_some() {
            return Err("an address of a directory is file:///PATH");
        }
        Ok(Address::Directory(url))
    }

    fn bucket(rest: &[u8]) -> std::result::Result<Address, &'static str> {
        let text = std::str::from_utf8(rest).map_err(|_| "an address is UTF-8")?;
        match text.split_once('/') {
            Some((bucket, key)) if !bucket.is_empty() && !key.is_empty() && !key.ends_with('/') => {
                let is_name = |c: char| c.is_ascii_alphanumeric() || ".-_".contains(c);
                if !bucket.chars().all(is_name) {
                    return Err("a bucket's name has letters, digits, dots and dashes");
                }
                Ok(Address::Bucket { bucket: bucket.to_owned(), key: key.to_owned() })
            }
            _ => Err("an address of a bucket is s3://BUCKET/NAME"),
        }
    }
}

/// The scheme and what follows it.
fn split(text: &OsStr) -> Option<(&str, &[u8])> {
    let bytes = text.as_bytes();
    let at = bytes.windows(3).position(|three| three == b"://")?;
    let scheme = std::str::from_utf8(&bytes[..at]).ok()?;
    let is_scheme = !scheme.is_empty() && scheme.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit());
    is_scheme.then(|| (scheme, &bytes[at + 3..]))
}

/// For messages: a terminal obeys nothing in it.
impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&display(self.text().as_bytes()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_told_from_paths() {
        for path in ["a.lbx", "/srv/a.lbx", "./https:/a", "a b://c", "://", "A://b"] {
            assert_eq!(Address::parse(OsStr::new(path)).unwrap(), None, "{path}");
        }
        for (text, shown) in [
            ("https://example.org/a.lbx", "https://example.org/a.lbx"),
            ("https://example.org:8443/x/a%20b.lbx", "https://example.org:8443/x/a%20b.lbx"),
            ("s3://bucket/path/a.lbx", "s3://bucket/path/a.lbx"),
            ("file:///srv/a%20b", "file:///srv/a%20b"),
        ] {
            assert_eq!(Address::parse(OsStr::new(text)).unwrap().unwrap().to_string(), shown);
        }
        // What is handed to another process is not what is shown.
        for text in ["s3://bucket/a\\b\u{1b}[31m.lbx", "s3://bucket/ä.lbx", "https://example.org/a%5Cb.lbx"] {
            let address = Address::parse(OsStr::new(text)).unwrap().unwrap();
            assert_eq!(Address::parse(address.text().as_ref()).unwrap().unwrap(), address);
            assert!(!address.to_string().contains('\u{1b}'));
        }
    }

    #[test]
    fn a_place_may_be_a_whole_bucket() {
        for (text, is) in [
            ("s3://bucket", "s3://bucket/"),
            ("s3://bucket/", "s3://bucket/"),
            ("s3://bucket/a/b", "s3://bucket/a/b"),
            ("s3://bucket/a/", "s3://bucket/a"),
            ("file:///srv/a/", "file:///srv/a"),
            ("file:///", "file:///"),
        ] {
            assert_eq!(Address::place(OsStr::new(text)).unwrap().text(), is, "{text}");
        }
        for text in ["s3://", "s3://bu cket", "https://example.org/a", "a.lbx", "file://host/a", "gs://bucket"] {
            assert!(matches!(Address::place(OsStr::new(text)), Err(Error::Invalid(_))), "{text}");
        }
    }

    #[test]
    fn what_cannot_be_used_says_why() {
        for (text, why) in [
            ("https://user:secret@example.org/a.lbx", "seen by everybody"),
            ("https://example.org/a.lbx?token=1", "may be a secret"),
            ("https://example.org/", "the path of a file"),
            ("s3://bucket", "s3://BUCKET/NAME"),
            ("s3://bucket/", "s3://BUCKET/NAME"),
            ("s3://bu cket/a", "letters, digits"),
            ("gs://bucket/a", "yet"),
            ("file://host/a", "file:///PATH"),
            ("file://a", "file:///PATH"),
            ("file:///a?b", "file:///PATH"),
            ("ftp://host/a", "begin with"),
        ] {
            let told = Address::parse(OsStr::new(text)).unwrap_err().to_string();
            assert!(told.contains(why), "{text}: {told}");
        }
    }
}
