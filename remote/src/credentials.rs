//! Credentials for object stores from the sources of each cloud's tools: the environment, files
//! such as those below `~/.aws`, a program. (For Azure see `azure.rs`.)
//!
//! Credentials never appear in arguments, mount options or logs. `identity/` has the credentials
//! that a cloud gives to a machine or a workload.
//!
//! Files of settings name programs (`credential_process`), servers and keys. sudo(8) and su(1) may
//! leave root with the HOME of a user. The files there would have root run that user's programs,
//! and send root's data to that user's server. So for root a file counts only when it and every
//! directory above it belong to root, and no other user may write or rename there.

use std::collections::BTreeMap;
use std::env;
use std::fs::{self, Metadata};
use std::io::{self, Read};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use jiff::Timestamp;
use lockbox::{Error, Result};
use lockbox_terminal::display;
use parking_lot::{Mutex, MutexGuard};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, geteuid, pidfd_open};
use serde::Deserialize;
use ureq::tls::{PemItem, RootCerts, parse_pem};
use zeroize::Zeroizing;

use crate::broker::{Broker, KeyPair, RegionEndpoint};
use crate::identity::{self, AwsIdentity};
pub(crate) use crate::identity::{File, Variable};
use crate::range_source::{RemoteError, RemoteResult, printable};

struct AwsProfile {
    place: RegionEndpoint,
    origin: CredentialOrigin,
}

/// Resolves region and endpoint from the environment, or through the broker in a sandboxed process.
/// Errors: `Invalid` when the named profile is not in the files.
pub(crate) fn region_endpoint(broker: Option<&Broker>) -> Result<RegionEndpoint> {
    let Some(broker) = broker else { return AwsProfile::of_environment().map(|profile| profile.place) };
    let found = broker.region_endpoint().map_err(|error| Error::io("cannot request the profile", error))?;
    found.map_err(Error::invalid)
}

pub(crate) fn to_key_pair(keys: &rusty_s3::Credentials) -> KeyPair {
    KeyPair { id: keys.key().to_owned(), secret: keys.secret().to_owned(), token: keys.token().map(str::to_owned) }
}

pub(crate) fn from_key_pair(keys: &KeyPair) -> rusty_s3::Credentials {
    credentials(&keys.id, &keys.secret, keys.token.as_deref())
}

enum CredentialOrigin {
    Static(rusty_s3::Credentials),
    /// A command line that prints JSON.
    Process(String),
    /// Session of a workload, container or machine.
    Identity(AwsIdentity),
    /// A public bucket.
    Anonymous,
}

const REGION: &str = "us-east-1";

pub(crate) fn variable(name: &str) -> Option<String> {
    let value = match name {
        "HOME" => home().and_then(|home| home.into_os_string().into_string().ok()),
        _ => env::var(name).ok(),
    };
    value.filter(|value| !value.is_empty())
}

/// Returns the home directory, from the system's user database if the environment has none, as in a
/// mount at boot.
pub(crate) fn home() -> Option<PathBuf> {
    env::home_dir().filter(|home| home.is_absolute())
}

impl AwsProfile {
    fn of_environment() -> Result<AwsProfile> {
        AwsProfile::of(&variable, &read_settings)
    }

