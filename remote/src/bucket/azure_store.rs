//! Object store below a prefix of an Azure container.
//!
//! Creates are conditional on the absence of the name and carry the hash of their bytes, as in
//! `s3_store.rs`. Two things differ from S3. Azure has no request for the last bytes of an object:
//! a range from the start is requested instead, which covers most objects read in this way and
//! returns the length. And a list begins at the start or at an opaque marker: so the end of the
//! last full list is remembered with its marker, and a list after another name skips page by page.

use instant_xml::FromXml;
use lockbox::Result;
use parking_lot::Mutex;
use ureq::http::{Response, StatusCode};
use ureq::tls::RootCerts;
use ureq::{Agent, Body};

use super::objects::{
    self, ListedObject, MAX_LIST, MAX_LIST_ENTRIES, MAX_PAGES, ObjectCreation, ObjectRange, ObjectStore,
};
use crate::RemoteOptions;
use crate::azure::{AzureContainer, AzureSigner};
use crate::http;
use crate::provenance::{self, RequestKind};
use crate::range_source::{RemoteError, RemoteResult};
use crate::signing::{SignedRequest, content_md5};
use crate::store_failure::azure_code;

/// Maximum list pages skipped to reach a name: the maximum of objects that are walked.
const MAX_SKIPPED_PAGES: usize = 4000;

pub(crate) struct AzureStore {
    agent: Agent,
    container: AzureContainer,
    prefix: String,
    marker_after: Mutex<Option<ListMarker>>,
}

/// End of a list of [`MAX_LIST_ENTRIES`] objects and its marker.
#[derive(Clone)]
struct ListMarker {
    prefix: String,
    last: String,
    marker: String,
}

impl AzureStore {
    /// Creates the store without connecting. Errors: `Invalid` for an invalid account or container.
    pub(crate) fn new(container: &str, prefix: &str, options: &RemoteOptions) -> Result<AzureStore> {
        Ok(AzureStore::of(AzureContainer::new(container, options)?, prefix, options))
    }

    pub(super) fn of(container: AzureContainer, prefix: &str, options: &RemoteOptions) -> AzureStore {
        AzureStore {
            agent: http::agent(options, RootCerts::PlatformVerifier),
            container,
            prefix: if prefix.is_empty() { String::new() } else { format!("{}/", prefix.trim_end_matches('/')) },
            marker_after: Mutex::new(None),
        }
    }

    fn key(&self, name: &str) -> String {
        format!("{}{name}", self.prefix)
    }
}

impl ObjectStore for AzureStore {
    fn create(&self, name: &str, bytes: &[u8]) -> RemoteResult<ObjectCreation> {
        let hash = content_md5(bytes);
        let headers = [
            ("content-md5", hash.clone()),
            ("content-type", "application/octet-stream".to_owned()),
            ("if-none-match", "*".to_owned()),
            ("x-ms-blob-type", "BlockBlob".to_owned()),
        ];
        self.container.with(|signer| {
            let (url, headers) = signer.request("PUT", &self.key(name), &[], &headers, bytes.len());
            let response = http::send(self.agent.put(url.as_str()), &headers, bytes, bytes.len() as u64)?;
            let response = provenance::check_azure(RequestKind::Create(&hash), response)?;
            match (response.status(), azure_code(&response)) {
                (StatusCode::CREATED, _) => Ok(ObjectCreation::Created(objects::store_time(&response))),
                (StatusCode::CONFLICT, "BlobAlreadyExists") | (StatusCode::PRECONDITION_FAILED, _) => {
                    Ok(ObjectCreation::Exists)
                }
                // The outcome of the other request, or of the container's deletion, is unknown.
                (StatusCode::CONFLICT, code) => {
                    Err(RemoteError::Transient(format!("another request is in progress (status 409 {code})")))
                }
                // They were changed on the way.
                (StatusCode::BAD_REQUEST, "Md5Mismatch") => {
                    Err(RemoteError::Transient("it got other bytes than were sent".into()))
                }
                _ => Err(match signer.failure(&response) {
                    RemoteError::NotFound => RemoteError::NoBucket("the container does not exist (status 404)".into()),
                    error => error,
                }),
            }
        })
    }

    /// A token for a single blob is denied any other one.
    fn can_hide_missing(&self) -> bool {
        true
    }

