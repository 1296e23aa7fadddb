//! The objects below a prefix of a container of Azure's blob storage.
//!
//! Creations are on the condition that there is none of the name, and say the hash of their bytes: as in `s3.rs`. Two things are not as with S3. A request for the last bytes of an object is not
//! known: the first so many are asked for, which is all of most that are asked for so, and tell the length. And a list begins at the beginning or at a marker, which means nothing to
//! whoever gets it: so where the last full list ended is remembered with its marker, and whoever wants to begin behind another name goes there list by list.

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use instant_xml::FromXml;
use lockbox::Result;
use md5::{Digest, Md5};
use parking_lot::Mutex;
use ureq::http::{Response, StatusCode};
use ureq::{Agent, Body};

use super::objects::{Created, LISTED, Listed, Objects, Part};
use super::response::{self, Answer, MAX_LIST, MOST_ANSWERS, limit};
use crate::Options;
use crate::azure::{Asker, Container, Request};
use crate::http;
use crate::provenance::{self, Asked};
use crate::range_source::Trouble;

/// Lists on the way to a name: as many as anybody looks through.
const MOST_SKIPPED: usize = 4000;

pub(crate) struct Azure {
    agent: Agent,
    container: Container,
    prefix: String,
    ended: Mutex<Option<Ended>>,
}

/// Where a list of [`LISTED`] objects ended.
#[derive(Clone)]
struct Ended {
    prefix: String,
    last: String,
    marker: String,
}

impl Azure {
    /// Connects nowhere yet.
    ///
    /// # Errors
    /// `Invalid` for a place that cannot be asked.
    pub(crate) fn new(container: &str, prefix: &str, options: &Options) -> Result<Azure> {
        Ok(Azure::of(Container::new(container, options)?, prefix, options))
    }

    pub(super) fn of(container: Container, prefix: &str, options: &Options) -> Azure {
        Azure {
            agent: http::agent(options),
            container,
            prefix: if prefix.is_empty() { String::new() } else { format!("{}/", prefix.trim_end_matches('/')) },
            ended: Mutex::new(None),
        }
    }

    fn key(&self, name: &str) -> String {
        format!("{}{name}", self.prefix)
    }
}

impl Objects for Azure {
    fn create(&self, name: &str, bytes: &[u8]) -> Answer<Created> {
        let hash = STANDARD.encode(Md5::digest(bytes));
        self.container.with(|asker| self.create_as(asker, name, bytes, &hash))
    }

    /// Whose token is for one blob alone is refused any other one.
    fn hides(&self) -> bool {
        true
    }

    fn get(&self, name: &str, part: Part) -> Answer<Vec<u8>> {
        self.container.with(|asker| match part {
            Part::Last(most) => self.last_as(asker, name, most),
            _ => self.get_as(asker, name, part).map(|(bytes, _)| bytes),
        })
    }

    fn list(&self, prefix: &str, after: &str, most: usize) -> Answer<Vec<Listed>> {
        self.container.with(|asker| self.list_as(asker, prefix, after, most.min(LISTED)))
    }

    fn remove(&self, name: &str) -> Answer<()> {
        self.container.with(|asker| self.remove_as(asker, name))
    }
}

