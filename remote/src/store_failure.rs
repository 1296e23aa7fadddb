//! Failures that a store reports: the code in the response, its meaning and the remedy.
//!
//! A status does not distinguish a wrong clock from a wrong key, nor a missing bucket from a
//! missing object: the code does. Amazon's and Google's interface have it in a document, Azure's in
//! a header. A code of an unknown meaning is displayed with the status; nothing else of a response
//! is.

use std::io::Read;
use std::time::{SystemTime, UNIX_EPOCH};

use ureq::Body;
use ureq::http::{Response, StatusCode, header};

use crate::address::Cloud;
use crate::provenance;
use crate::range_source::{RemoteError, StoreRefusal};

/// Maximum length of the document of a failure in bytes.
const MAX_DOCUMENT: u64 = 16 << 10;
/// Clock skew in seconds above which stores reject a signature (Amazon, Google and Azure: 15
/// minutes). Azure has no code of its own for it.
const MAX_SKEW: u64 = 15 * 60;

pub(crate) struct StoreFailure {
    status: StatusCode,
    /// Letters and digits; empty if the store names none.
    code: String,
    /// Region of the bucket, if the store names it.
    region: Option<String>,
    /// Difference between the clocks of the store and of this machine in seconds.
    skew: Option<u64>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Meaning {
    Clock,
    Signature,
    Key,
    Token,
    Rights,
    NoAccount,
    Network,
    Region,
    Bucket,
    Full,
    Busy,
    Unknown,
}

impl StoreFailure {
    /// Reads a failure of Amazon's or Google's interface.
    pub(crate) fn from_document(response: Response<Body>) -> StoreFailure {
        let header = response.headers().get("x-amz-bucket-region").and_then(|region| region.to_str().ok());
        let (header, skew, status) = (header.map(str::to_owned), clock_skew(&response), response.status());
        let mut bytes = Vec::new();
        // A part of the document, or none, means an unknown code.
        let _ = response.into_body().into_reader().take(MAX_DOCUMENT).read_to_end(&mut bytes);
        let text = String::from_utf8_lossy(&bytes);
        let code = element(&text, "Code").filter(|code| is_word(code, b"")).unwrap_or_default().to_owned();
        let region = header.or_else(|| element(&text, "Region").map(str::to_owned));
        StoreFailure { status, code, region: region.filter(|region| is_word(region, b"-")), skew }
    }

    pub(crate) fn from_azure(response: &Response<Body>) -> StoreFailure {
        let code = azure_code(response).to_owned();
        StoreFailure { status: response.status(), code, region: None, skew: clock_skew(response) }
    }

    /// Returns the error of the request. `is_signed`: the request had credentials.
    pub(crate) fn into_error(self, cloud: Cloud, is_signed: bool) -> RemoteError {
        let status = self.status.as_u16();
        let named =
            if self.code.is_empty() { format!("status {status}") } else { format!("status {status} {}", self.code) };
        let meaning = self.meaning();
        match meaning {
            Meaning::Bucket => {
                let kind = if cloud == Cloud::Azure { "container" } else { "bucket" };
                return RemoteError::NoBucket(format!("the {kind} does not exist ({named})"));
            }
            Meaning::Full => {
                return RemoteError::NoSpace(format!("the quota or the space of the store is used up ({named})"));
            }
            Meaning::Busy => return RemoteError::Transient(named),
            Meaning::Unknown if self.status == StatusCode::NOT_FOUND => return RemoteError::NotFound,
            Meaning::Unknown => return RemoteError::Unsupported(format!("it responds with {named}")),
            _ => {}
        }
        let (reason, remedy) = self.explain(meaning, cloud, is_signed);
        let why = format!("it refuses the request ({named}){}{reason}", if reason.is_empty() { "" } else { ": " });
        let hides_missing = matches!(meaning, Meaning::Rights | Meaning::NoAccount);
        RemoteError::Refused(StoreRefusal { why, remedy, hides_missing })
    }

