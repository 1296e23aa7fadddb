//! Starts a daemon for one test, and speaks HTTP with it.

use std::fmt::Write as _;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use lockbox_share_protocol::capsule::{Capsule, ContentLocation, SAMPLE_AGE_HEADER};
use lockbox_share_protocol::message::{ClaimRequest, CreateReply, CreateRequest, LookRequest, UploadReply};
use lockbox_share_protocol::token::{Auth, ClaimId, Digest, OwnerToken};
use serde_json::Value;
use sha2::Digest as _;
use tempfile::TempDir;

const PATIENCE: Duration = Duration::from_secs(60);

pub(crate) struct Daemon {
    pub(crate) child: Child,
    /// The last of the addresses, and those before it.
    pub(crate) http: SocketAddr,
    pub(crate) others: Vec<SocketAddr>,
    pub(crate) metrics: SocketAddr,
    pub(crate) unix: PathBuf,
    pub(crate) directory: TempDir,
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The limiter is off unless a test turns it on; replies do not wait for the disk.
pub(crate) const QUICK: [&str; 4] = ["--requests-per-minute", "0", "--durability", "none"];

/// No connection ends by a timeout because the machine is busy.
pub(crate) const LONG_TIMEOUTS: [&str; 4] = ["--head-timeout", "600s", "--body-timeout", "600s"];

impl Daemon {
    pub(crate) fn start(options: &[&str]) -> Daemon {
        Daemon::start_in(tempfile::tempdir().unwrap(), options)
    }

    pub(crate) fn start_in(directory: TempDir, options: &[&str]) -> Daemon {
        Daemon::launch(directory, options, |_| {})
    }

    pub(crate) fn launch(directory: TempDir, options: &[&str], change: impl FnOnce(&mut Command)) -> Daemon {
        let unix = directory.path().join("daemon.sock");
        let mut command = Command::new(env!("CARGO_BIN_EXE_lockbox-share"));
        command
            .arg("serve")
            .arg("--state-dir")
            .arg(directory.path().join("state"))
            .arg("--unix-socket")
            .arg(&unix)
            .args(["--listen", "127.0.0.1:0", "--metrics-listen", "127.0.0.1:0"])
            .args(options)
            .stdout(Stdio::piped())
            .stderr(std::fs::File::create(directory.path().join("log")).unwrap());
        change(&mut command);
        let mut child = command.spawn().unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let (mut http, mut metrics) = (Vec::new(), None);
        loop {
            let Some(line) = lines.next() else {
                let log = std::fs::read_to_string(directory.path().join("log")).unwrap();
                panic!("the daemon did not start: {:?}\n{log}", child.wait());
            };
            match line.unwrap().split_once('=').unwrap() {
                ("http", address) => http.push(address.parse().unwrap()),
                ("metrics", address) => metrics = Some(address.parse().unwrap()),
                ("ready", _) => break,
                _ => {}
            }
        }
        Daemon { child, http: http.pop().unwrap(), others: http, metrics: metrics.unwrap(), unix, directory }
    }

    pub(crate) fn log(&self) -> String {
        std::fs::read_to_string(self.directory.path().join("log")).unwrap()
    }

    pub(crate) fn state(&self) -> PathBuf {
        self.directory.path().join("state")
    }

    pub(crate) fn signal(&self, name: &str) {
        let id = self.child.id().to_string();
        assert!(Command::new("kill").args(["-s", name, &id]).status().unwrap().success());
    }

    pub(crate) fn connect(&self) -> Connection {
        Connection::new(TcpStream::connect(self.http).unwrap())
    }

    pub(crate) fn get(&self, path: &str, headers: &[(&str, &str)]) -> Answer {
        self.connect().ask("GET", path, headers, b"")
    }

    pub(crate) fn post(&self, path: &str, headers: &[(&str, &str)], message: &Value) -> Answer {
        let mut headers = headers.to_vec();
        headers.push(("content-type", "application/json"));
        self.connect().ask("POST", path, &headers, message.to_string().as_bytes())
    }

    /// The value of a series without labels.
    pub(crate) fn metric(&self, name: &str) -> u64 {
        let text = Connection::new(TcpStream::connect(self.metrics).unwrap()).ask("GET", "/metrics", &[], b"").text();
        let line = text.lines().find_map(|line| line.strip_prefix(&format!("{name} ")).map(str::to_owned));
        line.unwrap_or_else(|| panic!("no {name} in\n{text}")).parse::<f64>().unwrap() as u64
    }

