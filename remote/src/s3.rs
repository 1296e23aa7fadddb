//! Requests to a bucket that speaks S3, or Google's dialect of it: addresses, and the headers that
//! sign them.
//!
//! All differences between Amazon and Google are here. Google's store takes requests that are
//! signed as Amazon's are, and then passes over `If-None-Match`; its own condition is a header of
//! its own, which it refuses together with the headers of Amazon. So requests to Google have, and
//! sign, its own headers (`google.rs`, `signing.rs`).

use std::io::Read;
use std::time::Duration;

use jiff::Timestamp;
use lockbox::{Error, Result};
use rusty_s3::actions::ListObjectsV2;
use rusty_s3::{Bucket, S3Action, UrlStyle};
use ureq::http::Response;
use ureq::{Body, RequestBuilder};
use url::Url;

use crate::Options;
use crate::address::{Cloud, check_scheme};
use crate::broker::Broker;
use crate::credentials::{self, Credentials, variable};
use crate::google;
use crate::provenance::{self, Asked};
use crate::range_source::Trouble;
use crate::signing::{self, Header, Unsigned};

/// A bucket, and who asks it.
pub(crate) struct Signer {
    bucket: Bucket,
    cloud: Cloud,
    credentials: Credentials<rusty_s3::Credentials>,
}

/// The same with the credentials of one request.
pub(crate) struct Asker<'a> {
    bucket: &'a Bucket,
    cloud: Cloud,
    credentials: Option<&'a rusty_s3::Credentials>,
}

impl Signer {
    /// # Errors
    /// `Invalid` for an endpoint or a name that cannot be.
    pub(crate) fn new(cloud: Cloud, name: &str, options: &Options) -> Result<Signer> {
        let (endpoint, style, region) = match cloud {
            Cloud::Google => {
                // As Google's own libraries have it.
                let endpoint = variable("STORAGE_EMULATOR_HOST");
                (endpoint.unwrap_or_else(|| google::ENDPOINT.to_owned()), UrlStyle::Path, google::LOCATION.to_owned())
            }
            _ => at_amazon(name, options.broker.as_ref())?,
        };
        let bucket = bucket_at(cloud, name, &endpoint, style, region, options)?;
        Ok(Signer::of(cloud, bucket, Credentials::new(looked_for(cloud, options.broker.clone()))))
    }

    pub(crate) fn of(cloud: Cloud, bucket: Bucket, credentials: Credentials<rusty_s3::Credentials>) -> Signer {
        Signer { bucket, cloud, credentials }
    }

    /// See [`Credentials::with`].
    pub(crate) fn with<T>(
        &self,
        ask: impl Fn(&Asker<'_>) -> std::result::Result<T, Trouble>,
    ) -> std::result::Result<T, Trouble> {
        self.credentials.with(|credentials| ask(&Asker { bucket: &self.bucket, cloud: self.cloud, credentials }))
    }
}

/// Longest answer that says why a request is refused.
const MAX_ERROR: u64 = 16 << 10;

/// What status 400 means: with it Amazon says that a token has expired and that a request came too slowly or was cut, too. Which it is stands in the body alone.
pub(crate) fn bad_request(response: Response<Body>) -> Trouble {
    let mut text = Vec::new();
    // Without it, or with a part of it, less is known.
    let _ = response.into_body().into_reader().take(MAX_ERROR).read_to_end(&mut text);
    let text = String::from_utf8_lossy(&text);
    let code = text.split_once("<Code>").and_then(|(_, text)| text.split_once("</Code>")).map_or("", |(code, _)| code);
    let is_code = code.len() <= 64 && code.bytes().all(|byte| byte.is_ascii_alphanumeric());
    match if is_code { code } else { "" } {
        "ExpiredToken" | "InvalidToken" | "TokenRefreshRequired" | "RequestExpired" => {
            Trouble::Refused(format!("it refuses the request (status 400 {code})"))
        }
        "RequestTimeout" | "IncompleteBody" | "BadDigest" => Trouble::Passing(format!("status 400 {code}")),
        "" => Trouble::Unusable("it answers with status 400".into()),
        code => Trouble::Unusable(format!("it answers with status 400 {code}")),
    }
}

/// Looks for credentials; by the broker where this process may not look itself.
pub(crate) fn looked_for(
    cloud: Cloud,
    broker: Option<Broker>,
) -> impl Fn() -> std::result::Result<Option<rusty_s3::Credentials>, Trouble> + Send + Sync + 'static {
    move || match (&broker, cloud) {
        (Some(broker), _) => Ok(broker.keys(cloud == Cloud::Google)?.as_ref().map(credentials::taken)),
        (None, Cloud::Google) => credentials::of_google(),
        (None, _) => credentials::of_amazon(),
    }
}

