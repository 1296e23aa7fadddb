//! Diagnostics for `lockbox doctor`: probes a web server or an object store, and reports missing
//! capabilities before they matter.
//!
//! A web server gets two requests: for the start of the file, as at open, and one with a condition
//! that cannot hold. A store is probed with temporary objects: the contract OBJECTS-1 to 3, and the
//! clock.

use std::path::PathBuf;
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use std::{fs, io, thread};

use lockbox::Result;

use crate::address::{Address, Cloud};
use crate::bucket::{ListedObject, MAX_LIST_ENTRIES, ObjectCreation, ObjectRange, ObjectStore, random_bytes};
use crate::hex;
use crate::http::{HttpSource, RangeResponse};
use crate::range_source::{FileVersion, RemoteError, RemoteResult};
use crate::retry::with_retry;
use crate::{DirectoryTrust, RemoteOptions, azure, object_store, s3};

/// Result of one check of a probe.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProbeFinding {
    /// Stable identifier for programs.
    pub name: &'static str,
    /// Set if the check passed. A passed check with advice could be improved.
    pub works: bool,
    pub found: String,
    pub advice: Option<&'static str>,
}

impl ProbeFinding {
    pub(crate) fn good(name: &'static str, found: impl Into<String>) -> ProbeFinding {
        ProbeFinding { name, works: true, found: found.into(), advice: None }
    }

    pub(crate) fn advice(name: &'static str, found: impl Into<String>, advice: &'static str) -> ProbeFinding {
        ProbeFinding { name, works: true, found: found.into(), advice: Some(advice) }
    }

    pub(crate) fn bad(name: &'static str, found: impl Into<String>, advice: &'static str) -> ProbeFinding {
        ProbeFinding { name, works: false, found: found.into(), advice: Some(advice) }
    }
}

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
    // The directory of a new archive is created for the probe, as it is for the archive.
    let is_missing =
        |path: &PathBuf| path.symlink_metadata().is_err_and(|error| error.kind() == io::ErrorKind::NotFound);
    let missing = match address {
        Address::Directory(url) => url.to_file_path().ok().filter(is_missing),
        Address::Web(_) | Address::Bucket { .. } => None,
    };
    let probed = match object_store(address, options, missing.as_ref().map(|_| DirectoryTrust::Trusted))? {
        None => HttpSource::new(address, options).map(|http| probe_web(&http, address, &mut findings)),
        Some(objects) => probe_store(&*objects, options.timeout, &mut findings, goes_on),
    };
    if let Some(path) = missing {
        // It stays if a writer put objects in meanwhile.
        let _ = fs::remove_dir(path);
    }
    probed.map(|()| findings)
}

/// Checks whether credentials are found; never displays them.
fn probe_credentials(cloud: Cloud) -> ProbeFinding {
    const NAME: &str = "credentials";
    let found = match cloud {
        Cloud::S3 | Cloud::Google => s3::credential_lookup(cloud, None)().map(|found| found.is_some()),
        Cloud::Azure => azure::account_lookup(None)().map(|found| found.is_some_and(|it| it.secret.is_some())),
    };
    let (none, mend) = match cloud {
        Cloud::S3 => (
            "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE, unless it is public",
            "mend the profile that AWS_PROFILE names",
        ),
        Cloud::Google => (
            "set GS_ACCESS_KEY_ID and GS_SECRET_ACCESS_KEY to an HMAC key, unless it is public",
            "mend the profile that AWS_PROFILE names",
        ),
        Cloud::Azure => (
            "set AZURE_STORAGE_KEY, AZURE_STORAGE_SAS_TOKEN or AZURE_STORAGE_CONNECTION_STRING, unless it is public",
            "mend the variables AZURE_STORAGE_..., or ~/.azure/config",
        ),
    };
    match found {
        Ok(true) => ProbeFinding::good(NAME, "found, and requests are signed with them"),
        Ok(false) => ProbeFinding::advice(NAME, "none found, so the bucket is read as a public one", none),
        Err(error) => ProbeFinding::bad(NAME, error.message(), mend),
    }
}

