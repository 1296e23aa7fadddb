//! Fetcher: a process that performs the network requests of a daemon.
//!
//! The daemon of a mount has the keys and, in its sandbox, no network; the fetcher has the network
//! and no key. It receives an address and one socket per concurrent reader, and serves the file on
//! each. On one more socket the daemon polls for newer versions, which the fetcher serves on
//! sockets that it creates: the daemon cannot create any. An archive that is open for writing has
//! no newer versions; there, the end of that socket means that the mount is about to end. The
//! fetcher exits when the daemon closes the control socket.
//!
//! The server of its [`Broker`] is another process, outside of the sandbox.

use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::{Shutdown, ToSocketAddrs};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Weak};
use std::thread;
use std::time::{Duration, Instant};

use lockbox::storage::ipc::{code_of, error_of};
use lockbox::storage::{IpcStorage, Storage, serve_storage};
use lockbox::{Error, Result};
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use url::Url;
use zeroize::Zeroizing;

use crate::RemoteOptions;
use crate::address::{Address, Cloud};
use crate::azure::{self, AzureAccount};
use crate::broker::{Broker, BrokerRequest, BrokerScope, LookupFailure, MAX_SOCKETS, receive, send, socket_pairs};
use crate::bucket::{BucketWriter, CLEAN_INTERVAL, Follower};
use crate::cache::create_private_dir;
use crate::credentials::{self, variable};
use crate::range_source::RequestStats;
use crate::s3;
use crate::web_login;

/// Maximum concurrent readers: the event loops of a large mount, and its background threads. A
/// reader that waits for an unreachable store occupies one.
const READ_SOCKETS: usize = 40;
/// Including the socket for polls, or for the end of the mount.
const TOTAL_SOCKETS: usize = READ_SOCKETS + 1;
const _: () = assert!(TOTAL_SOCKETS <= MAX_SOCKETS);

#[derive(Serialize, Deserialize)]
struct OpenRequest {
    address: String,
    options: RemoteOptions,
    /// Directories of the caches and of the spool, which the JSON of the options does not have.
    directories: [Option<PathBuf>; 2],
    access: Access,
}

/// Access mode of an open.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Access {
    Read,
    /// Each barrier waits until the store has confirmed its record.
    Write {
        take_over: bool,
    },
}

struct OpenArchive {
    storage: Arc<dyn Storage>,
    stats: Box<dyn Fn() -> RequestStats>,
    /// Set if the archive is open for reading and can gain newer versions.
    follower: Option<Follower>,
    /// Set if the archive is open for writing.
    writer: Option<Arc<BucketWriter>>,
}

impl OpenArchive {
    fn open(request: &OpenRequest) -> Result<OpenArchive> {
        let address = Address::parse(request.address.as_ref())?;
        let address = address.ok_or_else(|| Error::invalid("not an address"))?;
        match request.access {
            Access::Read => {
                let (file, follower) = crate::open_with_follower(&address, &request.options)?;
                Ok(OpenArchive { stats: Box::new(file.stats_fn()), storage: file, follower, writer: None })
            }
            Access::Write { take_over } => {
                let writer = Arc::new(crate::open_writer(&address, &request.options, take_over)?);
                writer.retry_forever();
                remove_expired_periodically(&writer)?;
                let stats = writer.clone();
                let stats = Box::new(move || stats.stats());
                Ok(OpenArchive { storage: writer.clone(), stats, follower: None, writer: Some(writer) })
            }
        }
    }
}

/// Reply of the fetcher, with the code and the sentence of an error.
type Reply<T> = std::result::Result<T, (u32, String)>;

#[derive(Serialize, Deserialize)]
struct OpenReply {
    ordered: bool,
    /// Set if newer versions are possible.
    version: Option<u64>,
    /// Message for the user.
    notice: Option<String>,
}

/// Sequence of the newer version, with its sockets attached; None if there is none.
type PollReply = Option<u64>;

/// Byte of a spool signal that is forced, and the time of the store then: a forced end takes less
/// than five seconds.
const FORCED: u8 = 1;
const FORCED_LIMIT: Duration = Duration::from_secs(1);
/// Time limit of a statistics request: the thread that answers has nothing else to do.
const STATS_TIMEOUT: Duration = Duration::from_millis(if cfg!(test) { 60_000 } else { 250 });
/// Maximum length of a statistics reply.
const MAX_STATS_LINE: u64 = 4096;