    fn of(variable: Variable<'_>, file: File<'_>) -> Result<AwsProfile> {
        let at = |name: &str, default: &str| {
            variable(name)
                .map(PathBuf::from)
                .or_else(|| variable("HOME").map(|home| PathBuf::from(home).join(".aws").join(default)))
        };
        let read = |path: Option<PathBuf>| path.and_then(|path| file(&path)).map(Zeroizing::new).unwrap_or_default();
        let named = variable("AWS_PROFILE");
        let profile = named.clone().unwrap_or_else(|| "default".to_owned());
        let config = read(at("AWS_CONFIG_FILE", "config"));
        let title = if profile == "default" { profile.clone() } else { format!("profile {profile}") };
        let config = section(&config, &title);
        let secrets = read(at("AWS_SHARED_CREDENTIALS_FILE", "credentials"));
        let secrets = section(&secrets, &profile);
        if let (Some(name), None, None) = (&named, &config, &secrets) {
            return Err(Error::invalid(format!("AWS_PROFILE names {name}, which the files of profiles do not have")));
        }
        let (config, secrets) = (config.unwrap_or_default(), secrets.unwrap_or_default());
        let setting = |names: &[&str], key: &str| {
            names.iter().find_map(|name| variable(name)).or_else(|| config.get(key).map(|value| (*value).to_owned()))
        };
        let key = |table: &BTreeMap<String, &str>| {
            let pair = (table.get("aws_access_key_id")?, table.get("aws_secret_access_key")?);
            Some(credentials(pair.0, pair.1, table.get("aws_session_token").copied()))
        };
        let environment = || {
            let (id, secret) = (variable("AWS_ACCESS_KEY_ID")?, Zeroizing::new(variable("AWS_SECRET_ACCESS_KEY")?));
            Some(credentials(&id, &secret, variable("AWS_SESSION_TOKEN").as_deref()))
        };
        let place = RegionEndpoint {
            region: setting(&["AWS_REGION", "AWS_DEFAULT_REGION"], "region").unwrap_or_else(|| REGION.to_owned()),
            endpoint: setting(&["AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"], "endpoint_url"),
            ca_bundle: setting(&["AWS_CA_BUNDLE"], "ca_bundle").map(PathBuf::from),
        };
        // The order of the AWS tools; a profile that is named precedes the role of a workload.
        let mut role = AwsIdentity::role(variable, &place.region);
        let origin = if let Some(known) = environment() {
            CredentialOrigin::Static(known)
        } else if let Some(role) = role.take_if(|_| named.is_none()) {
            CredentialOrigin::Identity(role)
        } else if let Some(known) = key(&secrets).or_else(|| key(&config)) {
            CredentialOrigin::Static(known)
        } else if let Some(program) = config.get("credential_process") {
            CredentialOrigin::Process((*program).to_owned())
        } else {
            let identity = role.or_else(|| AwsIdentity::of_host(variable, file));
            identity.map_or(CredentialOrigin::Anonymous, CredentialOrigin::Identity)
        };
        Ok(AwsProfile { place, origin })
    }
}

/// Reads the CA certificates of a PEM file, which replace the system's. Errors: `Invalid` when it
/// has none, cannot be read, or, for root, could have been written by another user.
pub(crate) fn read_ca_bundle(path: &Path) -> Result<RootCerts> {
    let wrong = |why: &str| {
        let path = display(path.as_os_str().as_bytes());
        Error::invalid(format!("{path}, which AWS_CA_BUNDLE or ca_bundle names, {why}"))
    };
    if geteuid().is_root() && !is_owned_by_root(path) && path.exists() {
        return Err(wrong("could have been written by another user; root uses files of its own"));
    }
    let text = fs::read(path).map_err(|error| wrong(&printable(&format!("cannot be read: {error}"))))?;
    let certificate = |item| if let Ok(PemItem::Certificate(found)) = item { Some(found) } else { None };
    let certificates: Vec<_> = parse_pem(&text).filter_map(certificate).collect();
    if certificates.is_empty() { Err(wrong("has no certificate")) } else { Ok(RootCerts::from(certificates)) }
}

fn credentials(id: &str, secret: &str, token: Option<&str>) -> rusty_s3::Credentials {
    match token {
        Some(token) => rusty_s3::Credentials::new_with_token(id, secret, token),
        None => rusty_s3::Credentials::new(id, secret),
    }
}

/// Parses the settings of the section `[name]`, keyed in lower case; None if there is none. Follows
/// the AWS tools: comments begin with `#` or `;` and may follow a title; a title may have quotes; a
/// line that is indented more than the setting above it belongs to that setting (a nested table of
/// another service) and is skipped.
pub(crate) fn section<'a>(text: &'a str, name: &str) -> Option<BTreeMap<String, &'a str>> {
    let mut found = None;
    let mut inside = false;
    // How far the last setting is indented.
    let mut above: Option<usize> = None;
    for line in text.trim_start_matches('\u{feff}').lines() {
        let indent = line.len() - line.trim_start().len();
        let line = line.trim();
        if line.is_empty() || line.starts_with(['#', ';']) || above.is_some_and(|above| indent > above) {
            continue;
        }
        if let Some((title, _)) = line.strip_prefix('[').and_then(|line| line.split_once(']')) {
            let title = title.replace(['"', '\''], " ");
            inside = title.split_whitespace().eq(name.split_whitespace());
            above = None;
            if inside {
                found.get_or_insert_with(BTreeMap::new);
            }
        } else if let Some((key, value)) = line.split_once('=') {
            above = Some(indent);
            // One that is empty is none.
            if let (true, Some(settings), false) = (inside, &mut found, value.trim().is_empty()) {
                settings.insert(key.trim().to_ascii_lowercase(), value.trim());
            }
        }
    }
    found
}

