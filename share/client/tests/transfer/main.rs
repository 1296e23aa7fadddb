//! Shares and receives files against a daemon that loses replies, cuts connections and tampers with
//! what it keeps.

#![allow(clippy::unwrap_used)] // a failed step fails the test

mod daemon;
mod hostile;
mod kinds;

use std::fmt::Debug;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use lockbox_share_client::Error;
use lockbox_share_client::link::{Link, Secret};
use lockbox_share_client::meta::{ContentKind, Meta};
use lockbox_share_client::protocol::capsule::ContentLocation;
use lockbox_share_client::protocol::message::ErrorCode;
use lockbox_share_client::protocol::token::OwnerToken;
use lockbox_share_client::receive::{self, ReceiveOptions, ReceiveSummary, ReceiveTarget};
use lockbox_share_client::seal;
use lockbox_share_client::shares::{self, ShareTerms};
use lockbox_share_client::source::{FileSource, Source};
use tempfile::TempDir;
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Metadata, Subscriber};

use crate::daemon::Daemon;

const PIECE: usize = 64 << 10;

/// Nothing is remembered or reported, and a download that was cut is given up at once.
fn forgetful() -> ReceiveOptions<'static> {
    ReceiveOptions {
        state: None,
        resume: false,
        ciphertext: false,
        retry_timeout: Some(Duration::ZERO),
        progress: &|_, _| {},
        on_partial: &|_| {},
        on_unresumed: &|_, _| {},
        text: None,
        unpack: None,
    }
}

struct Place {
    directory: TempDir,
    daemon: Daemon,
}

impl Place {
    fn new() -> Place {
        let directory = tempfile::tempdir().unwrap();
        fs::create_dir(directory.path().join("in")).unwrap();
        let daemon = Daemon::start(directory.path());
        Place { directory, daemon }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    /// Shares `length` bytes as `report.bin`.
    fn share(&self, length: usize) -> Link {
        fs::write(self.path("report.bin"), content(length)).unwrap();
        self.share_source(&mut FileSource::open(&self.path("report.bin"), None).unwrap()).unwrap()
    }

    fn receive(&self, link: &Link, resume: bool) -> Result<ReceiveSummary, Error> {
        self.receive_as(link, resume, false)
    }

    fn share_source(&self, source: &mut dyn Source) -> Result<Link, Error> {
        let terms = ShareTerms { expires_in: None, max_claims: 1 };
        let owner = OwnerToken::new([5; 32]);
        shares::share(&self.daemon.client(), &owner, source, terms, &|_| {}).map(|shared| shared.link)
    }

    fn receive_as(&self, link: &Link, resume: bool, ciphertext: bool) -> Result<ReceiveSummary, Error> {
        let target = ReceiveTarget::Directory { path: self.path("in"), replace: false };
        let state = self.path("state");
        let options = ReceiveOptions { state: Some(&state), resume, ciphertext, ..forgetful() };
        receive::to_file(&self.daemon.client(), link, &target, &options)
    }

    /// What a daemon hears that is asked for the only share's `length` bytes from behind `pieces`
    /// of them on. The header before the pieces has no fixed length: age puts a random recipient
    /// into it.
    fn range_behind(&self, pieces: usize, length: usize) -> String {
        let mut inner = self.daemon.inner.lock().unwrap();
        let ContentLocation::Spooled { size, .. } = inner.shares.values_mut().next().unwrap().capsule.content() else {
            panic!("the content is beside it")
        };
        let sealed = length + length.div_ceil(PIECE) * 16;
        format!("{:?}", Some(usize::try_from(size).unwrap() - sealed + pieces * (PIECE + 16)))
    }

    /// Names in the target's directory.
    fn names(&self) -> Vec<String> {
        let entries = fs::read_dir(self.path("in")).unwrap();
        let mut names: Vec<_> = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }
}

fn content(length: usize) -> Vec<u8> {
    let mut state = length as u32 | 1;
    let mut next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 24) as u8
    };
    (0..length).map(|_| next()).collect()
}

