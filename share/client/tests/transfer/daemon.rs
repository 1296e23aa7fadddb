//! A small daemon in the test: speaks the documented messages over a Unix socket and fails on
//! demand.

use std::collections::HashMap;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::thread;

use lockbox_share_client::http::{ServerAddress, ShareClient};
use lockbox_share_client::protocol::capsule::ContentLocation;
use lockbox_share_client::protocol::message::{
    ClaimReply, ClaimRequest, CreateReply, CreateRequest, ErrorBody, ErrorCode, Lease, Limits, LookReply, LookRequest,
    UploadReply,
};
use lockbox_share_client::protocol::token::{Digest, LeaseToken, UploadToken};
use sha2::{Digest as _, Sha256};

/// What goes wrong with the next requests.
#[derive(Default)]
pub(crate) struct Faults {
    /// Downloads end after so many bytes each, in this order.
    pub(crate) cuts: Vec<usize>,
    /// So many replies to a claim are lost.
    pub(crate) lost_claims: u32,
    /// So many replies to the making of a share are lost.
    pub(crate) lost_shares: u32,
    /// Changes the ciphertext when it is stored.
    pub(crate) tamper: Option<fn(&mut Vec<u8>)>,
    /// The next claims and questions for a lease are answered with these.
    pub(crate) passing: Vec<(u16, ErrorCode)>,
    /// The next claims and questions for a lease reach something that is no daemon, which answers
    /// with these.
    pub(crate) elsewhere: Vec<u16>,
    /// Set if the lease has ended.
    pub(crate) lease_ended: bool,
    /// Set if the daemon never answers 100 Continue, as HTTP allows.
    pub(crate) no_interim_answer: bool,
}

#[derive(Default)]
pub(crate) struct Inner {
    pub(crate) faults: Faults,
    uploads: Vec<Vec<u8>>,
    pub(crate) shares: HashMap<String, CreateRequest>,
    claims: HashMap<String, String>,
    /// Every request line and body as it came.
    pub(crate) heard: Vec<Vec<u8>>,
    pub(crate) completed: u32,
    pub(crate) ranges: Vec<String>,
}

pub(crate) struct Daemon {
    pub(crate) socket: PathBuf,
    pub(crate) inner: Arc<Mutex<Inner>>,
}

impl Daemon {
    pub(crate) fn start(directory: &Path) -> Daemon {
        let socket = directory.join("daemon.sock");
        let listener = UnixListener::bind(&socket).unwrap();
        let inner = Arc::new(Mutex::new(Inner::default()));
        let shared = inner.clone();
        // Ends with the process of the tests.
        thread::spawn(move || {
            for stream in listener.incoming() {
                let inner = shared.clone();
                thread::spawn(move || serve(&stream.unwrap(), &inner));
            }
        });
        Daemon { socket, inner }
    }

    pub(crate) fn client(&self) -> ShareClient {
        ShareClient::new(ServerAddress::Socket(self.socket.clone()), None)
    }

    pub(crate) fn faults(&self, change: impl FnOnce(&mut Faults)) {
        change(&mut self.inner.lock().unwrap().faults);
    }
}

struct Heard {
    method: String,
    path: String,
    range: Option<usize>,
    body: Vec<u8>,
}

fn serve(stream: &UnixStream, inner: &Mutex<Inner>) {
    let mut reader = BufReader::new(stream);
    while let Some(heard) = hear(stream, &mut reader, inner) {
        if answer(stream, &heard, inner).is_none() {
            let _ = stream.shutdown(std::net::Shutdown::Both);
            return;
        }
    }
}

