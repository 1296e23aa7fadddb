//! Request signatures: helpers shared by the clouds, and Amazon's signature version 4, which
//! Google's store uses with other names.
//!
//! A signature and a session token are sent in headers and never in the URL: servers, proxies and
//! their logs keep URLs.

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use hmac::{Hmac, KeyInit, Mac};
use jiff::Timestamp;
use md5::Md5;
use sha2::{Digest, Sha256};
use url::Url;
use zeroize::Zeroizing;

use crate::hex;

pub(crate) type HttpHeader = (&'static str, String);

/// Address and headers of a signed request. The address may contain a secret.
pub(crate) type SignedRequest = (Url, Vec<HttpHeader>);

/// Names that one cloud uses in signatures of version 4.
pub(crate) struct SigningNames {
    pub(crate) algorithm: &'static str,
    /// Prefix of the secret in the first key.
    pub(crate) key: &'static str,
    pub(crate) service: &'static str,
    pub(crate) end: &'static str,
    /// Header names for the body hash, the time, and the session token.
    pub(crate) hash: &'static str,
    pub(crate) date: &'static str,
    pub(crate) token: &'static str,
}

pub(crate) const AMAZON: SigningNames = SigningNames {
    algorithm: "AWS4-HMAC-SHA256",
    key: "AWS4",
    service: "s3",
    end: "aws4_request",
    hash: "x-amz-content-sha256",
    date: "x-amz-date",
    token: "x-amz-security-token",
};

pub(crate) const GOOGLE: SigningNames = SigningNames {
    algorithm: "GOOG4-HMAC-SHA256",
    key: "GOOG4",
    service: "storage",
    end: "goog4_request",
    hash: "x-goog-content-sha256",
    date: "x-goog-date",
    token: "x-goog-security-token",
};

pub(crate) const GOOGLE_ENDPOINT: &str = "https://storage.googleapis.com";
/// Location in signatures: any is accepted; Google's libraries send this one.
pub(crate) const GOOGLE_LOCATION: &str = "auto";
/// Header that, with 0, makes a request conditional on the absence of the object.
pub(crate) const GOOGLE_IF_GENERATION: &str = "x-goog-if-generation-match";

pub(crate) struct UnsignedRequest<'a> {
    pub(crate) method: &'a str,
    pub(crate) url: Url,
    /// Headers that are signed and sent, in lower case.
    pub(crate) headers: Vec<HttpHeader>,
    pub(crate) body: &'a [u8],
}

impl UnsignedRequest<'_> {
    /// Returns the address with its query in the canonical order, and all headers that are sent,
    /// `authorization` among them.
    pub(crate) fn sign(
        self,
        names: &SigningNames,
        region: &str,
        credentials: &rusty_s3::Credentials,
        now: Timestamp,
    ) -> SignedRequest {
        let UnsignedRequest { method, mut url, mut headers, body } = self;
        let (time, day) = (now.strftime("%Y%m%dT%H%M%SZ").to_string(), now.strftime("%Y%m%d").to_string());
        let mut query: Vec<(String, String)> =
            url.query_pairs().map(|(name, value)| (percent_encode(&name, ""), percent_encode(&value, ""))).collect();
        query.sort_unstable();
        let query = query.iter().map(|(name, value)| format!("{name}={value}")).collect::<Vec<_>>().join("&");
        url.set_query(Some(&query).filter(|query| !query.is_empty()).map(String::as_str));
        let hash = hex(&Sha256::digest(body));
        headers.extend([(names.hash, hash.clone()), (names.date, time.clone())]);
        headers.extend(credentials.token().map(|token| (names.token, token.to_owned())));
        let host = match url.port() {
            Some(port) => format!("{}:{port}", url.host_str().unwrap_or_default()),
            None => url.host_str().unwrap_or_default().to_owned(),
        };
        let mut signed: Vec<(&str, &str)> = headers.iter().map(|(name, value)| (*name, value.as_str())).collect();
        signed.push(("host", &host));
        signed.sort_unstable();
        let list = signed.iter().map(|(name, _)| *name).collect::<Vec<_>>().join(";");
        let lines: String = signed.iter().map(|(name, value)| format!("{name}:{}\n", value.trim())).collect();
        let request = format!("{method}\n{}\n{query}\n{lines}\n{list}\n{hash}", url.path());
        let scope = format!("{day}/{region}/{}/{}", names.service, names.end);
        let text = format!("{}\n{time}\n{scope}\n{}", names.algorithm, hex(&Sha256::digest(request)));
        let mut key = Zeroizing::new(format!("{}{}", names.key, credentials.secret()).into_bytes());
        for part in [&*day, region, names.service, names.end] {
            key = Zeroizing::new(hmac_sha256(&key, part));
        }
        let (signature, id) = (hex(&hmac_sha256(&key, &text)), credentials.key());
        let authorization =
            format!("{} Credential={id}/{scope}, SignedHeaders={list}, Signature={signature}", names.algorithm);
        headers.push(("authorization", authorization));
        (url, headers)
    }
}

pub(crate) fn hmac_sha256(key: &[u8], text: &str) -> Vec<u8> {
    let mut mac = <Hmac<Sha256> as KeyInit>::new_from_slice(key).expect("any length is a key");
    mac.update(text.as_bytes());
    mac.finalize().into_bytes().to_vec()
}