fn secret_parts(link: &Link) -> Vec<String> {
    let text = link.to_text();
    let fragment = text.split_once('#').unwrap().1;
    vec![fragment.to_owned(), fragment.to_uppercase()]
}

#[track_caller]
fn holds(path: &Path, length: usize) {
    assert!(fs::read(path).unwrap() == content(length), "{} differs", path.display());
}

#[test]
fn files_of_every_size_arrive() {
    for length in [0, 1, 6000, 8000, PIECE - 1, PIECE, PIECE + 1, 1_000_000] {
        let place = Place::new();
        let link = place.share(length);
        let receipt = place.receive(&link, false).unwrap();
        assert_eq!((receipt.size, receipt.confirmed), (length as u64, true));
        let path = receipt.path.unwrap();
        assert_eq!(path, place.path("in/report.bin"));
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        holds(&path, length);
        assert_eq!(place.names(), ["report.bin"]);
        assert!(fs::read_dir(place.path("state/receiving")).unwrap().next().is_none());
        // Once, and no more.
        assert!(matches!(place.receive(&link, false), Err(Error::Refused(_))));
        assert_eq!(place.names(), ["report.bin"]);
    }
}

#[test]
fn a_server_that_never_answers_100_continue_gets_the_file() {
    let place = Place::new();
    place.daemon.faults(|faults| faults.no_interim_answer = true);
    let link = place.share(200_000);
    place.receive(&link, false).unwrap();
    holds(&place.path("in/report.bin"), 200_000);
}

#[test]
fn the_daemon_hears_no_secret_and_no_name() {
    for length in [100, 200_000] {
        let place = Place::new();
        let link = place.share(length);
        place.receive(&link, false).unwrap();
        for heard in &place.daemon.inner.lock().unwrap().heard {
            let text = String::from_utf8_lossy(heard);
            assert!(!text.contains("report.bin"));
            for secret in secret_parts(&link) {
                assert!(!text.contains(&secret));
            }
        }
    }
}

#[test]
fn cut_downloads_go_on_by_themselves() {
    let place = Place::new();
    let link = place.share(1_000_000);
    place.daemon.faults(|faults| faults.cuts = vec![0, 10_000, 500_000, 1]);
    let target = ReceiveTarget::Directory { path: place.path("in"), replace: false };
    let patient = ReceiveOptions { retry_timeout: None, ..forgetful() };
    let receipt = receive::to_file(&place.daemon.client(), &link, &target, &patient).unwrap();
    holds(&receipt.path.unwrap(), 1_000_000);
    let ranges = place.daemon.inner.lock().unwrap().ranges.clone();
    assert_eq!(ranges, ["None", "None", "Some(10000)", "Some(510000)", "Some(510001)"]);
}

#[test]
fn a_receiver_that_was_stopped_goes_on_later() {
    let place = Place::new();
    let length = 10 * PIECE + 17;
    let link = place.share(length);
    // It has 4 pieces and a part.
    place.daemon.faults(|faults| faults.cuts = vec![300_000]);
    assert!(matches!(place.receive(&link, false), Err(Error::Cut { received: 300_000, .. })));
    assert!(place.names().iter().all(|name| name.ends_with(".part")), "{:?}", place.names());
    place.daemon.faults(|faults| faults.cuts.clear());
    place.daemon.inner.lock().unwrap().ranges.clear();
    holds(&place.receive(&link, true).unwrap().path.unwrap(), length);
    assert_eq!(place.names(), ["report.bin"]);
    // The header, and then from the fourth piece on; the end is not asked for before its turn.
    let expected = ["None".to_owned(), place.range_behind(3, length)];
    assert_eq!(place.daemon.inner.lock().unwrap().ranges, expected);
}

#[test]
fn a_receiver_goes_on_behind_any_piece() {
    // At the last whole piece as well, behind which nothing or a part follows.
    for (length, cut) in [(3 * PIECE, 70_000), (3 * PIECE, 3 * PIECE), (PIECE + 5000, 68_000), (2 * PIECE, 131_200)] {
        let place = Place::new();
        let link = place.share(length);
        place.daemon.faults(|faults| faults.cuts = vec![cut]);
        assert!(matches!(place.receive(&link, false), Err(Error::Cut { .. })), "{length} cut at {cut}");
        place.daemon.faults(|faults| faults.cuts.clear());
        holds(&place.receive(&link, true).unwrap().path.unwrap(), length);
    }
}