#[derive(Serialize, Deserialize)]
struct StatsReply {
    /// Byte of the request, which identifies its reply.
    asked: u8,
    traffic: RequestStats,
}

/// Child process of the fetcher; it exits when this control socket is closed.
struct FetcherProcess {
    control: Arc<UnixStream>,
    child: Mutex<Child>,
}

impl FetcherProcess {
    /// Waits for the exit of the process, which first tells the store that the writer has closed.
    fn stop(&self) {
        // A concurrent statistics request sees the end as well.
        let _ = self.control.shutdown(Shutdown::Both);
        let _ = self.child.lock().wait();
    }
}

/// Control connection to the fetcher, independent of the sockets of readers.
pub struct FetcherControl {
    /// Weak: does not keep the process alive.
    control: Weak<UnixStream>,
    process: Weak<FetcherProcess>,
    last_request: Mutex<u8>,
    /// Closed to start spooling, after a byte if that is forced; set if the archive is open for
    /// writing.
    spool_signal: Option<UnixStream>,
}

impl FetcherControl {
    /// Starts spooling: data that the store does not take in time is kept on this host, and
    /// barriers succeed. With `is_forced` the time is [`FORCED_LIMIT`] at most.
    pub fn spool_on_timeout(&self, is_forced: bool) {
        if let Some(mut spool_signal) = self.spool_signal.as_ref() {
            // If the other end is closed, the fetcher has exited.
            if is_forced {
                let _ = spool_signal.write_all(&[FORCED]);
            }
            let _ = spool_signal.shutdown(Shutdown::Both);
        }
    }

    /// Stops the fetcher before the storage is dropped; the storage fails from then on.
    pub fn stop(&self) {
        if let Some(process) = self.process.upgrade() {
            process.stop();
        }
    }

    /// Returns the request statistics; None if the fetcher does not answer at once or has exited.
    pub fn stats(&self) -> Option<RequestStats> {
        let control = self.control.upgrade()?;
        let mut asked = self.last_request.lock();
        *asked = asked.wrapping_add(1);
        (&*control).write_all(&[*asked]).ok()?;
        let until = Instant::now() + STATS_TIMEOUT;
        while Instant::now() < until {
            let mut line = Vec::new();
            // Byte by byte: further bytes belong to the next reply.
            let reader = BufReader::with_capacity(1, &*control);
            reader.take(MAX_STATS_LINE + 1).read_until(b'\n', &mut line).ok()?;
            line.pop_if(|last| *last == b'\n')?; // else too long, or cut
            let reply: StatsReply = serde_json::from_slice(&line).ok()?;
            // Others are answers that came too late.
            if reply.asked == *asked {
                return Some(reply.traffic);
            }
        }
        None
    }
}

/// Polls the fetcher for newer versions of the archive.
pub struct VersionPoller {
    socket: UnixStream,
    /// Sequence of the version that was accepted last.
    sequence: u64,
    /// Weak: does not keep the process alive.
    process: Weak<FetcherGuard>,
}

impl VersionPoller {
    /// Passes a newer version to `take`, if there is one, and returns whether there was. A version
    /// that `take` refuses is offered again.
    ///
    /// # Errors
    /// Errors of requests and of `take`; `Io` when the process is gone.
    pub fn poll(&mut self, take: &mut dyn FnMut(Arc<dyn Storage>) -> Result<()>) -> Result<bool> {
        let gone = |error: io::Error| Error::io("the process that fetches has ended", error);
        (&self.socket).write_all(&self.sequence.to_le_bytes()).map_err(gone)?;
        let (first, sockets) = receive(&self.socket, READ_SOCKETS).map_err(gone)?;
        let mut line = vec![first];
        // Nothing comes behind it.
        BufReader::new(&self.socket).take(1 << 20).read_until(b'\n', &mut line).map_err(gone)?;
        let reply: Reply<PollReply> = serde_json::from_slice(&line).map_err(|error| gone(error.into()))?;
        let Some(version) = reply.map_err(|(code, sentence)| error_of(code, sentence))? else { return Ok(false) };
        let guard = self.process.upgrade().ok_or_else(|| gone(io::ErrorKind::BrokenPipe.into()))?;
        take(Arc::new(IpcStorage::new(sockets, false)?.with_atomic_barrier().with_keeper(guard)))?;
        self.sequence = version;
        Ok(true)
    }
}