impl Azure {
    fn create_as(&self, asker: &Asker<'_>, name: &str, bytes: &[u8], hash: &str) -> Answer<Created> {
        let headers = [
            ("content-md5", hash.to_owned()),
            ("content-type", "application/octet-stream".to_owned()),
            ("if-none-match", "*".to_owned()),
            ("x-ms-blob-type", "BlockBlob".to_owned()),
        ];
        let Request { url, headers } = asker.request("PUT", &self.key(name), &[], &headers, bytes.len());
        let mut request = self.agent.put(url.as_str());
        for (name, value) in headers {
            request = request.header(name, value);
        }
        let request = request.config().timeout_global(limit(bytes.len() as u64)).build();
        let response = request.send(bytes).map_err(|error| http::trouble(&error))?;
        let response = provenance::azure(Asked::Create(hash), response)?;
        match (response.status(), code(&response)) {
            (StatusCode::CREATED, _) => Ok(Created::Made(response::date(&response))),
            (StatusCode::CONFLICT, "BlobAlreadyExists") | (StatusCode::PRECONDITION_FAILED, _) => Ok(Created::Exists),
            // What becomes of another request, or of the container, is not known.
            (StatusCode::CONFLICT, code) => {
                Err(Trouble::Passing(format!("another request is under way (status 409 {code})")))
            }
            // They were changed on the way.
            (StatusCode::BAD_REQUEST, "Md5Mismatch") => {
                Err(Trouble::Passing("it got other bytes than were sent".into()))
            }
            (StatusCode::NOT_FOUND, _) => Err(Trouble::Unusable("there is no such container".into())),
            _ => Err(refusal(&response)),
        }
    }

    /// The bytes of a part, and the length of the object where that is told.
    fn get_as(&self, asker: &Asker<'_>, name: &str, part: Part) -> Answer<(Vec<u8>, Option<u64>)> {
        let (range, most) = match part {
            Part::All(most) => (format!("bytes=0-{most}"), most),
            Part::Range(offset, length) => (format!("bytes={offset}-{}", offset + length - 1), length),
            Part::Last(_) => return Err(Trouble::Unusable("it does not serve the last bytes of an object".into())),
        };
        let headers = [("range", range), ("accept-encoding", "identity".to_owned())];
        let response = self.call(asker.request("GET", &self.key(name), &[], &headers, 0), most)?;
        let refused = refusal(&response);
        response::part(response, part, most).unwrap_or(Err(refused))
    }

    fn last_as(&self, asker: &Asker<'_>, name: &str, most: u64) -> Answer<Vec<u8>> {
        let (mut bytes, length) = self.get_as(asker, name, Part::Range(0, most))?;
        let length = length.unwrap_or(bytes.len() as u64);
        if length <= most {
            return Ok(bytes);
        }
        // What is here already may be a part of it.
        let begin = most.max(length - most);
        let (rest, _) = self.get_as(asker, name, Part::Range(begin, length - begin))?;
        bytes.drain(..((length - most).min(bytes.len() as u64)) as usize);
        bytes.extend(rest);
        if bytes.len() as u64 != most {
            return Err(Trouble::Passing("its answer was cut off".into()));
        }
        Ok(bytes)
    }

    fn list_as(&self, asker: &Asker<'_>, prefix: &str, after: &str, most: usize) -> Answer<Vec<Listed>> {
        let known = self.ended.lock().clone();
        let known = known.filter(|ended| ended.prefix == prefix && ended.last == after).map(|ended| ended.marker);
        let is_known = known.is_some();
        match self.list_from(asker, prefix, after, most, known) {
            // A marker may be too old for the store.
            Err(Trouble::Unusable(_)) if is_known => {
                *self.ended.lock() = None;
                self.list_from(asker, prefix, after, most, None)
            }
            listed => listed,
        }
    }

    /// The objects behind `after`, from a marker that is not behind it. A store may give fewer than it was asked for, and say that there are more.
    fn list_from(
        &self,
        asker: &Asker<'_>,
        prefix: &str,
        after: &str,
        most: usize,
        mut marker: Option<String>,
    ) -> Answer<Vec<Listed>> {
        let mut listed: Vec<Listed> = Vec::new();
        let is_on_the_way = !after.is_empty() && marker.is_none();
        for _ in 0..if is_on_the_way { MOST_SKIPPED } else { MOST_ANSWERS } {
            // On the way to a name lists are as long as they can be.
            let wanted = if is_on_the_way && listed.is_empty() { LISTED } else { most - listed.len() };
            let (found, next) = self.list_once(asker, prefix, marker.as_deref(), wanted)?;
            listed.extend(found.into_iter().filter(|object| *object.name > *after));
            match (next, listed.last()) {
                (Some(next), _) if listed.len() < most => marker = Some(next),
                (Some(next), Some(last)) if listed.len() == LISTED => {
                    let ended = Ended { prefix: prefix.to_owned(), last: last.name.clone(), marker: next };
                    *self.ended.lock() = Some(ended);
                    return Ok(listed);
                }
                _ => {
                    listed.truncate(most);
                    return Ok(listed);
                }
            }
        }
        Err(Trouble::Unusable("it cuts a list short again and again".into()))
    }