#[test]
fn a_stopped_receiver_may_begin_anew_under_its_lease() {
    let place = Place::new();
    let link = place.share(300_000);
    place.daemon.faults(|faults| faults.cuts = vec![200_000]);
    assert!(matches!(place.receive(&link, false), Err(Error::Cut { .. })));
    place.daemon.faults(|faults| faults.cuts.clear());
    holds(&place.receive(&link, false).unwrap().path.unwrap(), 300_000);
    assert_eq!(place.names(), ["report.bin"]);
}

/// Whoever forgot `--resume` has lost nothing by it.
#[test]
fn what_arrived_before_is_kept_until_a_new_beginning_is_whole() {
    let length = 10 * PIECE + 17;
    for (anew, pieces) in [(None, 3), (Some(100_000), 3), (Some(400_000), 5)] {
        let place = Place::new();
        let link = place.share(length);
        place.daemon.faults(|faults| faults.cuts = vec![300_000]);
        assert!(matches!(place.receive(&link, false), Err(Error::Cut { .. })));
        match anew {
            None => {
                place.daemon.faults(|faults| faults.passing = vec![(503, ErrorCode::Unavailable)]);
                assert!(matches!(place.receive(&link, false), Err(Error::Unreachable { .. })));
            }
            Some(cut) => {
                place.daemon.faults(|faults| faults.cuts = vec![cut]);
                assert!(matches!(place.receive(&link, false), Err(Error::Cut { .. })));
            }
        }
        place.daemon.faults(|faults| faults.cuts.clear());
        place.daemon.inner.lock().unwrap().ranges.clear();
        holds(&place.receive(&link, true).unwrap().path.unwrap(), length);
        assert_eq!(place.names(), ["report.bin"]);
        let from = place.daemon.inner.lock().unwrap().ranges.last().unwrap().clone();
        assert_eq!(from, place.range_behind(pieces, length), "{anew:?}");
    }
}

/// By then no server has it any more: the file that is kept is the only one.
#[test]
fn what_arrived_whole_and_got_no_name_gets_one_after_the_end_of_its_link() {
    for (length, resume) in [(100, true), (100, false), (200_000, true), (200_000, false)] {
        let place = Place::new();
        let link = place.share(length);
        let state = place.path("state");
        let receive = |target, resume| {
            let options = ReceiveOptions { state: Some(&state), resume, ..forgetful() };
            receive::to_file(&place.daemon.client(), &link, &target, &options)
        };
        // A directory is not replaced by a file, whatever was said.
        fs::create_dir(place.path("in/report.bin")).unwrap();
        let in_the_way = ReceiveTarget::Directory { path: place.path("in"), replace: true };
        assert!(matches!(receive(in_the_way, false), Err(Error::Io { .. })));
        place.daemon.faults(|faults| {
            faults.passing = vec![(410, ErrorCode::Consumed), (410, ErrorCode::Consumed)];
            faults.lease_ended = true;
        });
        let free = ReceiveTarget::File { path: place.path("in/other.bin"), replace: false };
        let receipt = receive(free, resume).unwrap();
        assert_eq!((receipt.size, receipt.path.as_deref()), (length as u64, Some(&*place.path("in/other.bin"))));
        holds(&place.path("in/other.bin"), length);
        assert_eq!(place.names(), ["other.bin", "report.bin"], "{length}, {resume}");
        assert!(fs::read_dir(state.join("receiving")).unwrap().next().is_none());
    }
}

#[test]
fn nothing_of_a_longer_file_that_arrived_before_stays_behind_a_shorter_one() {
    let place = Place::new();
    let link = place.share(100);
    fs::create_dir(place.path("in/report.bin.age")).unwrap();
    let (target, state) = (ReceiveTarget::Directory { path: place.path("in"), replace: true }, place.path("state"));
    let sealed = ReceiveOptions { state: Some(&state), ciphertext: true, ..forgetful() };
    assert!(receive::to_file(&place.daemon.client(), &link, &target, &sealed).is_err());
    holds(&place.receive(&link, true).unwrap().path.unwrap(), 100);
}