/// Lifetime of a lookup: temporary credentials are valid for at least a quarter of an hour.
const MAX_AGE: Duration = Duration::from_secs(600);
/// Minimum time between lookups when a store denies the current credentials.
const MIN_REFRESH_INTERVAL: Duration = if cfg!(test) { Duration::ZERO } else { Duration::from_secs(2) };
/// Minimum time between lookups after a failed one.
const FAILURE_INTERVAL: Duration = Duration::from_secs(2);
/// As [`FAILURE_INTERVAL`], while old credentials are used: a lookup without a reply delays one
/// request by many seconds.
const RENEWAL_INTERVAL: Duration = Duration::from_secs(60);
/// Time limit of the program: it may wait for the touch of a hardware key.
const PROCESS_TIMEOUT: Duration = Duration::from_secs(60);
/// Maximum output of the program in bytes.
const MAX_OUTPUT: u64 = 64 << 10;

pub(crate) struct CredentialCache<T> {
    lookup: LookupFn<T>,
    /// Held during a lookup; locked before `cached`.
    renewal: Mutex<()>,
    /// Never held during a lookup.
    cached: Mutex<CachedLookup<T>>,
}

struct CachedLookup<T> {
    /// Result of the last successful lookup, and its time.
    found: Option<(Option<Arc<T>>, Instant)>,
    /// Failure of a later lookup, and its time.
    failure: Option<(RemoteError, Instant)>,
}

/// Credential lookup; None for a public bucket.
type LookupFn<T> = Box<dyn Fn() -> RemoteResult<Option<T>> + Send + Sync>;

/// Output of a `credential_process` of the AWS tools.
#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct ProcessOutput {
    access_key_id: String,
    secret_access_key: String,
    session_token: Option<String>,
}

impl<T: PartialEq> CredentialCache<T> {
    pub(crate) fn new(lookup: impl Fn() -> RemoteResult<Option<T>> + Send + Sync + 'static) -> CredentialCache<T> {
        let cached = Mutex::new(CachedLookup { found: None, failure: None });
        CredentialCache { lookup: Box::new(lookup), renewal: Mutex::new(()), cached }
    }

    /// Calls `ask` with the current credentials. If they are denied, looks them up again and
    /// retries with different ones: they may have expired and been renewed. Old ones that cannot be
    /// renewed now are used: the store decides whether they have expired.
    pub(crate) fn with<R>(&self, ask: impl Fn(Option<&T>) -> RemoteResult<R>) -> RemoteResult<R> {
        let credentials = self.current()?;
        let answer = ask(credentials.as_deref());
        if let Err(RemoteError::Denied(_) | RemoteError::Refused(_)) = &answer {
            let renewed = self.get_newer_than(MIN_REFRESH_INTERVAL)?;
            if renewed != credentials {
                return ask(renewed.as_deref());
            }
        }
        answer
    }

    /// Returns the credentials for the next request. Old ones are returned while another thread
    /// renews them, and for [`RENEWAL_INTERVAL`] after a failed renewal.
    fn current(&self) -> RemoteResult<Option<Arc<T>>> {
        let old = {
            let cached = self.cached.lock();
            let has_failed = cached.failure.as_ref().is_some_and(|(_, at)| at.elapsed() < RENEWAL_INTERVAL);
            match &cached.found {
                Some((old, at)) if at.elapsed() < MAX_AGE || has_failed => return Ok(old.clone()),
                found => found.as_ref().map(|(old, _)| old.clone()),
            }
        };
        let Some(old) = old else { return self.get_newer_than(MAX_AGE) };
        let Some(renewal) = self.renewal.try_lock() else { return Ok(old) };
        Ok(self.renew(&renewal, MAX_AGE).unwrap_or(old))
    }

    /// Returns the cached credentials if they are newer, and otherwise looks credentials up: a
    /// lookup may run a program, or wait for a service or for the lookup of another thread.
    fn get_newer_than(&self, age: Duration) -> RemoteResult<Option<Arc<T>>> {
        self.renew(&self.renewal.lock(), age)
    }

    /// Looks credentials up unless the cached ones are newer. A failure is returned for
    /// [`FAILURE_INTERVAL`]: waiting requests do not repeat the lookup one by one.
    fn renew(&self, _renewal: &MutexGuard<'_, ()>, age: Duration) -> RemoteResult<Option<Arc<T>>> {
        let has_credentials = {
            let cached = self.cached.lock();
            if let Some((credentials, _)) = cached.found.as_ref().filter(|(_, at)| at.elapsed() < age) {
                return Ok(credentials.clone());
            }
            if let Some((error, _)) = cached.failure.as_ref().filter(|(_, at)| at.elapsed() < FAILURE_INTERVAL) {
                return Err(error.clone());
            }
            matches!(cached.found, Some((Some(_), _)))
        };
        let found = match (self.lookup)() {
            // A machine has no credentials, too, while its metadata service does not respond.
            Ok(None) if has_credentials => {
                Err(RemoteError::Transient("cannot renew the credentials: their source has none now".into()))
            }
            found => found.map(|credentials| credentials.map(Arc::new)),
        };
        let (mut cached, now) = (self.cached.lock(), Instant::now());
        cached.failure = found.as_ref().err().map(|error| (error.clone(), now));
        if let Ok(credentials) = &found {
            cached.found = Some((credentials.clone(), now));
        }
        found
    }
}

