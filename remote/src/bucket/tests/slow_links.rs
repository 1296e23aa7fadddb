//! Uploads on links that are slow, stall or break: the test grants the bytes that the store takes.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::atomic::Ordering;
use std::sync::mpsc::{self, Receiver};
use std::thread;
use std::time::Duration;

use lockbox::storage::Storage;
use md5::{Digest, Md5};

use super::super::objects::ObjectStore;
use super::super::s3_store::S3Store;
use super::super::{Bucket, BucketWriter, check_objects};
use super::clouds::{Server, objects};
use super::writable::whole;
use crate::RemoteOptions;
use crate::address::Cloud;
use crate::credentials::CredentialCache;
use crate::hex;
use crate::range_source::RemoteError;
use crate::s3::S3Bucket;
use crate::transport::AttemptClock;

fn options(timeout: Duration) -> RemoteOptions {
    RemoteOptions {
        timeout: Some(timeout),
        cache_directory: None,
        allow_http: true,
        allow_private: true,
        ..RemoteOptions::default()
    }
}

/// Returns a store; `serve` gets its connections one after the other.
fn store(options: &RemoteOptions, mut serve: impl FnMut(&mut TcpStream) + Send + 'static) -> S3Store {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = format!("http://{}", listener.local_addr().unwrap());
    thread::spawn(move || listener.incoming().for_each(|stream| serve(&mut stream.unwrap())));
    let bucket = rusty_s3::Bucket::new(address.parse().unwrap(), rusty_s3::UrlStyle::Path, "b", "x").unwrap();
    let keys = CredentialCache::new(|| Ok(None));
    S3Store::of(S3Bucket::of(Cloud::S3, bucket, keys), "p", options)
}

/// Waits until the test is over, or so long that a request without a limit would get its response.
fn hold(is_over: &Receiver<()>) {
    let _ = is_over.recv_timeout(Duration::from_secs(30));
}

#[test]
fn a_server_that_takes_no_more_of_a_body_ends_the_request() {
    let (over, is_over) = mpsc::channel::<()>();
    let body = vec![7; 8 << 20];
    let hash = hex(&Md5::digest(&body));
    let store = store(&options(Duration::from_secs(2)), move |stream| {
        let mut taken = vec![0; 1 << 20];
        stream.read_exact(&mut taken).unwrap();
        hold(&is_over);
        let mut left = 7_usize << 20;
        while left > 0 {
            match stream.read(&mut taken) {
                Ok(count @ 1..) => left = left.saturating_sub(count),
                _ => return,
            }
        }
        let _ =
            write!(stream, "HTTP/1.1 200 x\r\nx-amz-request-id: 1\r\netag: \"{hash}\"\r\ncontent-length: 0\r\n\r\n");
    });
    let clock = AttemptClock::new(None);
    let created = AttemptClock::run(Some(clock.clone()), || store.create("object", &body));
    assert!(matches!(created, Err(RemoteError::Transient(_))), "{created:?}");
    assert!(clock.has_moved(), "a part of it was taken");
    drop(over);
}

/// DIVIDE-1, DIVIDE-2: uploads through connections that break after 3 MiB, in a backup and in
/// commits. Every read sees all writes, meanwhile and afterwards.
#[test]
fn a_link_that_breaks_again_and_again_stores_segments_in_pieces() {
    let (server, endpoint) = Server::start(Cloud::S3);
    server.longest_body.store(3 << 20, Ordering::Relaxed);
    let options = RemoteOptions { cache_directory: None, ..super::options() };
    let mut bytes: Vec<u8> = (0..20_u32 << 18).flat_map(|word| word.wrapping_mul(0x9E37_79B9).to_le_bytes()).collect();
    let open = || objects(Cloud::S3, &endpoint);
    let mut bucket = Bucket::open(open(), "s3://b/p".into(), &options, true).unwrap();
    let buffer = bucket.create_empty().unwrap();
    for (number, part) in bytes.chunks(1 << 20).enumerate() {
        buffer.write_at(number as u64 * (1 << 20), part).unwrap();
        assert!(whole(&*buffer) == bytes[..(number + 1) << 20], "after {number} MiB");
    }
    bucket.publish().unwrap();
    let taken = server.taken.load(Ordering::Relaxed);
    assert!(taken <= 3 * bytes.len(), "{taken} bytes were taken");
    let found = || whole(&**super::super::open(open(), "s3://b/p".into(), &options).unwrap().unwrap().file());
    assert!(found() == bytes);
    let writer = BucketWriter::open(open(), "s3://b/p".into(), &options, true).unwrap();
    for seed in 1..4 {
        bytes[1 << 20..8 << 20].iter_mut().for_each(|byte| *byte = byte.wrapping_mul(3).wrapping_add(seed));
        writer.write_at(1 << 20, &bytes[1 << 20..8 << 20]).unwrap();
        writer.barrier().unwrap();
        assert!(whole(&writer) == bytes && found() == bytes, "commit {seed}");
    }
    drop(writer);
    assert!(found() == bytes);
    let check = check_objects(open(), "s3://b/p".into(), &options, true, &mut |_, _| Ok(())).unwrap();
    assert!(check.faults.is_empty(), "{:?}", check.faults);
}