    fn get(&self, name: &str, part: ObjectRange) -> RemoteResult<Vec<u8>> {
        self.container.with(|signer| match part {
            ObjectRange::Last(most) => self.get_last_signed(signer, name, most),
            _ => self.get_signed(signer, name, part).map(|(bytes, _)| bytes),
        })
    }

    fn list(&self, prefix: &str, after: &str, most: usize) -> RemoteResult<Vec<ListedObject>> {
        let most = most.min(MAX_LIST_ENTRIES);
        self.container.with(|signer| {
            let known = self.marker_after.lock().clone();
            let known = known.filter(|known| known.prefix == prefix && known.last == after).map(|known| known.marker);
            let is_known = known.is_some();
            match self.list_from_marker(signer, prefix, after, most, known) {
                // A marker may be too old for the store.
                Err(RemoteError::Unsupported(_)) if is_known => {
                    *self.marker_after.lock() = None;
                    self.list_from_marker(signer, prefix, after, most, None)
                }
                listed => listed,
            }
        })
    }

    fn remove(&self, name: &str) -> RemoteResult<()> {
        self.container.with(|signer| {
            let (url, headers) = signer.request("DELETE", &self.key(name), &[], &[], 0);
            let response = http::call(self.agent.delete(url.as_str()), &headers, 0)?;
            let response = provenance::check_azure(RequestKind::Remove, response)?;
            match response.status() {
                StatusCode::OK | StatusCode::ACCEPTED | StatusCode::NOT_FOUND => Ok(()),
                _ => Err(signer.failure(&response)),
            }
        })
    }
}

impl AzureStore {
    /// Reads a part of an object that is not its end; also returns its length if the response has
    /// it.
    fn get_signed(
        &self,
        signer: &AzureSigner<'_>,
        name: &str,
        part: ObjectRange,
    ) -> RemoteResult<(Vec<u8>, Option<u64>)> {
        let (range, most) = part.header();
        let headers = [("range", range), ("accept-encoding", "identity".to_owned())];
        let response = self.get_checked(signer.request("GET", &self.key(name), &[], &headers, 0), most)?;
        match response.status() {
            status if status.is_success() || status == StatusCode::RANGE_NOT_SATISFIABLE => {
                objects::read_part(response, part, most)
            }
            _ => Err(signer.failure(&response)),
        }
    }

    fn get_last_signed(&self, signer: &AzureSigner<'_>, name: &str, most: u64) -> RemoteResult<Vec<u8>> {
        let (mut bytes, length) = self.get_signed(signer, name, ObjectRange::Range(0, most))?;
        let length = length.unwrap_or(bytes.len() as u64);
        if length <= most {
            return Ok(bytes);
        }
        // The first response may contain a part of the range.
        let begin = most.max(length - most);
        let (rest, _) = self.get_signed(signer, name, ObjectRange::Range(begin, length - begin))?;
        bytes.drain(..((length - most).min(bytes.len() as u64)) as usize);
        bytes.extend(rest);
        if bytes.len() as u64 != most {
            return Err(RemoteError::Transient("its response was truncated".into()));
        }
        Ok(bytes)
    }

    /// Lists the objects after `after`, from a marker that is not past it. A store may return fewer
    /// objects than requested and a marker for the rest.
    fn list_from_marker(
        &self,
        signer: &AzureSigner<'_>,
        prefix: &str,
        after: &str,
        most: usize,
        mut marker: Option<String>,
    ) -> RemoteResult<Vec<ListedObject>> {
        let mut listed: Vec<ListedObject> = Vec::new();
        let is_skipping = !after.is_empty() && marker.is_none();
        for _ in 0..if is_skipping { MAX_SKIPPED_PAGES } else { MAX_PAGES } {
            // On the way to a name lists are as long as they can be.
            let wanted = if is_skipping && listed.is_empty() { MAX_LIST_ENTRIES } else { most - listed.len() };
            let (found, next) = self.list_page(signer, prefix, marker.as_deref(), wanted)?;
            listed.extend(found.into_iter().filter(|object| *object.name > *after));
            match (next, listed.last()) {
                (Some(next), _) if listed.len() < most => marker = Some(next),
                (Some(next), Some(last)) if listed.len() == MAX_LIST_ENTRIES => {
                    let marker_after = ListMarker { prefix: prefix.to_owned(), last: last.name.clone(), marker: next };
                    *self.marker_after.lock() = Some(marker_after);
                    return Ok(listed);
                }
                _ => {
                    listed.truncate(most);
                    return Ok(listed);
                }
            }
        }
        Err(RemoteError::Unsupported("it cuts a list short again and again".into()))
    }

