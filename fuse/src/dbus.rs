//! Minimal D-Bus client (calls with string arguments, replies, signals, and one file descriptor),
//! the client of logind, which announces sleeps of the machine and delays them briefly, and the
//! relay of its signals from the mount agent to the confined daemon.
//!
//! Hand-written, because the D-Bus crates end the connection at a malformed message or bring
//! threads of their own, and this needs two calls and one signal. The specification is
//! dbus.freedesktop.org/doc/dbus-specification.html; its sections are cited.
//!
//! On the system bus root may start programs and change the machine. The daemon therefore gets no
//! connection to it: the agent holds the connection, and the daemon sends one byte per request.

use std::borrow::Cow;
use std::collections::VecDeque;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::thread::{self, JoinHandle};
use std::time::Duration;

use lockbox_host::control;
use nix::unistd::geteuid;
use percent_encoding::percent_decode_str;
use rustix::net::SocketAddrUnix;

use crate::mount::{receive_descriptor, send_descriptor};

/// Longest accepted message; ours have a few hundred bytes.
const MAX_MESSAGE: usize = 64 << 10;
/// Limit of the protocol.
const MAX_WIRE_MESSAGE: usize = 128 << 20;
/// Maximum number of signals queued while waiting for a reply, which bounds the memory that a flood
/// of them takes.
const MAX_QUEUED_SIGNALS: usize = 256;
const REPLY_TIMEOUT: Duration = Duration::from_secs(10);
/// Bytes of the header before its fields, including their length.
const FIXED: usize = 16;
/// Header fields (section "Header Fields").
const PATH: usize = 1;
const INTERFACE: usize = 2;
const MEMBER: usize = 3;
const ERROR_NAME: usize = 4;
const REPLY_SERIAL: u8 = 5;
const DESTINATION: usize = 6;
const SENDER: usize = 7;
const SIGNATURE: usize = 8;

const CALL: u8 = 1;
const REPLY: u8 = 2;
const ERROR: u8 = 3;
const SIGNAL: u8 = 4;

#[cfg(target_endian = "little")]
const ENDIAN: u8 = b'l';
#[cfg(target_endian = "big")]
const ENDIAN: u8 = b'B';

/// Object whose methods are called.
struct BusObject {
    name: &'static str,
    path: &'static str,
    interface: &'static str,
}

const BUS: BusObject =
    BusObject { name: "org.freedesktop.DBus", path: "/org/freedesktop/DBus", interface: "org.freedesktop.DBus" };
const LOGIND: BusObject = BusObject {
    name: "org.freedesktop.login1",
    path: "/org/freedesktop/login1",
    interface: "org.freedesktop.login1.Manager",
};

#[derive(Debug, Default)]
struct BusMessage {
    kind: u8,
    reply_to: u32,
    /// Header fields with a text, by their number.
    fields: [String; SIGNATURE + 1],
    body: Vec<u8>,
    descriptor: Option<OwnedFd>,
}

impl BusMessage {
    /// Returns a reader of the body, if its first value is of this type.
    fn body(&self, kind: char) -> Option<MessageReader<'_>> {
        self.fields[SIGNATURE].starts_with(kind).then_some(MessageReader { bytes: &self.body, at: 0 })
    }

    fn first_string(&self) -> Option<String> {
        self.body('s')?.read_string()
    }

    fn first_bool(&self) -> Option<bool> {
        self.body('b')?.read_u32().map(|number| number != 0)
    }
}

struct Bus {
    stream: UnixStream,
    serial: u32,
    /// Signals that came while waiting for a reply.
    queued_signals: VecDeque<BusMessage>,
}

/// Connects to the first address of the list that answers (section "Server Addresses").
fn connect(addresses: &str) -> io::Result<UnixStream> {
    let mut last = io::Error::new(io::ErrorKind::InvalidInput, format!("no usable address: {addresses}"));
    for address in addresses.split(';').filter_map(parse_address) {
        match control::connect_within(&address?, REPLY_TIMEOUT) {
            Ok(stream) => return Ok(stream),
            Err(error) => last = error,
        }
    }
    Err(last)
}