fn bucket_at(
    cloud: Cloud,
    name: &str,
    endpoint: &str,
    style: UrlStyle,
    region: String,
    options: &Options,
) -> Result<Bucket> {
    // What does not belong into one may be a secret, and it is not shown.
    let is_plain = |url: &Url| {
        url.has_host()
            && url.username().is_empty()
            && url.password().is_none()
            && url.query().is_none()
            && url.fragment().is_none()
    };
    let endpoint = Url::parse(endpoint)
        .ok()
        .filter(is_plain)
        .ok_or_else(|| Error::invalid("the endpoint of the object store is no address of a server"))?;
    check_scheme(&endpoint, options.allow_http)?;
    Bucket::new(endpoint, style, name.to_owned(), region)
        .map_err(|error| Error::invalid(format!("{}://{name}: {error}", cloud.scheme())))
}

fn of_region(region: &str, name: &str) -> (String, UrlStyle) {
    // The certificate of the service covers no name with dots, and buckets of before 2018 may have names that no server can have.
    let is_label = name.bytes().all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-');
    let style = if is_label { UrlStyle::VirtualHost } else { UrlStyle::Path };
    // Those in China are in a partition of their own.
    let china = if region.starts_with("cn-") { ".cn" } else { "" };
    (format!("https://s3.{region}.amazonaws.com{china}"), style)
}

fn at_amazon(name: &str, broker: Option<&Broker>) -> Result<(String, UrlStyle, String)> {
    let place = credentials::place(broker)?;
    Ok(match place.endpoint {
        Some(endpoint) => (endpoint, UrlStyle::Path, place.region),
        None => {
            let (endpoint, style) = of_region(&place.region, name);
            (endpoint, style, place.region)
        }
    })
}

impl Asker<'_> {
    /// Returns the answer when it is that of the store (PROOF-1).
    ///
    /// # Errors
    /// `Passing` for any other one.
    pub(crate) fn own(
        &self,
        asked: Asked<'_>,
        response: Response<Body>,
    ) -> std::result::Result<Response<Body>, Trouble> {
        match self.cloud {
            Cloud::Google => provenance::google(asked, response),
            _ => provenance::s3(asked, response),
        }
    }

    /// How an object is read: the address, and headers of the request.
    pub(crate) fn get(&self, key: &str) -> (Url, Vec<Header>) {
        self.signed("GET", &self.bucket.get_object(None, key), Vec::new(), b"")
    }

    /// Returns the request that creates an object unless its name is taken. `hash`: of its bytes,
    /// for Content-MD5. The condition is signed: no proxy can remove it.
    pub(crate) fn put(&self, key: &str, bytes: &[u8], hash: &str) -> (Url, Vec<Header>) {
        let condition = match self.cloud {
            Cloud::Google => (google::IF_GENERATION, "0".to_owned()),
            _ => ("if-none-match", "*".to_owned()),
        };
        let headers = vec![("content-md5", hash.to_owned()), condition];
        self.signed("PUT", &self.bucket.put_object(None, key), headers, bytes)
    }

    /// How objects are listed.
    pub(crate) fn list(&self, ask: impl FnOnce(&mut ListObjectsV2<'_>)) -> (Url, Vec<Header>) {
        let mut action = self.bucket.list_objects_v2(None);
        ask(&mut action);
        self.signed("GET", &action, Vec::new(), b"")
    }

    /// How an object is removed.
    pub(crate) fn delete(&self, key: &str) -> (Url, Vec<Header>) {
        self.signed("DELETE", &self.bucket.delete_object(None, key), Vec::new(), b"")
    }

    fn signed<'a>(
        &self,
        method: &str,
        action: &impl S3Action<'a>,
        headers: Vec<Header>,
        body: &[u8],
    ) -> (Url, Vec<Header>) {
        // Without credentials it is the address alone, and the time counts for nothing.
        let url = action.sign(Duration::ZERO);
        let Some(credentials) = self.credentials else { return (url, headers) };
        let (names, region) = match self.cloud {
            Cloud::Google => (&signing::GOOGLE, google::LOCATION),
            _ => (&signing::AMAZON, self.bucket.region()),
        };
        Unsigned { method, url, headers, body }.sign(names, region, credentials, Timestamp::now())
    }
}