    /// One answer, and the marker of what follows it.
    fn list_once(
        &self,
        asker: &Asker<'_>,
        prefix: &str,
        marker: Option<&str>,
        most: usize,
    ) -> Answer<(Vec<Listed>, Option<String>)> {
        let (prefix, most) = (self.key(prefix), most.to_string());
        let mut query = vec![("restype", "container"), ("comp", "list"), ("maxresults", &*most)];
        if !prefix.is_empty() {
            query.push(("prefix", &*prefix));
        }
        query.extend(marker.map(|marker| ("marker", marker)));
        let response = self.call(asker.request("GET", "", &query, &[], 0), MAX_LIST)?;
        match response.status() {
            StatusCode::OK => {}
            StatusCode::NOT_FOUND => return Err(Trouble::Gone),
            _ => return Err(refusal(&response)),
        }
        listed(&response::list(response)?, &self.prefix)
    }

    fn remove_as(&self, asker: &Asker<'_>, name: &str) -> Answer<()> {
        let Request { url, headers } = asker.request("DELETE", &self.key(name), &[], &[], 0);
        let mut request = self.agent.delete(url.as_str());
        for (name, value) in headers {
            request = request.header(name, value);
        }
        let request = request.config().timeout_global(limit(0)).build();
        let response = request.call().map_err(|error| http::trouble(&error))?;
        let response = provenance::azure(Asked::Remove, response)?;
        match response.status() {
            StatusCode::OK | StatusCode::ACCEPTED | StatusCode::NOT_FOUND => Ok(()),
            _ => Err(refusal(&response)),
        }
    }

    fn call(&self, Request { url, headers }: Request, bytes: u64) -> Answer<Response<Body>> {
        let mut request = self.agent.get(url.as_str());
        for (name, value) in headers {
            request = request.header(name, value);
        }
        let request = request.config().timeout_global(limit(bytes)).build();
        let response = request.call().map_err(|error| http::trouble(&error))?;
        provenance::azure(Asked::Read, response)
    }
}

/// Which of Azure's errors it is; nothing for what is none of its words.
fn code(response: &Response<Body>) -> &str {
    let code = response.headers().get("x-ms-error-code").and_then(|code| code.to_str().ok()).unwrap_or_default();
    if code.len() <= 64 && code.bytes().all(|byte| byte.is_ascii_alphanumeric()) { code } else { "" }
}

fn refusal(response: &Response<Body>) -> Trouble {
    let status = response.status();
    match (status, code(response)) {
        (StatusCode::CONFLICT, "PublicAccessNotPermitted") => {
            Trouble::Refused("it is not public (status 409), and no key of the account was found".into())
        }
        (StatusCode::FORBIDDEN, code) if !code.is_empty() => {
            Trouble::Refused(format!("it refuses the request (status 403 {code})"))
        }
        (StatusCode::CONFLICT | StatusCode::BAD_REQUEST, code) if !code.is_empty() => {
            Trouble::Unusable(format!("it answers with status {} {code}", status.as_u16()))
        }
        _ => response::refusal(status),
    }
}

/// The objects of a list below `prefix`, and the marker of what follows.
fn listed(text: &str, prefix: &str) -> Answer<(Vec<Listed>, Option<String>)> {
    let results: EnumerationResults =
        instant_xml::from_str(text.trim_start_matches('\u{feff}')).map_err(|_| response::no_list())?;
    let mut listed = Vec::new();
    for entry in results.listed.entries {
        // Accounts with directories list those too.
        if entry.properties.kind.as_deref() == Some("directory") {
            continue;
        }
        let name = entry.name.name().ok_or_else(response::no_list)?;
        listed.push(Listed {
            name: name.strip_prefix(prefix).map(str::to_owned).ok_or_else(response::no_list)?,
            bytes: entry.properties.length.ok_or_else(response::no_list)?,
            time: entry.properties.modified.as_deref().and_then(http::date),
        });
    }
    Ok((listed, results.marker.filter(|marker| !marker.is_empty())))
}

