//! A file of a server that answers as it should, late, not at all, or as an enemy would.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Barrier};
use std::thread;
use std::time::{Duration, Instant};

use lockbox::Error;
use lockbox::storage::Storage;
use parking_lot::Mutex;

use crate::RemoteOptions;
use crate::address::{Address, Cloud};
use crate::credentials::CredentialCache;
use crate::http::HttpSource;
use crate::range_source::{FileVersion, RangeSource, RemoteError, RemoteResult};
use crate::remote_file::RemoteFile;
use crate::s3::S3Bucket;
use crate::slot_cache::SLOT;

/// What the simulated server has, and what it does with the next requests.
#[derive(Default)]
struct Server {
    bytes: Vec<u8>,
    tag: Mutex<u64>,
    errors: Mutex<Vec<RemoteError>>,
    asked: Mutex<Vec<Range<u64>>>,
}

struct Simulated(Arc<Server>);

impl Simulated {
    fn version(&self) -> FileVersion {
        FileVersion {
            length: self.0.bytes.len() as u64,
            tag: Some(format!("\"{}\"", self.0.tag.lock())),
            modified: None,
        }
    }
}

impl RangeSource for Simulated {
    fn read_start(&self, count: u64) -> RemoteResult<(FileVersion, Vec<u8>)> {
        match self.0.errors.lock().pop() {
            Some(error) => Err(error),
            None => Ok((self.version(), self.0.bytes[..self.0.bytes.len().min(count as usize)].to_vec())),
        }
    }

    fn read_range(&self, version: &FileVersion, range: Range<u64>) -> RemoteResult<Vec<u8>> {
        if let Some(error) = self.0.errors.lock().pop() {
            return Err(error);
        }
        if *version != self.version() {
            return Err(RemoteError::Changed);
        }
        self.0.asked.lock().push(range.clone());
        Ok(self.0.bytes[range.start as usize..range.end as usize].to_vec())
    }
}

fn content(length: usize) -> Vec<u8> {
    (0..length as u64).map(|at| (at.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 56) as u8).collect()
}

fn server(length: usize) -> Arc<Server> {
    Arc::new(Server { bytes: content(length), ..Server::default() })
}

fn options() -> RemoteOptions {
    RemoteOptions {
        timeout: Some(Duration::ZERO),
        cache_directory: None,
        allow_http: true,
        allow_private: true,
        ..RemoteOptions::default()
    }
}

fn open(server: &Arc<Server>, options: &RemoteOptions) -> lockbox::Result<RemoteFile> {
    RemoteFile::open_metered(Arc::new(Simulated(Arc::clone(server))), "s3://b/a.lbx".into(), options)
}

fn read(file: &RemoteFile, offset: u64, length: usize) -> lockbox::Result<Vec<u8>> {
    let mut out = vec![0; length];
    file.read_at(offset, &mut out).map(|()| out)
}

const BEHIND: u64 = 2 << 20;

#[test]
fn every_range_has_the_bytes_that_the_server_has() {
    let seed: u64 = std::env::var("SEED").map_or(7, |seed| seed.parse().unwrap());
    println!("SEED={seed}");
    let server = server(9 * (1 << 20) + 12345);
    let place = tempfile::tempdir().unwrap();
    for cache_directory in [None, Some(place.path().join("c")), Some(place.path().join("c"))] {
        let options = RemoteOptions { cache_directory, cache_bytes: Some(3 << 20), ..options() };
        let file = Arc::new(open(&server, &options).unwrap());
        thread::scope(|scope| {
            for reader in 0..4 {
                let (file, server) = (&file, &server);
                scope.spawn(move || {
                    let mut state = seed.wrapping_mul(31) + reader;
                    let mut next = |below: usize| {
                        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                        (state >> 33) as usize % below
                    };
                    for _ in 0..300 {
                        let length = 1 + next(200_000);
                        let offset = next(server.bytes.len() - length);
                        if next(3) == 0 {
                            file.will_need(offset as u64, length as u64);
                        }
                        if next(20) == 0 {
                            file.evict(offset as u64, length as u64).unwrap();
                        }
                        assert!(read(file, offset as u64, length).unwrap() == server.bytes[offset..offset + length]);
                    }
                });
            }
        });
        assert!(matches!(read(&file, server.bytes.len() as u64 - 5, 6), Err(Error::Damaged(_))));
    }
}