fn hear(mut stream: &UnixStream, reader: &mut impl BufRead, inner: &Mutex<Inner>) -> Option<Heard> {
    let mut head = String::new();
    let mut lines = Vec::new();
    loop {
        head.clear();
        if reader.read_line(&mut head).ok()? == 0 {
            return None;
        }
        if head.trim().is_empty() {
            break;
        }
        lines.push(head.trim().to_owned());
    }
    let mut words = lines[0].split(' ');
    let (method, path) = (words.next()?.to_owned(), words.next()?.to_owned());
    let value = |name: &str| {
        lines.iter().find_map(|line| line.to_lowercase().strip_prefix(name).map(|rest| rest.trim().to_owned()))
    };
    if value("expect: 100-continue").is_some() && !inner.lock().unwrap().faults.no_interim_answer {
        stream.write_all(b"HTTP/1.1 100 Continue\r\n\r\n").ok()?;
    }
    let body = match value("transfer-encoding: chunked") {
        Some(_) => chunks(reader)?,
        None => {
            let mut body = vec![0; value("content-length:").map_or(0, |text| text.parse().unwrap())];
            reader.read_exact(&mut body).ok()?;
            body
        }
    };
    let range = value("range: bytes=").map(|text| text.trim_end_matches('-').parse().unwrap());
    Some(Heard { method, path, range, body })
}

/// A body in chunks; None when the last one does not come.
fn chunks(reader: &mut impl BufRead) -> Option<Vec<u8>> {
    let mut body = Vec::new();
    loop {
        let mut line = String::new();
        reader.read_line(&mut line).ok()?;
        let mut part = vec![0; usize::from_str_radix(line.trim(), 16).ok()? + 2];
        reader.read_exact(&mut part).ok()?;
        if part.len() == 2 {
            return Some(body);
        }
        body.extend_from_slice(&part[..part.len() - 2]);
    }
}

/// None to hang up.
fn answer(mut stream: &UnixStream, heard: &Heard, inner: &Mutex<Inner>) -> Option<()> {
    let mut inner = inner.lock().unwrap();
    let mut line = format!("{} {} ", heard.method, heard.path).into_bytes();
    line.extend_from_slice(&heard.body);
    inner.heard.push(line);
    let asks = heard.method == "HEAD" || heard.path == "/v1/claim";
    let (status, head, body) = match (heard.method.as_str(), heard.path.as_str()) {
        _ if asks && !inner.faults.passing.is_empty() => {
            let (status, error) = inner.faults.passing.remove(0);
            refusal(status, error)
        }
        _ if asks && !inner.faults.elsewhere.is_empty() => {
            (inner.faults.elsewhere.remove(0), "content-type: text/html\r\n".into(), b"<h1>Not here</h1>".to_vec())
        }
        ("GET", "/v1/limits") => json(200, &limits()),
        ("POST", "/v1/uploads") => upload(&mut inner, heard),
        ("POST", "/v1/shares") => {
            let reply = create(&mut inner, heard);
            if inner.faults.lost_shares > 0 {
                inner.faults.lost_shares -= 1;
                return None;
            }
            reply
        }
        ("POST", "/v1/look") => look(&inner, heard),
        ("POST", "/v1/claim") => {
            let reply = claim(&mut inner, heard);
            if inner.faults.lost_claims > 0 {
                inner.faults.lost_claims -= 1;
                return None;
            }
            reply
        }
        (method, path) if path.ends_with("/ciphertext") => download(&mut inner, heard, method == "HEAD"),
        ("POST", path) if path.ends_with("/complete") => {
            inner.completed += 1;
            (204, String::new(), Vec::new())
        }
        _ => refusal(404, ErrorCode::NotFound),
    };
    let cut = heard.path.ends_with("/ciphertext") && heard.method == "GET" && !inner.faults.cuts.is_empty();
    let sent = if cut { inner.faults.cuts.remove(0).min(body.len()) } else { body.len() };
    drop(inner);
    let length = if status == 204 { String::new() } else { format!("content-length: {}\r\n", body.len()) };
    let head = format!("HTTP/1.1 {status} X\r\n{head}{length}\r\n");
    stream.write_all(head.as_bytes()).ok()?;
    if heard.method != "HEAD" {
        stream.write_all(&body[..sent]).ok()?;
    }
    (sent == body.len()).then_some(())
}

type Reply = (u16, String, Vec<u8>);

fn json(status: u16, value: &impl serde::Serialize) -> Reply {
    (status, "content-type: application/json\r\n".into(), serde_json::to_vec(value).unwrap())
}

fn refusal(status: u16, error: ErrorCode) -> Reply {
    json(status, &ErrorBody { error, message: "refused by the test".into(), at: None })
}

