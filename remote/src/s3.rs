//! Request URLs and signed headers for buckets that speak S3, or Google's dialect of it.
//!
//! All differences between Amazon and Google are here. Google's store accepts requests signed like
//! Amazon's, but then ignores `If-None-Match`; its own condition is a header that it rejects
//! together with Amazon's headers. Requests to Google therefore have and sign Google's own headers
//! (`signing.rs`).

use std::time::Duration;

use jiff::Timestamp;
use lockbox::{Error, Result};
use rusty_s3::actions::ListObjectsV2;
use rusty_s3::{Bucket, S3Action, UrlStyle};
use ureq::Body;
use ureq::http::Response;
use ureq::tls::RootCerts;
use url::Url;

use crate::RemoteOptions;
use crate::address::{Cloud, check_scheme, parse_endpoint};
use crate::broker::Broker;
use crate::credentials::{self, CredentialCache, variable};
use crate::provenance::{self, RequestKind};
use crate::range_source::{RemoteError, RemoteResult};
use crate::signing::{self, HttpHeader, SignedRequest, UnsignedRequest, content_md5};
use crate::store_failure::StoreFailure;

pub(crate) const XML_NAMESPACE: &str = "http://s3.amazonaws.com/doc/2006-03-01/";

/// Lifetime of an action without credentials, which is the address alone: it counts for nothing.
const UNSIGNED: Duration = Duration::ZERO;

pub(crate) struct S3Bucket {
    bucket: Bucket,
    cloud: Cloud,
    credentials: CredentialCache<rusty_s3::Credentials>,
    /// CA certificates that the store's server is trusted by.
    pub(crate) roots: RootCerts,
}

/// Signs requests to a bucket with the credentials of one attempt.
pub(crate) struct S3Signer<'a> {
    bucket: &'a Bucket,
    cloud: Cloud,
    credentials: Option<&'a rusty_s3::Credentials>,
}

impl S3Bucket {
    /// Errors: `Invalid` for an endpoint or a name that cannot be.
    pub(crate) fn new(cloud: Cloud, name: &str, options: &RemoteOptions) -> Result<S3Bucket> {
        let mut roots = RootCerts::PlatformVerifier;
        let (endpoint, style, region) = match cloud {
            Cloud::Google => {
                // Google's own libraries read this variable.
                let endpoint = variable("STORAGE_EMULATOR_HOST");
                (
                    endpoint.unwrap_or_else(|| signing::GOOGLE_ENDPOINT.to_owned()),
                    UrlStyle::Path,
                    signing::GOOGLE_LOCATION.to_owned(),
                )
            }
            _ => {
                let place = credentials::region_endpoint(options.broker.as_ref())?;
                if let Some(bundle) = &place.ca_bundle {
                    roots = credentials::read_ca_bundle(bundle)?;
                }
                let (endpoint, style) = match place.endpoint {
                    Some(endpoint) => (endpoint, UrlStyle::Path),
                    None => regional_endpoint(&place.region, name),
                };
                (endpoint, style, place.region)
            }
        };
        let bucket = build_bucket(cloud, name, &endpoint, style, region, options)?;
        let credentials = CredentialCache::new(credential_lookup(cloud, options.broker.clone()));
        Ok(S3Bucket { roots, ..S3Bucket::of(cloud, bucket, credentials) })
    }

    pub(crate) fn of(cloud: Cloud, bucket: Bucket, credentials: CredentialCache<rusty_s3::Credentials>) -> S3Bucket {
        S3Bucket { bucket, cloud, credentials, roots: RootCerts::PlatformVerifier }
    }

    /// Calls `ask` with a signer; see [`CredentialCache::with`].
    pub(crate) fn with<T>(&self, ask: impl Fn(&S3Signer<'_>) -> RemoteResult<T>) -> RemoteResult<T> {
        self.credentials.with(|credentials| ask(&S3Signer { bucket: &self.bucket, cloud: self.cloud, credentials }))
    }
}

/// Returns a function that looks credentials up, through the broker in a sandboxed process.
pub(crate) fn credential_lookup(
    cloud: Cloud,
    broker: Option<Broker>,
) -> impl Fn() -> RemoteResult<Option<rusty_s3::Credentials>> + Send + Sync + 'static {
    move || match (&broker, cloud) {
        (Some(broker), _) => Ok(broker.key_pair(cloud == Cloud::Google)?.as_ref().map(credentials::from_key_pair)),
        (None, Cloud::Google) => credentials::google_credentials(&variable, &credentials::read_settings),
        (None, _) => credentials::aws_credentials(),
    }
}

fn build_bucket(
    cloud: Cloud,
    name: &str,
    endpoint: &str,
    style: UrlStyle,
    region: String,
    options: &RemoteOptions,
) -> Result<Bucket> {
    let endpoint = parse_endpoint(endpoint)
        .ok_or_else(|| Error::invalid("the endpoint of the object store is not an address of a server"))?;
    check_scheme(&endpoint, options.allow_http)?;
    Bucket::new(endpoint, style, name.to_owned(), region)
        .map_err(|error| Error::invalid(format!("{}://{name}: {error}", cloud.scheme())))
}