/// A request with these headers.
pub(crate) fn with<B>(mut request: RequestBuilder<B>, headers: Vec<Header>) -> RequestBuilder<B> {
    for (name, value) in headers {
        request = request.header(name, value);
    }
    request
}

#[cfg(test)]
mod tests {
    use super::*;

    fn signed_headers(cloud: Cloud) -> (String, Vec<Header>) {
        let endpoint = Url::parse("https://store.example.org").unwrap();
        let bucket = Bucket::new(endpoint, UrlStyle::Path, "b", "us-east-1").unwrap();
        let credentials = rusty_s3::Credentials::new("id", "secret");
        let asker = Asker { bucket: &bucket, cloud, credentials: Some(&credentials) };
        let (url, headers) = asker.put("p/name", b"bytes", "hash");
        assert_eq!(url.as_str(), "https://store.example.org/b/p/name", "what proves who asks is for no log");
        let foreign = if cloud == Cloud::S3 { "x-goog" } else { "x-amz" };
        assert!(!headers.iter().any(|(name, _)| name.starts_with(foreign)), "{headers:?}");
        let proof = &headers.iter().find(|(name, _)| *name == "authorization").unwrap().1;
        let signed = proof.split("SignedHeaders=").nth(1).unwrap().split(',').next().unwrap();
        (signed.to_owned(), headers)
    }

    #[test]
    fn an_endpoint_that_cannot_be_is_told_without_its_secrets() {
        for endpoint in [
            "http://user:s3cr3t@host",
            "https://user:s3cr3t@host",
            "https://host/?s3cr3t",
            "user:s3cr3t@host",
            "https://h:s3cr3t",
        ] {
            let bucket = bucket_at(Cloud::S3, "b", endpoint, UrlStyle::Path, "x".into(), &Options::default());
            let told = bucket.err().unwrap().to_string();
            assert!(!told.contains("s3cr3t"), "{told}");
        }
    }

    #[test]
    fn the_servers_of_amazon_are_those_of_the_region() {
        for (region, name, is) in [
            ("eu-central-1", "b", "https://b.s3.eu-central-1.amazonaws.com/"),
            ("eu-central-1", "b.c", "https://s3.eu-central-1.amazonaws.com/b.c/"),
            ("us-east-1", "Old_Name", "https://s3.us-east-1.amazonaws.com/Old_Name/"),
            ("cn-north-1", "b", "https://b.s3.cn-north-1.amazonaws.com.cn/"),
        ] {
            let (endpoint, style) = of_region(region, name);
            let bucket = bucket_at(Cloud::S3, name, &endpoint, style, region.into(), &Options::default()).unwrap();
            assert_eq!(bucket.base_url().as_str(), is);
        }
    }

    #[test]
    fn nobody_takes_condition_and_hash_off_a_creation() {
        let (signed, headers) = signed_headers(Cloud::S3);
        assert_eq!(signed, "content-md5;host;if-none-match;x-amz-content-sha256;x-amz-date");
        assert_eq!(headers[1], ("if-none-match", "*".into()));
        let (signed, headers) = signed_headers(Cloud::Google);
        assert_eq!(signed, "content-md5;host;x-goog-content-sha256;x-goog-date;x-goog-if-generation-match");
        assert_eq!(headers[1], ("x-goog-if-generation-match", "0".into()));
    }
}