#[test]
fn what_was_asked_is_counted_and_since_when_nobody_answers() {
    let server = server(16 << 20);
    let file = open(&server, &options()).unwrap();
    let opened = file.stats();
    assert_eq!((opened.reads, opened.lists, opened.offline_since), (1, 0, None));
    let start = opened.bytes;
    assert!(start >= 385 * 4096);
    server.errors.lock().push(RemoteError::Transient("away".into()));
    assert!(read(&file, 8 << 20, 4096).is_err());
    let away = file.stats();
    assert!(away.offline_since.is_some() && away.bytes == start && away.reads == 2, "{away:?}");
    // Who is away goes on to be since the first time; what is here needs nobody.
    server.errors.lock().push(RemoteError::Transient("away".into()));
    assert!(read(&file, 8 << 20, 4096).is_err());
    read(&file, 0, 4096).unwrap();
    assert_eq!(file.stats().offline_since, away.offline_since);
    read(&file, 8 << 20, 4096).unwrap();
    let back = file.stats();
    assert_eq!((back.reads, back.offline_since, back.memory_hits), (4, None, 0));
    assert_eq!(back.bytes, start + 4 * SLOT);
    read(&file, 8 << 20, 4096).unwrap();
    assert_eq!((file.stats().reads, file.stats().memory_hits), (4, 1));
    // A refusal is an answer.
    server.errors.lock().push(RemoteError::Denied("no".into()));
    assert!(read(&file, 12 << 20, 4096).is_err());
    assert_eq!(file.stats().offline_since, None);
}

#[test]
fn a_page_costs_one_request_and_none_when_it_is_kept() {
    let server = server(16 << 20);
    let place = tempfile::tempdir().unwrap();
    let options =
        RemoteOptions { cache_directory: Some(place.path().join("c")), cache_bytes: Some(64 << 20), ..options() };
    let file = open(&server, &options).unwrap();
    // The start is what the opening brought.
    read(&file, 0, 1 << 20).unwrap();
    assert_eq!(file.stats().reads, 1);
    // Its head first, then the rest, as pages are read.
    read(&file, (4 << 20) + 4096, 4096).unwrap();
    read(&file, (4 << 20) + 8192, 128 << 10).unwrap();
    // What comes behind it is fetched ahead, now or later.
    let page = 4 << 20..(4 << 20) + 4096 + (132 << 10);
    let asked = server.asked.lock().iter().filter(|asked| asked.start < page.end && page.start < asked.end).count();
    assert_eq!(asked, 1);
    drop(file);
    // A thread that fetches ahead has the cache until it sees that the file is gone.
    let file = loop {
        let file = open(&server, &options).unwrap();
        read(&file, (4 << 20) + 4096, 132 << 10).unwrap();
        if file.stats().disk_hits > 0 {
            break file;
        }
        thread::yield_now();
    };
    assert_eq!(file.stats().reads, 1, "REMOTE-2: the opening asks");
}

#[test]
fn of_what_is_kept_on_disk_no_more_is_read_than_is_wanted() {
    let server = server(16 << 20);
    let place = tempfile::tempdir().unwrap();
    let options =
        RemoteOptions { cache_directory: Some(place.path().join("c")), cache_bytes: Some(64 << 20), ..options() };
    let file = open(&server, &options).unwrap();
    // From the server come its neighbours, too.
    read(&file, 4 << 20, 4096).unwrap();
    drop(file);
    // The file may be held a moment longer by a thread that ends.
    let file = loop {
        let file = open(&server, &options).unwrap();
        read(&file, 4 << 20, 4096).unwrap();
        if file.stats().disk_hits > 0 {
            break file;
        }
        thread::yield_now();
    };
    assert_eq!(file.stats().disk_hits, 1);
    read(&file, (4 << 20) + (64 << 10), 128 << 10).unwrap();
    assert_eq!((file.stats().disk_hits, file.stats().reads), (3, 1));
}