fn probe_web(http: &HttpSource, address: &Address, findings: &mut Vec<ProbeFinding>) {
    findings.push(match address {
        Address::Web(url) if url.scheme() == "http" => ProbeFinding::advice(
            "transport",
            "plain http",
            "serve it over https: with http, every host on the route sees which parts are read, and can block them",
        ),
        _ => ProbeFinding::good("transport", "https, with a certificate that this machine trusts"),
    });
    let ask = |version: Option<&FileVersion>| {
        let answered = http.request_range(&(0..PROBE_BYTES), version);
        answered.and_then(|response| RangeResponse::of(&response, 0, PROBE_BYTES))
    };
    let answer = match ask(None) {
        Ok(answer) => answer,
        Err(error) => {
            let name = if matches!(error, RemoteError::Unsupported(_)) { "ranges" } else { "file" };
            findings.push(ProbeFinding::bad(name, error.message(), error.remedy()));
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
            "configure the server to send an ETag: without it, two versions of one second look alike, and there is no cache on disk",
        ),
        (None, None) => ProbeFinding::advice(
            "version",
            "neither a strong entity tag nor a time",
            "configure the server to send an ETag: without it, versions of one length look alike, and there is no cache on disk",
        ),
    });
    if tag.is_none() {
        return;
    }
    let other = FileVersion { length: *length, tag: Some(NO_TAG.into()), modified: None };
    findings.push(match ask(Some(&other)) {
        Err(RemoteError::Changed) => ProbeFinding::good("conditions", "If-Match is honoured"),
        Ok(_) => ProbeFinding::advice(
            "conditions",
            "If-Match is passed over",
            "none needed: the tag in each response is compared",
        ),
        Err(error) => ProbeFinding::bad("conditions", error.message(), error.remedy()),
    });
}

/// Concurrent creators of one object.
const WRITERS: u8 = 8;
/// Size of an object in bytes.
const BYTES: usize = 10_000;
/// Clock skew in seconds above which a store rejects signatures.
const MAX_CLOCK_SKEW: u64 = 300;
const USE_ANOTHER: &str = "use another store for backups: two writers could destroy each other's data there";

/// Objects of this probe, removed in every case.
struct ProbeObjects<'a> {
    objects: &'a dyn ObjectStore,
    timeout: Option<Duration>,
    prefix: String,
    names: Vec<String>,
}

impl ProbeObjects<'_> {
    /// Returns a new name, recorded before its object is created.
    fn next(&mut self) -> String {
        let name = format!("{}{}", self.prefix, self.names.len());
        self.names.push(name.clone());
        name
    }

    fn request<T>(&self, mut call: impl FnMut(&dyn ObjectStore) -> RemoteResult<T>) -> RemoteResult<T> {
        with_retry(&|| self.timeout, &mut || call(self.objects))
    }

    fn remove(&mut self) -> RemoteResult<()> {
        while let Some(name) = self.names.last().cloned() {
            self.request(|objects| objects.remove(&name))?;
            self.names.pop();
        }
        Ok(())
    }
}

impl Drop for ProbeObjects<'_> {
    fn drop(&mut self) {
        self.names.iter().for_each(|name| drop(self.objects.remove(name)));
    }
}

fn content(of: u8) -> Vec<u8> {
    (0..BYTES).map(|at| (at % 251) as u8 ^ of).collect()
}

/// Returns whether the user lacks a right. Reading may work all the same.
fn is_about_rights(error: &RemoteError) -> bool {
    matches!(error, RemoteError::Denied(_)) || error.may_hide_missing()
}

