//! The objects below a prefix of a bucket that speaks S3, or Google's words of it (`crate::s3`).
//!
//! Creations are on the condition that there is none of the name (`If-None-Match: *`), and say the hash of their bytes (`Content-MD5`, the one that all stores know): there
//! are stores that take what came before a connection was cut for the whole object. Both are signed, so nobody on the way takes them off.

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use lockbox::Result;
use md5::{Digest, Md5};
use rusty_s3::actions::ListObjectsV2;
use ureq::http::{Response, StatusCode, header};
use ureq::{Agent, Body};

use super::objects::{Created, LISTED, Listed, Objects, Part};
use super::response::{self, Answer, MAX_LIST, MOST_ANSWERS, limit};
use crate::Options;
use crate::address::Cloud;
use crate::http;
use crate::provenance::Asked;
use crate::range_source::Trouble;
use crate::s3::{self, Asker, Signer};

pub(crate) struct S3 {
    agent: Agent,
    signer: Signer,
    prefix: String,
}

impl S3 {
    /// Connects nowhere yet.
    ///
    /// # Errors
    /// `Invalid` for a place that cannot be asked.
    pub(crate) fn new(cloud: Cloud, bucket: &str, prefix: &str, options: &Options) -> Result<S3> {
        Ok(S3::of(Signer::new(cloud, bucket, options)?, prefix, options))
    }

    pub(super) fn of(signer: Signer, prefix: &str, options: &Options) -> S3 {
        S3 {
            agent: http::agent(options),
            signer,
            prefix: if prefix.is_empty() { String::new() } else { format!("{}/", prefix.trim_end_matches('/')) },
        }
    }

    fn key(&self, name: &str) -> String {
        format!("{}{name}", self.prefix)
    }
}

impl Objects for S3 {
    fn create(&self, name: &str, bytes: &[u8]) -> Answer<Created> {
        let hash = STANDARD.encode(Md5::digest(bytes));
        self.signer.with(|asker| self.create_as(asker, name, bytes, &hash))
    }

    /// From those who may not list.
    fn hides(&self) -> bool {
        true
    }

    fn get(&self, name: &str, part: Part) -> Answer<Vec<u8>> {
        self.signer.with(|asker| self.get_as(asker, name, part))
    }

    fn list(&self, prefix: &str, after: &str, most: usize) -> Answer<Vec<Listed>> {
        self.signer.with(|asker| self.list_as(asker, prefix, after, most))
    }

    fn remove(&self, name: &str) -> Answer<()> {
        self.signer.with(|asker| self.remove_as(asker, name))
    }
}

impl S3 {
    fn create_as(&self, asker: &Asker<'_>, name: &str, bytes: &[u8], hash: &str) -> Answer<Created> {
        let (url, headers) = asker.put(&self.key(name), bytes, hash);
        let request = s3::with(self.agent.put(url.as_str()), headers);
        let request = request.config().timeout_global(limit(bytes.len() as u64)).build();
        let response = request.send(bytes).map_err(|error| http::trouble(&error))?;
        let response = asker.own(Asked::Create(hash), response)?;
        match response.status() {
            StatusCode::OK | StatusCode::CREATED | StatusCode::NO_CONTENT => {
                Ok(Created::Made(response::date(&response)))
            }
            StatusCode::PRECONDITION_FAILED => Ok(Created::Exists),
            // Another request for the name is under way: what becomes of it is not known.
            StatusCode::CONFLICT => Err(Trouble::Passing("another request is under way (status 409)".into())),
            StatusCode::NOT_IMPLEMENTED => Err(Trouble::Unusable(
                "it does not know conditional requests (If-None-Match), without which two writers could destroy each other's work".into(),
            )),
            StatusCode::NOT_FOUND => Err(Trouble::Unusable("there is no such bucket".into())),
            _ => Err(refusal(response)),
        }
    }

    fn get_as(&self, asker: &Asker<'_>, name: &str, part: Part) -> Answer<Vec<u8>> {
        let (range, most) = match part {
            Part::All(most) => (format!("bytes=0-{most}"), most),
            Part::Range(offset, length) => (format!("bytes={offset}-{}", offset + length - 1), length),
            Part::Last(most) => (format!("bytes=-{most}"), most),
        };
        let (url, headers) = asker.get(&self.key(name));
        let request = s3::with(self.agent.get(url.as_str()), headers).header(header::RANGE, range);
        let request = request.header(header::ACCEPT_ENCODING, "identity").config().timeout_global(limit(most)).build();
        let response = request.call().map_err(|error| http::trouble(&error))?;
        let response = asker.own(Asked::Read, response)?;
        match response.status() {
            StatusCode::BAD_REQUEST => Err(refusal(response)),
            status => {
                response::part(response, part, most).unwrap_or_else(|| Err(refused(status))).map(|(bytes, _)| bytes)
            }
        }
    }