#[test]
fn another_version_is_never_mixed_in() {
    let server = server(16 << 20);
    let file = open(&server, &options()).unwrap();
    let before = read(&file, BEHIND, 100).unwrap();
    *server.tag.lock() += 1;
    // REMOTE-1: what is here is of the version before, and nothing else comes.
    assert_eq!(read(&file, BEHIND, 100).unwrap(), before);
    let error = read(&file, 9 << 20, 100).unwrap_err();
    let Error::Io { source, .. } = &error else { panic!("{error:?}") };
    assert_eq!(source.kind(), std::io::ErrorKind::StaleNetworkFileHandle);
    assert!(error.to_string().contains("changed on its server"), "{error}");
}

#[test]
fn a_cache_of_another_version_or_other_commits_is_not_used() {
    let place = tempfile::tempdir().unwrap();
    let options =
        RemoteOptions { cache_directory: Some(place.path().join("c")), cache_bytes: Some(64 << 20), ..options() };
    let first = server(8 << 20);
    let read_all = |server: &Arc<Server>| {
        // A thread of the previous file, or a child process of another test before its exec, may
        // hold the lock of the cache.
        let begun = Instant::now();
        let file = loop {
            let file = open(server, &options).unwrap();
            if file.has_disk_cache() {
                break file;
            }
            assert!(begun.elapsed() < Duration::from_secs(60), "the cache is locked");
            thread::yield_now();
        };
        assert!(read(&file, BEHIND, 1 << 20).unwrap() == server.bytes[BEHIND as usize..][..1 << 20]);
        file.stats().disk_hits
    };
    assert_eq!((read_all(&first), read_all(&first)), (0, 16));
    // Another tag; the same tag and length with other commits, as of a server whose tags are of
    // seconds.
    *first.tag.lock() += 1;
    assert_eq!(read_all(&first), 0);
    let mut bytes: Vec<u8> = first.bytes.iter().map(|byte| byte ^ 0x55).collect();
    bytes[0] = first.bytes[0];
    let second = Arc::new(Server { bytes, tag: Mutex::new(1), ..Server::default() });
    assert_eq!((read_all(&second), read_all(&second)), (0, 16));
    let longer = Server { bytes: [&second.bytes[..], b"more"].concat(), tag: Mutex::new(1), ..Server::default() };
    assert_eq!(read_all(&Arc::new(longer)), 0);
}

#[test]
fn a_failed_request_is_told_as_that_and_the_next_one_may_do() {
    let server = server(8 << 20);
    let passing = || RemoteError::Transient("status 503".into());
    server.errors.lock().push(passing());
    assert!(matches!(open(&server, &options()), Err(Error::Io { .. })));
    for (error, words) in [
        (passing(), "does not answer: status 503"),
        (RemoteError::Denied("status 403".into()), "cannot access "),
        (RemoteError::Unsupported("no ranges".into()), "cannot be used: no ranges"),
        (RemoteError::NotFound, "was removed from its server"),
    ] {
        let file = open(&server, &options()).unwrap();
        server.errors.lock().push(error);
        let error = read(&file, BEHIND, 10).unwrap_err();
        assert!(matches!(error, Error::Io { .. }) && error.to_string().contains(words), "REMOTE-3: {error}");
        assert!(read(&file, BEHIND, 10).is_ok());
    }
    // With patience nobody learns of it.
    let patient = RemoteOptions { timeout: None, ..options() };
    let file = open(&server, &patient).unwrap();
    server.errors.lock().extend([passing(), passing()]);
    assert!(read(&file, BEHIND, 10).is_ok());
    assert_eq!(file.stats().reads, 4);
    server.errors.lock().push(RemoteError::NotFound);
    assert!(
        matches!(open(&server, &patient), Err(Error::Io { source, .. }) if source.kind() == std::io::ErrorKind::NotFound)
    );
}

#[test]
fn many_readers_of_one_slot_ask_once() {
    let server = server(8 << 20);
    let file = Arc::new(open(&server, &options()).unwrap());
    let together = Barrier::new(8);
    thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| {
                together.wait();
                read(&file, BEHIND, 4096).unwrap();
            });
        }
    });
    assert_eq!(file.stats().reads, 2);
}

/// A server on the loopback address that answers each request by `answer`: the head of the request,
/// and where the response goes.
struct Enemy {
    address: SocketAddr,
    served: Arc<AtomicUsize>,
    ended: Arc<AtomicBool>,
}