/// Adds findings about the store. Stops at the first operation that fails entirely.
pub(crate) fn probe_store(
    objects: &dyn ObjectStore,
    timeout: Option<Duration>,
    findings: &mut Vec<ProbeFinding>,
    goes_on: &mut dyn FnMut() -> Result<()>,
) -> Result<()> {
    // Without retries: an unreachable store is reported at once.
    match objects.list("", "", 1) {
        Ok(_) => findings.push(ProbeFinding::good("lists", "objects can be listed")),
        Err(error) if is_about_rights(&error) => findings.push(ProbeFinding::advice(
            "lists",
            error.message(),
            "grant the right to list if there are backups of many objects; an archive that is one object is read without it",
        )),
        Err(error) => {
            findings.push(ProbeFinding::bad("lists", error.message(), error.remedy()));
            return Ok(());
        }
    }
    goes_on()?;
    let prefix = format!("probe-{}-", hex(&random_bytes()?));
    let mut created = ProbeObjects { objects, timeout, prefix, names: Vec::new() };
    let (first, bytes) = (created.next(), content(0));
    let date = match created.request(|objects| objects.create(&first, &bytes)) {
        Ok(ObjectCreation::Created(date)) => date,
        failed => {
            findings.push(match failed {
                Ok(_) => ProbeFinding::bad("writes", "the store reports an unused name as taken", USE_ANOTHER),
                Err(error) if is_about_rights(&error) => ProbeFinding::advice(
                    "writes",
                    error.message(),
                    "grant the rights to put and delete objects if backups are to be written; reading needs neither",
                ),
                Err(error) => ProbeFinding::bad("writes", error.message(), error.remedy()),
            });
            return Ok(());
        }
    };
    findings.push(ProbeFinding::good("writes", "objects can be created"));
    goes_on()?;
    findings.push(probe_conditional(&created, &first));
    goes_on()?;
    findings.push(probe_race(&mut created));
    goes_on()?;
    findings.push(report("ranges", probe_ranges(&created, &first, &bytes), "parts of objects are served"));
    goes_on()?;
    findings.push(report("order", probe_order(&mut created), "new objects are listed at once, sorted by bytes"));
    findings.push(probe_clock(date));
    goes_on()?;
    findings.push(probe_removal(&mut created));
    Ok(())
}

fn report(name: &'static str, done: RemoteResult<Option<String>>, good: &str) -> ProbeFinding {
    match done {
        Ok(None) => ProbeFinding::good(name, good),
        Ok(Some(wrong)) => {
            ProbeFinding::bad(name, wrong, "use another store, or set this one up as lockbox-remote(7) says")
        }
        Err(error) => ProbeFinding::bad(name, error.message(), error.remedy()),
    }
}

fn probe_conditional(created: &ProbeObjects<'_>, first: &str) -> ProbeFinding {
    const NAME: &str = "conditions";
    let other = content(1);
    match created.request(|objects| objects.create(first, &other)) {
        Ok(ObjectCreation::Exists) => ProbeFinding::good(NAME, "conditional create (If-None-Match: *) works"),
        Ok(ObjectCreation::Created(_)) => {
            ProbeFinding::bad(NAME, "the store ignores If-None-Match and overwrites objects", USE_ANOTHER)
        }
        Err(error) => ProbeFinding::bad(NAME, error.message(), USE_ANOTHER),
    }
}

fn probe_race(created: &mut ProbeObjects<'_>) -> ProbeFinding {
    const NAME: &str = "one writer";
    let name = created.next();
    let created = &*created;
    let name = &*name;
    let answers: Vec<RemoteResult<ObjectCreation>> = thread::scope(|scope| {
        let make = move |writer| created.request(|objects| objects.create(name, &content(writer)));
        let started: Vec<_> = (0..WRITERS).map(|writer| scope.spawn(move || make(writer))).collect();
        let lost = |_| Err(RemoteError::Transient("the request was not sent".into()));
        started.into_iter().map(|writer| writer.join().unwrap_or_else(lost)).collect()
    });
    let winners: Vec<u8> = (0..)
        .zip(&answers)
        .filter(|(_, answer)| matches!(answer, Ok(ObjectCreation::Created(_))))
        .map(|(writer, _)| writer)
        .collect();
    let there = match created.request(|objects| objects.get(name, ObjectRange::All(BYTES as u64))) {
        Ok(there) => there,
        Err(error) => return ProbeFinding::bad(NAME, error.message(), error.remedy()),
    };
    match winners[..] {
        [winner] if there == content(winner) => {
            ProbeFinding::good(NAME, format!("of {WRITERS} concurrent creates of one object, one succeeded"))
        }
        [_] => {
            ProbeFinding::bad(NAME, "the object does not have the content of the create that succeeded", USE_ANOTHER)
        }
        [] => ProbeFinding::advice(
            NAME,
            format!("of {WRITERS} concurrent creates of one object, none was confirmed"),
            "try again: responses may have been lost",
        ),
        _ => ProbeFinding::bad(
            NAME,
            format!("of {WRITERS} concurrent creates of one object, {} succeeded", winners.len()),
            USE_ANOTHER,
        ),
    }
}