fn limits() -> Limits {
    Limits {
        protocol: 1,
        default_expiry: 900,
        max_expiry: 86_400,
        max_ciphertext: 1 << 30,
        max_claims: 8,
        max_batch: 100,
        public_url: "http://127.0.0.1:1".into(),
    }
}

fn upload(inner: &mut Inner, heard: &Heard) -> Reply {
    let digest = Digest::new(Sha256::digest(&heard.body).into());
    inner.uploads.push(heard.body.clone());
    let mut number = [0; UploadToken::LENGTH];
    number[0] = u8::try_from(inner.uploads.len() - 1).unwrap();
    let size = heard.body.len() as u64;
    json(201, &UploadReply { upload: UploadToken::new(number), size, digest, expires_in: 900 })
}

fn create(inner: &mut Inner, heard: &Heard) -> Reply {
    let create: CreateRequest = serde_json::from_slice(&heard.body).unwrap();
    // As the daemon does: the same share by its upload.
    let same = inner.shares.iter().find(|(_, known)| known.upload.is_some() && known.upload == create.upload);
    let handle = same.map_or_else(|| format!("1{:012}", inner.shares.len()), |(handle, _)| handle.clone());
    if let (Some(upload), Some(tamper)) = (&create.upload, inner.faults.tamper) {
        tamper(&mut inner.uploads[usize::from(upload.as_bytes()[0])]);
    }
    let created = CreateReply {
        handle: handle.parse().unwrap(),
        url: format!("http://127.0.0.1:1/s/{handle}"),
        expires_at: 2_000_000_000,
    };
    inner.shares.insert(handle, create);
    json(201, &created)
}

fn look(inner: &Inner, heard: &Heard) -> Reply {
    let look: LookRequest = serde_json::from_slice(&heard.body).unwrap();
    let handle = look.handle.to_string();
    match inner.shares.get(&handle) {
        Some(share) if look.auth.verifier() != share.verifier => refusal(404, ErrorCode::Refused),
        None => refusal(404, ErrorCode::Refused),
        Some(_) if inner.claims.contains_key(&handle) => refusal(410, ErrorCode::Consumed),
        Some(_) => json(200, &LookReply { expires_at: 2_000_000_000 }),
    }
}

fn claim(inner: &mut Inner, heard: &Heard) -> Reply {
    let claim: ClaimRequest = serde_json::from_slice(&heard.body).unwrap();
    let handle = claim.handle.to_string();
    let Some(share) = inner.shares.get(&handle) else { return refusal(404, ErrorCode::Refused) };
    if claim.auth.verifier() != share.verifier {
        return refusal(404, ErrorCode::Refused);
    }
    let id = claim.claim.to_text().to_string();
    if inner.claims.get(&handle).is_some_and(|other| *other != id) {
        return refusal(410, ErrorCode::Consumed);
    }
    let lease = matches!(share.capsule.content(), ContentLocation::Spooled { .. })
        .then(|| Lease { token: LeaseToken::new([9; LeaseToken::LENGTH]), expires_in: 2 });
    let reply = json(200, &ClaimReply { capsule: share.capsule.clone(), lease });
    inner.claims.insert(handle, id);
    reply
}

fn download(inner: &mut Inner, heard: &Heard, head_only: bool) -> Reply {
    if inner.faults.lease_ended {
        return refusal(410, ErrorCode::Consumed);
    }
    let handle = heard.path.split('/').nth(3).unwrap();
    let share = &inner.shares[handle];
    let number = usize::from(share.upload.as_ref().unwrap().as_bytes()[0]);
    let file = inner.uploads[number].clone();
    if head_only {
        return (200, String::new(), file);
    }
    inner.ranges.push(format!("{:?}", heard.range));
    match heard.range {
        None => (200, String::new(), file),
        Some(start) => {
            // Tampering may have changed the length; what the capsule says is what the client
            // expects.
            let ContentLocation::Spooled { size, .. } = share.capsule.content() else {
                return refusal(404, ErrorCode::Refused);
            };
            let range = format!("content-range: bytes {start}-{}/{size}\r\n", size - 1);
            (206, range, file.get(start..).unwrap_or_default().to_vec())
        }
    }
}