    /// A store may give fewer objects than it was asked for, and say that there are more: these are asked for too, for whoever asks takes a short list for the end.
    fn list_as(&self, asker: &Asker<'_>, prefix: &str, after: &str, most: usize) -> Answer<Vec<Listed>> {
        let most = most.min(LISTED);
        let mut listed = Vec::new();
        let mut token: Option<String> = None;
        for _ in 0..MOST_ANSWERS {
            let (url, headers) = asker.list(|action| {
                action.with_prefix(self.key(prefix));
                action.with_max_keys(most - listed.len());
                match &token {
                    Some(token) => action.with_continuation_token(token.clone()),
                    None if !after.is_empty() => action.with_start_after(self.key(after)),
                    None => {}
                }
            });
            let request = s3::with(self.agent.get(url.as_str()), headers);
            let request = request.config().timeout_global(limit(MAX_LIST)).build();
            let response = request.call().map_err(|error| http::trouble(&error))?;
            let response = asker.own(Asked::List, response)?;
            match response.status() {
                StatusCode::OK => {}
                StatusCode::NOT_FOUND => return Err(Trouble::Gone),
                _ => return Err(refusal(response)),
            }
            let text = as_amazons(response::list(response)?);
            let parsed = ListObjectsV2::parse_response(&text).map_err(|_| response::no_list())?;
            for object in parsed.contents.into_iter().take(most - listed.len()) {
                let name = object.key.strip_prefix(&self.prefix).map(str::to_owned).ok_or_else(response::no_list)?;
                let time = object.last_modified.as_deref().and_then(http::list_date);
                listed.push(Listed { name, bytes: object.size.ok_or_else(response::no_list)?, time });
            }
            token = parsed.next_continuation_token.filter(|_| listed.len() < most);
            if token.is_none() {
                return Ok(listed);
            }
        }
        Err(Trouble::Unusable("it cuts a list short again and again".into()))
    }

    fn remove_as(&self, asker: &Asker<'_>, name: &str) -> Answer<()> {
        let (url, headers) = asker.delete(&self.key(name));
        let request = s3::with(self.agent.delete(url.as_str()), headers).config().timeout_global(limit(0)).build();
        let response = request.call().map_err(|error| http::trouble(&error))?;
        let status = response.status();
        let response = match asker.own(Asked::Remove, response) {
            // PROOF-1: some stores send no proof with an answer that has no content, and with all others.
            Err(strange) if status.is_success() => {
                return match self.get_as(asker, name, Part::Last(1)) {
                    Err(Trouble::Gone) => Ok(()),
                    Ok(_) => Err(strange),
                    Err(trouble) => Err(trouble),
                };
            }
            judged => judged?,
        };
        match response.status() {
            StatusCode::OK | StatusCode::NO_CONTENT | StatusCode::NOT_FOUND => Ok(()),
            _ => Err(refusal(response)),
        }
    }
}

fn refusal(response: Response<Body>) -> Trouble {
    match response.status() {
        StatusCode::BAD_REQUEST => s3::bad_request(response),
        status => refused(status),
    }
}

fn refused(status: StatusCode) -> Trouble {
    if status.is_redirection() {
        return Trouble::Refused("the bucket is in another region; AWS_REGION names the one to ask".into());
    }
    response::refusal(status)
}

/// A list with Amazon's name for what its elements mean: Google's store has an older one.
fn as_amazons(text: String) -> String {
    const OLDER: &str = "http://doc.s3.amazonaws.com/2006-03-01";
    const AMAZONS: &str = "http://s3.amazonaws.com/doc/2006-03-01/";
    let begin = text.find("<ListBucketResult").unwrap_or(text.len());
    let end = begin + text[begin..].find('>').unwrap_or_default();
    match text[begin..end].contains(OLDER) {
        true => format!("{}{}", text[..end].replace(&format!("{OLDER}/"), OLDER).replace(OLDER, AMAZONS), &text[end..]),
        false => text,
    }
}
