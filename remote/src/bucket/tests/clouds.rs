//! The store of each cloud on a real connection: its requests, and the meaning of its responses.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, UNIX_EPOCH};

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use md5::{Digest, Md5};
use parking_lot::Mutex;
use rusty_s3::UrlStyle;
use url::Url;

use crate::RemoteOptions;
use crate::address::Cloud;
use crate::azure::{AzureAccount, AzureContainer};
use crate::bucket::objects::{BatchReply, MAX_LIST_ENTRIES, ObjectCreation, ObjectRange, ObjectStore};
use crate::bucket::store::BucketStore;
use crate::bucket::{AzureStore, S3Store};
use crate::credentials::CredentialCache;
use crate::diagnostics::probe_store;
use crate::hex;
use crate::range_source::RemoteError;
use crate::s3::S3Bucket;

/// A store in memory that speaks what one cloud does, as far as it is asked.
pub(super) struct Server {
    cloud: Cloud,
    pub(super) objects: Mutex<BTreeMap<String, Vec<u8>>>,
    /// Most objects of one answer.
    cut: AtomicUsize,
    /// What was asked for: method and query.
    asked: Mutex<Vec<String>>,
    /// What the next requests are answered with: a status, and Azure's word for it.
    scripted: Mutex<Vec<(u16, &'static str)>>,
    /// A part of what proves who asks that is refused.
    refused: Mutex<Option<&'static str>>,
    /// Whether answers that speak S3 come without a request id, as those of R2.
    pub(super) is_bare: AtomicBool,
    /// Seconds since 1970.
    pub(super) clock: AtomicU64,
    /// A portal on the way answers with this status after so many requests, once.
    pub(super) portal: Mutex<Option<(usize, u16)>>,
    /// Bytes of a body after which the connection breaks, and bytes of all bodies that were taken.
    pub(super) longest_body: AtomicUsize,
    pub(super) taken: AtomicUsize,
}

struct RequestKind {
    method: String,
    key: String,
    query: BTreeMap<String, String>,
    headers: BTreeMap<String, String>,
    body: Vec<u8>,
}

type Answer = (u16, String, Vec<u8>);

/// Thu, 26 Nov 2026 01:00:00 GMT.
const NOW: u64 = 1_795_654_800;
const PAGE: &str = "<!DOCTYPE html><html><body>Welcome to our network. <a href=\"/login\">Log in</a></body></html>\n";

impl Server {
    pub(super) fn start(cloud: Cloud) -> (Arc<Server>, Url) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let url = Url::parse(&format!("http://{}", listener.local_addr().unwrap())).unwrap();
        let server = Arc::new(Server {
            cloud,
            objects: Mutex::default(),
            cut: AtomicUsize::new(MAX_LIST_ENTRIES),
            asked: Mutex::default(),
            scripted: Mutex::default(),
            refused: Mutex::default(),
            is_bare: AtomicBool::new(false),
            clock: AtomicU64::new(NOW),
            portal: Mutex::default(),
            longest_body: AtomicUsize::new(usize::MAX),
            taken: AtomicUsize::new(0),
        });
        let serving = server.clone();
        thread::spawn(move || {
            for stream in listener.incoming() {
                let (server, stream) = (serving.clone(), stream.unwrap());
                thread::spawn(move || server.answer(stream));
            }
        });
        (server, url)
    }