/// Archive opened in a fetcher process.
pub struct FetcherConnection {
    pub storage: IpcStorage,
    pub control: FetcherControl,
    /// Set if the archive is open for reading and can gain newer versions.
    pub versions: Option<VersionPoller>,
    /// Message for the user.
    pub notice: Option<String>,
}

/// Opens the archive in a process of its own: `command`, which calls [`serve_fetcher`] with its
/// standard input.
///
/// # Errors
/// As [`crate::open`]; `Io` when the process cannot be started.
pub fn open_in_fetcher(
    command: &mut Command,
    address: &Address,
    options: &RemoteOptions,
    access: Access,
) -> Result<FetcherConnection> {
    let cannot = |error: io::Error| Error::io("cannot start the process that fetches", error);
    for variable in BrokerScope::of(Some(address)).foreign_secrets() {
        command.env_remove(variable);
    }
    let (control, theirs) = UnixStream::pair().map_err(cannot)?;
    let child = command.stdin(OwnedFd::from(theirs)).stdout(Stdio::null()).spawn().map_err(cannot)?;
    let process = Arc::new(FetcherProcess { control: Arc::new(control), child: Mutex::new(child) });
    let Handshake { sockets, ordered, control, news, notice } = handshake(&process.control, address, options, access)?;
    let control = FetcherControl { process: Arc::downgrade(&process), ..control };
    let borrowed = IpcStorage::new(sockets, access != Access::Read)?;
    let guard = Arc::new(FetcherGuard(process));
    let news =
        news.map(|(socket, version)| VersionPoller { socket, sequence: version, process: Arc::downgrade(&guard) });
    let storage = if ordered { borrowed.with_atomic_barrier() } else { borrowed }.with_keeper(guard);
    Ok(FetcherConnection { storage, control, versions: news, notice })
}

/// Stops the fetcher when the last storage is dropped.
struct FetcherGuard(Arc<FetcherProcess>);

impl Drop for FetcherGuard {
    fn drop(&mut self) {
        self.0.stop();
    }
}

/// Result of a successful open in the fetcher.
struct Handshake {
    /// One socket per reader.
    sockets: Vec<UnixStream>,
    ordered: bool,
    control: FetcherControl,
    /// Socket for polls, and the sequence of the current version.
    news: Option<(UnixStream, u64)>,
    notice: Option<String>,
}

/// Sends the open request and waits for its reply.
fn handshake(
    control: &Arc<UnixStream>,
    address: &Address,
    options: &RemoteOptions,
    access: Access,
) -> Result<Handshake> {
    let cannot = |error: io::Error| Error::io("cannot start the process that fetches", error);
    let (mut ours, theirs) = socket_pairs(TOTAL_SOCKETS).map_err(cannot)?;
    let directories = [options.cache_directory.clone(), options.spool_directory.clone()];
    let request = OpenRequest { address: address.text(), options: options.clone(), directories, access };
    send(control, &request, &theirs).map_err(cannot)?;
    drop(theirs);
    let news = ours.split_off(READ_SOCKETS).pop();
    let mut answer = String::new();
    BufReader::new(&**control).read_line(&mut answer).map_err(cannot)?;
    let reply: Reply<OpenReply> = serde_json::from_str(&answer).map_err(|error| cannot(error.into()))?;
    let OpenReply { ordered, version, notice } = reply.map_err(|(code, sentence)| error_of(code, sentence))?;
    control
        .set_read_timeout(Some(STATS_TIMEOUT))
        .and_then(|()| control.set_write_timeout(Some(STATS_TIMEOUT)))
        .map_err(cannot)?;
    let (control, process) = (Arc::downgrade(control), Weak::new());
    let (news, spool_signal) = if access == Access::Read { (news, None) } else { (None, news) };
    let control = FetcherControl { control, process, last_request: Mutex::new(0), spool_signal };
    Ok(Handshake { sockets: ours, ordered, control, news: news.zip(version), notice })
}

