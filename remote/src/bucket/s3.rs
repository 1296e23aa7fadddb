//! The objects below a prefix of a bucket that speaks S3.
//!
//! Creations are on the condition that there is none of the name (`If-None-Match: *`), and say the hash of their bytes (`Content-MD5`, the one that all stores know): there
//! are stores that take what came before a connection was cut for the whole object. Both are signed, so nobody on the way takes them off.

use std::io::Read;
use std::time::Duration;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use lockbox::Result;
use md5::{Digest, Md5};
use rusty_s3::actions::ListObjectsV2;
use rusty_s3::{Bucket, S3Action};
use ureq::http::{Response, StatusCode, header};
use ureq::{Agent, Body};
use url::Url;

use super::objects::{Created, LISTED, Listed, Objects, Part};
use crate::Options;
use crate::credentials::Credentials;
use crate::http::{self, SIGNED_FOR};
use crate::source::Trouble;

/// Longest answer of a list.
const MAX_LIST: u64 = 4 << 20;

const CONTENT_MD5: &str = "content-md5";

type Answer<T> = std::result::Result<T, Trouble>;

pub(crate) struct S3 {
    agent: Agent,
    bucket: Bucket,
    prefix: String,
    credentials: Credentials,
}

impl S3 {
    /// Connects nowhere yet.
    ///
    /// # Errors
    /// `Invalid` for a place that cannot be asked.
    pub(crate) fn new(bucket: &str, prefix: &str, options: &Options) -> Result<S3> {
        Ok(S3 {
            agent: http::agent(options.allow_private),
            bucket: http::bucket_at(bucket, options)?,
            prefix: if prefix.is_empty() { String::new() } else { format!("{}/", prefix.trim_end_matches('/')) },
            credentials: Credentials::new(),
        })
    }

    fn key(&self, name: &str) -> String {
        format!("{}{name}", self.prefix)
    }
}

/// Where an object of this hash is sent, on the condition that there is none of its name.
fn creation(bucket: &Bucket, credentials: Option<&rusty_s3::Credentials>, key: &str, hash: &str) -> Url {
    let mut action = bucket.put_object(credentials, key);
    action.headers_mut().insert("if-none-match", "*");
    action.headers_mut().insert(CONTENT_MD5, hash.to_owned());
    action.sign(SIGNED_FOR)
}

/// How long a request with so many bytes may take.
fn limit(bytes: u64) -> Option<Duration> {
    Some(http::REQUEST + Duration::from_secs(bytes / http::SLOWEST))
}

impl Objects for S3 {
    fn create(&self, name: &str, bytes: &[u8]) -> Answer<Created> {
        let hash = STANDARD.encode(Md5::digest(bytes));
        self.credentials.with(|credentials| self.create_as(credentials, name, bytes, &hash))
    }

    /// From those who may not list.
    fn hides(&self) -> bool {
        true
    }

    fn get(&self, name: &str, part: Part) -> Answer<Vec<u8>> {
        self.credentials.with(|credentials| self.get_as(credentials, name, part))
    }

    fn list(&self, prefix: &str, after: &str, most: usize) -> Answer<Vec<Listed>> {
        self.credentials.with(|credentials| self.list_as(credentials, prefix, after, most))
    }

    fn remove(&self, name: &str) -> Answer<()> {
        self.credentials.with(|credentials| self.remove_as(credentials, name))
    }
}

type Signer<'a> = Option<&'a rusty_s3::Credentials>;

impl S3 {
    fn create_as(&self, credentials: Signer<'_>, name: &str, bytes: &[u8], hash: &str) -> Answer<Created> {
        let url = creation(&self.bucket, credentials, &self.key(name), hash);
        let request = self.agent.put(url.as_str()).header(header::IF_NONE_MATCH, "*").header(CONTENT_MD5, hash);
        let request = request.config().timeout_global(limit(bytes.len() as u64)).build();
        let response = request.send(bytes).map_err(|error| http::trouble(&error))?;
        match response.status() {
            StatusCode::OK | StatusCode::CREATED | StatusCode::NO_CONTENT => Ok(Created::Made(date(&response))),
            StatusCode::PRECONDITION_FAILED => Ok(Created::Exists),
            // Another request for the name is under way: what becomes of it is not known.
            StatusCode::CONFLICT => Err(Trouble::Passing("another request is under way (status 409)".into())),
            StatusCode::NOT_IMPLEMENTED => Err(Trouble::Unusable(
                "it does not know conditional requests (If-None-Match), without which two writers could destroy each other's work".into(),
            )),
            StatusCode::NOT_FOUND => Err(Trouble::Unusable("there is no such bucket".into())),
            status => Err(refusal(status)),
        }
    }

