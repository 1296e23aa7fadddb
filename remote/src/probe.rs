//! What is behind an address, and what it can do, for `lockbox doctor`: whoever set up a server or a store learns what is missing before it matters.
//!
//! A web server is asked for the beginning of the file, as an opening does, and once more on a condition that cannot hold. What a store does is found out with objects
//! of its own (`bucket/probe.rs`).

use lockbox::Result;

use crate::address::{Address, Cloud};
use crate::azure;
use crate::bucket;
use crate::diagnostics::{Finding, remedy};
use crate::http::{Answer, Http};
use crate::range_source::{Trouble, Version};
use crate::s3;
use crate::{Options, objects};

/// Bytes that a web server is asked for.
const BEGIN: u64 = 4096;
/// A tag that no file has.
const NO_TAG: &str = "\"lockbox-doctor\"";

/// Looks at an address. Whatever is made there for it is removed again, when `goes_on` ends it too, which is asked between requests.
///
/// # Errors
/// `Invalid` for an address that needs an option; that of `goes_on`; of a directory, those of the host.
pub fn probe(address: &Address, options: &Options, goes_on: &mut dyn FnMut() -> Result<()>) -> Result<Vec<Finding>> {
    let mut findings = Vec::new();
    if let Address::Bucket { cloud, .. } = address {
        findings.push(identity(*cloud));
    }
    match objects(address, options, None)? {
        None => web(&Http::new(address, options)?, address, &mut findings),
        Some(objects) => bucket::probe(&*objects, options.timeout, &mut findings, goes_on)?,
    }
    Ok(findings)
}

/// Who asks: never what proves it.
fn identity(cloud: Cloud) -> Finding {
    const NAME: &str = "credentials";
    let (found, none, mend) = match cloud {
        Cloud::S3 => (
            s3::looked_for(cloud, None)().map(|found| found.is_some()),
            "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE, unless it is public",
            "mend the profile that AWS_PROFILE names",
        ),
        Cloud::Google => (
            s3::looked_for(cloud, None)().map(|found| found.is_some()),
            "set GS_ACCESS_KEY_ID and GS_SECRET_ACCESS_KEY to an HMAC key, unless it is public",
            "mend the profile that AWS_PROFILE names",
        ),
        Cloud::Azure => (
            azure::looked_for(None)().map(|found| found.is_some_and(|account| account.is_somebody())),
            "set AZURE_STORAGE_KEY, AZURE_STORAGE_SAS_TOKEN or AZURE_STORAGE_CONNECTION_STRING, unless it is public",
            "mend the variables AZURE_STORAGE_..., or ~/.azure/config",
        ),
    };
    match found {
        Ok(true) => Finding::good(NAME, "found, and requests are signed with them"),
        Ok(false) => Finding::advice(NAME, "none were found, so the bucket is asked as a public one", none),
        Err(trouble) => Finding::bad(NAME, trouble.words(), mend),
    }
}

fn web(http: &Http, address: &Address, findings: &mut Vec<Finding>) {
    findings.push(match address {
        Address::Web(url) if url.scheme() == "http" => Finding::advice(
            "transport",
            "plain http",
            "serve it over https: everybody on the way sees which parts are read, and can keep them from being read",
        ),
        _ => Finding::good("transport", "https, with a certificate that is to be trusted here"),
    });
    let answered = http.ask(&(0..BEGIN), None);
    let answer = answered.and_then(|response| Answer::of(&response, 0, BEGIN));
    let answer = match answer {
        Ok(answer) => answer,
        Err(trouble) => {
            let name = if matches!(trouble, Trouble::Unusable(_)) { "ranges" } else { "file" };
            findings.push(Finding::bad(name, trouble.words(), remedy(&trouble)));
            return;
        }
    };
    let Version { length, tag, modified } = &answer.version;
    findings.push(Finding::good("file", format!("{length} bytes")));
    findings.push(Finding::good("ranges", "parts of the file are served, uncompressed"));
    findings.push(match (tag, modified) {
        (Some(tag), _) => Finding::good("version", format!("a strong entity tag: {tag}")),
        (None, Some(modified)) => Finding::advice(
            "version",
            format!("no strong entity tag, but a time: {modified}"),
            "have the server send an ETag: without one two versions of a second are not told apart, and nothing is kept on disk",
        ),
        (None, None) => Finding::advice(
            "version",
            "neither a strong entity tag nor a time",
            "have the server send an ETag: without one versions of one length are not told apart, and nothing is kept on disk",
        ),
    });
    if tag.is_none() {
        return;
    }
    let other = Version { length: *length, tag: Some(NO_TAG.into()), modified: None };
    let answered = http.ask(&(0..BEGIN), Some(&other)).and_then(|response| Answer::of(&response, 0, BEGIN));
    findings.push(match answered {
        Err(Trouble::Changed) => Finding::good("conditions", "If-Match is honoured"),
        Ok(_) => Finding::advice(
            "conditions",
            "If-Match is passed over",
            "nothing has to be done: the tag in each answer is compared",
        ),
        Err(trouble) => Finding::bad("conditions", trouble.words(), remedy(&trouble)),
    });
}