/// Runs the fetcher: opens the archive of the request and serves until the other side exits. Calls
/// `confine` before the first network request; after that, `broker` looks up names and credentials,
/// which this process cannot.
///
/// # Errors
/// When the message is not an open request. An error of the open is sent to the other side.
pub fn serve_fetcher(
    control: UnixStream,
    broker: Option<Broker>,
    confine: impl FnOnce(&FetcherReach),
) -> io::Result<()> {
    let (first, mut sockets) = receive(&control, TOTAL_SOCKETS)?;
    let mut line = vec![first];
    BufReader::new(&control).take(1 << 20).read_until(b'\n', &mut line)?;
    let mut request: OpenRequest = serde_json::from_slice(&line)?;
    if let Some(broker) = &broker {
        broker.set_scope(BrokerScope::of(Address::parse(request.address.as_ref()).ok().flatten().as_ref()))?;
    }
    request.options.broker = broker;
    [request.options.cache_directory, request.options.spool_directory] = std::mem::take(&mut request.directories);
    confine(&FetcherReach::of(&request.address, &request.options, request.access != Access::Read));
    let OpenArchive { storage, stats, follower, writer } = match OpenArchive::open(&request) {
        Ok(served) => served,
        Err(error) => return send(&control, &Reply::<OpenReply>::Err(code_of(&error)), &[]),
    };
    let version = follower.as_ref().map(Follower::sequence);
    let notice = writer.as_ref().and_then(|writer| writer.notice());
    let opened = OpenReply { ordered: storage.has_atomic_barrier(), version, notice };
    send(&control, &Reply::Ok(opened), &[])?;
    let news = sockets.pop();
    spawn_servers(&storage, sockets)?;
    // A version without readers must be freed.
    drop(storage);
    match (follower, &writer, news) {
        (Some(follower), _, Some(news)) => {
            thread::Builder::new().name("follow".into()).spawn(move || answer_polls(follower, news))?;
        }
        (None, Some(writer), Some(mut spool_signal)) => {
            let writer = Arc::downgrade(writer);
            let wait = move || {
                let is_forced = matches!(spool_signal.read(&mut [0]), Ok(1));
                if let Some(writer) = writer.upgrade() {
                    writer.spool_on_timeout(is_forced.then_some(FORCED_LIMIT));
                }
            };
            thread::Builder::new().name("leave".into()).spawn(wait)?;
        }
        _ => {}
    }
    // Until the other side is gone.
    let mut asked = [0];
    while matches!((&control).read(&mut asked), Ok(1)) {
        // A client that does not wait for the reply may have exited.
        if send(&control, &StatsReply { asked: asked[0], traffic: stats() }, &[]).is_err() {
            break;
        }
    }
    // Requests in progress make their last attempts: the final record must be the last one.
    if let Some(writer) = writer {
        writer.close();
    }
    Ok(())
}

/// Removes expired objects while the mount serves, from its beginning. Nothing awaits the thread:
/// it ends with the writer, or with the process.
fn remove_expired_periodically(writer: &Arc<BucketWriter>) -> Result<()> {
    let writer = Arc::downgrade(writer);
    let remove = move || {
        while let Some(writer) = writer.upgrade() {
            while writer.remove_expired() {}
            drop(writer);
            thread::sleep(CLEAN_INTERVAL);
        }
    };
    let thread = thread::Builder::new().name("expired".into()).spawn(remove);
    thread.map(drop).map_err(|error| Error::io("cannot start a thread", error))
}

fn spawn_servers(storage: &Arc<dyn Storage>, sockets: Vec<UnixStream>) -> io::Result<()> {
    for socket in sockets {
        let storage = storage.clone();
        thread::Builder::new().name("serve".into()).spawn(move || serve_storage(&*storage, socket))?;
    }
    Ok(())
}