impl Bus {
    /// Authenticates over a new connection.
    fn handshake(mut stream: UnixStream) -> io::Result<Bus> {
        stream.set_read_timeout(Some(REPLY_TIMEOUT))?;
        stream.set_write_timeout(Some(REPLY_TIMEOUT))?;
        let name = lockbox_terminal::hex(geteuid().to_string().as_bytes());
        stream.write_all(format!("\0AUTH EXTERNAL {name}\r\n").as_bytes())?;
        expect(&mut stream, "OK ")?;
        stream.write_all(b"NEGOTIATE_UNIX_FD\r\n")?;
        expect(&mut stream, "AGREE_UNIX_FD")?;
        stream.write_all(b"BEGIN\r\n")?;
        let mut bus = Bus { stream, serial: 0, queued_signals: VecDeque::new() };
        bus.call(&BUS, "Hello", &[])?;
        Ok(bus)
    }

    /// Calls a method and waits for the reply. Errors: failures of the connection, and error
    /// replies, by their name.
    fn call(&mut self, object: &BusObject, method: &str, arguments: &[&str]) -> io::Result<BusMessage> {
        self.serial += 1;
        self.stream.write_all(&encode(self.serial, object, method, arguments))?;
        self.stream.set_read_timeout(Some(REPLY_TIMEOUT))?;
        loop {
            let message = self.receive()?;
            match message.kind {
                SIGNAL if self.queued_signals.len() < MAX_QUEUED_SIGNALS => self.queued_signals.push_back(message),
                REPLY if message.reply_to == self.serial => return Ok(message),
                ERROR if message.reply_to == self.serial => {
                    let detail = message.first_string().unwrap_or_default();
                    return Err(io::Error::other(format!("{}: {detail}", message.fields[ERROR_NAME])));
                }
                // Calls to us, and replies that came too late.
                _ => {}
            }
        }
    }

    /// Waits for the next signal, without a limit.
    fn next_signal(&mut self) -> io::Result<BusMessage> {
        if let Some(message) = self.queued_signals.pop_front() {
            return Ok(message);
        }
        self.stream.set_read_timeout(None)?;
        loop {
            let message = self.receive()?;
            if message.kind == SIGNAL {
                return Ok(message);
            }
        }
    }

    /// Returns the next supported message. Any program of any user may send signals: in the other
    /// byte order, longer than ours, or with unknown fields. These are skipped. Otherwise one of
    /// them would end the connection, and sleeps of the machine would go unnoticed.
    fn receive(&mut self) -> io::Result<BusMessage> {
        loop {
            let mut bytes = vec![0; FIXED];
            let first = self.read_full(&mut bytes)?;
            let total = total_length(&bytes)?;
            if bytes[0] != ENDIAN || total > MAX_MESSAGE {
                io::copy(&mut (&self.stream).take((total - FIXED) as u64), &mut io::sink())?;
                continue;
            }
            bytes.resize(total, 0);
            let later = self.read_full(&mut bytes[FIXED..])?;
            if let Some(message) = decode(&bytes) {
                return Ok(BusMessage { descriptor: first.or(later), ..message });
            }
        }
    }

    /// Reads until `buffer` is full, and returns a descriptor that was received with it.
    fn read_full(&mut self, mut buffer: &mut [u8]) -> io::Result<Option<OwnedFd>> {
        let mut descriptor = None;
        while !buffer.is_empty() {
            let (count, descriptors) = control::receive_with_descriptors(&self.stream, buffer)?;
            descriptor = descriptors.into_iter().next().or(descriptor);
            if count == 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            buffer = &mut buffer[count..];
        }
        Ok(descriptor)
    }
}

/// Parses `unix:path=` and `unix:abstract=`; returns None for other addresses.
fn parse_address(address: &str) -> Option<io::Result<SocketAddrUnix>> {
    address.strip_prefix("unix:")?.split(',').find_map(|pair| {
        let (key, value) = pair.split_once('=')?;
        let value: Cow<'_, [u8]> = percent_decode_str(value).into();
        match key {
            "path" => Some(SocketAddrUnix::new(&*value).map_err(io::Error::from)),
            "abstract" => Some(SocketAddrUnix::new_abstract_name(&value).map_err(io::Error::from)),
            _ => None,
        }
    })
}