    /// Makes a share whose content is in its capsule.
    pub(crate) fn share(&self, owner: &Owner, more: &Value) -> Share {
        self.make(owner, capsule(ContentLocation::Inline), None, more)
    }

    /// Uploads a ciphertext and makes a share of it.
    pub(crate) fn share_file(&self, owner: &Owner, ciphertext: &[u8]) -> Share {
        let uploaded = self.upload(owner, ciphertext);
        assert_eq!(uploaded.status, 201, "{}", uploaded.text());
        let uploaded: UploadReply = serde_json::from_slice(&uploaded.body).unwrap();
        let digest = Digest::new(sha2::Sha256::digest(ciphertext).into());
        assert_eq!((uploaded.size, uploaded.digest), (ciphertext.len() as u64, digest));
        let content = ContentLocation::Spooled { size: uploaded.size, digest };
        self.make(owner, capsule(content), Some(uploaded), &serde_json::json!({}))
    }

    pub(crate) fn upload(&self, owner: &Owner, ciphertext: &[u8]) -> Answer {
        let headers = [("authorization", owner.header.as_str()), ("content-type", "application/octet-stream")];
        self.connect().ask("POST", "/v1/uploads", &headers, ciphertext)
    }

    fn make(&self, owner: &Owner, capsule: Capsule, uploaded: Option<UploadReply>, more: &Value) -> Share {
        let auth: [u8; 32] = random();
        let answer =
            self.post("/v1/shares", &[("authorization", &owner.header)], &create(&auth, capsule, uploaded, more));
        assert_eq!(answer.status, 201, "{}", answer.text());
        let created: CreateReply = serde_json::from_slice(&answer.body).unwrap();
        Share { created, auth }
    }

    pub(crate) fn claim(&self, share: &Share) -> Answer {
        self.post("/v1/claim", &[], &share.claim(random()))
    }

    pub(crate) fn look(&self, share: &Share) -> Answer {
        let look = LookRequest { handle: share.created.handle, auth: Auth::new(share.auth) };
        self.post("/v1/look", &[], &serde_json::to_value(look).unwrap())
    }

    pub(crate) fn info(&self, owner: &Owner, share: &Share) -> Value {
        let path = format!("/v1/shares/{}", share.created.handle);
        let answer = self.get(&path, &[("authorization", &owner.header)]);
        assert_eq!(answer.status, 200, "{}", answer.text());
        answer.json()
    }

    pub(crate) fn state_of(&self, owner: &Owner, share: &Share) -> String {
        self.info(owner, share)["state"].as_str().unwrap().to_owned()
    }
}

pub(crate) fn create(auth: &[u8; 32], capsule: Capsule, uploaded: Option<UploadReply>, more: &Value) -> Value {
    let create = CreateRequest {
        capsule,
        verifier: Auth::new(*auth).verifier(),
        expires_in: None,
        max_claims: 1,
        upload: uploaded.map(|uploaded| uploaded.upload),
    };
    let mut message = serde_json::to_value(create).unwrap();
    message.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    message
}

pub(crate) struct Owner {
    pub(crate) header: String,
}

impl Owner {
    pub(crate) fn new() -> Owner {
        Owner { header: format!("Bearer {}", *OwnerToken::new(random()).to_text()) }
    }
}

pub(crate) struct Share {
    pub(crate) created: CreateReply,
    pub(crate) auth: [u8; 32],
}

impl Share {
    pub(crate) fn claim(&self, id: [u8; 16]) -> Value {
        let claim = ClaimRequest { handle: self.created.handle, auth: Auth::new(self.auth), claim: ClaimId::new(id) };
        serde_json::to_value(claim).unwrap()
    }