    /// Requests one page; returns its objects and the marker of the next page.
    fn list_page(
        &self,
        signer: &AzureSigner<'_>,
        prefix: &str,
        marker: Option<&str>,
        most: usize,
    ) -> RemoteResult<(Vec<ListedObject>, Option<String>)> {
        let (prefix, most) = (self.key(prefix), most.to_string());
        let mut query = vec![("restype", "container"), ("comp", "list"), ("maxresults", &*most)];
        if !prefix.is_empty() {
            query.push(("prefix", &*prefix));
        }
        query.extend(marker.map(|marker| ("marker", marker)));
        let response = self.get_checked(signer.request("GET", "", &query, &[], 0), MAX_LIST)?;
        if response.status() != StatusCode::OK {
            return Err(signer.failure(&response));
        }
        parse_list(&objects::read_list(response)?, &self.prefix)
    }

    fn get_checked(&self, (url, headers): SignedRequest, bytes: u64) -> RemoteResult<Response<Body>> {
        let response = http::call(self.agent.get(url.as_str()), &headers, bytes)?;
        provenance::check_azure(RequestKind::Read, response)
    }
}

/// Parses a list into the objects below `prefix` and the marker of the next page.
fn parse_list(text: &str, prefix: &str) -> RemoteResult<(Vec<ListedObject>, Option<String>)> {
    let results: EnumerationResults =
        instant_xml::from_str(text.trim_start_matches('\u{feff}')).map_err(|_| objects::invalid_list())?;
    let mut listed = Vec::new();
    for entry in results.listed.entries {
        // Accounts with directories list those too.
        if entry.properties.kind.as_deref() == Some("directory") {
            continue;
        }
        let name = entry.name.name().ok_or_else(objects::invalid_list)?;
        listed.push(ListedObject {
            name: name.strip_prefix(prefix).map(str::to_owned).ok_or_else(objects::invalid_list)?,
            bytes: entry.properties.length.ok_or_else(objects::invalid_list)?,
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
    /// Set for a name that XML cannot represent.
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

    /// Of an account with directories, as Microsoft's documentation shows it, and a name that XML
    /// cannot have.
    #[test]
    fn a_list_of_azures_is_read_as_it_is_written() {
        let text = "\u{feff}<?xml version=\"1.0\" encoding=\"utf-8\"?><EnumerationResults ServiceEndpoint=\"https://a.example.org/\" ContainerName=\"b\">\
            <Prefix>p/</Prefix><Marker></Marker><MaxResults>4</MaxResults><Delimiter /><Blobs>\
            <Blob><Name>p/a</Name><Properties><ResourceType>directory</ResourceType><Content-Length>0</Content-Length></Properties></Blob>\
            <Blob><Name>p/a/&lt;b&gt;</Name><Snapshot /><Properties><Creation-Time>x</Creation-Time><Last-Modified>Thu, 26 Nov 2026 01:00:00 GMT</Last-Modified>\
            <Etag>0x1</Etag><ResourceType>file</ResourceType><Content-Length>7</Content-Length><Content-MD5 /></Properties><Metadata><x>y</x></Metadata><OrMetadata /></Blob>\
            <Blob><Name Encoded=\"true\">p/c%EF%BF%BEd%25</Name><Properties><Content-Length>1</Content-Length></Properties></Blob>\
            </Blobs><NextMarker>2!8!x--</NextMarker></EnumerationResults>";
        let object = |name: &str, bytes, time| ListedObject { name: name.into(), bytes, time };
        let all = vec![object("a/<b>", 7, Some(1_795_654_800)), object("c\u{fffe}d%", 1, None)];
        assert_eq!(parse_list(text, "p/"), Ok((all, Some("2!8!x--".into()))));
        let none = "<EnumerationResults><Blobs /><NextMarker /></EnumerationResults>";
        assert_eq!(parse_list(none, "p/"), Ok((Vec::new(), None)));
        for wrong in
            ["", "<html></html>", &text.replace("%25", "%2"), &text.replace("p/a/", "q/"), &text.replace('7', "-7")]
        {
            assert!(matches!(parse_list(wrong, "p/"), Err(RemoteError::Unsupported(_))), "{wrong}");
        }
    }
}