/// Answers polls until the client closes the socket.
fn answer_polls(mut follower: Follower, news: UnixStream) {
    let mut shown = [0; 8];
    while (&news).read_exact(&mut shown).is_ok() {
        let polled = follower.poll().and_then(|()| {
            if follower.sequence() <= u64::from_le_bytes(shown) {
                return Ok((None, Vec::new()));
            }
            let cannot = |error| Error::io("cannot serve the newer version", error);
            let (ours, theirs) = socket_pairs(READ_SOCKETS).map_err(cannot)?;
            let file: Arc<dyn Storage> = follower.file().clone();
            spawn_servers(&file, ours).map_err(cannot)?;
            Ok((Some(follower.sequence()), theirs))
        });
        let (reply, sockets): (Reply<PollReply>, _) = match polled {
            Ok((version, sockets)) => (Ok(version), sockets),
            Err(error) => (Err(code_of(&error)), Vec::new()),
        };
        if send(&news, &reply, &sockets).is_err() {
            return;
        }
    }
}

/// CA certificate paths of TLS libraries: readable and not secret. `/etc/ssl/private` is not below
/// them.
const CA_PATHS: [&str; 10] = [
    "/etc/ssl/certs",
    "/etc/ssl/cert.pem",
    "/etc/ssl/ca-bundle.pem",
    "/etc/pki/tls/certs",
    "/etc/pki/tls/cert.pem",
    "/etc/pki/ca-trust/extracted",
    "/etc/ca-certificates/extracted",
    "/usr/share/ca-certificates",
    "/usr/local/share/ca-certificates",
    "/var/lib/ca-certificates",
];
/// Paths that show whether another writer of this machine is alive. A confined process cannot read
/// the memory of others through /proc.
const LIVENESS_PATHS: [&str; 2] = ["/proc", "/etc/machine-id"];

/// Files and ports that the sandbox must allow.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FetcherReach {
    /// Directories in which files are created, written and removed.
    pub written: Vec<PathBuf>,
    /// Files and directory trees that are read.
    pub read: Vec<PathBuf>,
    /// Directory of the archive's objects, which is also one of the paths above.
    pub objects: Option<PathBuf>,
    /// TCP ports of servers; None for all, since a web server may redirect anywhere.
    pub ports: Option<Vec<u16>>,
}

impl FetcherReach {
    /// Lists the accessible paths and creates missing cache directories, which a confined process
    /// cannot.
    pub(crate) fn of(address: &str, options: &RemoteOptions, writes: bool) -> FetcherReach {
        let address = Address::parse(address.as_ref()).ok().flatten();
        let cache = options.cache_directory.clone().filter(|_| options.cache_bytes != Some(0));
        let spool = options.spool_directory.clone().filter(|_| writes || options.unsent);
        let mut written: Vec<PathBuf> = cache.into_iter().chain(spool).collect();
        for directory in &written {
            // The code that needs the directory reports the error.
            let _ = create_private_dir(directory);
        }
        let mut read: Vec<PathBuf> = LIVENESS_PATHS.iter().map(PathBuf::from).collect();
        let mut objects = None;
        match &address {
            Some(Address::Directory(url)) => {
                objects = url.to_file_path().ok();
                let granted = if writes { &mut written } else { &mut read };
                granted.extend(objects.clone());
            }
            _ => {
                let named = ["SSL_CERT_FILE", "SSL_CERT_DIR"].into_iter().filter_map(variable);
                let named = named.flat_map(|list| list.split(':').map(PathBuf::from).collect::<Vec<_>>());
                let bundle = match &address {
                    Some(Address::Bucket { cloud: Cloud::S3, .. }) => {
                        credentials::region_endpoint(options.broker.as_ref()).ok().and_then(|place| place.ca_bundle)
                    }
                    _ => None,
                };
                read.extend(CA_PATHS.iter().map(PathBuf::from).chain(named).chain(bundle));
            }
        }
        read.retain(|path| Path::new(path).exists());
        let ports = address.and_then(|address| ports(&address, options));
        FetcherReach { written, read, objects, ports }
    }
}

