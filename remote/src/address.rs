//! Addresses of archives as users write them.

use std::ffi::OsStr;
use std::fmt;
use std::os::unix::ffi::OsStrExt;
use std::path::{Component, PathBuf};

use lockbox::{Error, Result};
use lockbox_terminal::display;
use serde::{Deserialize, Serialize};
use url::Url;

/// Protocol of an object store.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Cloud {
    /// S3, at Amazon or at the endpoint that the environment names.
    S3,
    /// Google Cloud Storage: its own dialect of the S3 protocol.
    Google,
    /// Azure Blob Storage.
    Azure,
}

impl Cloud {
    fn of(scheme: &str) -> Option<Cloud> {
        [Cloud::S3, Cloud::Google, Cloud::Azure].into_iter().find(|cloud| cloud.scheme() == scheme)
    }

    pub(crate) fn scheme(self) -> &'static str {
        match self {
            Cloud::S3 => "s3",
            Cloud::Google => "gs",
            Cloud::Azure => "az",
        }
    }
}

/// Location of an archive that is not a file of this host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Address {
    /// `https://host/path`, or `http://`.
    Web(Url),
    /// `s3://bucket/key`, `gs://` or `az://`: a file, or the objects of an archive below `key/`.
    Bucket { cloud: Cloud, bucket: String, key: String },
    /// `file:///path`: the objects of an archive in a directory.
    Directory(Url),
}

impl Address {
    /// Parses an address; returns None for the path of a file.
    ///
    /// # Errors
    /// `Invalid` for an unusable address, with a sentence that explains it.
    pub fn parse(text: &OsStr) -> Result<Option<Address>> {
        let Some((scheme, rest)) = split(text) else { return Ok(None) };
        let refused = |why: &str| Error::invalid(format!("{}: {why}", display(text.as_bytes())));
        let known = match scheme {
            "https" | "http" => Address::web(text),
            "file" => Address::directory(text),
            _ => match Cloud::of(scheme) {
                Some(cloud) => Address::bucket(cloud, rest),
                None => Err("addresses of archives begin with https://, s3://, gs://, az:// or file://"),
            },
        };
        known.map(Some).map_err(refused)
    }

    /// Parses the address of a directory of archives: it may be a whole bucket or end with a slash.
    ///
    /// # Errors
    /// `Invalid`, with a sentence that explains it.
    pub fn place(text: &OsStr) -> Result<Address> {
        if let Some((scheme, rest)) = split(text)
            && Cloud::of(scheme).is_some()
            && let Some(bucket) = rest.strip_suffix(b"/").or(Some(rest)).filter(|rest| !rest.contains(&b'/'))
        {
            // Its name is looked at with one in it.
            let text = [scheme.as_bytes(), b"://", bucket, b"/x"].concat();
            return match Address::parse(OsStr::from_bytes(&text))? {
                Some(Address::Bucket { cloud, bucket, .. }) => {
                    Ok(Address::Bucket { cloud, bucket, key: String::new() })
                }
                _ => Err(Error::invalid("not an address")),
            };
        }
        let trimmed = OsStr::from_bytes(text.as_bytes().strip_suffix(b"/").unwrap_or(text.as_bytes()));
        let parsed =
            Address::parse(if split(trimmed).is_some_and(|(_, rest)| !rest.is_empty()) { trimmed } else { text })?;
        match parsed {
            Some(address @ (Address::Bucket { .. } | Address::Directory(_))) => Ok(address),
            _ => Err(Error::invalid(format!(
                "{}: archives are listed in s3://BUCKET, s3://BUCKET/NAME (or gs://, az://) or file:///DIRECTORY",
                display(text.as_bytes())
            ))),
        }
    }

    /// Returns whether `text` has the form of an address and not of a path.
    pub fn is_meant(text: &OsStr) -> bool {
        split(text).is_some()
    }

    /// Returns the text that [`Address::parse`] parses to this address.
    pub fn text(&self) -> String {
        match self {
            Address::Web(url) | Address::Directory(url) => url.as_str().to_owned(),
            Address::Bucket { cloud, bucket, key } => format!("{}://{bucket}/{key}", cloud.scheme()),
        }
    }

    pub(crate) fn below(&self, name: &str) -> String {
        if let Address::Directory(url) = self
            && let Some(below) = url.to_file_path().ok().and_then(|path| Url::from_file_path(path.join(name)).ok())
        {
            return below.as_str().trim_end_matches('/').to_owned();
        }
        let text = self.text();
        let place = text.trim_end_matches('/');
        if name.is_empty() { place.to_owned() } else { format!("{place}/{name}") }
    }

