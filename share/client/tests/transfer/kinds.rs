//! What is no file of a known size: streams, texts and directories; and links that are looked at
//! first.

use std::cell::RefCell;
use std::fs;
use std::io::{self, Read};
use std::path::PathBuf;

use lockbox_share_client::Error;
use lockbox_share_client::meta::ContentKind;
use lockbox_share_client::receive::{self, ReceiveOptions, ReceiveTarget};
use lockbox_share_client::source::StreamSource;

use crate::{PIECE, Place, content, forgetful};

/// Gives its content in odd parts, and fails at its end when it is told to.
struct Pipe {
    content: Vec<u8>,
    at: usize,
    fails: bool,
}

impl Read for Pipe {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let part = &self.content[self.at..];
        if part.is_empty() && self.fails {
            return Err(io::Error::other("the program before it failed"));
        }
        let count = part.len().min(buffer.len()).min(777);
        buffer[..count].copy_from_slice(&part[..count]);
        self.at += count;
        Ok(count)
    }
}

fn stream(kind: ContentKind, name: &str, content: Vec<u8>) -> StreamSource<Pipe> {
    StreamSource::begin(name.into(), kind, Pipe { content, at: 0, fails: false }).unwrap()
}

fn target(place: &Place) -> ReceiveTarget {
    ReceiveTarget::Directory { path: place.path("in"), replace: false }
}

#[test]
fn a_stream_whose_end_is_not_known_arrives_whole() {
    let place = Place::new();
    for length in [0, 1, 7000, 8000, PIECE, PIECE + 1, 4 * PIECE, 500_001] {
        let link = place.share_source(&mut stream(ContentKind::File, "stream", content(length))).unwrap();
        let receipt = place.receive(&link, false).unwrap();
        assert_eq!((receipt.size, receipt.kind), (length as u64, ContentKind::File));
        let path = receipt.path.unwrap();
        assert!(fs::read(&path).unwrap() == content(length), "{length}");
        fs::remove_file(path).unwrap();
    }
}

#[test]
fn a_stream_that_fails_is_not_shared() {
    let place = Place::new();
    for length in [8000, PIECE, 4 * PIECE] {
        let pipe = Pipe { content: content(length), at: 0, fails: true };
        let mut source = StreamSource::begin("stream".into(), ContentKind::File, pipe).unwrap();
        let told = place.share_source(&mut source).map(drop).unwrap_err();
        assert!(matches!(told, Error::Io { .. }), "{told}");
        let inner = place.daemon.inner.lock().unwrap();
        assert!(inner.shares.is_empty());
        assert!(
            !inner.heard.iter().any(|line| line.starts_with(b"POST /v1/uploads")),
            "the upload was ended as a whole one"
        );
    }
    let pipe = Pipe { content: content(10), at: 0, fails: true };
    assert!(StreamSource::begin("stream".into(), ContentKind::File, pipe).is_err());
}

#[test]
fn a_text_is_handed_over_and_is_a_file_to_who_does_not_know_texts() {
    let place = Place::new();
    let link = place.share_source(&mut stream(ContentKind::Text, "text.txt", b"the bridge\n".to_vec())).unwrap();
    let read = RefCell::new(Vec::new());
    let hand_over = |text: &[u8]| {
        read.borrow_mut().extend_from_slice(text);
        Ok(())
    };
    let options = ReceiveOptions { text: Some(&hand_over), ..forgetful() };
    let receipt = receive::to_file(&place.daemon.client(), &link, &target(&place), &options).unwrap();
    assert_eq!((receipt.path, receipt.kind, &read.borrow()[..]), (None, ContentKind::Text, &b"the bridge\n"[..]));
    assert!(place.names().is_empty());

    let link = place.share(10);
    let receipt = receive::to_file(&place.daemon.client(), &link, &target(&place), &options).unwrap();
    assert!(receipt.path.is_some(), "a file is no text, however small");

    let link = place.share_source(&mut stream(ContentKind::Text, "text.txt", b"the bridge\n".to_vec())).unwrap();
    let receipt = place.receive(&link, false).unwrap();
    assert_eq!(fs::read(receipt.path.unwrap()).unwrap(), b"the bridge\n");
}

#[test]
fn a_directory_is_unpacked_when_it_is_whole_and_kept_packed_when_that_fails() {
    let place = Place::new();
    let tar = content(3 * PIECE + 5);
    let share = || place.share_source(&mut stream(ContentKind::Directory, "folder.tar", tar.clone())).unwrap();
    let receive = |link, unpack: &receive::Unpack<'_>| {
        let options = ReceiveOptions { unpack: Some(unpack), ..forgetful() };
        receive::to_file(&place.daemon.client(), &link, &target(&place), &options)
    };
    let link = share();
    place.daemon.faults(|faults| faults.cuts = vec![100_000]);
    let never = |_: &mut fs::File, _: &str| panic!("it is not whole");
    assert!(matches!(receive(link, &never), Err(Error::Cut { .. })));
    place.daemon.faults(|faults| faults.cuts.clear());
    // What was cut stays to be gone on with.
    let visible = || place.names().into_iter().filter(|name| !name.starts_with('.')).collect::<Vec<_>>();
    let unpacked = |file: &mut fs::File, name: &str| {
        assert_eq!(name, "folder.tar");
        // It has a name by now, and nobody is asked for it again.
        assert_eq!(visible(), ["folder.tar"]);
        let mut bytes = Vec::new();
        file.read_to_end(&mut bytes).unwrap();
        assert!(bytes == tar);
        Ok(PathBuf::from("somewhere"))
    };
    let receipt = receive(share(), &unpacked).unwrap();
    assert_eq!((receipt.path, receipt.kind), (Some("somewhere".into()), ContentKind::Directory));
    assert_eq!(visible(), [""; 0]);

    let refused = |_: &mut fs::File, _: &str| Err(Error::Invalid("no tar at all".into()));
    let told = receive(share(), &refused).unwrap_err().to_string();
    assert!(told.contains("folder.tar") && told.contains("no tar at all"), "{told}");
    assert!(fs::read(place.path("in/folder.tar")).unwrap() == tar);
    // A program that does not unpack saves it as it is.
    let receipt = place.receive(&share(), false).unwrap();
    assert!(fs::read(receipt.path.unwrap()).unwrap() == tar);
}

#[test]
fn a_link_is_looked_at_before_it_is_used() {
    let place = Place::new();
    let link = place.share(10);
    let client = place.daemon.client();
    for _ in 0..3 {
        assert_eq!(receive::look(&client, &link).unwrap(), 2_000_000_000);
    }
    place.receive(&link, false).unwrap();
    assert!(matches!(receive::look(&client, &link), Err(Error::Refused(_))));
}