/// Returns the value of the header `Content-MD5` for a body.
pub(crate) fn content_md5(body: &[u8]) -> String {
    STANDARD.encode(Md5::digest(body))
}

/// Percent-encodes all but letters, digits, `-._~` and the characters of `unescaped` (RFC 3986).
pub(crate) fn percent_encode(text: &str, unescaped: &str) -> String {
    let mut encoded = String::with_capacity(text.len());
    for byte in text.bytes() {
        match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'.' | b'_' | b'~' => encoded.push(byte.into()),
            _ if unescaped.as_bytes().contains(&byte) => encoded.push(byte.into()),
            _ => encoded.push_str(&format!("%{byte:02X}")),
        }
    }
    encoded
}

#[cfg(test)]
mod tests {
    use super::*;

    fn authorization(headers: &[HttpHeader]) -> &str {
        &headers.iter().find(|(name, _)| *name == "authorization").unwrap().1
    }

    /// The examples of Amazon's documentation ("Signature Calculations for the Authorization
    /// Header").
    #[test]
    fn a_request_is_signed_as_amazon_documents_it() {
        let credentials =
            rusty_s3::Credentials::new("AKIAIOSFODNN7EXAMPLE", "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY");
        let now: Timestamp = "2013-05-24T00:00:00Z".parse().unwrap();
        let sign = |method, path: &str, headers: Vec<HttpHeader>, body: &'static [u8]| {
            let url = Url::parse(&format!("https://examplebucket.s3.amazonaws.com/{path}")).unwrap();
            UnsignedRequest { method, url, headers, body }.sign(&AMAZON, "us-east-1", &credentials, now)
        };
        let (url, headers) = sign("GET", "test.txt", vec![("range", "bytes=0-9".to_owned())], b"");
        assert_eq!(
            authorization(&headers),
            "AWS4-HMAC-SHA256 Credential=AKIAIOSFODNN7EXAMPLE/20130524/us-east-1/s3/aws4_request, \
             SignedHeaders=host;range;x-amz-content-sha256;x-amz-date, \
             Signature=f0e8bdb87c964420e857bd35b5d6ed310bd44f0170aba48dd91039c6036bdb41"
        );
        assert_eq!(url.as_str(), "https://examplebucket.s3.amazonaws.com/test.txt");
        let (url, headers) = sign("GET", "?prefix=J&max-keys=2", Vec::new(), b"");
        assert!(
            authorization(&headers).ends_with("34b48302e7b5fa45bde8084f4b7868a86f0a534bc59db6670ed5711ef69dc6f7"),
            "{headers:?}"
        );
        assert_eq!(url.query(), Some("max-keys=2&prefix=J"));
        let extra = vec![
            ("date", "Fri, 24 May 2013 00:00:00 GMT".to_owned()),
            ("x-amz-storage-class", "REDUCED_REDUNDANCY".to_owned()),
        ];
        let (_, headers) = sign("PUT", "test%24file.text", extra, b"Welcome to Amazon S3.");
        assert!(
            authorization(&headers).ends_with("98ad721746da40c64f1a55b78f14c238d841ea1380cd77a1b5971af0ece108bd"),
            "{headers:?}"
        );
    }

    /// What `hmac` and `hashlib` of Python make of the same request, put together by hand as
    /// Google's documentation says.
    #[test]
    fn a_request_is_signed_in_the_words_of_google() {
        let url = Url::parse("https://storage.googleapis.com/some-bucket/p/name?prefix=a%2Fb").unwrap();
        let credentials = rusty_s3::Credentials::new("GOOG1EXAMPLE", "secret/key+with=signs");
        let headers = vec![("content-md5", "aGFzaA==".to_owned()), ("x-goog-if-generation-match", "0".to_owned())];
        let request = UnsignedRequest { method: "PUT", url, headers, body: b"bytes" };
        let now = Timestamp::from_second(1_800_000_000).unwrap();
        let (url, headers) = request.sign(&GOOGLE, "auto", &credentials, now);
        assert_eq!(url.as_str(), "https://storage.googleapis.com/some-bucket/p/name?prefix=a%2Fb");
        assert_eq!(
            authorization(&headers),
            "GOOG4-HMAC-SHA256 Credential=GOOG1EXAMPLE/20270115/auto/storage/goog4_request, \
             SignedHeaders=content-md5;host;x-goog-content-sha256;x-goog-date;x-goog-if-generation-match, \
             Signature=4145db6fd8821a4de135087f50c52c9254a6dc600ca7fafff0d4196dc11ba3ee"
        );
    }

    #[test]
    fn neither_signature_nor_token_stands_in_the_address() {
        let url = Url::parse("https://store.example.org/b/name?list-type=2").unwrap();
        let credentials = rusty_s3::Credentials::new_with_token("id", "secret", "t0k3n");
        let request = UnsignedRequest { method: "GET", url, headers: Vec::new(), body: b"" };
        let (url, headers) = request.sign(&AMAZON, "x", &credentials, Timestamp::now());
        assert_eq!(url.as_str(), "https://store.example.org/b/name?list-type=2");
        assert!(headers.contains(&("x-amz-security-token", "t0k3n".to_owned())));
        assert!(authorization(&headers).contains(";x-amz-security-token, "));
    }
}
