//! Who asks an object store, as the tools of that cloud find it out: the environment, files like those below `~/.aws`, a program. (For Azure see `azure.rs`.)
//!
//! Nothing of it is in arguments, mount options or logs. What instances of machines are given is not asked for: that lies at an address of
//! the machine's own link.

use std::collections::BTreeMap;
use std::env;
use std::io::{self, Read};
use std::os::fd::{AsFd, BorrowedFd};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use lockbox::{Error, Result};
use parking_lot::Mutex;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use serde::Deserialize;
use zeroize::Zeroizing;

use crate::broker::{Broker, GivenKeys, GivenPlace};
use crate::range_source::Trouble;
use crate::settings_file;

/// Where a store is, and whose words are signed there.
struct Place {
    region: String,
    /// None for that of the region.
    endpoint: Option<String>,
    origin: Origin,
}

/// Region and endpoint of the environment; by the broker where this process may not look itself.
///
/// # Errors
/// `Invalid` when a profile is named that the files do not have.
pub(crate) fn place(broker: Option<&Broker>) -> Result<GivenPlace> {
    match broker {
        None => Place::of_environment().map(|Place { region, endpoint, .. }| GivenPlace { region, endpoint }),
        Some(broker) => {
            let given = broker.place().map_err(|error| Error::io("cannot ask for the profile", error))?;
            given.map_err(Error::invalid)
        }
    }
}

/// As they are passed on between processes.
pub(crate) fn given(keys: &rusty_s3::Credentials) -> GivenKeys {
    GivenKeys { id: keys.key().to_owned(), secret: keys.secret().to_owned(), token: keys.token().map(str::to_owned) }
}

/// Credentials from the broker.
pub(crate) fn taken(keys: &GivenKeys) -> rusty_s3::Credentials {
    credentials(&keys.id, &keys.secret, keys.token.as_deref())
}

enum Origin {
    Known(rusty_s3::Credentials),
    /// A command line whose output is JSON.
    Program(String),
    /// A public bucket.
    Nobody,
}

const REGION: &str = "us-east-1";

/// Gives a variable of the environment.
pub(crate) type Variable<'a> = &'a dyn Fn(&str) -> Option<String>;
/// Gives the text of a file.
pub(crate) type File<'a> = &'a dyn Fn(&Path) -> Option<String>;

pub(crate) fn variable(name: &str) -> Option<String> {
    let value = match name {
        "HOME" => home().and_then(|home| home.into_os_string().into_string().ok()),
        _ => env::var(name).ok(),
    };
    value.filter(|value| !value.is_empty())
}

/// That of the system where the environment has none: what mounts when a machine starts is nobody's login.
pub(crate) fn home() -> Option<PathBuf> {
    env::home_dir().filter(|home| home.is_absolute())
}

impl Place {
    /// # Errors
    /// `Invalid` when a profile is named that the files do not have.
    fn of_environment() -> Result<Place> {
        Place::of(&variable, &settings_file::read)
    }

    fn of(variable: Variable<'_>, file: File<'_>) -> Result<Place> {
        let at = |name: &str, default: &str| {
            variable(name)
                .map(PathBuf::from)
                .or_else(|| variable("HOME").map(|home| PathBuf::from(home).join(".aws").join(default)))
        };
        let read = |path: Option<PathBuf>| path.and_then(|path| file(&path)).map(Zeroizing::new).unwrap_or_default();
        let named = variable("AWS_PROFILE");
        let profile = named.clone().unwrap_or_else(|| "default".to_owned());
        let config = read(at("AWS_CONFIG_FILE", "config"));
        let config = match &*profile {
            "default" => section(&config, "default"),
            _ => section(&config, &format!("profile {profile}")),
        };
        let secrets = read(at("AWS_SHARED_CREDENTIALS_FILE", "credentials"));
        let secrets = section(&secrets, &profile);
        if let (Some(name), None, None) = (&named, &config, &secrets) {
            return Err(Error::invalid(format!("AWS_PROFILE names {name}, which the files of profiles do not have")));
        }
        let (config, secrets) = (config.unwrap_or_default(), secrets.unwrap_or_default());
        let setting = |names: [&str; 2], key: &str| {
            names.into_iter().find_map(variable).or_else(|| config.get(key).map(|value| (*value).to_owned()))
        };
        let key = |table: &BTreeMap<String, &str>| {
            let pair = (table.get("aws_access_key_id")?, table.get("aws_secret_access_key")?);
            Some(credentials(pair.0, pair.1, table.get("aws_session_token").copied()))
        };
        let environment = || {
            let (id, secret) = (variable("AWS_ACCESS_KEY_ID")?, Zeroizing::new(variable("AWS_SECRET_ACCESS_KEY")?));
            Some(credentials(&id, &secret, variable("AWS_SESSION_TOKEN").as_deref()))
        };
        let known = environment().or_else(|| key(&secrets)).or_else(|| key(&config));
        let origin = match (known, config.get("credential_process")) {
            (Some(known), _) => Origin::Known(known),
            (None, Some(program)) => Origin::Program((*program).to_owned()),
            (None, None) => Origin::Nobody,
        };
        Ok(Place {
            region: setting(["AWS_REGION", "AWS_DEFAULT_REGION"], "region").unwrap_or_else(|| REGION.to_owned()),
            endpoint: setting(["AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"], "endpoint_url"),
            origin,
        })
    }
}