    fn meaning(&self) -> Meaning {
        match &*self.code {
            "RequestTimeTooSkewed" | "RequestExpired" => Meaning::Clock,
            "AuthenticationFailed" if self.skew.is_some_and(|skew| skew > MAX_SKEW) => Meaning::Clock,
            "SignatureDoesNotMatch" | "AuthenticationFailed" | "InvalidAuthenticationInfo" => Meaning::Signature,
            "InvalidAccessKeyId" | "InvalidSecurity" | "KeyBasedAuthenticationNotPermitted" => Meaning::Key,
            "ExpiredToken" | "InvalidToken" | "TokenRefreshRequired" => Meaning::Token,
            "AuthorizationFailure" | "AuthorizationSourceIPMismatch" => Meaning::Network,
            "NoAuthenticationInformation" | "PublicAccessNotPermitted" => Meaning::NoAccount,
            "AuthorizationHeaderMalformed"
            | "PermanentRedirect"
            | "TemporaryRedirect"
            | "Redirect"
            | "IllegalLocationConstraintException" => Meaning::Region,
            "NoSuchBucket" | "ContainerNotFound" => Meaning::Bucket,
            "RequestTimeout" | "IncompleteBody" | "BadDigest" | "SlowDown" | "ServerBusy" => Meaning::Busy,
            "InsufficientStorage" | "StorageLimitExceeded" => Meaning::Full,
            code if code.ends_with("QuotaExceeded") || code.ends_with("StorageFull") => Meaning::Full,
            _ => match self.status {
                StatusCode::INSUFFICIENT_STORAGE => Meaning::Full,
                StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN | StatusCode::PROXY_AUTHENTICATION_REQUIRED => {
                    Meaning::Rights
                }
                StatusCode::REQUEST_TIMEOUT | StatusCode::TOO_MANY_REQUESTS => Meaning::Busy,
                status if status.is_server_error() => Meaning::Busy,
                status if status.is_redirection() => Meaning::Region,
                _ => Meaning::Unknown,
            },
        }
    }

    /// Returns the reason, and the remedy for it.
    fn explain(&self, meaning: Meaning, cloud: Cloud, is_signed: bool) -> (String, &'static str) {
        let (reason, remedy) = match (meaning, cloud) {
            (Meaning::Clock, _) => {
                let reason = match self.skew.filter(|skew| *skew > 0) {
                    Some(skew) => format!("its clock and the clock of this machine differ by {skew} seconds"),
                    None => "the clock of this machine is wrong".into(),
                };
                return (reason, "set the clock of this machine");
            }
            (Meaning::Region, _) => {
                let reason = match &self.region {
                    Some(region) => format!("the bucket is in the region {region}"),
                    None => "the bucket is in another region".into(),
                };
                return (reason, "set AWS_REGION to the region of the bucket");
            }
            (Meaning::Signature, Cloud::S3) => (
                "the secret key does not belong to the access key",
                "correct AWS_SECRET_ACCESS_KEY, or the profile that AWS_PROFILE names",
            ),
            (Meaning::Signature, Cloud::Google) => {
                ("the secret does not belong to the HMAC key", "correct GS_SECRET_ACCESS_KEY")
            }
            (Meaning::Signature, Cloud::Azure) => (
                "the key or token is wrong or has expired",
                "correct AZURE_STORAGE_KEY, AZURE_STORAGE_SAS_TOKEN or AZURE_STORAGE_CONNECTION_STRING",
            ),
            (Meaning::Key, Cloud::S3) => (
                "the store does not know the access key",
                "set AWS_ACCESS_KEY_ID to a key of this store, or AWS_ENDPOINT_URL to the store of this key",
            ),
            (Meaning::Key, Cloud::Google) => (
                "the store does not know the HMAC key",
                "set GS_ACCESS_KEY_ID and GS_SECRET_ACCESS_KEY to an active HMAC key",
            ),
            (Meaning::Key, Cloud::Azure) => {
                ("the account does not accept its key", "set AZURE_STORAGE_SAS_TOKEN, or permit keys in the account")
            }
            (Meaning::Token, _) => ("the session token is invalid or has expired", "renew the credentials"),
            (Meaning::Network, _) => (
                "the account's network rules exclude this machine, or the token lacks a right",
                "permit the address of this machine, or grant the token the rights that lockbox-remote(7) lists",
            ),
            // Without credentials, rights cannot be the fault of an account.
            _ if !is_signed || meaning == Meaning::NoAccount => (
                "it is not public, and no credentials were found",
                match cloud {
                    Cloud::S3 => "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE",
                    Cloud::Google => "set GS_ACCESS_KEY_ID and GS_SECRET_ACCESS_KEY",
                    Cloud::Azure => "set AZURE_STORAGE_KEY or AZURE_STORAGE_SAS_TOKEN",
                },
            ),
            _ => ("its user lacks a right", "grant the user the rights that lockbox-remote(7) lists"),
        };
        (reason.to_owned(), remedy)
    }
}

/// Returns Azure's error code, or an empty string.
pub(crate) fn azure_code(response: &Response<Body>) -> &str {
    let code = response.headers().get("x-ms-error-code").and_then(|code| code.to_str().ok()).unwrap_or_default();
    if is_word(code, b"") { code } else { "" }
}

/// Returns whether untrusted text is short and has letters, digits and `more` only.
fn is_word(text: &str, more: &[u8]) -> bool {
    text.len() <= 64 && text.bytes().all(|byte| byte.is_ascii_alphanumeric() || more.contains(&byte))
}

fn element<'a>(text: &'a str, name: &str) -> Option<&'a str> {
    let (_, rest) = text.split_once(&format!("<{name}>"))?;
    rest.split_once(&format!("</{name}>")).map(|(content, _)| content.trim())
}