/// Returns the allowed ports; None for all, if the port is unknown: the open reports the reason.
fn ports(address: &Address, options: &RemoteOptions) -> Option<Vec<u16>> {
    let endpoint = match address {
        Address::Web(_) => return None,
        Address::Directory(_) => return Some(Vec::new()),
        Address::Bucket { cloud: Cloud::S3, .. } => {
            credentials::region_endpoint(options.broker.as_ref()).ok()?.endpoint
        }
        Address::Bucket { cloud: Cloud::Google, .. } => variable("STORAGE_EMULATOR_HOST"),
        Address::Bucket { cloud: Cloud::Azure, bucket, .. } => {
            Some(azure::account(bucket, options.broker.as_ref(), Some(Duration::ZERO)).ok()?.endpoint)
        }
    };
    let server = match endpoint {
        Some(endpoint) => Url::parse(&endpoint).ok()?.port_or_known_default()?,
        None => 443,
    };
    let proxy = ureq::Proxy::try_from_env();
    Some([server].into_iter().chain(proxy.map(|proxy| proxy.port())).collect())
}

/// Maximum request length in bytes: a host name has at most 253.
const MAX_REQUEST: u64 = 4096;
/// Maximum concurrent requests; more are dropped.
const MAX_CONCURRENT: usize = 64;

/// Serves requests within the scope that the fetcher sends first, until the fetcher exits.
///
/// # Errors
/// The errors of starting a thread, and a first message that is not a scope.
pub fn serve_broker(control: UnixStream) -> io::Result<()> {
    let Ok((first, _)) = receive(&control, 0) else { return Ok(()) };
    let mut line = vec![first];
    BufReader::with_capacity(1, &control).take(MAX_REQUEST).read_until(b'\n', &mut line)?;
    let scope: BrokerScope = serde_json::from_slice(&line)?;
    let active = Arc::new(AtomicUsize::new(0));
    while let Ok((_, mut sockets)) = receive(&control, 1) {
        // The rest of the line.
        if BufReader::with_capacity(1, &control).take(MAX_REQUEST).read_until(b'\n', &mut Vec::new()).is_err() {
            break;
        }
        let Some(socket) = sockets.pop() else { continue };
        if active.fetch_add(1, Ordering::SeqCst) >= MAX_CONCURRENT {
            active.fetch_sub(1, Ordering::SeqCst);
            continue;
        }
        let count = Arc::clone(&active);
        let scope = scope.clone();
        let work = move || {
            // The client may have exited.
            let _ = answer_request(&socket, &scope);
            count.fetch_sub(1, Ordering::SeqCst);
        };
        thread::Builder::new().name("question".into()).spawn(work)?;
    }
    Ok(())
}