    fn web(text: &OsStr) -> std::result::Result<Address, &'static str> {
        let text = text.to_str().ok_or("an address is UTF-8")?;
        let url = Url::parse(text).map_err(|_| "not an address of a web server")?;
        // Arguments are seen by every user of the machine, and the kernel's table of mounts by
        // every program.
        if !url.username().is_empty() || url.password().is_some() {
            return Err("an address must not contain a password: every user of this machine could see it");
        }
        if url.query().is_some() || url.fragment().is_some() {
            return Err(
                "an address must end with the path of the file: every user of this machine could see a secret after '?' or '#'",
            );
        }
        if url.host().is_none() || url.path().ends_with('/') {
            return Err("an address has a host and the path of a file");
        }
        Ok(Address::Web(url))
    }

    fn directory(text: &OsStr) -> std::result::Result<Address, &'static str> {
        let url = text.to_str().and_then(|text| Url::parse(text).ok()).ok_or("not an address of a directory")?;
        let path = url.to_file_path().ok();
        let path = path.filter(|_| url.query().is_none() && url.fragment().is_none() && url.host().is_none());
        // A percent-encoded slash is a separator too, and the component between may be `..`.
        let path = path.filter(|path| !path.components().any(|part| part == Component::ParentDir));
        // Caches and spools are keyed by address: a directory has one, in every spelling.
        let url = path.and_then(|path| Url::from_file_path(path.components().collect::<PathBuf>()).ok());
        let url = url.ok_or("an address of a directory is file:///PATH")?;
        Ok(Address::Directory(url))
    }

    fn bucket(cloud: Cloud, rest: &[u8]) -> std::result::Result<Address, &'static str> {
        let text = std::str::from_utf8(rest).map_err(|_| "an address is UTF-8")?;
        let named = text.split_once('/');
        let named = named.filter(|(bucket, key)| !bucket.is_empty() && !key.is_empty() && !key.ends_with('/'));
        let (bucket, key) = named.ok_or(match cloud {
            Cloud::S3 => "an address of a bucket is s3://BUCKET/NAME",
            Cloud::Google => "an address of a bucket is gs://BUCKET/NAME",
            Cloud::Azure => "an address of a container is az://CONTAINER/NAME",
        })?;
        let is_name = |c: char| match cloud {
            Cloud::Azure => c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-',
            Cloud::S3 | Cloud::Google => c.is_ascii_alphanumeric() || ".-_".contains(c),
        };
        if !bucket.chars().all(is_name) {
            return Err(match cloud {
                Cloud::Azure => "a container's name has small letters, digits and dashes",
                Cloud::S3 | Cloud::Google => "a bucket's name has letters, digits, dots and dashes",
            });
        }
        // Azure takes a backslash for a slash, and dots at the end of a part for nothing: two names
        // would be one.
        let is_one = |part: &str| !part.is_empty() && !part.ends_with('.') && !part.contains('\\');
        if cloud == Cloud::Azure && !key.split('/').all(is_one) {
            return Err("a name in a container has no backslash, and no part of it is empty or ends with a dot");
        }
        // In the address of a request such a part means another name, which may be in another
        // bucket.
        if key.split('/').any(|part| matches!(part, "." | "..")) {
            return Err("a name in a bucket has dots, but no part of it is '.' or '..'");
        }
        Ok(Address::Bucket { cloud, bucket: bucket.to_owned(), key: key.to_owned() })
    }
}

fn split(text: &OsStr) -> Option<(&str, &[u8])> {
    let bytes = text.as_bytes();
    let at = bytes.windows(3).position(|three| three == b"://")?;
    let scheme = std::str::from_utf8(&bytes[..at]).ok()?;
    let is_scheme = !scheme.is_empty() && scheme.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit());
    is_scheme.then(|| (scheme, &bytes[at + 3..]))
}

/// Parses the address of a server. None for one with other parts: these may be secrets, so callers
/// do not display the text.
pub(crate) fn parse_endpoint(text: &str) -> Option<Url> {
    let url = Url::parse(text).ok()?;
    let has_login = !url.username().is_empty() || url.password().is_some();
    (url.has_host() && !has_login && url.query().is_none() && url.fragment().is_none()).then_some(url)
}