fn probe_ranges(created: &ProbeObjects<'_>, name: &str, bytes: &[u8]) -> RemoteResult<Option<String>> {
    let length = bytes.len();
    for (part, wanted) in [
        (ObjectRange::All(length as u64), 0..length),
        (ObjectRange::Range(0, 1), 0..1),
        (ObjectRange::Range(1000, 4096), 1000..5096),
        // Truncated at the end of the object.
        (ObjectRange::Range(length as u64 - 5, 10), length - 5..length),
        (ObjectRange::Last(7), length - 7..length),
    ] {
        if created.request(|objects| objects.get(name, part))? != bytes[wanted] {
            return Ok(Some("a response has other bytes than the requested range".into()));
        }
    }
    Ok(None)
}

fn probe_order(created: &mut ProbeObjects<'_>) -> RemoteResult<Option<String>> {
    // Not in their order.
    let mut names: Vec<String> = ["b", "c", "a"].map(|letter| format!("{}{letter}", created.prefix)).into();
    for name in &names {
        created.names.push(name.clone());
        created.request(|objects| objects.create(name, b"probe"))?;
    }
    names.sort();
    let made = format!("{}a", created.prefix);
    let mut all = created.names.clone();
    all.sort();
    let list = |after: &str, most| created.request(|objects| objects.list(&created.prefix, after, most));
    let named = |listed: Vec<ListedObject>| listed.into_iter().map(|object| object.name).collect::<Vec<_>>();
    let wrong = if named(list("", MAX_LIST_ENTRIES)?) != all {
        "new objects are not listed at once, or not sorted by bytes"
    } else if named(list(&made, 1)?) != names[1..2] {
        "lists do not begin after the requested name"
    } else {
        return Ok(None);
    };
    Ok(Some(wrong.into()))
}

fn probe_clock(date: Option<u64>) -> ProbeFinding {
    const NAME: &str = "clock";
    let here = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs());
    match date.map(|date| date.abs_diff(here)) {
        None => ProbeFinding::advice(
            NAME,
            "the responses of the store have no date",
            "objects that backups no longer need are never removed there; use another store if that matters",
        ),
        Some(wrong) if wrong > MAX_CLOCK_SKEW => ProbeFinding::advice(
            NAME,
            format!("the clocks of the store and of this machine differ by {wrong} seconds"),
            "set the clocks: stores reject requests signed at another time, and removal uses the store's clock",
        ),
        Some(wrong) => ProbeFinding::good(NAME, format!("differs by {wrong} seconds from the clock of this machine")),
    }
}

fn probe_removal(created: &mut ProbeObjects<'_>) -> ProbeFinding {
    const NAME: &str = "removal";
    const ADVICE: &str = "grant the right to delete objects, then delete the objects of this probe: without it, objects that backups no longer need remain";
    let last = created.names.clone();
    if let Err(error) = created.remove() {
        let left = format!("{}; objects with the prefix {} remain", error.message(), created.prefix);
        return ProbeFinding::advice(NAME, left, ADVICE);
    }
    let gone = |name: &String| {
        matches!(created.request(|objects| objects.get(name, ObjectRange::Last(1))), Err(RemoteError::NotFound))
    };
    if last.iter().all(gone) {
        return ProbeFinding::good(NAME, "objects can be removed; the objects of this probe are");
    }
    ProbeFinding::advice(NAME, "removed objects are still there", ADVICE)
}