/// A way to the server that leads elsewhere for a moment, such as a proxy that does not know its
/// name.
#[test]
fn an_answer_of_something_else_does_not_end_a_lease() {
    let place = Place::new();
    let length = 10 * PIECE;
    let link = place.share(length);
    place.daemon.faults(|faults| faults.cuts = vec![300_000]);
    assert!(matches!(place.receive(&link, false), Err(Error::Cut { .. })));
    for status in [404, 410] {
        place.daemon.faults(|faults| faults.elsewhere = vec![status; 2]);
        let told = place.receive(&link, true);
        assert!(matches!(told, Err(Error::Foreign { .. })), "{status}: {told:?}");
    }
    place.daemon.faults(|faults| {
        faults.cuts.clear();
        faults.elsewhere.clear();
    });
    place.daemon.inner.lock().unwrap().ranges.clear();
    holds(&place.receive(&link, true).unwrap().path.unwrap(), length);
    let expected = ["None".to_owned(), place.range_behind(3, length)];
    assert_eq!(place.daemon.inner.lock().unwrap().ranges, expected);
}

#[test]
fn a_lost_reply_after_an_upload_makes_no_second_share() {
    let place = Place::new();
    place.daemon.faults(|faults| faults.lost_shares = 2);
    let link = place.share(200_000);
    assert_eq!(place.daemon.inner.lock().unwrap().shares.len(), 1);
    holds(&place.receive(&link, false).unwrap().path.unwrap(), 200_000);
}

#[test]
fn a_lost_reply_to_a_claim_does_not_burn_the_link() {
    for length in [100, 200_000] {
        let place = Place::new();
        let link = place.share(length);
        place.daemon.faults(|faults| faults.lost_claims = 2);
        holds(&place.receive(&link, false).unwrap().path.unwrap(), length);
    }
}

/// A daemon that was killed behind the claim, and is not back when the reply is asked for again.
#[test]
fn a_daemon_that_is_started_anew_behind_a_claim_does_not_burn_the_link() {
    let place = Place::new();
    let link = place.share(100);
    place.daemon.faults(|faults| faults.lost_claims = 1);
    let (socket, away) = (place.daemon.socket.clone(), place.path("away"));
    let attempts = Arc::new(AtomicUsize::new(0));
    // The client logs each attempt that had no reply before it waits for the next one: the first
    // was heard and its reply lost, the second finds nobody.
    let failed = attempts.clone();
    let subscriber = Messages(Box::new(move |message| {
        if message.contains("sending it again") {
            match failed.fetch_add(1, Ordering::Relaxed) {
                0 => fs::rename(&socket, &away).unwrap(),
                1 => fs::rename(&away, &socket).unwrap(),
                number => panic!("attempt {number}: {message}"),
            }
        }
    }));
    // With one subscriber alone, another test's thread could switch the message off for all.
    let _second = tracing::dispatcher::Dispatch::new(Messages(Box::new(|_| ())));
    let receipt = tracing::subscriber::with_default(subscriber, || place.receive(&link, false));
    holds(&receipt.unwrap().path.unwrap(), 100);
    assert_eq!(attempts.load(Ordering::Relaxed), 2);
    assert_eq!(claims_heard(&place), 2);
}

/// How many claims the daemon heard.
fn claims_heard(place: &Place) -> usize {
    let inner = place.daemon.inner.lock().unwrap();
    inner.heard.iter().filter(|heard| heard.starts_with(b"POST /v1/claim")).count()
}

/// Calls a function with each message that is logged, in the thread that logs it.
struct Messages(Box<dyn Fn(&str) + Send + Sync>);

impl Subscriber for Messages {
    fn enabled(&self, _: &Metadata<'_>) -> bool {
        true
    }

    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}

    fn record_follows_from(&self, _: &Id, _: &Id) {}

    fn event(&self, event: &Event<'_>) {
        struct Message(String);
        impl Visit for Message {
            fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
                if field.name() == "message" {
                    self.0 = format!("{value:?}");
                }
            }
        }
        let mut message = Message(String::new());
        event.record(&mut message);
        (self.0)(&message.0);
    }

    fn enter(&self, _: &Id) {}

    fn exit(&self, _: &Id) {}
}