fn clock_skew(response: &Response<Body>) -> Option<u64> {
    let date = provenance::text(response.headers(), header::DATE).and_then(provenance::date)?;
    let now = SystemTime::now().duration_since(UNIX_EPOCH).ok()?.as_secs();
    Some(date.abs_diff(now))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of_document(
        cloud: Cloud,
        status: u16,
        headers: &[(&str, &str)],
        document: &str,
        is_signed: bool,
    ) -> RemoteError {
        let builder = headers.iter().fold(Response::builder(), |builder, (name, value)| builder.header(*name, *value));
        let response = builder.status(status).body(Body::builder().data(document.to_owned())).unwrap();
        match cloud {
            Cloud::Azure => StoreFailure::from_azure(&response),
            _ => StoreFailure::from_document(response),
        }
        .into_error(cloud, is_signed)
    }

    fn of_code(cloud: Cloud, status: u16, code: &str) -> RemoteError {
        let document = format!("<?xml version=\"1.0\"?><Error><Code>{code}</Code><Message>m</Message></Error>");
        match cloud {
            Cloud::Azure => of_document(cloud, status, &[("x-ms-error-code", code)], "", true),
            _ => of_document(cloud, status, &[], &document, true),
        }
    }

    #[test]
    fn each_code_has_a_sentence_of_its_own_and_a_remedy() {
        use Cloud::{Azure, Google, S3};
        for (cloud, status, code, reason, remedy) in [
            (S3, 403, "RequestTimeTooSkewed", "clock of this machine", "set the clock"),
            (S3, 403, "SignatureDoesNotMatch", "secret key does not belong", "AWS_SECRET_ACCESS_KEY"),
            (S3, 403, "InvalidAccessKeyId", "does not know the access key", "AWS_ACCESS_KEY_ID"),
            (S3, 400, "ExpiredToken", "session token is invalid or has expired", "renew the credentials"),
            (S3, 403, "AccessDenied", "lacks a right", "grant the user the rights"),
            (S3, 400, "AuthorizationHeaderMalformed", "another region", "set AWS_REGION"),
            (S3, 301, "PermanentRedirect", "another region", "set AWS_REGION"),
            (Google, 403, "SignatureDoesNotMatch", "does not belong to the HMAC key", "GS_SECRET_ACCESS_KEY"),
            (Google, 403, "InvalidSecurity", "does not know the HMAC key", "GS_ACCESS_KEY_ID"),
            (Azure, 403, "AuthenticationFailed", "key or token is wrong", "AZURE_STORAGE_KEY"),
            (Azure, 403, "AuthorizationFailure", "network rules", "permit the address"),
            (Azure, 403, "AuthorizationPermissionMismatch", "lacks a right", "grant the user the rights"),
            (Azure, 409, "PublicAccessNotPermitted", "not public", "AZURE_STORAGE_SAS_TOKEN"),
        ] {
            let error = of_code(cloud, status, code);
            let message = error.message();
            assert!(matches!(error, RemoteError::Refused(_)), "{code}: {error:?}");
            assert!(message.contains(reason) && message.contains(&format!("(status {status} {code})")), "{message}");
            let whole = error.into_error("s3://b/p").to_string();
            let (before, after) = whole.split_once(&message).unwrap_or_else(|| panic!("{whole}"));
            assert!(
                before.starts_with("cannot access ")
                    && before.ends_with(": ")
                    && after.starts_with("; ")
                    && after.contains(remedy),
                "{whole}"
            );
        }
    }

    #[test]
    fn a_missing_bucket_and_a_full_store_are_not_refusals() {
        for (cloud, status, code) in [(Cloud::S3, 404, "NoSuchBucket"), (Cloud::Azure, 404, "ContainerNotFound")] {
            let error = of_code(cloud, status, code);
            assert!(matches!(&error, RemoteError::NoBucket(why) if why.contains(code)), "{error:?}");
            assert!(error.into_error("s3://b/p").to_string().contains("create it"));
        }
        assert_eq!(of_code(Cloud::S3, 404, "NoSuchKey"), RemoteError::NotFound);
        for (status, code) in
            [(403, "QuotaExceeded"), (507, ""), (507, "XMinioStorageFull"), (400, "XMinioAdminBucketQuotaExceeded")]
        {
            let error = of_code(Cloud::S3, status, code);
            assert!(
                matches!(&error, RemoteError::NoSpace(why) if why.contains(&status.to_string())),
                "{code}: {error:?}"
            );
        }
        for (status, code) in [(503, "SlowDown"), (400, "RequestTimeout"), (500, "InternalError"), (429, "")] {
            assert!(matches!(of_code(Cloud::S3, status, code), RemoteError::Transient(_)), "{code}");
        }
    }

    #[test]
    fn region_clock_and_missing_credentials_are_named() {
        let document = "<Error><Code>AuthorizationHeaderMalformed</Code><Region>eu-west-1</Region></Error>";
        let named = |headers: &[_], document| of_document(Cloud::S3, 400, headers, document, true).message();
        assert!(named(&[], document).contains("in the region eu-west-1"));
        let header = [("x-amz-bucket-region", "ap-south-1")];
        assert!(named(&header, "<Error><Code>PermanentRedirect</Code></Error>").contains("in the region ap-south-1"));
        // Text of an untrusted server.
        assert!(named(&[], &document.replace("eu-west-1", "\u{1b}[31m")).contains("in another region"));
        let past = [("date", "Sat, 01 Jan 2000 00:00:00 GMT"), ("x-ms-error-code", "AuthenticationFailed")];
        let skewed = of_document(Cloud::Azure, 403, &past, "", true).message();
        assert!(skewed.contains("clock of this machine differ by ") && skewed.contains(" seconds"), "{skewed}");
        let anonymous = of_document(Cloud::S3, 403, &[], "<Error><Code>AccessDenied</Code></Error>", false);
        assert!(matches!(&anonymous, RemoteError::Refused(refusal) if refusal.hides_missing), "{anonymous:?}");
        assert!(anonymous.message().contains("no credentials were found"));
    }
}