    fn answer(&self, mut stream: TcpStream) {
        let mut reader = BufReader::new(stream.try_clone().unwrap());
        let mut lines = reader.by_ref().lines().map_while(Result::ok).take_while(|line| !line.is_empty());
        let Some(first) = lines.next() else { return };
        let headers: BTreeMap<String, String> = lines
            .filter_map(|line| {
                let (name, value) = line.split_once(':')?;
                Some((name.to_ascii_lowercase(), value.trim().to_owned()))
            })
            .collect();
        let mut words = first.split(' ');
        let (method, target) = (words.next().unwrap().to_owned(), words.next().unwrap());
        let url = Url::parse("http://x").unwrap().join(target).unwrap();
        let key = url.path().strip_prefix("/b").unwrap().trim_start_matches('/').to_owned();
        let length = headers.get("content-length").map_or(0, |length| length.parse().unwrap());
        let longest = self.longest_body.load(Ordering::Relaxed);
        let mut body = vec![0; longest.min(length)];
        reader.read_exact(&mut body).unwrap();
        self.taken.fetch_add(body.len(), Ordering::Relaxed);
        if longest < length {
            return;
        }
        self.asked.lock().push(format!("{method} {}", url.query().unwrap_or_default()));
        let query = url.query_pairs().into_owned().collect();
        let asked = RequestKind { method, key, query, headers, body };
        let (head, body) = self.between(&asked).unwrap_or_else(|| {
            let (status, more, body) = self.carry_out(&asked);
            let date = httpdate::fmt_http_date(UNIX_EPOCH + Duration::from_secs(self.clock.load(Ordering::Relaxed)));
            let id = match self.cloud {
                _ if self.is_bare.load(Ordering::Relaxed) => "",
                Cloud::S3 => "x-amz-request-id: 4442587FB7D0A2F9\r\n",
                Cloud::Google => "X-GUploader-UploadID: AAANsUm\r\n",
                Cloud::Azure => "x-ms-request-id: 8f1c6b3e-e01e-0015\r\n",
            };
            (format!("{status} x\r\nDate: {date}\r\n{id}{more}"), body)
        });
        let length = body.len();
        let _ = write!(stream, "HTTP/1.1 {head}Content-Length: {length}\r\nConnection: close\r\n\r\n");
        let _ = stream.write_all(&body);
    }

    /// What a portal on the way answers in the store's place: a page with a tag, of another time; a
    /// part of that where a part is asked for.
    fn between(&self, asked: &RequestKind) -> Option<(String, Vec<u8>)> {
        let mut portal = self.portal.lock();
        let (left, status) = portal.as_mut()?;
        if *left > 0 {
            *left -= 1;
            return None;
        }
        let (status, page) = (*status, PAGE.repeat(200));
        *portal = None;
        let kind =
            "Date: Sat, 01 Jan 2000 00:00:00 GMT\r\nServer: portal\r\nContent-Type: text/html\r\nETag: \"5f3c-1a\"\r\n";
        let range = asked.headers.get("range").and_then(|range| range.strip_prefix("bytes=")?.split_once('-'));
        Some(match (status, range) {
            (204, _) => ("204 x\r\n".into(), Vec::new()),
            (302, _) => (format!("302 x\r\n{kind}Location: https://portal.invalid/login\r\n"), Vec::new()),
            (206, Some((first, last))) => {
                let (last, length) = (last.parse().unwrap_or(0), page.len());
                let range = match first.parse::<usize>() {
                    Ok(first) => first.min(length - 1)..(last + 1).min(length),
                    Err(_) => length.saturating_sub(last)..length,
                };
                let place = format!("Content-Range: bytes {}-{}/{length}\r\n", range.start, range.end - 1);
                (format!("206 x\r\n{kind}{place}"), page.as_bytes()[range].to_vec())
            }
            (status, _) => (format!("{status} x\r\n{kind}"), page.into_bytes()),
        })
    }