    fn get_as(&self, credentials: Signer<'_>, name: &str, part: Part) -> Answer<Vec<u8>> {
        let (range, most) = match part {
            Part::All(most) => (format!("bytes=0-{most}"), most),
            Part::Range(offset, length) => (format!("bytes={offset}-{}", offset + length - 1), length),
            Part::Last(most) => (format!("bytes=-{most}"), most),
        };
        let key = self.key(name);
        let url = self.bucket.get_object(credentials, &key).sign(SIGNED_FOR);
        let request = self.agent.get(url.as_str()).header(header::RANGE, range);
        let request = request.header(header::ACCEPT_ENCODING, "identity").config().timeout_global(limit(most)).build();
        let response = request.call().map_err(|error| http::trouble(&error))?;
        let wrong = || Trouble::Unusable("its answer is not about the range that it was asked for".into());
        let told = http::text(response.headers(), header::CONTENT_RANGE).and_then(http::content_range);
        match (response.status(), part, told) {
            (StatusCode::PARTIAL_CONTENT, Part::Range(offset, length), Some((first, last, _))) => {
                // A shorter answer is a shorter object.
                if first != offset || last >= offset + length {
                    return Err(wrong());
                }
            }
            (StatusCode::PARTIAL_CONTENT, Part::All(_), Some((0, last, length))) if last + 1 == length => {}
            (StatusCode::PARTIAL_CONTENT, Part::Last(_), Some((_, last, length))) if last + 1 == length => {}
            (StatusCode::PARTIAL_CONTENT, ..) => return Err(wrong()),
            // All of an object that is no longer than what was asked for.
            (StatusCode::OK, Part::All(_) | Part::Last(_), _) => {}
            (StatusCode::OK, Part::Range(0, _), _) => {}
            (StatusCode::OK, ..) => {
                return Err(Trouble::Unusable("it does not serve parts of objects (ranges)".into()));
            }
            (StatusCode::NOT_FOUND, ..) => return Err(Trouble::Gone),
            // The object ends before the range begins.
            (StatusCode::RANGE_NOT_SATISFIABLE, ..) => return Ok(Vec::new()),
            (status, ..) => return Err(refusal(status)),
        }
        body(response, most)
    }

    fn list_as(&self, credentials: Signer<'_>, prefix: &str, after: &str, most: usize) -> Answer<Vec<Listed>> {
        let mut action = self.bucket.list_objects_v2(credentials);
        action.with_prefix(self.key(prefix));
        action.with_max_keys(most.min(LISTED));
        if !after.is_empty() {
            action.with_start_after(self.key(after));
        }
        let url = action.sign(SIGNED_FOR);
        let request = self.agent.get(url.as_str()).config().timeout_global(limit(MAX_LIST)).build();
        let response = request.call().map_err(|error| http::trouble(&error))?;
        match response.status() {
            StatusCode::OK => {}
            StatusCode::NOT_FOUND => return Err(Trouble::Gone),
            status => return Err(refusal(status)),
        }
        let unusable = || Trouble::Unusable("its answer is no list".into());
        let text = String::from_utf8(body(response, MAX_LIST)?).map_err(|_| unusable())?;
        let parsed = ListObjectsV2::parse_response(&text).map_err(|_| unusable())?;
        let listed = parsed.contents.into_iter().take(most).map(|object| {
            let name = object.key.strip_prefix(&self.prefix).map(str::to_owned).ok_or_else(unusable)?;
            let time = object.last_modified.as_deref().and_then(http::list_date);
            Ok(Listed { name, bytes: object.size.ok_or_else(unusable)?, time })
        });
        listed.collect()
    }

    fn remove_as(&self, credentials: Signer<'_>, name: &str) -> Answer<()> {
        let key = self.key(name);
        let url = self.bucket.delete_object(credentials, &key).sign(SIGNED_FOR);
        let request = self.agent.delete(url.as_str()).config().timeout_global(limit(0)).build();
        let response = request.call().map_err(|error| http::trouble(&error))?;
        match response.status() {
            StatusCode::OK | StatusCode::NO_CONTENT | StatusCode::NOT_FOUND => Ok(()),
            status => Err(refusal(status)),
        }
    }
}

fn refusal(status: StatusCode) -> Trouble {
    match status {
        StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN | StatusCode::PROXY_AUTHENTICATION_REQUIRED => {
            Trouble::Refused(format!("it refuses the request (status {})", status.as_u16()))
        }
        StatusCode::REQUEST_TIMEOUT | StatusCode::TOO_MANY_REQUESTS => {
            Trouble::Passing(format!("status {}", status.as_u16()))
        }
        _ if status.is_server_error() => Trouble::Passing(format!("status {}", status.as_u16())),
        _ if status.is_redirection() => {
            Trouble::Refused("the bucket is in another region; AWS_REGION names the one to ask".into())
        }
        _ => Trouble::Unusable(format!("it answers with status {}", status.as_u16())),
    }
}

/// All of an answer that has so many bytes at most.
fn body(response: Response<Body>, most: u64) -> Answer<Vec<u8>> {
    let length = http::text(response.headers(), header::CONTENT_LENGTH).and_then(|length| length.parse::<u64>().ok());
    let mut bytes = Vec::new();
    let mut reader = response.into_body().into_reader().take(most + 1);
    reader.read_to_end(&mut bytes).map_err(|error| Trouble::Passing(http::plain(&error.to_string())))?;
    if bytes.len() as u64 > most {
        return Err(Trouble::Unusable("it sends more than it was asked for".into()));
    }
    match length {
        Some(length) if length != bytes.len() as u64 => Err(Trouble::Passing("its answer was cut off".into())),
        _ => Ok(bytes),
    }
}

/// What the store's clock says.
fn date(response: &Response<Body>) -> Option<u64> {
    let text = http::text(response.headers(), header::DATE)?;
    http::date(text)
}

#[cfg(test)]
mod tests {
    use rusty_s3::UrlStyle;

    use super::*;

    #[test]
    fn nobody_takes_condition_and_hash_off_a_creation() {
        let endpoint = Url::parse("https://s3.example.org").unwrap();
        let bucket = Bucket::new(endpoint, UrlStyle::Path, "b", "us-east-1").unwrap();
        let credentials = rusty_s3::Credentials::new("id", "secret");
        let url = creation(&bucket, Some(&credentials), "p/name", "hash");
        let signed = url.query_pairs().find(|(name, _)| name == "X-Amz-SignedHeaders").unwrap().1;
        assert_eq!(signed, "content-md5;host;if-none-match");
    }
}
