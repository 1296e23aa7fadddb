//! Probes an address for `lockbox doctor`: reports missing capabilities of a server or store before
//! they matter.
//!
//! A web server gets two requests: for the start of the file, as at open, and one with a condition
//! that cannot hold. A store is probed with objects of its own (`bucket/probe.rs`).

use lockbox::Result;

use crate::address::{Address, Cloud};
use crate::azure;
use crate::bucket;
use crate::diagnostics::{ProbeFinding, remedy};
use crate::http::{HttpSource, RangeResponse};
use crate::range_source::{FileVersion, RemoteError};
use crate::s3;
use crate::{RemoteOptions, object_store};

/// Bytes requested from a web server.
const PROBE_BYTES: u64 = 4096;
/// Tag that no file has.
const NO_TAG: &str = "\"lockbox-doctor\"";

/// Probes an address. Removes all objects that it created, also if `goes_on`, which is called
/// between requests, cancels it.
///
/// # Errors
/// `Invalid` for an address that needs an option; the error of `goes_on`; of a directory, those of
/// the host.
pub fn probe_address(
    address: &Address,
    options: &RemoteOptions,
    goes_on: &mut dyn FnMut() -> Result<()>,
) -> Result<Vec<ProbeFinding>> {
    let mut findings = Vec::new();
    if let Address::Bucket { cloud, .. } = address {
        findings.push(probe_credentials(*cloud));
    }
    match object_store(address, options, None)? {
        None => probe_web(&HttpSource::new(address, options)?, address, &mut findings),
        Some(objects) => bucket::probe_store(&*objects, options.timeout, &mut findings, goes_on)?,
    }
    Ok(findings)
}

/// Checks whether credentials are found; never displays them.
fn probe_credentials(cloud: Cloud) -> ProbeFinding {
    const NAME: &str = "credentials";
    let (found, none, mend) = match cloud {
        Cloud::S3 => (
            s3::credential_lookup(cloud, None)().map(|found| found.is_some()),
            "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE, unless it is public",
            "mend the profile that AWS_PROFILE names",
        ),
        Cloud::Google => (
            s3::credential_lookup(cloud, None)().map(|found| found.is_some()),
            "set GS_ACCESS_KEY_ID and GS_SECRET_ACCESS_KEY to an HMAC key, unless it is public",
            "mend the profile that AWS_PROFILE names",
        ),
        Cloud::Azure => (
            azure::account_lookup(None)().map(|found| found.is_some_and(|account| account.has_secret())),
            "set AZURE_STORAGE_KEY, AZURE_STORAGE_SAS_TOKEN or AZURE_STORAGE_CONNECTION_STRING, unless it is public",
            "mend the variables AZURE_STORAGE_..., or ~/.azure/config",
        ),
    };
    match found {
        Ok(true) => ProbeFinding::good(NAME, "found, and requests are signed with them"),
        Ok(false) => ProbeFinding::advice(NAME, "none were found, so the bucket is asked as a public one", none),
        Err(error) => ProbeFinding::bad(NAME, error.message(), mend),
    }
}

fn probe_web(http: &HttpSource, address: &Address, findings: &mut Vec<ProbeFinding>) {
    findings.push(match address {
        Address::Web(url) if url.scheme() == "http" => ProbeFinding::advice(
            "transport",
            "plain http",
            "serve it over https: everybody on the way sees which parts are read, and can keep them from being read",
        ),
        _ => ProbeFinding::good("transport", "https, with a certificate that is to be trusted here"),
    });
    let answered = http.request_range(&(0..PROBE_BYTES), None);
    let answer = answered.and_then(|response| RangeResponse::of(&response, 0, PROBE_BYTES));
    let answer = match answer {
        Ok(answer) => answer,
        Err(error) => {
            let name = if matches!(error, RemoteError::Unsupported(_)) { "ranges" } else { "file" };
            findings.push(ProbeFinding::bad(name, error.message(), remedy(&error)));
            return;
        }
    };
    let FileVersion { length, tag, modified } = &answer.version;
    findings.push(ProbeFinding::good("file", format!("{length} bytes")));
    findings.push(ProbeFinding::good("ranges", "parts of the file are served, uncompressed"));
    findings.push(match (tag, modified) {
        (Some(tag), _) => ProbeFinding::good("version", format!("a strong entity tag: {tag}")),
        (None, Some(modified)) => ProbeFinding::advice(
            "version",
            format!("no strong entity tag, but a time: {modified}"),
            "have the server send an ETag: without one two versions of a second are not told apart, and nothing is kept on disk",
        ),
        (None, None) => ProbeFinding::advice(
            "version",
            "neither a strong entity tag nor a time",
            "have the server send an ETag: without one versions of one length are not told apart, and nothing is kept on disk",
        ),
    });
    if tag.is_none() {
        return;
    }
    let other = FileVersion { length: *length, tag: Some(NO_TAG.into()), modified: None };
    let answered = http
        .request_range(&(0..PROBE_BYTES), Some(&other))
        .and_then(|response| RangeResponse::of(&response, 0, PROBE_BYTES));
    findings.push(match answered {
        Err(RemoteError::Changed) => ProbeFinding::good("conditions", "If-Match is honoured"),
        Ok(_) => ProbeFinding::advice(
            "conditions",
            "If-Match is passed over",
            "nothing has to be done: the tag in each answer is compared",
        ),
        Err(error) => ProbeFinding::bad("conditions", error.message(), remedy(&error)),
    });
}