/// Reads one line of the authentication (section "Authentication Protocol").
fn expect(stream: &mut UnixStream, beginning: &str) -> io::Result<()> {
    let mut line = Vec::new();
    let mut byte = [0];
    // Byte by byte, because messages follow the last line.
    while !line.ends_with(b"\r\n") {
        stream.read_exact(&mut byte)?;
        line.push(byte[0]);
        if line.len() > 1024 {
            return Err(io::ErrorKind::InvalidData.into());
        }
    }
    if line.starts_with(beginning.as_bytes()) {
        return Ok(());
    }
    Err(io::Error::new(io::ErrorKind::PermissionDenied, String::from_utf8_lossy(line.trim_ascii_end()).into_owned()))
}

/// Encodes a call with string arguments (section "Message Format").
fn encode(serial: u32, object: &BusObject, method: &str, arguments: &[&str]) -> Vec<u8> {
    let mut body = Vec::new();
    for argument in arguments {
        pad(&mut body, 4);
        put_text(&mut body, argument);
    }
    let mut fields = Vec::new();
    for (code, kind, value) in [
        (PATH, b'o', object.path),
        (DESTINATION, b's', object.name),
        (INTERFACE, b's', object.interface),
        (MEMBER, b's', method),
    ] {
        pad(&mut fields, 8);
        fields.extend_from_slice(&[code as u8, 1, kind, 0]);
        put_text(&mut fields, value);
    }
    if !arguments.is_empty() {
        pad(&mut fields, 8);
        // Four strings at most.
        fields.extend_from_slice(&[SIGNATURE as u8, 1, b'g', 0, arguments.len() as u8]);
        fields.extend(arguments.iter().map(|_| b's').chain([0]));
    }
    let mut message = vec![ENDIAN, CALL, 0, 1];
    for number in [body.len() as u32, serial, fields.len() as u32] {
        message.extend_from_slice(&number.to_ne_bytes());
    }
    message.extend_from_slice(&fields);
    pad(&mut message, 8);
    message.extend_from_slice(&body);
    message
}

fn pad(bytes: &mut Vec<u8>, boundary: usize) {
    bytes.resize(bytes.len().next_multiple_of(boundary), 0);
}

fn put_text(bytes: &mut Vec<u8>, text: &str) {
    bytes.extend_from_slice(&(text.len() as u32).to_ne_bytes());
    bytes.extend_from_slice(text.as_bytes());
    bytes.push(0);
}

/// Returns the length of the message that begins with these bytes, in either byte order.
fn total_length(fixed: &[u8]) -> io::Result<usize> {
    let number = |at: usize| {
        let bytes: [u8; 4] = fixed.get(at..at + 4)?.try_into().ok()?;
        match fixed.first()? {
            b'l' => Some(u32::from_le_bytes(bytes) as usize),
            b'B' => Some(u32::from_be_bytes(bytes) as usize),
            _ => None,
        }
    };
    let total = || number(12)?.checked_add(FIXED)?.next_multiple_of(8).checked_add(number(4)?);
    total()
        .filter(|&total| fixed.get(3) == Some(&1) && total <= MAX_WIRE_MESSAGE)
        .ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, "malformed D-Bus message"))
}

fn decode(bytes: &[u8]) -> Option<BusMessage> {
    let end = FIXED + MessageReader { bytes, at: 12 }.read_u32()? as usize;
    let mut reader = MessageReader { bytes: bytes.get(..end)?, at: FIXED };
    let body = bytes.get(end.next_multiple_of(8)..).unwrap_or_default().to_vec();
    let mut message = BusMessage { kind: bytes[1], body, ..BusMessage::default() };
    while reader.at < end {
        reader.at = reader.at.next_multiple_of(8);
        let code = reader.take(1)?[0];
        let text = match reader.read_signature()?.as_str() {
            "s" | "o" => reader.read_string()?,
            "g" => reader.read_signature()?,
            "u" => {
                let number = reader.read_u32()?;
                if code == REPLY_SERIAL {
                    message.reply_to = number;
                }
                continue;
            }
            _ => return None,
        };
        if let Some(field) = message.fields.get_mut(usize::from(code)) {
            *field = text;
        }
    }
    Some(message)
}