#[test]
fn a_daemon_without_time_does_not_end_what_was_begun() {
    let busy = [(429, ErrorCode::Limited), (503, ErrorCode::Unavailable), (504, ErrorCode::Timeout)];
    let place = Place::new();
    let length = 10 * PIECE;
    let link = place.share(length);
    place.daemon.faults(|faults| {
        faults.passing = busy.to_vec();
        faults.cuts = vec![300_000];
    });
    assert!(matches!(place.receive(&link, false), Err(Error::Cut { received: 300_000, .. })));
    let part = place.names();
    for (status, error) in busy.into_iter().chain([(500, ErrorCode::Unavailable)]) {
        place.daemon.faults(|faults| faults.passing = vec![(status, error)]);
        let told = place.receive(&link, true);
        assert!(matches!(told, Err(Error::Unreachable { .. })), "{status}: {told:?}");
        assert_eq!(place.names(), part, "{status}");
    }
    place.daemon.faults(|faults| faults.cuts.clear());
    place.daemon.inner.lock().unwrap().ranges.clear();
    holds(&place.receive(&link, true).unwrap().path.unwrap(), length);
    let expected = ["None".to_owned(), place.range_behind(3, length)];
    assert_eq!(place.daemon.inner.lock().unwrap().ranges, expected);
}