    fn carry_out(&self, asked: &RequestKind) -> Answer {
        let message = |status, code: &str| match self.cloud {
            Cloud::Azure => (status, format!("x-ms-error-code: {code}\r\nETag: \"0x8D4BCC2E4835CD0\"\r\n"), Vec::new()),
            _ if status < 400 => (status, String::new(), Vec::new()),
            _ => {
                let text = "<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n<Error><Code>";
                (status, String::new(), format!("{text}{code}</Code><Message>m</Message></Error>").into_bytes())
            }
        };
        let proof = asked.query.iter().map(|(name, value)| format!("{name}={value}")).collect::<Vec<_>>().join("&");
        if self.refused.lock().is_some_and(|refused| proof.contains(refused)) {
            return message(403, "AuthenticationFailed");
        }
        if let Some((status, code)) = self.scripted.lock().pop() {
            return message(status, code);
        }
        let mut objects = self.objects.lock();
        match &*asked.method {
            "PUT" => {
                let condition =
                    if self.cloud == Cloud::Google { "x-goog-if-generation-match" } else { "if-none-match" };
                let wanted = if self.cloud == Cloud::Google { "0" } else { "*" };
                assert_eq!(asked.headers.get(condition).map(String::as_str), Some(wanted), "an object that overwrites");
                assert!(asked.headers.contains_key("content-md5"));
                let is_azure = self.cloud == Cloud::Azure;
                assert_eq!(asked.headers.get("x-ms-blob-type").is_some_and(|kind| kind == "BlockBlob"), is_azure);
                if objects.contains_key(&asked.key) {
                    return if is_azure {
                        message(409, "BlobAlreadyExists")
                    } else {
                        message(412, "PreconditionFailed")
                    };
                }
                objects.insert(asked.key.clone(), asked.body.clone());
                let hash = STANDARD.encode(Md5::digest(&asked.body));
                let proof = match self.cloud {
                    Cloud::S3 => tag_of(&asked.body),
                    Cloud::Google => format!("x-goog-hash: crc32c=AAAAAA==\r\nx-goog-hash: md5={hash}\r\n"),
                    Cloud::Azure => format!("ETag: \"0x8D4BCC2E4835CD0\"\r\nContent-MD5: {hash}\r\n"),
                };
                (if is_azure { 201 } else { 200 }, proof, Vec::new())
            }
            "DELETE" => match (objects.remove(&asked.key), self.cloud) {
                (Some(_), Cloud::Azure) => message(202, ""),
                (None, Cloud::Azure) => message(404, "BlobNotFound"),
                _ => message(204, ""),
            },
            "POST" if self.cloud == Cloud::S3 && asked.query.contains_key("delete") => {
                let text = String::from_utf8(asked.body.clone()).unwrap();
                let hash = STANDARD.encode(Md5::digest(&asked.body));
                assert_eq!(asked.headers.get("content-md5"), Some(&hash));
                let keys: Vec<&str> = text.split("<Key>").skip(1).map(|rest| rest.split('<').next().unwrap()).collect();
                assert!((1..=1000).contains(&keys.len()));
                let row = |key: &&str| {
                    if key.ends_with("locked") {
                        return format!("<Error><Key>{key}</Key><Code>AccessDenied</Code><Message>m</Message></Error>");
                    }
                    objects.remove(&key.replace("&amp;", "&"));
                    format!("<Deleted><Key>{key}</Key></Deleted>")
                };
                let rows: String = keys.iter().map(row).collect();
                let text =
                    format!("<DeleteResult xmlns=\"http://s3.amazonaws.com/doc/2006-03-01/\">{rows}</DeleteResult>");
                (200, String::new(), text.into_bytes())
            }
            "GET" if asked.key.is_empty() => self.list(&objects, &asked.query),
            _ => {
                let Some(bytes) = objects.get(&asked.key) else { return message(404, "BlobNotFound") };
                let (first, last) = asked.headers["range"].strip_prefix("bytes=").unwrap().split_once('-').unwrap();
                let length = bytes.len();
                let range = match first {
                    "" if self.cloud == Cloud::Azure => return message(400, "InvalidHeaderValue"),
                    "" => length.saturating_sub(last.parse().unwrap())..length,
                    first => first.parse().unwrap()..(last.parse::<usize>().unwrap() + 1).min(length),
                };
                if range.start >= length {
                    return message(416, "InvalidRange");
                }
                let message = format!("Content-Range: bytes {}-{}/{length}\r\n", range.start, range.end - 1);
                (206, format!("{message}{}", tag_of(bytes)), bytes[range].to_vec())
            }
        }
    }

