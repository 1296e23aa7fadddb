//! Object store below a prefix of a bucket that speaks S3, or Google's dialect of it (`crate::s3`).
//!
//! Creates are conditional on the absence of the name (`If-None-Match: *`) and carry the hash of
//! their bytes (`Content-MD5`, which all stores support): some stores take the bytes received
//! before a connection was cut for the whole object. Both headers are signed, so no hop can remove
//! them.

use instant_xml::FromXml;
use lockbox::Result;
use rusty_s3::actions::ListObjectsV2;
use ureq::Agent;
use ureq::http::StatusCode;

use super::objects::{
    self, BatchRemoval, BatchReply, ListedObject, MAX_LIST, MAX_LIST_ENTRIES, MAX_PAGES, ObjectCreation, ObjectRange,
    ObjectStore,
};
use crate::RemoteOptions;
use crate::address::Cloud;
use crate::http;
use crate::provenance::RequestKind;
use crate::range_source::{RemoteError, RemoteResult};
use crate::s3::{S3Bucket, S3Signer, XML_NAMESPACE};
use crate::signing::content_md5;

pub(crate) struct S3Store {
    agent: Agent,
    bucket: S3Bucket,
    prefix: String,
}

impl S3Store {
    /// Creates the store without connecting. Errors: `Invalid` for an invalid endpoint or bucket.
    pub(crate) fn new(cloud: Cloud, bucket: &str, prefix: &str, options: &RemoteOptions) -> Result<S3Store> {
        Ok(S3Store::of(S3Bucket::new(cloud, bucket, options)?, prefix, options))
    }

    pub(super) fn of(bucket: S3Bucket, prefix: &str, options: &RemoteOptions) -> S3Store {
        S3Store {
            agent: http::agent(options, bucket.roots.clone()),
            bucket,
            prefix: if prefix.is_empty() { String::new() } else { format!("{}/", prefix.trim_end_matches('/')) },
        }
    }

    fn key(&self, name: &str) -> String {
        format!("{}{name}", self.prefix)
    }
}

impl S3Store {
    fn get_signed(&self, signer: &S3Signer<'_>, name: &str, part: ObjectRange) -> RemoteResult<Vec<u8>> {
        let (range, most) = part.header();
        let (url, mut headers) = signer.get(&self.key(name));
        headers.extend([("range", range), ("accept-encoding", "identity".to_owned())]);
        let response = http::call(self.agent.get(url.as_str()), &headers, most)?;
        let response = signer.check_provenance(RequestKind::Read, response)?;
        match response.status() {
            status if status.is_success() || status == StatusCode::RANGE_NOT_SATISFIABLE => {
                objects::read_part(response, part, most).map(|(bytes, _)| bytes)
            }
            _ => Err(signer.failure(response)),
        }
    }
}

impl ObjectStore for S3Store {
    fn create(&self, name: &str, bytes: &[u8]) -> RemoteResult<ObjectCreation> {
        let hash = content_md5(bytes);
        self.bucket.with(|signer| {
            let (url, headers) = signer.put(&self.key(name), bytes, &hash);
            let response = http::send(self.agent.put(url.as_str()), &headers, bytes, bytes.len() as u64)?;
            let response = signer.check_provenance(RequestKind::Create(&hash), response)?;
            match response.status() {
                StatusCode::OK | StatusCode::CREATED | StatusCode::NO_CONTENT => {
                    Ok(ObjectCreation::Created(objects::store_time(&response)))
                }
                StatusCode::PRECONDITION_FAILED => Ok(ObjectCreation::Exists),
                // Another request for the name is in progress; its outcome is unknown.
                StatusCode::CONFLICT => {
                    Err(RemoteError::Transient("another request is in progress (status 409)".into()))
                }
                StatusCode::NOT_IMPLEMENTED => Err(RemoteError::Unsupported(
                    "it does not support conditional requests (If-None-Match), so two writers could destroy each other's data".into(),
                )),
                _ => Err(match signer.failure(response) {
                    RemoteError::NotFound => RemoteError::NoBucket("the bucket does not exist (status 404)".into()),
                    error => error,
                }),
            }
        })
    }

    /// A user without the right to list is denied missing objects.
    fn can_hide_missing(&self) -> bool {
        true
    }

    fn get(&self, name: &str, part: ObjectRange) -> RemoteResult<Vec<u8>> {
        self.bucket.with(|signer| self.get_signed(signer, name, part))
    }