impl Enemy {
    fn start(answer: impl Fn(&str, &mut TcpStream) + Send + Sync + 'static) -> Enemy {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let (served, ended) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicBool::new(false)));
        let (count, end, answer) = (Arc::clone(&served), Arc::clone(&ended), Arc::new(answer));
        thread::spawn(move || {
            for stream in listener.incoming().map_while(Result::ok) {
                if end.load(Ordering::SeqCst) {
                    return;
                }
                let (count, answer) = (Arc::clone(&count), Arc::clone(&answer));
                thread::spawn(move || attend(stream, &count, &*answer));
            }
        });
        Enemy { address, served, ended }
    }

    fn open(&self, options: &RemoteOptions) -> lockbox::Result<RemoteFile> {
        let url = format!("http://{}/a.lbx", self.address);
        RemoteFile::open(&Address::parse(url.as_ref()).unwrap().unwrap(), options)
    }

    fn refused(answer: impl Fn(&str, &mut TcpStream) + Send + Sync + 'static) -> String {
        Enemy::start(answer).open(&options()).err().unwrap().to_string()
    }
}

impl Drop for Enemy {
    fn drop(&mut self) {
        self.ended.store(true, Ordering::SeqCst);
        let _ = TcpStream::connect(self.address);
    }
}

/// One connection: requests until it is closed.
fn attend(mut stream: TcpStream, served: &AtomicUsize, answer: &dyn Fn(&str, &mut TcpStream)) {
    let mut head = Vec::new();
    let mut byte = [0];
    while stream.read(&mut byte).is_ok_and(|count| count == 1) {
        head.push(byte[0]);
        if head.ends_with(b"\r\n\r\n") {
            served.fetch_add(1, Ordering::SeqCst);
            answer(&String::from_utf8_lossy(&head).to_lowercase(), &mut stream);
            head.clear();
        }
    }
}

fn say(stream: &mut TcpStream, status: &str, headers: &str, body: &[u8]) {
    let _ =
        stream.write_all(format!("HTTP/1.1 {status}\r\n{headers}content-length: {}\r\n\r\n", body.len()).as_bytes());
    let _ = stream.write_all(body);
}

fn asked(head: &str) -> Range<usize> {
    let range = head.lines().find_map(|line| line.strip_prefix("range: bytes=")).unwrap();
    let (first, last) = range.trim().split_once('-').unwrap();
    first.parse().unwrap()..last.parse::<usize>().unwrap() + 1
}

/// The answer of a server that does all that is asked of it.
fn honest(head: &str, stream: &mut TcpStream, bytes: &[u8], tag: &str) {
    assert!(head.contains("accept-encoding: identity\r\n"), "{head}");
    let mut range = asked(head);
    range.end = range.end.min(bytes.len());
    let place = format!("content-range: bytes {}-{}/{}\r\netag: {tag}\r\n", range.start, range.end - 1, bytes.len());
    match head.lines().find_map(|line| line.strip_prefix("if-match: ")) {
        Some(wanted) if wanted.trim() != tag => say(stream, "412 Precondition Failed", "", b""),
        _ => say(stream, "206 Partial Content", &place, &bytes[range]),
    }
}

#[test]
fn an_honest_server_is_asked_for_ranges_of_one_version() {
    let bytes = Arc::new(content(8 << 20));
    let (tag, served) = (Arc::new(Mutex::new("\"a\"")), Arc::clone(&bytes));
    let current = Arc::clone(&tag);
    let server = Enemy::start(move |head, stream| honest(head, stream, &served, *current.lock()));
    let file = server.open(&options()).unwrap();
    assert_eq!(file.len().unwrap(), 8 << 20);
    assert!(read(&file, BEHIND, 1 << 20).unwrap() == bytes[BEHIND as usize..][..1 << 20]);
    *tag.lock() = "\"b\"";
    let message = read(&file, 7 << 20, 10).unwrap_err().to_string();
    assert!(message.contains("changed on its server"), "{message}");
    assert_eq!(server.served.load(Ordering::SeqCst), 3);
}

#[test]
fn a_server_that_ignores_the_condition_is_found_out_by_its_answer() {
    let bytes = content(8 << 20);
    let count = AtomicUsize::new(0);
    let server = Enemy::start(move |head, stream| {
        let head = head.replace("if-match", "x-if-match");
        let tag = if count.fetch_add(1, Ordering::SeqCst) == 0 { "\"a\"" } else { "\"b\"" };
        honest(&head, stream, &bytes, tag);
    });
    let file = server.open(&options()).unwrap();
    let message = read(&file, BEHIND, 10).unwrap_err().to_string();
    assert!(message.contains("changed on its server"), "{message}");
}