    fn list(&self, objects: &BTreeMap<String, Vec<u8>>, query: &BTreeMap<String, String>) -> Answer {
        let asked = |name: &str| query.get(name).map(String::as_str).unwrap_or_default();
        let prefix = asked("prefix");
        let (begin, most, next) = match self.cloud {
            Cloud::Azure => (asked("marker"), asked("maxresults"), "NextMarker"),
            _ => (asked("start-after").max(asked("continuation-token")), asked("max-keys"), "NextContinuationToken"),
        };
        // A marker is what nobody would take for a name.
        let begin = begin.strip_prefix("2!").unwrap_or(begin);
        let most = most.parse().unwrap_or(MAX_LIST_ENTRIES).min(self.cut.load(Ordering::Relaxed));
        let mut found = objects.iter().filter(|(name, _)| name.starts_with(prefix) && &***name > begin).peekable();
        let (mut rows, mut last) = (String::new(), "");
        for (name, bytes) in found.by_ref().take(most) {
            last = name;
            let size = bytes.len();
            rows += &match self.cloud {
                Cloud::Azure => format!(
                    "<Blob><Name>{name}</Name><Properties><Last-Modified>Thu, 26 Nov 2026 01:00:00 GMT</Last-Modified>\
                     <Etag>0x1</Etag><Content-Length>{size}</Content-Length><BlobType>BlockBlob</BlobType></Properties><OrMetadata /></Blob>"
                ),
                _ => format!(
                    "<Contents><Key>{name}</Key><Generation>1</Generation><LastModified>2026-11-26T01:00:00.000Z</LastModified><Size>{size}</Size></Contents>"
                ),
            };
        }
        let is_cut = found.peek().is_some();
        let next = if is_cut { format!("<{next}>2!{last}</{next}>") } else { String::new() };
        let text = match self.cloud {
            Cloud::Azure => format!(
                "\u{feff}<?xml version=\"1.0\" encoding=\"utf-8\"?><EnumerationResults ServiceEndpoint=\"http://x/\" ContainerName=\"b\">\
                 <Prefix>{prefix}</Prefix><Blobs>{rows}</Blobs>{next}</EnumerationResults>"
            ),
            Cloud::Google => format!(
                "<?xml version='1.0' encoding='UTF-8'?><ListBucketResult xmlns='http://doc.s3.amazonaws.com/2006-03-01'><Name>b</Name><IsTruncated>{is_cut}</IsTruncated>{next}{rows}</ListBucketResult>"
            ),
            Cloud::S3 => format!(
                "<ListBucketResult xmlns=\"http://s3.amazonaws.com/doc/2006-03-01/\"><Name>b</Name><IsTruncated>{is_cut}</IsTruncated>{next}{rows}</ListBucketResult>"
            ),
        };
        (200, String::new(), text.into_bytes())
    }
}

/// The entity tag of an object that came in one request.
fn tag_of(bytes: &[u8]) -> String {
    format!("ETag: \"{}\"\r\n", hex(&Md5::digest(bytes)))
}

fn options() -> RemoteOptions {
    RemoteOptions { timeout: Some(Duration::ZERO), allow_http: true, allow_private: true, ..RemoteOptions::default() }
}

fn account(endpoint: &Url, proof: (&str, &str)) -> AzureAccount {
    let variable = |name: &str| match name {
        "AZURE_STORAGE_ACCOUNT" => Some("account".to_owned()),
        "AZURE_STORAGE_SERVICE_ENDPOINT" => Some(endpoint.to_string()),
        _ if name == proof.0 => Some(proof.1.to_owned()),
        _ => None,
    };
    AzureAccount::of(&variable, &|_| None).unwrap()
}

fn azure(endpoint: &Url, proof: (&'static str, &'static str)) -> AzureStore {
    let (known, endpoint) = (account(endpoint, proof), endpoint.clone());
    let look = move || Ok(Some(account(&endpoint, proof)));
    AzureStore::of(AzureContainer::at("b", known, look, &options()).unwrap(), "p", &options())
}

const KEY: (&str, &str) = ("AZURE_STORAGE_KEY", "a2V5");

pub(super) fn objects(cloud: Cloud, endpoint: &Url) -> Box<dyn ObjectStore> {
    if cloud == Cloud::Azure {
        return Box::new(azure(endpoint, KEY));
    }
    let bucket = rusty_s3::Bucket::new(endpoint.clone(), UrlStyle::Path, "b", "x").unwrap();
    let credentials = CredentialCache::new(|| Ok(Some(rusty_s3::Credentials::new("id", "secret"))));
    Box::new(S3Store::of(S3Bucket::of(cloud, bucket, credentials), "p", &options()))
}

pub(super) const CLOUDS: [Cloud; 3] = [Cloud::S3, Cloud::Google, Cloud::Azure];