#[test]
fn tampered_ciphertext_is_never_named() {
    type Tamper = (&'static str, fn(&mut Vec<u8>));
    let tampers: [Tamper; 7] = [
        ("a bit of the header", |file| file[30] ^= 1),
        ("a bit of the first piece", |file| file[1000] ^= 1),
        ("the last bit", |file| *file.last_mut().unwrap() ^= 0x80),
        ("pieces in another order", |file| {
            let start = file.len() - 3 * (PIECE + 16);
            let (first, rest) = file[start..].split_at_mut(PIECE + 16);
            first.swap_with_slice(&mut rest[..PIECE + 16]);
        }),
        ("without its last piece", |file| file.truncate(file.len() - PIECE - 16)),
        ("without its last byte", |file| file.truncate(file.len() - 1)),
        ("with a byte behind", |file| file.push(0)),
    ];
    for (what, tamper) in tampers {
        for ciphertext in [false, true] {
            let place = Place::new();
            place.daemon.faults(|faults| faults.tamper = Some(tamper));
            let link = place.share(4 * PIECE);
            let received = place.receive_as(&link, false, ciphertext);
            match what {
                // What follows the length that was sealed is not even asked for.
                "with a byte behind" => assert!(received.is_ok(), "{what}"),
                "without its last piece" | "without its last byte" => {
                    assert!(matches!(received, Err(Error::Cut { .. })), "{what}: {received:?}");
                    assert!(place.names().iter().all(|name| name.ends_with(".part")), "{what}: {:?}", place.names());
                }
                _ => {
                    assert!(matches!(received, Err(Error::Damaged(_))), "{what}: {received:?}");
                    assert!(place.names().is_empty(), "{what}: {:?}", place.names());
                }
            }
        }
    }
}

/// A sender says anything of a content: no room is kept for more than what is sealed can hold.
#[test]
fn a_description_of_more_than_was_sealed_is_damage() {
    let place = Place::new();
    let link = place.share(4 * PIECE);
    let secret = Secret::from_fragment(&link.secret().fragment()).unwrap();
    let mut inner = place.daemon.inner.lock().unwrap();
    let share = inner.shares.values_mut().next().unwrap();
    let ContentLocation::Spooled { size, digest } = share.capsule.content() else { panic!("the content is beside it") };
    let meta = Meta::new("report.bin".into(), ContentKind::File, 1 << 40, digest);
    share.capsule = seal::seal_spooled(&secret, &meta, size, digest).unwrap();
    drop(inner);
    let error = place.receive(&link, false).unwrap_err();
    assert!(matches!(&error, Error::Damaged(told) if told.contains("cannot hold")), "{error}");
    assert!(place.names().is_empty());
}

#[test]
fn an_age_file_can_be_kept_and_gone_on_with() {
    let place = Place::new();
    let link = place.share(500_000);
    place.daemon.faults(|faults| faults.cuts = vec![123_456]);
    assert!(matches!(place.receive_as(&link, false, true), Err(Error::Cut { .. })));
    place.daemon.faults(|faults| faults.cuts.clear());
    let path = place.receive_as(&link, true, true).unwrap().path.unwrap();
    assert_eq!(path, place.path("in/report.bin.age"));
    let identity: age::x25519::Identity = link.secret().identity_line().parse().unwrap();
    assert!(age::decrypt(&identity, &fs::read(path).unwrap()).unwrap() == content(500_000));
    assert_eq!(place.daemon.inner.lock().unwrap().ranges.last().unwrap(), "Some(123456)");
}

/// The bytes that arrived before are not the beginning of the file then.
#[test]
fn a_download_that_is_resumed_in_the_other_form_starts_over_under_its_lease() {
    for ciphertext in [true, false] {
        let place = Place::new();
        let link = place.share(500_000);
        place.daemon.faults(|faults| faults.cuts = vec![300_000]);
        assert!(matches!(place.receive_as(&link, false, !ciphertext), Err(Error::Cut { .. })));
        place.daemon.faults(|faults| faults.cuts.clear());
        let path = place.receive_as(&link, true, ciphertext).unwrap().path.unwrap();
        let mut received = fs::read(path).unwrap();
        if ciphertext {
            let identity: age::x25519::Identity = link.secret().identity_line().parse().unwrap();
            received = age::decrypt(&identity, &received).unwrap();
        }
        assert!(received == content(500_000), "ciphertext: {ciphertext}");
    }
}

#[test]
fn a_lease_that_ended_is_told() {
    let place = Place::new();
    let link = place.share(300_000);
    place.daemon.faults(|faults| faults.lease_ended = true);
    assert!(matches!(place.receive(&link, false), Err(Error::Refused(_))));
}

#[test]
fn nothing_is_claimed_when_the_file_cannot_be_written() {
    let place = Place::new();
    let link = place.share(100);
    fs::write(place.path("taken"), "old").unwrap();
    let options = forgetful();
    for path in ["taken", "none/file", "in"] {
        let target = ReceiveTarget::File { path: place.path(path), replace: false };
        assert!(receive::to_file(&place.daemon.client(), &link, &target, &options).is_err());
    }
    assert_eq!(fs::read(place.path("taken")).unwrap(), b"old");
    let target = ReceiveTarget::File { path: place.path("taken"), replace: true };
    receive::to_file(&place.daemon.client(), &link, &target, &options).unwrap();
    holds(&place.path("taken"), 100);
}

#[test]
fn a_stream_gets_the_content() {
    for length in [100, 300_000] {
        let place = Place::new();
        let link = place.share(length);
        let options = forgetful();
        let mut output = Vec::new();
        let receipt = receive::to_stream(&place.daemon.client(), &link, &mut output, &options).unwrap();
        assert!(output == content(length) && receipt.path.is_none());
    }
}

#[test]
fn the_wrong_fragment_opens_nothing_and_burns_nothing() {
    let place = Place::new();
    let link = place.share(100);
    let text = link.to_text();
    let other = Secret::generate().unwrap().fragment();
    let wrong = Link::parse(&format!("{}#{}", text.split_once('#').unwrap().0, *other)).unwrap();
    let told = place.receive(&wrong, false).unwrap_err();
    assert!(told.to_string().starts_with("this link is not valid"), "{told}");
    holds(&place.receive(&link, false).unwrap().path.unwrap(), 100);
}

#[test]
fn a_daemon_out_of_reach_is_named() {
    let place = Place::new();
    let link = place.share(100);
    fs::remove_file(&place.daemon.socket).unwrap();
    let told = place.receive(&link, false).unwrap_err().to_string();
    assert!(told.contains("daemon.sock cannot be reached: No such file"), "{told}");
}