#[test]
fn answers_that_cannot_be_used_are_refused_by_name_before_their_bodies() {
    let endless = |status: &'static str, headers: &'static str| {
        move |_: &str, stream: &mut TcpStream| {
            let _ = stream.write_all(format!("HTTP/1.1 {status}\r\n{headers}\r\n").as_bytes());
            // Nobody may wait for this to end.
            while stream.write_all(&[b'x'; 4096]).is_ok() {}
        }
    };
    let message = Enemy::refused(endless("200 OK", "content-length: 99999999999\r\n"));
    assert!(message.contains("does not serve parts of files"), "{message}");
    let message = Enemy::refused(endless(
        "206 Partial Content",
        "content-encoding: gzip\r\ncontent-range: bytes 0-1638399/9999999\r\n",
    ));
    assert!(message.contains("compresses"), "{message}");
    for range in [
        "bytes 5-9/100",
        "bytes 0-99999999999/99999999999999",
        "bytes 0-9/5",
        "bytes */5",
        "garbage",
        "bytes 0-18446744073709551615/7",
    ] {
        let message = Enemy::refused(move |_, stream| {
            say(stream, "206 Partial Content", &format!("content-range: {range}\r\n"), b"0123456789")
        });
        assert!(message.contains("not for the requested range"), "{range}: {message}");
    }
    let message = Enemy::refused(|_, stream| {
        say(stream, "206 Partial Content", "content-range: bytes 0-9/100\r\n", b"0123456789")
    });
    assert!(message.contains("sends fewer"), "{message}");
    for (status, words) in [
        ("404 Not Found", "cannot open"),
        ("403 Forbidden", "status 403"),
        ("503 Service Unavailable", "status 503"),
        ("416 Range Not Satisfiable", "is empty"),
        ("418 I'm a teapot", "status 418"),
    ] {
        let message = Enemy::refused(move |_, stream| say(stream, status, "", b""));
        assert!(message.contains(words), "{message}");
    }
}

#[test]
fn a_cut_answer_and_more_than_was_asked_for_do_no_harm() {
    let bytes = content(8 << 20);
    let count = AtomicUsize::new(0);
    let server = Enemy::start(move |head, stream| {
        let range = asked(head);
        let headers =
            |end: usize| format!("content-range: bytes {}-{}/{}\r\netag: \"a\"\r\n", range.start, end - 1, bytes.len());
        match count.fetch_add(1, Ordering::SeqCst) {
            0 => honest(head, stream, &bytes, "\"a\""),
            // Half of what it promises.
            1 => {
                let length = range.end - range.start;
                let _ = stream.write_all(
                    format!("HTTP/1.1 206 Partial Content\r\n{}content-length: {length}\r\n\r\n", headers(range.end))
                        .as_bytes(),
                );
                let _ = stream.write_all(&bytes[range.start..range.start + length / 2]);
                let _ = stream.shutdown(std::net::Shutdown::Both);
            }
            // More than was asked for, in pieces without an end.
            _ => {
                let _ = stream.write_all(
                    format!("HTTP/1.1 206 Partial Content\r\n{}transfer-encoding: chunked\r\n\r\n", headers(range.end))
                        .as_bytes(),
                );
                let mut at = range.start;
                loop {
                    let part: Vec<u8> = (at..at + 4096).map(|at| bytes.get(at).copied().unwrap_or(b'!')).collect();
                    let piece = [b"1000\r\n", &part[..], b"\r\n"].concat();
                    if stream.write_all(&piece).is_err() {
                        return;
                    }
                    at += 4096;
                }
            }
        }
    });
    let expected = content(8 << 20);
    let file = server.open(&RemoteOptions { timeout: None, ..options() }).unwrap();
    assert!(read(&file, BEHIND, SLOT as usize).unwrap() == expected[BEHIND as usize..][..SLOT as usize]);
    assert!(read(&file, 6 << 20, SLOT as usize).unwrap() == expected[6 << 20..][..SLOT as usize]);
}