#[test]
fn each_cloud_is_asked_for_what_a_store_owes() {
    for cloud in CLOUDS {
        let (server, endpoint) = Server::start(cloud);
        let objects = objects(cloud, &endpoint);
        let mut findings = Vec::new();
        probe_store(&*objects, Some(Duration::ZERO), &mut findings, &mut || Ok(())).unwrap();
        // The server's clock stands still.
        let wrong =
            findings.iter().find(|finding| finding.name != "clock" && (!finding.works || finding.advice.is_some()));
        assert_eq!((wrong, findings.len()), (None, 8), "{cloud:?}");
        assert!(server.objects.lock().is_empty());
    }
}

#[test]
fn a_batch_of_removals_is_one_request_and_each_object_counts_by_its_name() {
    let names = ["a", "b & c", "locked", "missing"].map(str::to_owned);
    for cloud in CLOUDS {
        let (server, endpoint) = Server::start(cloud);
        let objects = objects(cloud, &endpoint);
        server.objects.lock().extend(names[..3].iter().map(|name| (format!("p/{name}"), vec![1])));
        if cloud != Cloud::S3 {
            assert!(matches!(objects.remove_batch(&names), Ok(BatchReply::Unsupported)));
            assert!(server.asked.lock().is_empty(), "{cloud:?}");
            continue;
        }
        for is_bare in [false, true] {
            server.is_bare.store(is_bare, Ordering::Relaxed);
            let BatchReply::Done(batch) = objects.remove_batch(&names).unwrap() else { panic!("no batch") };
            let confirmed = [&names[0], &names[1], &names[3]].into_iter().cloned().collect();
            assert_eq!(batch.removed, confirmed);
            let Some(RemoteError::Denied(why)) = batch.error else { panic!("{:?}", batch.error) };
            assert!(why.contains("AccessDenied"), "{why}");
        }
        assert_eq!(*server.asked.lock(), ["POST delete="; 2]);
        assert_eq!(server.objects.lock().keys().collect::<Vec<_>>(), ["p/locked"]);
        // Stores without it, and who may not.
        for (status, code) in [(501, "NotImplemented"), (405, "MethodNotAllowed")] {
            server.scripted.lock().push((status, code));
            assert!(matches!(objects.remove_batch(&names), Ok(BatchReply::Unsupported)), "{status}");
        }
        server.scripted.lock().push((400, "MalformedXML"));
        assert!(matches!(objects.remove_batch(&names), Ok(BatchReply::Rejected)));
        server.scripted.lock().push((403, "AccessDenied"));
        assert!(matches!(objects.remove_batch(&names), Err(RemoteError::Refused(_))));
    }
}

#[test]
fn lists_that_a_store_cuts_short_are_asked_for_on() {
    for cloud in CLOUDS {
        let (server, endpoint) = Server::start(cloud);
        let all: Vec<String> = (0..2500).map(|number| format!("seg/{number:04}")).collect();
        *server.objects.lock() = all.iter().map(|name| (format!("p/{name}"), vec![1])).collect();
        for (cut, asked) in [(MAX_LIST_ENTRIES, 3), (300, 10), (70, 38)] {
            server.cut.store(cut, Ordering::Relaxed);
            server.asked.lock().clear();
            let store = BucketStore::new(objects(cloud, &endpoint), "x".into(), Some(Duration::ZERO));
            let mut seen = Vec::new();
            let visit = &mut |object: crate::bucket::objects::ListedObject| {
                seen.push(object.name);
                Ok(())
            };
            store.walk("seg/", visit).unwrap();
            assert!(seen == all, "{cloud:?} {cut}: {}", seen.len());
            assert!(server.asked.lock().len() <= asked + 3, "{cloud:?} {cut}: {}", server.asked.lock().len());
        }
        server.cut.store(MAX_LIST_ENTRIES, Ordering::Relaxed);
        let objects = objects(cloud, &endpoint);
        let names = |after: &str, most| {
            let listed = objects.list("seg/", after, most).unwrap();
            listed.into_iter().map(|object| object.name).collect::<Vec<_>>()
        };
        // Behind a name at which no list ended, or that is none.
        assert_eq!(names("seg/1234", 2), all[1235..1237]);
        assert_eq!(names("seg/1234x", MAX_LIST_ENTRIES), all[1235..2235]);
        assert_eq!(names("seg/2234", MAX_LIST_ENTRIES), all[2235..]);
        assert_eq!(names("seg/9", MAX_LIST_ENTRIES), [""; 0]);
        assert_eq!(names("", 1), all[..1]);
        // A store that has always more, and never any.
        server.cut.store(0, Ordering::Relaxed);
        assert!(
            matches!(objects.list("seg/", "", 1), Err(RemoteError::Unsupported(why)) if why.contains("again and again"))
        );
    }
}