/// Reads values of a message, within its bounds.
struct MessageReader<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> MessageReader<'a> {
    fn take(&mut self, length: usize) -> Option<&'a [u8]> {
        let taken = self.bytes.get(self.at..self.at.checked_add(length)?)?;
        self.at += length;
        Some(taken)
    }

    fn read_u32(&mut self) -> Option<u32> {
        self.at = self.at.next_multiple_of(4);
        Some(u32::from_ne_bytes(self.take(4)?.try_into().ok()?))
    }

    fn read_string(&mut self) -> Option<String> {
        let length = self.read_u32()? as usize;
        self.take_string(length)
    }

    fn read_signature(&mut self) -> Option<String> {
        let length = self.take(1)?[0];
        self.take_string(length.into())
    }

    /// Reads a string with its terminating zero.
    fn take_string(&mut self, length: usize) -> Option<String> {
        let text = self.take(length)?.to_vec();
        self.take(1)?;
        String::from_utf8(text).ok()
    }
}

/// Address of the system bus, unless `DBUS_SYSTEM_BUS_ADDRESS` is set.
const SYSTEM_BUS: &str = "unix:path=/run/dbus/system_bus_socket;unix:path=/var/run/dbus/system_bus_socket";
const SLEEP_SIGNAL: &str = "PrepareForSleep";

/// Connection that is subscribed to logind's sleep signal.
pub(crate) struct LogindClient {
    bus: Bus,
}

/// Subscribes to logind at the system bus. Fails if no bus answers, or it has no logind.
fn subscribe_to_sleeps() -> io::Result<LogindClient> {
    let address = std::env::var("DBUS_SYSTEM_BUS_ADDRESS").ok().filter(|address| !address.is_empty());
    connect(address.as_deref().unwrap_or(SYSTEM_BUS)).and_then(LogindClient::subscribe)
}

impl LogindClient {
    fn subscribe(stream: UnixStream) -> io::Result<LogindClient> {
        let mut bus = Bus::handshake(stream)?;
        let BusObject { name, path, interface } = LOGIND;
        let rule =
            format!("type='signal',sender='{name}',path='{path}',interface='{interface}',member='{SLEEP_SIGNAL}'");
        bus.call(&BUS, "AddMatch", &[&rule])?;
        Ok(LogindClient { bus })
    }

    /// Takes an inhibitor lock: the machine delays its sleep while the descriptor is open, for a
    /// few seconds at most (`InhibitDelayMaxSec=`).
    pub(crate) fn delay_sleep(&mut self) -> io::Result<OwnedFd> {
        let arguments = ["sleep", "lockbox", "unmounts an encrypted archive", "delay"];
        let answer = self.bus.call(&LOGIND, "Inhibit", &arguments)?;
        answer.descriptor.ok_or_else(|| io::Error::other("logind gave no lock"))
    }

    /// Waits until the machine is about to sleep (true) or woke up (false).
    pub(crate) fn next_sleep_signal(&mut self) -> io::Result<bool> {
        loop {
            let message = self.bus.next_signal()?;
            if message.fields[INTERFACE] == LOGIND.interface
                && message.fields[MEMBER] == SLEEP_SIGNAL
                && self.is_from_logind(&message)?
            {
                return message.first_bool().ok_or_else(|| io::Error::other("malformed signal of logind"));
            }
        }
    }

    /// Checks the sender: any program may send this signal, and the bus knows the owner of logind's
    /// name.
    fn is_from_logind(&mut self, message: &BusMessage) -> io::Result<bool> {
        let owner = self.bus.call(&BUS, "GetNameOwner", &[LOGIND.name])?.first_string();
        Ok(owner.is_some_and(|owner| owner == message.fields[SENDER]))
    }
}

/// Request for an inhibitor lock. Reply: a byte with the lock, or a byte and a line with the error.
const DELAY: u8 = b'd';
/// Request for the next signal. Reply: 1 before a sleep, 0 after it.
const NEXT_SIGNAL: u8 = b'n';
/// Maximum length of an error in bytes.
const MAX_ERROR: u64 = 4096;

/// Client of the relay, used by the daemon.
pub(crate) struct SleepClient(pub(crate) UnixStream);

impl SleepClient {
    /// Takes an inhibitor lock: the machine delays its sleep while the descriptor is open. Errors:
    /// failures of the bus and of logind, and the end of the agent.
    pub(crate) fn delay_sleep(&mut self) -> io::Result<OwnedFd> {
        self.0.write_all(&[DELAY])?;
        if let Some(lock) = receive_descriptor(&self.0) {
            return Ok(lock);
        }
        let mut error = String::new();
        BufReader::new(&self.0).take(MAX_ERROR).read_line(&mut error)?;
        match error.trim_end() {
            "" => Err(io::ErrorKind::UnexpectedEof.into()),
            error => Err(io::Error::other(error.to_owned())),
        }
    }