#[derive(FromXml)]
struct EnumerationResults {
    listed: Entries,
    #[xml(rename = "NextMarker")]
    marker: Option<String>,
}

#[derive(FromXml)]
#[xml(rename = "Blobs")]
struct Entries {
    entries: Vec<Entry>,
}

#[derive(FromXml)]
#[xml(rename = "Blob")]
struct Entry {
    name: Name,
    properties: Properties,
}

#[derive(FromXml)]
struct Name {
    /// Of a name that XML cannot have.
    #[xml(attribute, rename = "Encoded")]
    encoded: Option<bool>,
    #[xml(direct)]
    text: String,
}

#[derive(FromXml)]
struct Properties {
    #[xml(rename = "Last-Modified")]
    modified: Option<String>,
    #[xml(rename = "Content-Length")]
    length: Option<u64>,
    #[xml(rename = "ResourceType")]
    kind: Option<String>,
}

impl Name {
    fn name(self) -> Option<String> {
        if self.encoded != Some(true) {
            return Some(self.text);
        }
        let mut bytes = Vec::new();
        let mut parts = self.text.split('%');
        bytes.extend_from_slice(parts.next()?.as_bytes());
        for part in parts {
            bytes.push(u8::from_str_radix(part.get(..2)?, 16).ok()?);
            bytes.extend_from_slice(&part.as_bytes()[2..]);
        }
        String::from_utf8(bytes).ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Of an account with directories, as Microsoft's documentation shows it, and a name that XML cannot have.
    #[test]
    fn a_list_of_azures_is_read_as_it_is_written() {
        let text = "\u{feff}<?xml version=\"1.0\" encoding=\"utf-8\"?><EnumerationResults ServiceEndpoint=\"https://a.example.org/\" ContainerName=\"b\">\
            <Prefix>p/</Prefix><Marker></Marker><MaxResults>4</MaxResults><Delimiter /><Blobs>\
            <Blob><Name>p/a</Name><Properties><ResourceType>directory</ResourceType><Content-Length>0</Content-Length></Properties></Blob>\
            <Blob><Name>p/a/&lt;b&gt;</Name><Snapshot /><Properties><Creation-Time>x</Creation-Time><Last-Modified>Thu, 26 Nov 2026 01:00:00 GMT</Last-Modified>\
            <Etag>0x1</Etag><ResourceType>file</ResourceType><Content-Length>7</Content-Length><Content-MD5 /></Properties><Metadata><x>y</x></Metadata><OrMetadata /></Blob>\
            <Blob><Name Encoded=\"true\">p/c%EF%BF%BEd%25</Name><Properties><Content-Length>1</Content-Length></Properties></Blob>\
            </Blobs><NextMarker>2!8!x--</NextMarker></EnumerationResults>";
        let object = |name: &str, bytes, time| Listed { name: name.into(), bytes, time };
        let all = vec![object("a/<b>", 7, Some(1_795_654_800)), object("c\u{fffe}d%", 1, None)];
        assert_eq!(listed(text, "p/"), Ok((all, Some("2!8!x--".into()))));
        let none = "<EnumerationResults><Blobs /><NextMarker /></EnumerationResults>";
        assert_eq!(listed(none, "p/"), Ok((Vec::new(), None)));
        for wrong in
            ["", "<html></html>", &text.replace("%25", "%2"), &text.replace("p/a/", "q/"), &text.replace('7', "-7")]
        {
            assert!(matches!(listed(wrong, "p/"), Err(Trouble::Unusable(_))), "{wrong}");
        }
    }
}