#[test]
fn redirections_are_followed_a_few_times_and_never_off_tls_or_into_the_house() {
    let bytes = content(3 << 20);
    let target = Arc::new(Enemy::start(move |head, stream| honest(head, stream, &bytes, "\"a\"")));
    let to = target.address;
    let server =
        Enemy::start(move |_, stream| say(stream, "302 Found", &format!("location: http://{to}/b.lbx\r\n"), b""));
    let file = server.open(&options()).unwrap();
    read(&file, BEHIND, 10).unwrap();
    assert_eq!(
        (server.served.load(Ordering::SeqCst), target.served.load(Ordering::SeqCst)),
        (1, 2),
        "the way is remembered"
    );
    let message = Enemy::refused(|_, stream| say(stream, "302 Found", "location: /a.lbx\r\n", b""));
    assert!(message.contains("again and again"), "{message}");
    for to in ["file:///etc/passwd", "ftp://127.0.0.1/", "gopher://127.0.0.1:1/"] {
        let message = Enemy::refused(move |_, stream| say(stream, "302 Found", &format!("location: {to}\r\n"), b""));
        assert!(message.contains("not https"), "{message}");
    }
    let message = Enemy::refused(|_, stream| say(stream, "302 Found", "", b""));
    assert!(message.contains("no address"), "{message}");
    // Without leave neither the first address nor a later one is asked.
    let untouched = Enemy::start(|_, _| unreachable!());
    let strict = RemoteOptions { allow_private: false, ..options() };
    let message = untouched.open(&strict).err().unwrap().to_string();
    assert!(message.contains("needs allow-private"), "{message}");
    let message = untouched.open(&RemoteOptions { allow_http: false, ..options() }).err().unwrap().to_string();
    assert!(
        message.contains("to allow it, use --remote allow-http")
            && message.contains("allow-http,allow-private")
            && message.contains("LOCKBOX_REMOTE"),
        "{message}"
    );
    assert_eq!(untouched.served.load(Ordering::SeqCst), 0);
}

#[test]
fn where_a_redirection_led_is_forgotten_when_it_does_not_answer() {
    let bytes = Arc::new(content(8 << 20));
    let serving = || {
        let bytes = Arc::clone(&bytes);
        Enemy::start(move |head, stream| {
            honest(head, stream, &bytes, "\"a\"");
            let _ = stream.shutdown(std::net::Shutdown::Both);
        })
    };
    let (first, second) = (serving(), serving());
    let to = Arc::new(Mutex::new(first.address));
    let current = Arc::clone(&to);
    let server = Enemy::start(move |_, stream| {
        say(stream, "307 Temporary Redirect", &format!("location: http://{}/b.lbx\r\n", current.lock()), b"");
    });
    let file = server.open(&options()).unwrap();
    *to.lock() = second.address;
    // Nobody listens there from now on.
    let gone = first.address;
    drop(first);
    while TcpStream::connect(gone).is_ok() {
        thread::yield_now();
    }
    assert!(read(&file, 6 << 20, 10).unwrap() == bytes[6 << 20..][..10]);
    assert_eq!(second.served.load(Ordering::SeqCst), 1);
}

/// What a portal answers: a page, whatever is asked for.
fn welcome(status: u16, stream: &mut TcpStream) {
    let page = b"<!DOCTYPE html><html><body>Log in</body></html>";
    let kind = "content-type: text/html\r\netag: \"5f3c-1a\"\r\n";
    match status {
        204 => drop(stream.write_all(b"HTTP/1.1 204 x\r\n\r\n")),
        206 => say(stream, "206 x", &format!("{kind}content-range: bytes 0-46/47\r\n"), page),
        302 => say(stream, "302 x", "location: /login\r\n", b""),
        status => say(stream, &format!("{status} x"), kind, page),
    }
}