#[test]
fn a_marker_that_is_refused_is_not_needed() {
    let (server, endpoint) = Server::start(Cloud::Azure);
    *server.objects.lock() = (0..1500).map(|number| (format!("p/{number:04}"), vec![1])).collect();
    let azure = azure(&endpoint, KEY);
    assert_eq!(azure.list("", "", MAX_LIST_ENTRIES).unwrap().len(), MAX_LIST_ENTRIES);
    *server.scripted.lock() = vec![(400, "OutOfRangeInput")];
    let rest = azure.list("", "0999", MAX_LIST_ENTRIES).unwrap();
    assert_eq!((rest.len(), &*rest[0].name), (500, "1000"));
}

#[test]
fn the_last_bytes_of_a_blob_are_one_request_or_two() {
    let (server, endpoint) = Server::start(Cloud::Azure);
    let azure = azure(&endpoint, KEY);
    for (length, asked) in [(1, 1), (99, 1), (100, 1), (101, 2), (150, 2), (200, 2), (201, 2), (5000, 2)] {
        let bytes: Vec<u8> = (0..length).map(|at: usize| (at % 251) as u8).collect();
        server.objects.lock().insert("p/name".into(), bytes.clone());
        server.asked.lock().clear();
        let last = azure.get("name", ObjectRange::Last(100)).unwrap();
        assert_eq!(
            (last, server.asked.lock().len()),
            (bytes[length.saturating_sub(100)..].to_vec(), asked),
            "{length}"
        );
    }
    assert_eq!(azure.get("none", ObjectRange::Last(100)), Err(RemoteError::NotFound));
}

#[test]
fn what_azure_answers_is_taken_for_what_it_is() {
    let (server, endpoint) = Server::start(Cloud::Azure);
    let azure = azure(&endpoint, ("AZURE_STORAGE_SAS_TOKEN", "sv=1&sig=s3cr3t"));
    let create = |status, code| {
        server.scripted.lock().push((status, code));
        azure.create("name", b"bytes")
    };
    assert_eq!(create(409, "BlobAlreadyExists"), Ok(ObjectCreation::Exists));
    assert_eq!(create(412, "ConditionNotMet"), Ok(ObjectCreation::Exists));
    assert_eq!(create(201, ""), Ok(ObjectCreation::Created(Some(1_795_654_800))));
    let passing = |created| matches!(created, Err(RemoteError::Transient(_)));
    for (status, code) in [
        (409, "ContainerBeingDeleted"),
        (400, "Md5Mismatch"),
        (500, "OperationTimedOut"),
        (503, "ServerBusy"),
        (429, ""),
    ] {
        assert!(passing(create(status, code)), "{status} {code}");
    }
    for (status, code, why) in [
        (403, "AuthenticationFailed", "AuthenticationFailed"),
        (403, "<blink>", "(status 403)"),
        (409, "PublicAccessNotPermitted", "409"),
        (404, "ContainerNotFound", "the container does not exist"),
        (400, "InvalidHeaderValue", "400 InvalidHeaderValue"),
    ] {
        let message = create(status, code).unwrap_err().message();
        assert!(message.contains(why) && !message.contains("s3cr3t") && !message.contains('<'), "{message}");
    }
    server.scripted.lock().push((404, "ContainerNotFound"));
    assert!(matches!(azure.list("", "", 1), Err(RemoteError::NoBucket(_))));
    assert_eq!(azure.remove("none"), Ok(()));
    server.scripted.lock().push((409, "SnapshotsPresent"));
    assert!(matches!(azure.remove("none"), Err(RemoteError::Unsupported(why)) if why.contains("SnapshotsPresent")));
}