    /// Waits until the machine is about to sleep (true) or woke up (false). Errors: the end of the
    /// relay, which ends when the bus or logind is lost.
    pub(crate) fn next_sleep_signal(&mut self) -> io::Result<bool> {
        self.0.write_all(&[NEXT_SIGNAL])?;
        let mut sleeps = [0];
        self.0.read_exact(&mut sleeps)?;
        Ok(sleeps == [1])
    }
}

/// Server of the relay, in the agent of a mount with `lock-on-suspend`.
pub(crate) struct SleepRelay {
    /// Subscription that was made before the mount, which may hide the socket of the bus.
    prepared: Option<io::Result<LogindClient>>,
    running: Option<JoinHandle<()>>,
}

impl SleepRelay {
    pub(crate) fn prepare() -> SleepRelay {
        SleepRelay { prepared: Some(subscribe_to_sleeps()), running: None }
    }

    /// Starts the relay and returns the end of the daemon. Errors: `AlreadyExists` while an earlier
    /// one runs: a daemon that is compromised cannot start many.
    pub(crate) fn open(&mut self) -> io::Result<UnixStream> {
        if self.running.as_ref().is_some_and(|running| !running.is_finished()) {
            return Err(io::ErrorKind::AlreadyExists.into());
        }
        let login = self.prepared.take().unwrap_or_else(subscribe_to_sleeps);
        let (ours, theirs) = UnixStream::pair()?;
        // Not joined: it ends with the bus or with this process.
        let serving = thread::Builder::new().name("sleeps".into()).spawn(move || drop(serve(&ours, login)))?;
        self.running = Some(serving);
        Ok(theirs)
    }
}