pub(crate) fn aws_credentials() -> RemoteResult<Option<rusty_s3::Credentials>> {
    match AwsProfile::of_environment().map_err(|error| RemoteError::Denied(error.to_string()))?.origin {
        CredentialOrigin::Identity(identity) => {
            let session = identity.session(&read_settings)?;
            Ok(session.map(|key| credentials(&key.id, &key.secret, key.token.as_ref().map(|token| token.as_str()))))
        }
        origin => known_credentials(origin),
    }
}

/// Returns credentials that no service has to be asked for.
fn known_credentials(origin: CredentialOrigin) -> RemoteResult<Option<rusty_s3::Credentials>> {
    match origin {
        CredentialOrigin::Static(known) => Ok(Some(known)),
        CredentialOrigin::Process(line) => run_process(&line, PROCESS_TIMEOUT).map(Some).map_err(RemoteError::Denied),
        CredentialOrigin::Identity(_) | CredentialOrigin::Anonymous => Ok(None),
    }
}

/// Looks up HMAC keys of Google's tools, in the environment or the file that gsutil reads. Falls
/// back to keys of the AWS tools only if their id marks them as Google's: keys of another cloud
/// must not be sent to Google, and their failure is not an error. Without any key it asks for an
/// access token.
pub(crate) fn google_credentials(
    variable: Variable<'_>,
    file: File<'_>,
) -> RemoteResult<Option<rusty_s3::Credentials>> {
    if let Some(known) = google_hmac_key(variable, file) {
        return Ok(Some(known));
    }
    let profile = AwsProfile::of(variable, file).map_err(|error| RemoteError::Denied(error.to_string()));
    match profile.and_then(|profile| known_credentials(profile.origin)) {
        Ok(known) => {
            if let Some(known) = known.filter(|known| known.key().starts_with("GOOG")) {
                return Ok(Some(known));
            }
        }
        // The profile may be one for Amazon.
        Err(error) => tracing::debug!("no keys for Google from the AWS profile: {}", error.message()),
    }
    let token = identity::google_token(variable, file, Timestamp::now().as_second())?;
    Ok(token.map(|token| credentials("", "", Some(&token))))
}

/// Returns the access token of credentials that have no key: such requests are not signed, and the
/// token is sent.
pub(crate) fn access_token(credentials: &rusty_s3::Credentials) -> Option<&str> {
    credentials.token().filter(|_| credentials.key().is_empty())
}

fn google_hmac_key(variable: Variable<'_>, file: File<'_>) -> Option<rusty_s3::Credentials> {
    if let (Some(id), Some(secret)) = (variable("GS_ACCESS_KEY_ID"), variable("GS_SECRET_ACCESS_KEY")) {
        return Some(credentials(&id, &Zeroizing::new(secret), None));
    }
    let path = variable("BOTO_CONFIG").or_else(|| variable("HOME").map(|home| format!("{home}/.boto")))?;
    let text = Zeroizing::new(file(Path::new(&path))?);
    let settings = section(&text, "Credentials")?;
    Some(credentials(settings.get("gs_access_key_id")?, settings.get("gs_secret_access_key")?, None))
}

/// Runs the line in a shell, as the AWS tools do; never repeats its output. Kills it after
/// `longest`: a request to the store waits for it.
fn run_process(line: &str, longest: Duration) -> std::result::Result<rusty_s3::Credentials, String> {
    let failed = |why: &str| format!("the credential_process of the profile {why}");
    let mut child = Command::new("/bin/sh")
        .args(["-c", line])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .map_err(|error| failed(&format!("cannot be run: {error}")))?;
    let until = Instant::now() + longest;
    let mut output = Zeroizing::new(Vec::with_capacity(MAX_OUTPUT as usize));
    let read = read_until(&mut child, &mut output, until);
    let is_done = read.is_ok() && has_ended(&child, until);
    if !is_done {
        // The shell may have exited without its children.
        let _ = child.kill();
    }
    let status = child.wait().map_err(|error| failed(&format!("does not end: {error}")))?;
    if !is_done {
        return Err(failed("does not end"));
    }
    if !status.success() {
        return Err(failed("failed"));
    }
    let parsed: ProcessOutput = serde_json::from_slice(&output).map_err(|_| failed("prints no credentials"))?;
    let (id, secret) = (parsed.access_key_id, Zeroizing::new(parsed.secret_access_key));
    Ok(credentials(&id, &secret, parsed.session_token.as_deref().filter(|token| !token.is_empty())))
}