    pub(crate) fn path(&self, ending: &str) -> String {
        format!("/v1/shares/{}{ending}", self.created.handle)
    }
}

/// `Bearer` with the token of the lease in the answer to a claim.
pub(crate) fn lease(claimed: &Answer) -> String {
    assert_eq!(claimed.status, 200, "{}", claimed.text());
    format!("Bearer {}", claimed.json()["lease"]["token"].as_str().unwrap())
}

pub(crate) fn random<const N: usize>() -> [u8; N] {
    let mut bytes = [0; N];
    getrandom::fill(&mut bytes).unwrap();
    bytes
}

/// Bytes that look like an age v1 file with a payload of this length.
pub(crate) fn age_file(payload: usize) -> Vec<u8> {
    let mut file = SAMPLE_AGE_HEADER.as_bytes().to_vec();
    let mut state = u64::from_le_bytes(random());
    file.extend((0..payload.div_ceil(8)).flat_map(|_| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state ^ (state >> 29)).to_le_bytes()
    }));
    file
}

pub(crate) fn capsule(content: ContentLocation) -> Capsule {
    Capsule::new(content, &age_file(100)).unwrap()
}

pub(crate) struct Answer {
    pub(crate) status: u16,
    /// Names in small letters.
    pub(crate) headers: Vec<(String, String)>,
    pub(crate) body: Vec<u8>,
}

impl Answer {
    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(known, _)| known == name).map(|(_, value)| value.as_str())
    }

    pub(crate) fn text(&self) -> String {
        String::from_utf8_lossy(&self.body).into_owned()
    }

    pub(crate) fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap_or_else(|_| panic!("{} {}", self.status, self.text()))
    }

    pub(crate) fn error(&self) -> String {
        self.json()["error"].as_str().unwrap().to_owned()
    }
}

/// One connection, kept alive.
pub(crate) struct Connection<S: Read + Write = TcpStream> {
    pub(crate) stream: BufReader<S>,
}

impl Connection<TcpStream> {
    pub(crate) fn new(stream: TcpStream) -> Connection {
        stream.set_nodelay(true).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        Connection { stream: BufReader::new(stream) }
    }
}

impl Connection<std::os::unix::net::UnixStream> {
    pub(crate) fn unix(path: &Path) -> Self {
        let stream = std::os::unix::net::UnixStream::connect(path).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        Connection { stream: BufReader::new(stream) }
    }
}

impl<S: Read + Write> Connection<S> {
    pub(crate) fn ask(&mut self, method: &str, path: &str, headers: &[(&str, &str)], body: &[u8]) -> Answer {
        self.send(method, path, headers, body);
        self.answer(method)
    }

    pub(crate) fn send(&mut self, method: &str, path: &str, headers: &[(&str, &str)], body: &[u8]) {
        let mut head = format!("{method} {path} HTTP/1.1\r\nhost: localhost\r\n");
        for (name, value) in headers {
            write!(head, "{name}: {value}\r\n").unwrap();
        }
        if !body.is_empty() || method == "POST" {
            write!(head, "content-length: {}\r\n", body.len()).unwrap();
        }
        head.push_str("\r\n");
        let stream = self.stream.get_mut();
        // The daemon may answer, and close, before it has read everything.
        let _ = stream.write_all(head.as_bytes()).and_then(|()| stream.write_all(body));
    }

    pub(crate) fn answer(&mut self, method: &str) -> Answer {
        let mut answer = self.head();
        let length = answer.header("content-length").map_or(0, |text| text.parse().unwrap());
        if method != "HEAD" && answer.status != 304 && answer.status != 204 {
            answer.body.resize(length, 0);
            self.stream.read_exact(&mut answer.body).unwrap();
        }
        answer
    }

    pub(crate) fn head(&mut self) -> Answer {
        let mut line = String::new();
        self.stream.read_line(&mut line).unwrap();
        let status = line.split(' ').nth(1).unwrap_or_else(|| panic!("no answer: {line:?}")).parse().unwrap();
        let mut headers = Vec::new();
        loop {
            line.clear();
            self.stream.read_line(&mut line).unwrap();
            match line.trim_end().split_once(": ") {
                Some((name, value)) => headers.push((name.to_ascii_lowercase(), value.to_owned())),
                None => return Answer { status, headers, body: Vec::new() },
            }
        }
    }
}

/// Polls until `done`, at most a minute.
pub(crate) fn until(what: &str, mut done: impl FnMut() -> bool) {
    let end = Instant::now() + PATIENCE;
    while !done() {
        assert!(Instant::now() < end, "{what}");
        std::thread::sleep(Duration::from_millis(10));
    }
}