/// Answers requests until the daemon or the bus is gone.
fn serve(mut daemon: &UnixStream, login: io::Result<LogindClient>) -> io::Result<()> {
    let report = |error: io::Error| writeln!(&mut &*daemon, "\0{}", error.to_string().replace('\n', " "));
    let mut login = match login {
        Ok(login) => login,
        Err(error) => {
            daemon.read_exact(&mut [0])?;
            return report(error);
        }
    };
    let mut request = [0];
    loop {
        daemon.read_exact(&mut request)?;
        match request[0] {
            DELAY => match login.delay_sleep() {
                Ok(lock) => send_descriptor(daemon, lock.as_fd())?,
                Err(error) => return report(error),
            },
            NEXT_SIGNAL => daemon.write_all(&[u8::from(login.next_sleep_signal()?)])?,
            _ => return Err(io::ErrorKind::InvalidData.into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    impl LogindClient {
        fn subscribed(stream: UnixStream) -> LogindClient {
            LogindClient { bus: Bus { stream, serial: 0, queued_signals: VecDeque::new() } }
        }
    }

    const OBJECT: BusObject = BusObject { name: "a.b", path: "/a/b", interface: "a.b.C" };

    #[test]
    fn a_call_reads_back_as_it_was_written() {
        for arguments in [&[][..], &["x"], &["sleep", "lockbox", "why, because", "delay"]] {
            let bytes = encode(7, &OBJECT, "Do", arguments);
            assert_eq!(total_length(&bytes[..FIXED]).unwrap(), bytes.len());
            let message = decode(&bytes).unwrap();
            assert_eq!(message.kind, CALL);
            assert_eq!([&message.fields[INTERFACE], &message.fields[MEMBER]], ["a.b.C", "Do"]);
            assert_eq!(message.fields[SIGNATURE], "s".repeat(arguments.len()));
            assert_eq!(message.first_string().as_deref(), arguments.first().copied());
            assert_eq!(message.first_bool(), None);
        }
    }

    #[test]
    fn no_message_however_damaged_is_more_than_refused() {
        let bytes = encode(7, &OBJECT, "Do", &["sleep", "lockbox"]);
        for length in 0..bytes.len() {
            let _ = decode(&bytes[..length.max(FIXED)]);
            let _ = total_length(&bytes[..length.min(FIXED)]);
        }
        for at in 0..bytes.len() {
            for value in [0, 1, 7, 0x7f, 0xff] {
                let mut damaged = bytes.clone();
                damaged[at] = value;
                if total_length(&damaged[..FIXED]).is_ok_and(|total| total <= damaged.len()) {
                    let _ = decode(&damaged).map(|message| (message.first_string(), message.first_bool()));
                }
            }
        }
        let mut endless = bytes;
        endless[4..8].copy_from_slice(&u32::MAX.to_ne_bytes());
        assert!(total_length(&endless[..FIXED]).is_err());
    }

    #[test]
    fn unsupported_messages_end_no_connection() {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        ours.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        let ours_is = encode(7, &OBJECT, "Do", &["sleep"]);
        let mut foreign = ours_is.clone();
        foreign[0] = if ENDIAN == b'l' { b'B' } else { b'l' };
        foreign[4..8].reverse();
        foreign[12..16].reverse();
        let mut long = ours_is.clone();
        let body = 2 * MAX_MESSAGE;
        let head = ours_is.len() - u32::from_ne_bytes(ours_is[4..8].try_into().unwrap()) as usize;
        long[4..8].copy_from_slice(&(body as u32).to_ne_bytes());
        long.resize(head + body, 0);
        let mut unknown = ours_is.clone();
        // The type of the first field: an array.
        unknown[FIXED + 2] = b'a';
        let sent = std::thread::spawn(move || {
            for message in [foreign, long, unknown, ours_is] {
                theirs.write_all(&message).unwrap();
            }
        });
        let mut bus = Bus { stream: ours, serial: 0, queued_signals: VecDeque::new() };
        let message = bus.receive().unwrap();
        assert_eq!((&*message.fields[MEMBER], message.first_string().as_deref()), ("Do", Some("sleep")));
        sent.join().unwrap();
        assert!(bus.receive().is_err(), "nothing is left");
    }

    #[test]
    fn addresses_are_paths_or_abstract_names() {
        let parsed = |address: &str| parse_address(address).unwrap().unwrap();
        assert_eq!(parsed("unix:path=/run/a%20b,guid=00").path(), Some(c"/run/a b".into()));
        assert_eq!(parsed("unix:abstract=/tmp/x").abstract_name(), Some(&b"/tmp/x"[..]));
        assert!(parse_address("tcp:host=localhost").is_none());
        assert!(parse_address("unix:guid=00").is_none());
        assert!(connect("tcp:host=a;unix:path=/nonexistent").is_err());
        assert!(connect("").is_err());
    }

    #[test]
    fn a_daemon_gets_the_reason_for_which_logind_is_missing() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let serving = thread::spawn(move || serve(&ours, Err(io::Error::other("no\nbus"))));
        let mut client = SleepClient(theirs);
        assert_eq!(client.delay_sleep().unwrap_err().to_string(), "no bus");
        serving.join().unwrap().unwrap();
        assert!(client.delay_sleep().is_err() && client.next_sleep_signal().is_err());
    }

    /// A compromised daemon that writes the protocol of the bus reaches no bus.
    #[test]
    fn what_a_daemon_writes_does_not_reach_the_bus() {
        let (mut bus, theirs) = UnixStream::pair().unwrap();
        let (ours, mut daemon) = UnixStream::pair().unwrap();
        let serving = thread::spawn(move || serve(&ours, Ok(LogindClient::subscribed(theirs))));
        daemon.write_all(b"\0AUTH EXTERNAL 30\r\n").unwrap();
        assert!(serving.join().unwrap().is_err());
        let mut received = Vec::new();
        bus.read_to_end(&mut received).unwrap();
        assert!(received.is_empty(), "{received:?}");
        // The end, or a reset since not all of it was read.
        assert!(!daemon.read(&mut [0; 64]).is_ok_and(|length| length > 0));
    }

    #[test]
    fn one_relay_runs_at_a_time() {
        let (bus, theirs) = UnixStream::pair().unwrap();
        let mut relay = SleepRelay { prepared: Some(Ok(LogindClient::subscribed(theirs))), running: None };
        let mut daemon = relay.open().unwrap();
        daemon.write_all(&[NEXT_SIGNAL]).unwrap();
        assert_eq!(relay.open().unwrap_err().kind(), io::ErrorKind::AlreadyExists);
        drop(bus);
        assert_eq!(daemon.read(&mut [0]).unwrap(), 0, "the bus is gone");
    }
}