/// Rejects plain http, which every hop can read and change, unless it is allowed.
pub(crate) fn check_scheme(url: &Url, allow_http: bool) -> Result<()> {
    match url.scheme() {
        "https" => Ok(()),
        "http" if allow_http => Ok(()),
        "http" => Err(Error::invalid(format!(
            "{url}: plain http shows every host on the route the bytes that are read; to allow it, use --remote allow-http (at a private address allow-http,allow-private), or set LOCKBOX_REMOTE to the same"
        ))),
        _ => Err(Error::invalid(format!("{}: this kind of address cannot be read", display(url.as_str().as_bytes())))),
    }
}

/// Display form for messages: without control characters that a terminal would obey.
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
            ("gs://bucket_1/path/a.lbx", "gs://bucket_1/path/a.lbx"),
            ("az://some-container/path/a.lbx", "az://some-container/path/a.lbx"),
            ("file:///srv/a%20b", "file:///srv/a%20b"),
            // What is kept of an archive is kept under its address: spellings of one directory are
            // one.
            ("file:///srv/a b/", "file:///srv/a%20b"),
            ("file:///srv//./%61%20b//", "file:///srv/a%20b"),
            ("file:///x/../srv%2Fa%20b", "file:///srv/a%20b"),
            ("file:///", "file:///"),
        ] {
            assert_eq!(Address::parse(OsStr::new(text)).unwrap().unwrap().to_string(), shown);
        }
        // What is handed to another process is not what is shown.
        for text in [
            "s3://bucket/a\\b\u{1b}[31m.lbx",
            "s3://bucket/ä.lbx",
            "az://container/ä\u{1b}[31m.lbx",
            "https://example.org/a%5Cb.lbx",
        ] {
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
            ("gs://bucket", "gs://bucket/"),
            ("az://container/", "az://container/"),
            ("az://container/a/b/", "az://container/a/b"),
            ("file:///srv/a/", "file:///srv/a"),
            ("file:///", "file:///"),
        ] {
            assert_eq!(Address::place(OsStr::new(text)).unwrap().text(), is, "{text}");
        }
        for text in ["s3://", "s3://bu cket", "https://example.org/a", "a.lbx", "file://host/a", "az://Container"] {
            assert!(matches!(Address::place(OsStr::new(text)), Err(Error::Invalid(_))), "{text}");
        }
    }

    #[test]
    fn what_lies_below_a_place_has_an_address_that_leads_there() {
        for (place, name, is) in [
            ("file:///srv/a b/", "c%20d/e?f#g", "file:///srv/a%20b/c%2520d/e%3Ff%23g"),
            ("file:///", "a b", "file:///a%20b"),
            ("file:///srv", "", "file:///srv"),
            ("s3://bucket", "a%20b/c d", "s3://bucket/a%20b/c d"),
            ("az://container/a/", "b?", "az://container/a/b?"),
            ("gs://bucket/a", "", "gs://bucket/a"),
        ] {
            let found = Address::place(OsStr::new(place)).unwrap().below(name);
            assert_eq!(found, is);
            assert_eq!(Address::parse(OsStr::new(&found)).unwrap().unwrap().text(), is);
        }
    }

    #[test]
    fn what_cannot_be_used_says_why() {
        for (text, why) in [
            ("https://user:secret@example.org/a.lbx", "every user of this machine"),
            ("https://example.org/a.lbx?token=1", "a secret after"),
            ("https://example.org/", "the path of a file"),
            ("s3://bucket", "s3://BUCKET/NAME"),
            ("s3://bucket/", "s3://BUCKET/NAME"),
            ("s3://bu cket/a", "letters, digits"),
            ("gs://bucket", "gs://BUCKET/NAME"),
            ("az://container", "az://CONTAINER/NAME"),
            ("az://my.container/a", "small letters"),
            ("az://container/a/../b", "ends with a dot"),
            ("az://container/a\\b", "no backslash"),
            ("az://container//a", "is empty"),
            // Whoever asks by an address is led elsewhere by these.
            ("s3://bucket/a/../b", "no part of it"),
            ("s3://bucket/../other/a", "no part of it"),
            ("s3://bucket/./a", "no part of it"),
            ("gs://bucket/a/..", "no part of it"),
            ("file://host/a", "file:///PATH"),
            ("file://a", "file:///PATH"),
            ("file:///a?b", "file:///PATH"),
            ("file:///a/..%2Fb", "file:///PATH"),
            ("ftp://host/a", "begin with"),
        ] {
            let message = Address::parse(OsStr::new(text)).unwrap_err().to_string();
            assert!(message.contains(why), "{text}: {message}");
        }
    }
}