/// Reads the output until it is closed, or up to the maximum size.
fn read_until(child: &mut Child, output: &mut Vec<u8>, until: Instant) -> io::Result<()> {
    let Some(mut stdout) = child.stdout.take() else { return Ok(()) };
    let mut part = Zeroizing::new([0; 4096]);
    while (output.len() as u64) < MAX_OUTPUT {
        if !wait_readable(stdout.as_fd(), until)? {
            return Err(io::ErrorKind::TimedOut.into());
        }
        match stdout.read(&mut part[..])? {
            0 => break,
            count => output.extend_from_slice(&part[..count]),
        }
    }
    Ok(())
}

fn has_ended(child: &Child, until: Instant) -> bool {
    let ends = pidfd_open(Pid::from_child(child), PidfdFlags::empty());
    ends.map_err(io::Error::from).and_then(|ends| wait_readable(ends.as_fd(), until)).unwrap_or(false)
}

/// Waits until the descriptor is readable; returns false at the deadline.
fn wait_readable(from: BorrowedFd<'_>, until: Instant) -> io::Result<bool> {
    loop {
        let left = until.saturating_duration_since(Instant::now());
        let left = Timespec::try_from(left).map_err(io::Error::other)?;
        match poll(&mut [PollFd::from_borrowed_fd(from, PollFlags::IN)], Some(&left)) {
            Err(Errno::INTR) => {}
            found => return Ok(found? > 0),
        }
    }
}

/// Returns the text of a file; None without one, and of one that does not count, which is logged.
pub(crate) fn read_settings(path: &Path) -> Option<String> {
    let is_root = geteuid().is_root();
    if is_root && !is_owned_by_root(path) {
        if path.exists() {
            let path = path.display();
            tracing::warn!(
                "{path} is not used: it, or a directory above it, belongs to another user or may be written by others; root uses files of its own"
            );
        }
        return None;
    }
    fs::read_to_string(path).ok()
}