    /// Follows the continuation of a shortened list: the caller takes a short list for the end.
    fn list(&self, prefix: &str, after: &str, most: usize) -> RemoteResult<Vec<ListedObject>> {
        let most = most.min(MAX_LIST_ENTRIES);
        self.bucket.with(|signer| {
            let mut listed = Vec::new();
            let mut token: Option<String> = None;
            for _ in 0..MAX_PAGES {
                let (url, headers) = signer.list(|action| {
                    action.with_prefix(self.key(prefix));
                    action.with_max_keys(most - listed.len());
                    match &token {
                        Some(token) => action.with_continuation_token(token.clone()),
                        None if !after.is_empty() => action.with_start_after(self.key(after)),
                        None => {}
                    }
                });
                let response = http::call(self.agent.get(url.as_str()), &headers, MAX_LIST)?;
                let response = signer.check_provenance(RequestKind::List, response)?;
                if response.status() != StatusCode::OK {
                    return Err(signer.failure(response));
                }
                let text = to_aws_namespace(objects::read_list(response)?);
                let parsed = ListObjectsV2::parse_response(&text).map_err(|_| objects::invalid_list())?;
                for object in parsed.contents.into_iter().take(most - listed.len()) {
                    let name =
                        object.key.strip_prefix(&self.prefix).map(str::to_owned).ok_or_else(objects::invalid_list)?;
                    let time = object.last_modified.as_deref().and_then(http::list_date);
                    listed.push(ListedObject { name, bytes: object.size.ok_or_else(objects::invalid_list)?, time });
                }
                token = parsed.next_continuation_token.filter(|_| listed.len() < most);
                if token.is_none() {
                    return Ok(listed);
                }
            }
            Err(RemoteError::Unsupported("it cuts a list short again and again".into()))
        })
    }

    fn remove(&self, name: &str) -> RemoteResult<()> {
        self.bucket.with(|signer| {
            let (url, headers) = signer.delete(&self.key(name));
            let response = http::call(self.agent.delete(url.as_str()), &headers, 0)?;
            let status = response.status();
            let response = match signer.check_provenance(RequestKind::Remove, response) {
                // PROOF-1: some stores send no proof with an answer that has no content, and with
                // all others.
                Err(unproven) if status.is_success() => {
                    return match self.get_signed(signer, name, ObjectRange::Last(1)) {
                        Err(RemoteError::NotFound) => Ok(()),
                        Ok(_) => Err(unproven),
                        Err(error) => Err(error),
                    };
                }
                checked => checked?,
            };
            match response.status() {
                StatusCode::OK | StatusCode::NO_CONTENT | StatusCode::NOT_FOUND => Ok(()),
                _ => Err(signer.failure(response)),
            }
        })
    }

    /// An object is removed when the response names it (PROOF-1).
    fn remove_batch(&self, names: &[String]) -> RemoteResult<BatchReply> {
        let keys: Vec<String> = names.iter().map(|name| self.key(name)).collect();
        self.bucket.with(|signer| {
            let Some(((url, headers), body)) = signer.delete_batch(&keys) else { return Ok(BatchReply::Unsupported) };
            let response = http::send(self.agent.post(url.as_str()), &headers, body.as_bytes(), MAX_LIST)?;
            let response = signer.check_provenance(RequestKind::RemoveBatch, response)?;
            match response.status() {
                StatusCode::OK => {
                    let parsed = parse_batch(&objects::read_list(response)?, &self.prefix);
                    Ok(parsed.map_or(BatchReply::Unsupported, BatchReply::Done))
                }
                StatusCode::BAD_REQUEST => Ok(BatchReply::Rejected),
                StatusCode::NOT_IMPLEMENTED | StatusCode::METHOD_NOT_ALLOWED => Ok(BatchReply::Unsupported),
                _ => Err(signer.failure(response)),
            }
        })
    }
}

#[derive(FromXml)]
#[xml(rename = "DeleteResult", ns(XML_NAMESPACE))]
struct DeleteResult {
    deleted: Vec<DeletedObject>,
    errors: Vec<KeptObject>,
}

#[derive(FromXml)]
#[xml(rename = "Deleted", ns(XML_NAMESPACE))]
struct DeletedObject {
    #[xml(rename = "Key")]
    key: String,
}

#[derive(FromXml)]
#[xml(rename = "Error", ns(XML_NAMESPACE))]
struct KeptObject {
    #[xml(rename = "Code")]
    code: String,
    #[xml(rename = "Message")]
    message: String,
}

/// Returns the names that a response to a batch removal confirms, and the first error among the
/// others; None for a document of another form.
fn parse_batch(text: &str, prefix: &str) -> Option<BatchRemoval> {
    let parsed: DeleteResult = instant_xml::from_str(text).ok()?;
    let error = parsed.errors.into_iter().next().map(|error| {
        let (code, why) = (http::printable(&error.code), http::printable(&error.message));
        RemoteError::Denied(format!("it does not remove an object: {why} ({code})"))
    });
    let names = parsed.deleted.into_iter().filter_map(|deleted| deleted.key.strip_prefix(prefix).map(str::to_owned));
    Some(BatchRemoval { removed: names.collect(), error })
}

/// Replaces the older XML namespace of Google's store by Amazon's.
fn to_aws_namespace(text: String) -> String {
    const OLDER: &str = "http://doc.s3.amazonaws.com/2006-03-01";
    let begin = text.find("<ListBucketResult").unwrap_or(text.len());
    let end = begin + text[begin..].find('>').unwrap_or_default();
    if !text[begin..end].contains(OLDER) {
        return text;
    }
    text[..end].replace(&format!("{OLDER}/"), OLDER).replace(OLDER, XML_NAMESPACE) + &text[end..]
}