fn answer_request(mut socket: &UnixStream, scope: &BrokerScope) -> io::Result<()> {
    let mut question = Vec::new();
    socket.take(MAX_REQUEST).read_to_end(&mut question)?;
    let request = serde_json::from_slice(&question)?;
    if !scope.allows(&request) {
        return Err(io::ErrorKind::PermissionDenied.into());
    }
    let answer = match request {
        BrokerRequest::Addresses { host, port } => {
            let found = (host.as_str(), port).to_socket_addrs().map(Iterator::collect::<Vec<_>>);
            serde_json::to_vec(&found.map_err(|error| error.to_string()))
        }
        BrokerRequest::Place => {
            serde_json::to_vec(&credentials::region_endpoint(None).map_err(|error| error.to_string()))
        }
        BrokerRequest::Keys { google } => {
            let cloud = if google { Cloud::Google } else { Cloud::S3 };
            let found = s3::credential_lookup(cloud, None)().map(|keys| keys.as_ref().map(credentials::to_key_pair));
            serde_json::to_vec(&found.map_err(LookupFailure::from))
        }
        BrokerRequest::Login => {
            let BrokerScope::Web(host) = scope else { return Err(io::ErrorKind::PermissionDenied.into()) };
            let found = web_login::login_lookup(host.clone(), None)();
            let header = found.map(|login| login.map(|login| Zeroizing::new(login.header().to_owned())));
            let header = header.map_err(LookupFailure::from);
            serde_json::to_vec(&header.as_ref().map(|header| header.as_deref()))
        }
        BrokerRequest::Account => serde_json::to_vec(&AzureAccount::with_secret().map_err(LookupFailure::from)),
    }?;
    socket.write_all(&Zeroizing::new(answer))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::DirectoryTrust;
    use crate::bucket::{Bucket, DirectoryStore};

    #[test]
    fn what_was_asked_is_told_beside_the_readers_and_to_nobody_when_the_process_hangs() {
        let place = tempfile::tempdir().unwrap();
        let options =
            RemoteOptions { cache_directory: None, timeout: Some(Duration::ZERO), ..RemoteOptions::default() };
        let directory = DirectoryStore::open(place.path(), Some(DirectoryTrust::Trusted)).unwrap();
        let mut bucket = Bucket::open(Box::new(directory), "file:///a".into(), &options, false).unwrap();
        bucket.create_empty().unwrap().write_at(0, &vec![7; 12 << 20]).unwrap();
        bucket.publish().unwrap();
        let (ours, theirs) = UnixStream::pair().unwrap();
        let serving = thread::spawn(|| serve_fetcher(theirs, None, |_| {}));
        let control = Arc::new(ours);
        let address = Address::parse(format!("file://{}", place.path().display()).as_ref()).unwrap().unwrap();
        let Handshake { sockets, ordered, control: client, .. } =
            handshake(&control, &address, &options, Access::Read).unwrap();
        assert!(ordered);
        let borrowed = IpcStorage::new(sockets, false).unwrap();
        // The process answers within a limit or not at all.
        let stats = || (0..200).find_map(|_| client.stats()).unwrap();
        let before = stats();
        // The newest record's number by a list; the marker, the record, and what the file begins
        // with.
        assert!(before.lists == 1 && before.reads >= 3 && before.offline_since.is_none(), "{before:?}");
        borrowed.read_at(8 << 20, &mut [0; 4096]).unwrap();
        borrowed.read_at(8 << 20, &mut [0; 4096]).unwrap();
        let after = stats();
        assert!(after.reads > before.reads && after.bytes >= before.bytes + (256 << 10), "{after:?}");
        assert!(after.memory_hits > before.memory_hits && after.disk_hits == 0, "{after:?}");
        // Whoever asks is not what keeps the process.
        drop((borrowed, control));
        assert!(client.stats().is_none());
        serving.join().unwrap().unwrap();
        let (ours, silent) = UnixStream::pair().unwrap();
        ours.set_read_timeout(Some(Duration::from_millis(1))).unwrap();
        let ours = Arc::new(ours);
        let client = FetcherControl {
            control: Arc::downgrade(&ours),
            process: Weak::new(),
            last_request: Mutex::new(0),
            spool_signal: None,
        };
        assert!(client.stats().is_none());
        // It goes on, and its late answer is not taken for the one to the next question.
        let tell = |asked, reads| {
            let reply = StatsReply { asked, traffic: RequestStats { reads, ..RequestStats::default() } };
            (&silent).write_all(&[&serde_json::to_vec(&reply).unwrap()[..], b"\n"].concat()).unwrap();
        };
        tell(1, 10);
        tell(2, 20);
        assert_eq!(client.stats().map(|traffic| traffic.reads), Some(20));
        (&silent).write_all(&vec![b'x'; 100_000]).unwrap();
        assert!(client.stats().is_none(), "what never ends is not waited for");
    }

    #[test]
    fn a_directory_needs_no_port_and_a_cache_is_made() {
        let place = tempfile::tempdir().unwrap();
        let at = |name: &str| place.path().join(name);
        let options = RemoteOptions {
            cache_directory: Some(at("a/cache")),
            spool_directory: Some(at("a/unsent")),
            ..RemoteOptions::default()
        };
        let reach = |address: &str, options: &RemoteOptions, writes| FetcherReach::of(address, options, writes);
        let directory = format!("file://{}", at("objects").display());
        let found = reach(&directory, &options, true);
        assert_eq!(found.written, [at("a/cache"), at("a/unsent"), at("objects")]);
        assert_eq!(found.ports, Some(Vec::new()));
        assert!(at("a/cache").is_dir() && at("a/unsent").is_dir() && !at("objects").exists());
        create_private_dir(&at("objects")).unwrap();
        let reading = reach(&directory, &options, false);
        assert_eq!((reading.written, reading.objects), (vec![at("a/cache")], Some(at("objects"))));
        assert!(reading.read.contains(&at("objects")));
        let reading = reach("https://host.example/a.lbx", &RemoteOptions { cache_bytes: Some(0), ..options }, false);
        assert_eq!((reading.written, reading.ports), (Vec::new(), None));
        assert!(reading.read.contains(&PathBuf::from("/proc")));
    }

    #[test]
    fn what_is_asked_is_what_this_process_finds() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let answering = thread::spawn(move || serve_broker(theirs));
        let broker = Broker::new(ours);
        broker.set_scope(BrokerScope::Store(Cloud::S3)).unwrap();
        let limit = Some(Duration::from_secs(60));
        let found = broker.addresses("127.0.0.1", 80, limit).unwrap();
        assert_eq!(found, ["127.0.0.1:80".parse().unwrap()]);
        assert!(broker.addresses("no host has spaces", 80, limit).is_err());
        let place = credentials::region_endpoint(None).unwrap();
        assert_eq!(credentials::region_endpoint(Some(&broker)).unwrap(), place);
        // Many at once, each with its own answer.
        thread::scope(|scope| {
            for port in 1..20 {
                let broker = &broker;
                scope.spawn(move || {
                    let found = broker.addresses("::1", port, limit).unwrap();
                    assert_eq!((found.len(), found[0].port()), (1, port));
                });
            }
        });
        drop(broker);
        answering.join().unwrap().unwrap();
    }

    #[test]
    fn a_broker_answers_within_the_scope_of_its_archive_alone() {
        let scope_of = |address: &str| BrokerScope::of(Address::parse(address.as_ref()).unwrap().as_ref());
        let requests = [
            BrokerRequest::Addresses { host: "127.0.0.1".into(), port: 80 },
            BrokerRequest::Place,
            BrokerRequest::Keys { google: false },
            BrokerRequest::Keys { google: true },
            BrokerRequest::Account,
            BrokerRequest::Login,
        ];
        for (address, expected) in [
            ("file:///srv/a", [false; 6]),
            ("https://host.example/a.lbx", [true, false, false, false, false, true]),
            ("s3://bucket/a", [true, true, true, false, false, false]),
            ("gs://bucket/a", [true, false, false, true, false, false]),
            ("az://bucket/a", [true, false, false, false, true, false]),
        ] {
            assert_eq!(requests.each_ref().map(|request| scope_of(address).allows(request)), expected, "{address}");
        }
        assert_eq!(scope_of("file:///srv/a").foreign_secrets().count(), 11);
        assert_eq!(scope_of("s3://bucket/a").foreign_secrets().filter(|name| name.starts_with("AWS_")).count(), 0);
        assert!(scope_of("s3://bucket/a").foreign_secrets().any(|name| name == "GS_SECRET_ACCESS_KEY"));
        let (ours, theirs) = UnixStream::pair().unwrap();
        let answering = thread::spawn(move || serve_broker(theirs));
        let broker = Broker::new(ours);
        broker.set_scope(scope_of("https://host.example/a.lbx")).unwrap();
        broker.addresses("127.0.0.1", 80, None).unwrap();
        assert!(
            broker.region_endpoint().is_err() && broker.account::<AzureAccount>().is_err() && broker.login().is_ok()
        );
        assert!(s3::credential_lookup(Cloud::S3, Some(broker.clone()))().is_err());
        broker.set_scope(BrokerScope::Store(Cloud::S3)).unwrap();
        assert!(s3::credential_lookup(Cloud::S3, Some(broker.clone()))().is_err(), "the scope does not change");
        drop(broker);
        answering.join().unwrap().unwrap();
    }

    #[test]
    fn a_broker_that_is_gone_or_hangs_is_an_error() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let broker = Broker::new(ours);
        let waited = broker.addresses("127.0.0.1", 80, Some(Duration::from_millis(1)));
        assert_eq!(waited.unwrap_err().kind(), io::ErrorKind::WouldBlock, "nobody answers");
        drop(theirs);
        assert!(broker.addresses("127.0.0.1", 80, None).is_err());
        assert!(s3::credential_lookup(Cloud::S3, Some(broker))().is_err());
    }
}