/// PROOF-1. Of a web server nobody knows whether an error is its own, so that is told, and the next
/// read asks again.
#[test]
fn a_portals_answer_about_a_file_is_asked_for_again_and_never_damage() {
    let bytes = Arc::new(content(4 << 20));
    let patient = RemoteOptions { timeout: Some(Duration::from_secs(60)), ..options() };
    for (is_bucket, status, at) in [true, false].into_iter().flat_map(|is_bucket| {
        let statuses = [200, 204, 206, 302, 403, 404, 412, 507];
        statuses.into_iter().flat_map(move |status| [0, 1].map(|at| (is_bucket, status, at)))
    }) {
        let (served, count) = (Arc::clone(&bytes), AtomicUsize::new(0));
        let server = Enemy::start(move |head, stream| match head.starts_with("get /login") {
            true => welcome(200, stream),
            false if count.fetch_add(1, Ordering::SeqCst) == at => welcome(status, stream),
            false => honest(head, stream, &served, "\"d41d8cd98f00b204e9800998ecf8427e\""),
        });
        let open = || match is_bucket {
            true => {
                let url = format!("http://{}", server.address).parse().unwrap();
                let bucket = rusty_s3::Bucket::new(url, rusty_s3::UrlStyle::Path, "b", "x").unwrap();
                let signer = S3Bucket::of(Cloud::S3, bucket, CredentialCache::new(|| Ok(None)));
                let http = HttpSource::of_bucket(signer, "a.lbx", &patient);
                RemoteFile::open_metered(Arc::new(http), "s3://b/a.lbx".into(), &patient)
            }
            false => server.open(&patient),
        };
        let when = format!("status {status} in place of answer {at}, of a bucket: {is_bucket}");
        let is_believed = |error: Error| {
            assert!(!is_bucket && [403, 404, 412].contains(&status), "{when}: {error}");
            assert!(matches!(error, Error::Io { .. }), "{when}: {error}");
        };
        let file = open().or_else(|error| {
            is_believed(error);
            open()
        });
        let file = file.unwrap_or_else(|error| panic!("{when}: {error}"));
        let got = read(&file, 3 << 20, 10).or_else(|error| {
            is_believed(error);
            read(&file, 3 << 20, 10)
        });
        assert!(got.unwrap_or_else(|error| panic!("{when}: {error}")) == bytes[3 << 20..][..10], "{when}");
    }
}

#[test]
fn a_token_that_has_expired_is_renewed_for_a_file_in_a_bucket_too() {
    let expired = "<Error><Code>ExpiredToken</Code></Error>";
    let server =
        Enemy::start(move |_, stream| say(stream, "400 Bad Request", "x-amz-request-id: 1\r\n", expired.as_bytes()));
    let bucket = rusty_s3::Bucket::new(
        format!("http://{}", server.address).parse().unwrap(),
        rusty_s3::UrlStyle::Path,
        "b",
        "x",
    );
    let looks = AtomicUsize::new(0);
    let look = move || {
        let number = looks.fetch_add(1, Ordering::SeqCst);
        Ok(Some(rusty_s3::Credentials::new_with_token("id", "secret", format!("token{number}"))))
    };
    let signer = S3Bucket::of(Cloud::S3, bucket.unwrap(), CredentialCache::new(look));
    let http = HttpSource::of_bucket(signer, "a.lbx", &options());
    let message = http.request_range(&(0..10), None).err();
    assert!(
        matches!(&message, Some(RemoteError::Refused(refusal)) if refusal.why.contains("ExpiredToken")),
        "{message:?}"
    );
    assert_eq!(server.served.load(Ordering::SeqCst), 2);
}

#[test]
fn without_a_strong_tag_the_time_and_the_length_tell_versions_apart() {
    let bytes = content(8 << 20);
    let (time, seen) = (Arc::new(Mutex::new("Mon")), Arc::new(Mutex::new(String::new())));
    let (current, last) = (Arc::clone(&time), Arc::clone(&seen));
    let server = Enemy::start(move |head, stream| {
        *last.lock() = head.to_owned();
        let mut range = asked(head);
        range.end = range.end.min(bytes.len());
        let place = format!("content-range: bytes {}-{}/{}", range.start, range.end - 1, bytes.len());
        let headers = format!("{place}\r\netag: W/\"x\"\r\nlast-modified: {}\r\n", *current.lock());
        say(stream, "206 Partial Content", &headers, &bytes[range]);
    });
    let place = tempfile::tempdir().unwrap();
    let file = server.open(&RemoteOptions { cache_directory: Some(place.path().join("c")), ..options() }).unwrap();
    read(&file, BEHIND, 10).unwrap();
    assert!(!seen.lock().contains("if-"), "a weak tag is no condition: {}", seen.lock());
    assert!(!place.path().join("c").exists(), "nothing is kept of what nobody can tell from another version");
    *time.lock() = "Tue";
    assert!(read(&file, 7 << 20, 10).unwrap_err().to_string().contains("changed on its server"));
}