fn credentials(id: &str, secret: &str, token: Option<&str>) -> rusty_s3::Credentials {
    match token {
        Some(token) => rusty_s3::Credentials::new_with_token(id, secret, token),
        None => rusty_s3::Credentials::new(id, secret),
    }
}

/// The settings below `[name]`, by their names in small letters; None without it. As the tools read them: comments begin with `#` or `;` and may stand behind a title, a title may
/// have quotes, and what is indented more than the setting above it belongs to that one (a table of another service, which is for nobody here).
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

/// How long an answer is taken for the newest: those that expire are valid for a quarter of an hour at least.
const FRESH: Duration = Duration::from_secs(600);
/// Least time between two looks for others, when a store refuses those that are given.
const ANEW: Duration = if cfg!(test) { Duration::ZERO } else { Duration::from_secs(2) };
/// Longest that a program takes: somebody may have to touch a key.
const LONGEST: Duration = Duration::from_secs(60);
/// Longest output of a program.
const MAX_OUTPUT: u64 = 64 << 10;

/// The newest of what the environment gives.
pub(crate) struct Credentials<T> {
    look: Look<T>,
    given: Mutex<Option<Given<T>>>,
}

/// Looks for them; None for a public bucket.
type Look<T> = Box<dyn Fn() -> std::result::Result<Option<T>, Trouble> + Send + Sync>;

struct Given<T> {
    credentials: Option<Arc<T>>,
    at: Instant,
}

/// What a program prints (the AWS tools' `credential_process`).
#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Printed {
    access_key_id: String,
    secret_access_key: String,
    session_token: Option<String>,
}

impl<T: PartialEq> Credentials<T> {
    pub(crate) fn new(
        look: impl Fn() -> std::result::Result<Option<T>, Trouble> + Send + Sync + 'static,
    ) -> Credentials<T> {
        Credentials { look: Box::new(look), given: Mutex::new(None) }
    }

    /// Those of now; a program may have to be run for them.
    fn get(&self) -> std::result::Result<Option<Arc<T>>, Trouble> {
        self.newer_than(FRESH)
    }

    /// What `ask` is answered with those of now; and when they are refused, with others if there are any: they may have expired, and been renewed by somebody else.
    pub(crate) fn with<R>(
        &self,
        ask: impl Fn(Option<&T>) -> std::result::Result<R, Trouble>,
    ) -> std::result::Result<R, Trouble> {
        let credentials = self.get()?;
        let answer = ask(credentials.as_deref());
        if let Err(Trouble::Refused(_)) = &answer {
            let others = self.newer_than(ANEW)?;
            if others != credentials {
                return ask(others.as_deref());
            }
        }
        answer
    }

    fn newer_than(&self, age: Duration) -> std::result::Result<Option<Arc<T>>, Trouble> {
        let mut given = self.given.lock();
        if let Some(given) = given.as_ref().filter(|given| given.at.elapsed() < age) {
            return Ok(given.credentials.clone());
        }
        let credentials = (self.look)()?.map(Arc::new);
        *given = Some(Given { credentials: credentials.clone(), at: Instant::now() });
        Ok(credentials)
    }
}

/// Those of the AWS tools.
pub(crate) fn of_amazon() -> std::result::Result<Option<rusty_s3::Credentials>, Trouble> {
    match Place::of_environment().map_err(|error| Trouble::Refused(error.to_string()))?.origin {
        Origin::Known(known) => Ok(Some(known)),
        Origin::Program(line) => run(&line).map(Some).map_err(Trouble::Refused),
        Origin::Nobody => Ok(None),
    }
}

/// Those of Google's tools: HMAC keys, from the environment or the file that gsutil reads. Those of the AWS tools are tried when they are of that kind, which their name says: another
/// cloud's are nothing for Google to see.
pub(crate) fn of_google() -> std::result::Result<Option<rusty_s3::Credentials>, Trouble> {
    match google(&variable, &settings_file::read) {
        Some(known) => Ok(Some(known)),
        None => Ok(of_amazon()?.filter(|known| known.key().starts_with("GOOG"))),
    }
}

fn google(variable: Variable<'_>, file: File<'_>) -> Option<rusty_s3::Credentials> {
    if let (Some(id), Some(secret)) = (variable("GS_ACCESS_KEY_ID"), variable("GS_SECRET_ACCESS_KEY")) {
        return Some(credentials(&id, &Zeroizing::new(secret), None));
    }
    let path = variable("BOTO_CONFIG").or_else(|| variable("HOME").map(|home| format!("{home}/.boto")))?;
    let text = Zeroizing::new(file(Path::new(&path))?);
    let settings = section(&text, "Credentials")?;
    Some(credentials(settings.get("gs_access_key_id")?, settings.get("gs_secret_access_key")?, None))
}