/// Returns whether only root could have written the file and its path.
///
/// The path is resolved first: each component of the result belongs to root, so no other user can
/// put a link in after that.
pub(crate) fn is_owned_by_root(path: &Path) -> bool {
    // In a user namespace root's directories belong to the overflow user; the owner of / controls
    // all files anyhow.
    let owners = [Some(0), fs::metadata("/").ok().map(|root| root.uid())];
    let is_closed = |found: Metadata| {
        let is_sticky = found.is_dir() && found.mode() & 0o1000 != 0;
        owners.contains(&Some(found.uid())) && (found.mode() & 0o022 == 0 || is_sticky)
    };
    path.canonicalize().is_ok_and(|real| real.ancestors().all(|part| part.symlink_metadata().is_ok_and(is_closed)))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{PermissionsExt, chown, symlink};
    use std::sync::Weak;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    const CONFIG: &str = "# all\n[default]\nregion = eu-central-1\n[profile other]\nregion=us-west-2\nendpoint_url = https://store.example.org\n\
        ca_bundle = /h/ca.pem\ncredential_process = printf '{\"Version\":1,\"AccessKeyId\":\"made\",\"SecretAccessKey\":\"s\"}'\n";
    const SECRETS: &str = "[default]\naws_access_key_id = one\naws_secret_access_key = first\n";

    fn profile(variables: &[(&str, &str)]) -> Result<AwsProfile> {
        let variable =
            |name: &str| variables.iter().find(|(key, _)| *key == name).map(|(_, value)| (*value).to_owned());
        AwsProfile::of(&variable, &|path| match path.to_str() {
            Some("/h/.aws/config") => Some(CONFIG.into()),
            Some("/h/.aws/credentials") => Some(SECRETS.into()),
            _ => None,
        })
    }

    fn id(profile: &AwsProfile) -> Option<String> {
        match &profile.origin {
            CredentialOrigin::Static(known) => Some(known.key().to_owned()),
            CredentialOrigin::Process(line) => Some(run_process(line, PROCESS_TIMEOUT).unwrap().key().to_owned()),
            CredentialOrigin::Identity(identity) => Some(format!("{identity:?}")),
            CredentialOrigin::Anonymous => None,
        }
    }

    #[test]
    fn credentials_come_from_the_environment_then_from_the_profile() {
        let found = profile(&[("HOME", "/h")]).unwrap();
        assert_eq!(
            (found.place.region.as_str(), &found.place.endpoint, id(&found).as_deref()),
            ("eu-central-1", &None, Some("one"))
        );
        let found = profile(&[("HOME", "/h"), ("AWS_PROFILE", "other")]).unwrap();
        assert_eq!(found.place.endpoint.as_deref(), Some("https://store.example.org"));
        assert_eq!((found.place.region.as_str(), id(&found).as_deref()), ("us-west-2", Some("made")));
        let named =
            [("HOME", "/h"), ("AWS_ACCESS_KEY_ID", "env"), ("AWS_SECRET_ACCESS_KEY", "x"), ("AWS_REGION", "here")];
        let found = profile(&named).unwrap();
        assert_eq!((found.place.region.as_str(), id(&found).as_deref()), ("here", Some("env")));
        let found = profile(&[]).unwrap();
        assert_eq!((found.place.region.as_str(), id(&found)), (REGION, None));
        assert!(profile(&[("HOME", "/h"), ("AWS_PROFILE", "none")]).is_err());
        // A role of a workload precedes a default profile, and a container follows it.
        let role = [("HOME", "/h"), ("AWS_ROLE_ARN", "arn:r"), ("AWS_WEB_IDENTITY_TOKEN_FILE", "/t")];
        let container = [("AWS_CONTAINER_CREDENTIALS_RELATIVE_URI", "/x")];
        let id = |parts: &[&[(&str, &str)]]| id(&profile(&parts.concat()).unwrap()).unwrap();
        assert!(id(&[&role, &container]).contains("sts.eu-central-1.amazonaws.com"));
        assert_eq!(id(&[&role, &[("AWS_PROFILE", "other")]]), "made");
        assert_eq!(id(&[&role[..1], &container]), "one");
        assert!(id(&[&container]).contains("http://169.254.170.2/x"));
    }

    #[test]
    fn a_ca_bundle_is_that_of_the_environment_then_of_the_profile() {
        let found = |variables: &[(&str, &str)]| profile(variables).unwrap().place.ca_bundle;
        assert_eq!(found(&[("HOME", "/h")]), None);
        let other = [("HOME", "/h"), ("AWS_PROFILE", "other")];
        assert_eq!(found(&other), Some("/h/ca.pem".into()));
        assert_eq!(found(&[&other[..], &[("AWS_CA_BUNDLE", "/env.pem")]].concat()), Some("/env.pem".into()));
        let place = tempfile::tempdir().unwrap();
        let file = place.path().join("ca.pem");
        let message = || read_ca_bundle(&file).err().map(|error| error.to_string()).unwrap_or_default();
        assert!(message().contains("cannot be read"), "{}", message());
        fs::write(&file, "no certificate").unwrap();
        assert!(message().contains("has no certificate"), "{}", message());
        if geteuid().is_root() {
            chown(&file, Some(1234), None).unwrap();
            assert!(message().contains("written by another user"), "{}", message());
        }
    }

    #[test]
    fn sections_are_read_as_the_tools_read_them() {
        let text = "\u{feff}[default] ; mine\r\naws_access_key_id=one\r\naws_session_token =\r\nAWS_Secret_Access_Key = first\r\n\
            [other]  # another's\r\naws_access_key_id=two\r\ndynamodb =\r\n  endpoint_url = http://127.0.0.1:8000\r\n\
            region = here\r\n[profile \"two words\"]\r\n  region = there\r\n  s3 =\r\n    region = nowhere\r\n  output = json\r\n";
        let pairs = |name: &str| {
            let mut pairs: Vec<String> =
                section(text, name).unwrap().iter().map(|(key, value)| format!("{key}={value}")).collect();
            pairs.sort();
            pairs.join(" ")
        };
        assert_eq!(pairs("default"), "aws_access_key_id=one aws_secret_access_key=first");
        assert_eq!(pairs("other"), "aws_access_key_id=two region=here");
        assert_eq!(pairs("profile two words"), "output=json region=there");
        assert!(section("[default", "default").is_none());
    }

    #[test]
    fn those_of_google_are_hmac_keys() {
        let found = |variables: &[(&str, &str)]| {
            let variable =
                |name: &str| variables.iter().find(|(key, _)| *key == name).map(|(_, value)| (*value).to_owned());
            google_hmac_key(&variable, &|path| match path.to_str() {
                Some("/h/.boto") => {
                    Some("[Credentials]\ngs_access_key_id = GOOG1\ngs_secret_access_key=b==\n[Boto]\n".into())
                }
                Some("/other") => Some("[Credentials]\ngs_oauth2_refresh_token = x\n".into()),
                _ => None,
            })
        };
        let pair = |found: Option<rusty_s3::Credentials>| found.map(|it| (it.key().to_owned(), it.secret().to_owned()));
        assert_eq!(pair(found(&[("HOME", "/h")])), Some(("GOOG1".into(), "b==".into())));
        let named = [("HOME", "/h"), ("GS_ACCESS_KEY_ID", "GOOG2"), ("GS_SECRET_ACCESS_KEY", "c")];
        assert_eq!(pair(found(&named)), Some(("GOOG2".into(), "c".into())));
        assert_eq!(pair(found(&[("HOME", "/h"), ("BOTO_CONFIG", "/other")])), None);
        assert_eq!(pair(found(&[])), None);
    }

    #[test]
    fn a_program_that_does_not_end_is_ended() {
        // What the lines read comes to an end with this test.
        let place = tempfile::tempdir().unwrap();
        let fifo = place.path().join("fifo");
        rustix::fs::mknodat(rustix::fs::CWD, &fifo, rustix::fs::FileType::Fifo, rustix::fs::Mode::RWXU, 0).unwrap();
        let endless = std::fs::OpenOptions::new().read(true).write(true).open(&fifo).unwrap();
        for line in ["cat FIFO", "exec 1>&-; read line <FIFO", "cat FIFO & exit 0"] {
            let line = line.replace("FIFO", fifo.to_str().unwrap());
            let message = run_process(&line, Duration::from_millis(50)).err().unwrap();
            assert!(message.contains("does not end"), "{line}: {message}");
        }
        drop(endless);
        let line = "printf '{\"AccessKeyId\":\"a\",\"SecretAccessKey\":\"s\",\"SessionToken\":\"\"}'";
        assert!(run_process(line, PROCESS_TIMEOUT).unwrap().token().is_none());
    }

    #[test]
    fn a_program_that_fails_or_prints_something_else_is_told_without_its_output() {
        for line in ["exit 1", "echo secret", "printf '{}'"] {
            let message = run_process(line, PROCESS_TIMEOUT).err().unwrap();
            assert!(message.contains("credential_process") && !message.contains("secret"), "{message}");
        }
    }

    /// Returns a cache in which only the first lookup succeeds, and the number of lookups.
    fn failing_after_one(failure: RemoteError) -> (CredentialCache<u8>, Arc<AtomicUsize>) {
        let lookups = Arc::new(AtomicUsize::new(0));
        let counted = lookups.clone();
        let cache = CredentialCache::new(move || match counted.fetch_add(1, Ordering::SeqCst) {
            0 => Ok(Some(7)),
            _ => Err(failure.clone()),
        });
        (cache, lookups)
    }

    #[test]
    fn old_credentials_are_used_while_their_renewal_fails() {
        let (cache, lookups) = failing_after_one(RemoteError::Transient("no answer".into()));
        let ask = || cache.with(|number| Ok(number.copied()));
        assert_eq!(ask(), Ok(Some(7)));
        cache.cached.lock().found.as_mut().unwrap().1 -= MAX_AGE;
        assert_eq!((ask(), ask()), (Ok(Some(7)), Ok(Some(7))));
        cache.cached.lock().failure.as_mut().unwrap().1 -= FAILURE_INTERVAL;
        assert_eq!(ask(), Ok(Some(7)));
        assert_eq!(lookups.load(Ordering::SeqCst), 2, "one failed renewal serves the requests that follow");
        cache.cached.lock().failure.as_mut().unwrap().1 -= RENEWAL_INTERVAL;
        assert_eq!(ask(), Ok(Some(7)));
        assert_eq!(lookups.load(Ordering::SeqCst), 3, "the renewal is tried again");
        // Once the store denies them, the outage is the failure.
        let denied = cache.with(|_| Err::<(), _>(RemoteError::Denied("expired".into())));
        assert!(denied.as_ref().is_err_and(RemoteError::is_transient), "{denied:?}");
        let never = CredentialCache::<u8>::new(|| Err(RemoteError::Transient("no answer".into())));
        assert!(never.with(|_| Ok(())).is_err_and(|error| error.is_transient()));
    }

    #[test]
    fn old_credentials_are_used_while_their_program_fails() {
        let denied = RemoteError::Denied("the credential_process of the profile failed".into());
        let (cache, lookups) = failing_after_one(denied);
        let ask = || cache.with(|number| Ok(number.copied()));
        assert_eq!(ask(), Ok(Some(7)));
        cache.cached.lock().found.as_mut().unwrap().1 -= MAX_AGE;
        assert_eq!((ask(), ask()), (Ok(Some(7)), Ok(Some(7))));
        assert_eq!(lookups.load(Ordering::SeqCst), 2, "one failed renewal serves the requests that follow");
        cache.cached.lock().failure.as_mut().unwrap().1 -= RENEWAL_INTERVAL;
        assert_eq!(ask(), Ok(Some(7)));
        assert_eq!(lookups.load(Ordering::SeqCst), 3, "the renewal is tried again");
        // Once the store denies them, the failed renewal is the failure.
        let denied = cache.with(|_| Err::<(), _>(RemoteError::Denied("expired".into())));
        assert!(matches!(&denied, Err(RemoteError::Denied(why)) if why.contains("failed")), "{denied:?}");
    }

    #[test]
    fn a_lookup_without_credentials_is_a_failed_renewal_of_the_old_ones() {
        let lookups = AtomicUsize::new(0);
        let cache = CredentialCache::new(move || Ok((lookups.fetch_add(1, Ordering::SeqCst) == 0).then_some(7)));
        let ask = || cache.with(|number| Ok(number.copied()));
        assert_eq!(ask(), Ok(Some(7)));
        cache.cached.lock().found.as_mut().unwrap().1 -= MAX_AGE;
        assert_eq!((ask(), ask()), (Ok(Some(7)), Ok(Some(7))));
        let denied = cache.with(|_| Err::<(), _>(RemoteError::Denied("expired".into())));
        assert!(denied.as_ref().is_err_and(RemoteError::is_transient), "{denied:?}");
        let public = CredentialCache::<u8>::new(|| Ok(None));
        let denied = public.with(|_| Err::<(), _>(RemoteError::Denied("private".into())));
        assert_eq!(denied, Err(RemoteError::Denied("private".into())));
    }

    #[test]
    fn old_credentials_are_used_during_their_renewal() {
        let lookups = Arc::new(AtomicUsize::new(0));
        let counted = lookups.clone();
        let cache = Arc::new_cyclic(|cache: &Weak<CredentialCache<u8>>| {
            let cache = cache.clone();
            CredentialCache::new(move || {
                let cache = cache.upgrade().unwrap();
                match counted.fetch_add(1, Ordering::SeqCst) {
                    0 => Ok(Some(7)),
                    _ if cache.cached.is_locked() => Err(RemoteError::Denied("requests wait for the lookup".into())),
                    // Another request, during the lookup.
                    _ => cache.with(|number| Ok(number.map(|number| number + 1))),
                }
            })
        });
        let ask = || cache.with(|number| Ok(number.copied()));
        assert_eq!(ask(), Ok(Some(7)));
        cache.cached.lock().found.as_mut().unwrap().1 -= MAX_AGE;
        assert_eq!((ask(), ask()), (Ok(Some(8)), Ok(Some(8))));
        assert_eq!(lookups.load(Ordering::SeqCst), 2);
    }

    #[test]
    fn root_reads_no_settings_that_another_user_could_have_written() {
        if !geteuid().is_root() {
            println!("not tested: the rule is for root");
            return;
        }
        let place = tempfile::tempdir().unwrap();
        let home = place.path().join("home");
        let config = home.join(".aws/config");
        fs::create_dir_all(config.parent().unwrap()).unwrap();
        fs::write(&config, "[default]\n").unwrap();
        let set_mode = |path: &Path, mode| fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
        let give = |path: &Path, user| chown(path, Some(user), None).unwrap();
        assert_eq!(read_settings(&config).as_deref(), Some("[default]\n"));
        for part in [config.as_path(), config.parent().unwrap(), home.as_path()] {
            give(part, 1234);
            assert_eq!(read_settings(&config), None, "{part:?} is a user's");
            give(part, 0);
            let before = part.metadata().unwrap().mode();
            set_mode(part, before | 0o020);
            assert_eq!(read_settings(&config), None, "others write to {part:?}");
            set_mode(part, before);
            assert!(read_settings(&config).is_some());
        }
        // Where a link leads counts, and not only where it lies.
        let theirs = place.path().join("theirs");
        fs::write(&theirs, "credential_process = false\n").unwrap();
        give(&theirs, 1234);
        fs::remove_file(&config).unwrap();
        symlink(&theirs, &config).unwrap();
        assert_eq!(read_settings(&config), None);
        assert_eq!(read_settings(&home.join("missing")), None);
    }
}