#[test]
fn who_is_refused_is_asked_for_another_token_once() {
    let (server, endpoint) = Server::start(Cloud::Azure);
    *server.refused.lock() = Some("sig=old");
    let looks = Arc::new(AtomicUsize::new(0));
    let container = |tokens: &'static [&'static str]| {
        let (endpoint, looks) = (endpoint.clone(), looks.clone());
        let proof = |token| ("AZURE_STORAGE_SAS_TOKEN", token);
        let known = account(&endpoint, proof(tokens[0]));
        let look = move || Ok(Some(account(&endpoint, proof(tokens[looks.fetch_add(1, Ordering::Relaxed)]))));
        AzureStore::of(AzureContainer::at("b", known, look, &options()).unwrap(), "p", &options())
    };
    assert!(matches!(container(&["sv=1&sig=old", "sv=1&sig=new"]).create("one", b"x"), Ok(ObjectCreation::Created(_))));
    assert_eq!((looks.swap(0, Ordering::Relaxed), server.asked.lock().len()), (2, 2));
    server.asked.lock().clear();
    // The same once more is not sent.
    let message = container(&["sv=1&sig=old", "sv=1&sig=old"]).create("two", b"x").unwrap_err();
    assert!(matches!(&message, RemoteError::Refused(refusal) if !refusal.why.contains("sig")), "{message:?}");
    assert_eq!((looks.load(Ordering::Relaxed), server.asked.lock().len()), (2, 1));
}

#[test]
fn the_code_of_a_failure_decides_at_each_request() {
    let (server, endpoint) = Server::start(Cloud::S3);
    let objects = objects(Cloud::S3, &endpoint);
    let ask = [
        |objects: &dyn ObjectStore| objects.create("name", b"bytes").map(drop),
        |objects: &dyn ObjectStore| objects.get("name", ObjectRange::Last(1)).map(drop),
        |objects: &dyn ObjectStore| objects.list("", "", 1).map(drop),
        |objects: &dyn ObjectStore| objects.remove("name"),
    ];
    for ask in ask {
        let asked = |code| {
            server.scripted.lock().push((400, code));
            ask(&*objects)
        };
        for code in ["ExpiredToken", "InvalidToken", "TokenRefreshRequired", "RequestExpired"] {
            let message = asked(code);
            assert!(
                matches!(&message, Err(RemoteError::Refused(refusal)) if refusal.why.contains(code)),
                "{code}: {message:?}"
            );
        }
        for code in ["RequestTimeout", "IncompleteBody", "BadDigest"] {
            let message = asked(code);
            assert!(matches!(&message, Err(RemoteError::Transient(why)) if why.contains(code)), "{code}: {message:?}");
        }
        for (status, code) in [(403, "SignatureDoesNotMatch"), (403, "QuotaExceeded")] {
            server.scripted.lock().push((status, code));
            let message = ask(&*objects).unwrap_err().message();
            assert!(message.contains(&format!("(status {status} {code})")), "{message}");
        }
        let message = asked("\u{1b}[31m");
        assert_eq!(message, Err(RemoteError::Unsupported("it responds with status 400".into())));
    }
}

#[test]
fn an_object_whose_answer_was_cut_is_no_shorter_object() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let endpoint = Url::parse(&format!("http://{}", listener.local_addr().unwrap())).unwrap();
    // Nothing but the end of the connection tells where these answers end, and of those that come
    // in pieces the last one.
    let bodies = ["\r\n0123", "transfer-encoding: chunked\r\n\r\n4\r\n0123\r\n0\r\n\r\n"];
    thread::spawn(move || {
        for (number, stream) in listener.incoming().enumerate() {
            let mut stream = stream.unwrap();
            let mut head = BufReader::new(stream.try_clone().unwrap()).lines().map_while(Result::ok);
            assert!(head.by_ref().any(|line| line.is_empty()));
            let ids = "x-amz-request-id: 1\r\nx-guploader-uploadid: 1\r\nx-ms-request-id: 1";
            let place = format!("connection: close\r\n{ids}\r\ncontent-range: bytes 0-9/10");
            let _ = write!(stream, "HTTP/1.1 206 Partial Content\r\n{place}\r\n{}", bodies[number % 2]);
        }
    });
    for cloud in CLOUDS {
        let objects = objects(cloud, &endpoint);
        for part in [ObjectRange::All(10), ObjectRange::Range(0, 10), ObjectRange::Last(10)].repeat(2) {
            let got = objects.get("name", part);
            assert!(matches!(got, Err(RemoteError::Transient(_))), "{cloud:?} {part:?}: {got:?}");
        }
    }
}