/// Has a shell run the line, as the AWS tools do; its output is never repeated.
fn run(line: &str) -> std::result::Result<rusty_s3::Credentials, String> {
    run_until(line, LONGEST)
}

/// Whoever waits for a store waits for this, too: a program that does not end is ended, with a failure.
fn run_until(line: &str, longest: Duration) -> std::result::Result<rusty_s3::Credentials, String> {
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
        // It may have ended, without what it started.
        let _ = child.kill();
    }
    let status = child.wait().map_err(|error| failed(&format!("does not end: {error}")))?;
    if !is_done {
        return Err(failed("does not end"));
    }
    if !status.success() {
        return Err(failed("failed"));
    }
    let printed: Printed = serde_json::from_slice(&output).map_err(|_| failed("prints no credentials"))?;
    let (id, secret) = (printed.access_key_id, Zeroizing::new(printed.secret_access_key));
    Ok(credentials(&id, &secret, printed.session_token.as_deref().filter(|token| !token.is_empty())))
}

/// What a program prints until it closes its output, or as much as credentials can be.
fn read_until(child: &mut Child, output: &mut Vec<u8>, until: Instant) -> io::Result<()> {
    let Some(mut stdout) = child.stdout.take() else { return Ok(()) };
    let mut part = Zeroizing::new([0; 4096]);
    while (output.len() as u64) < MAX_OUTPUT {
        if !comes(stdout.as_fd(), until)? {
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
    ends.map_err(io::Error::from).and_then(|ends| comes(ends.as_fd(), until)).unwrap_or(false)
}

/// Whether there is something to be read before that time.
fn comes(from: BorrowedFd<'_>, until: Instant) -> io::Result<bool> {
    loop {
        let left = until.saturating_duration_since(Instant::now());
        let left = Timespec::try_from(left).map_err(io::Error::other)?;
        match poll(&mut [PollFd::from_borrowed_fd(from, PollFlags::IN)], Some(&left)) {
            Err(Errno::INTR) => {}
            found => return Ok(found? > 0),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const CONFIG: &str = "# all\n[default]\nregion = eu-central-1\n[profile other]\nregion=us-west-2\nendpoint_url = https://store.example.org\n\
        credential_process = printf '{\"Version\":1,\"AccessKeyId\":\"made\",\"SecretAccessKey\":\"s\"}'\n";
    const SECRETS: &str = "[default]\naws_access_key_id = one\naws_secret_access_key = first\n";

    fn place(variables: &[(&str, &str)]) -> Result<Place> {
        let variable =
            |name: &str| variables.iter().find(|(key, _)| *key == name).map(|(_, value)| (*value).to_owned());
        Place::of(&variable, &|path| match path.to_str() {
            Some("/h/.aws/config") => Some(CONFIG.into()),
            Some("/h/.aws/credentials") => Some(SECRETS.into()),
            _ => None,
        })
    }

    fn id(place: &Place) -> Option<String> {
        match &place.origin {
            Origin::Known(known) => Some(known.key().to_owned()),
            Origin::Program(line) => Some(run(line).unwrap().key().to_owned()),
            Origin::Nobody => None,
        }
    }

    #[test]
    fn credentials_come_from_the_environment_then_from_the_profile() {
        let found = place(&[("HOME", "/h")]).unwrap();
        assert_eq!(
            (found.region.as_str(), &found.endpoint, id(&found).as_deref()),
            ("eu-central-1", &None, Some("one"))
        );
        let found = place(&[("HOME", "/h"), ("AWS_PROFILE", "other")]).unwrap();
        assert_eq!(found.endpoint.as_deref(), Some("https://store.example.org"));
        assert_eq!((found.region.as_str(), id(&found).as_deref()), ("us-west-2", Some("made")));
        let named =
            [("HOME", "/h"), ("AWS_ACCESS_KEY_ID", "env"), ("AWS_SECRET_ACCESS_KEY", "x"), ("AWS_REGION", "here")];
        let found = place(&named).unwrap();
        assert_eq!((found.region.as_str(), id(&found).as_deref()), ("here", Some("env")));
        let found = place(&[]).unwrap();
        assert_eq!((found.region.as_str(), id(&found)), (REGION, None));
        assert!(place(&[("HOME", "/h"), ("AWS_PROFILE", "none")]).is_err());
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
            google(&variable, &|path| match path.to_str() {
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
            let told = run_until(&line, Duration::from_millis(50)).err().unwrap();
            assert!(told.contains("does not end"), "{line}: {told}");
        }
        drop(endless);
        let line = "printf '{\"AccessKeyId\":\"a\",\"SecretAccessKey\":\"s\",\"SessionToken\":\"\"}'";
        assert!(run_until(line, LONGEST).unwrap().token().is_none());
    }

    #[test]
    fn a_program_that_fails_or_prints_something_else_is_told_without_its_output() {
        for line in ["exit 1", "echo secret", "printf '{}'"] {
            let told = run(line).err().unwrap();
            assert!(told.contains("credential_process") && !told.contains("secret"), "{told}");
        }
    }
}