fn regional_endpoint(region: &str, name: &str) -> (String, UrlStyle) {
    // The certificate of the service covers no name with dots, and buckets of before 2018 may have
    // names that no server can have.
    let is_label = name.bytes().all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-');
    let style = if is_label { UrlStyle::VirtualHost } else { UrlStyle::Path };
    // Those in China are in a partition of their own.
    let china = if region.starts_with("cn-") { ".cn" } else { "" };
    (format!("https://s3.{region}.amazonaws.com{china}"), style)
}

impl S3Signer<'_> {
    /// Returns the answer when it is that of the store (PROOF-1). Errors: `Transient` for any other
    /// one.
    pub(crate) fn check_provenance(
        &self,
        asked: RequestKind<'_>,
        response: Response<Body>,
    ) -> RemoteResult<Response<Body>> {
        match self.cloud {
            Cloud::Google => provenance::check_google(asked, response),
            _ => provenance::check_s3(asked, response),
        }
    }

    pub(crate) fn failure(&self, response: Response<Body>) -> RemoteError {
        StoreFailure::from_document(response).into_error(self.cloud, self.credentials.is_some())
    }

    pub(crate) fn get(&self, key: &str) -> SignedRequest {
        self.sign("GET", self.bucket.get_object(None, key).sign(UNSIGNED), Vec::new(), b"")
    }

    /// Returns the request that creates an object unless its name is taken. `hash`: of its bytes,
    /// for Content-MD5. The condition is signed: no proxy can remove it.
    pub(crate) fn put(&self, key: &str, bytes: &[u8], hash: &str) -> SignedRequest {
        let condition = match self.cloud {
            Cloud::Google => (signing::GOOGLE_IF_GENERATION, "0".to_owned()),
            _ => ("if-none-match", "*".to_owned()),
        };
        let headers = vec![("content-md5", hash.to_owned()), condition];
        self.sign("PUT", self.bucket.put_object(None, key).sign(UNSIGNED), headers, bytes)
    }

    pub(crate) fn list(&self, ask: impl FnOnce(&mut ListObjectsV2<'_>)) -> SignedRequest {
        let mut action = self.bucket.list_objects_v2(None);
        ask(&mut action);
        self.sign("GET", action.sign(UNSIGNED), Vec::new(), b"")
    }

    pub(crate) fn delete(&self, key: &str) -> SignedRequest {
        self.sign("DELETE", self.bucket.delete_object(None, key).sign(UNSIGNED), Vec::new(), b"")
    }

    /// Returns the request that removes several objects, with its body; None for Google's store and
    /// for names that XML cannot represent.
    pub(crate) fn delete_batch(&self, keys: &[String]) -> Option<(SignedRequest, String)> {
        if self.cloud == Cloud::Google || keys.iter().any(|key| key.contains(char::is_control)) {
            return None;
        }
        let escaped = |key: &String| key.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;");
        let objects: String = keys.iter().map(|key| format!("<Object><Key>{}</Key></Object>", escaped(key))).collect();
        let body = format!("<Delete xmlns=\"{XML_NAMESPACE}\">{objects}</Delete>");
        let mut url = self.bucket.base_url().clone();
        url.set_query(Some("delete="));
        Some((self.sign("POST", url, vec![("content-md5", content_md5(body.as_bytes()))], body.as_bytes()), body))
    }

    fn sign(&self, method: &str, url: Url, headers: Vec<HttpHeader>, body: &[u8]) -> SignedRequest {
        let Some(credentials) = self.credentials else { return (url, headers) };
        if let Some(token) = credentials::access_token(credentials) {
            // Without TLS each host on the way could use it.
            let authorization = ("authorization", format!("Bearer {token}"));
            let shown = (url.scheme() == "https").then_some(authorization);
            return (url, headers.into_iter().chain(shown).collect());
        }
        let (names, region) = match self.cloud {
            Cloud::Google => (&signing::GOOGLE, signing::GOOGLE_LOCATION),
            _ => (&signing::AMAZON, self.bucket.region()),
        };
        UnsignedRequest { method, url, headers, body }.sign(names, region, credentials, Timestamp::now())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn signed_headers(cloud: Cloud) -> (String, Vec<HttpHeader>) {
        let endpoint = Url::parse("https://store.example.org").unwrap();
        let bucket = Bucket::new(endpoint, UrlStyle::Path, "b", "us-east-1").unwrap();
        let credentials = rusty_s3::Credentials::new("id", "secret");
        let signer = S3Signer { bucket: &bucket, cloud, credentials: Some(&credentials) };
        let (url, headers) = signer.put("p/name", b"bytes", "hash");
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
            let bucket = build_bucket(Cloud::S3, "b", endpoint, UrlStyle::Path, "x".into(), &RemoteOptions::default());
            let message = bucket.err().unwrap().to_string();
            assert!(!message.contains("s3cr3t"), "{message}");
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
            let (endpoint, style) = regional_endpoint(region, name);
            let bucket =
                build_bucket(Cloud::S3, name, &endpoint, style, region.into(), &RemoteOptions::default()).unwrap();
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
