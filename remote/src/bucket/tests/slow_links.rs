//! Uploads on links that are slow, stall or break: the test grants the bytes that the store takes.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::mpsc::{self, Receiver};
use std::thread;
use std::time::Duration;

use md5::{Digest, Md5};

use super::super::objects::ObjectStore;
use super::super::s3::S3Store;
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

/// Returns a store whose connections `serve` gets one after the other, and its address.
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
    let store = store(&options(Duration::from_millis(100)), move |stream| {
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
