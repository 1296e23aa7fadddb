//! Servers behind TLS: which certificates are trusted, and which server is sent a login.

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::process::Command;
use std::sync::{Arc, Mutex};
use std::thread;

use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::{ServerConfig, ServerConnection, StreamOwned};

use crate::living_elsewhere::{CREATE, Home};
use crate::support::{RunOutput, TestDir, output_of};

/// A CA that no system trusts, and a certificate of `localhost` and 127.0.0.1 by it, until 2126.
const CA: &[u8] = include_bytes!("tls/ca.pem");
const CERTIFICATE: &[u8] = include_bytes!("tls/server.pem");
const KEY: &[u8] = include_bytes!("tls/server.key");

/// Head of a request, and its body.
fn request(stream: &mut impl Read) -> (Vec<String>, Vec<u8>) {
    let mut reader = BufReader::new(stream);
    let mut head = Vec::new();
    while let Some(Ok(line)) =
        reader.by_ref().lines().next().filter(|line| line.as_ref().is_ok_and(|it| !it.is_empty()))
    {
        head.push(line);
    }
    let length = field(&head, "content-length").map_or(0, |length| length.parse().unwrap());
    let mut body = vec![0; length];
    reader.read_exact(&mut body).unwrap();
    (head, body)
}

fn field(head: &[String], name: &str) -> Option<String> {
    head.iter().find_map(|line| {
        let (key, value) = line.split_once(':')?;
        key.eq_ignore_ascii_case(name).then(|| value.trim().to_owned())
    })
}

/// Serves `answer` over TLS until the test ends; gives the address.
fn serve_tls(answer: impl Fn(Vec<String>, Vec<u8>) -> Vec<u8> + Send + Sync + 'static) -> SocketAddr {
    let certificate = CertificateDer::from_pem_slice(CERTIFICATE).unwrap();
    let key = PrivateKeyDer::from_pem_slice(KEY).unwrap();
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let config = ServerConfig::builder_with_provider(provider).with_safe_default_protocol_versions().unwrap();
    let config = Arc::new(config.with_no_client_auth().with_single_cert(vec![certificate], key).unwrap());
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let answer = Arc::new(answer);
    thread::spawn(move || {
        for stream in listener.incoming() {
            let (config, answer, stream) = (config.clone(), answer.clone(), stream.unwrap());
            thread::spawn(move || {
                let mut stream = StreamOwned::new(ServerConnection::new(config).unwrap(), stream);
                // A client that does not trust the certificate sends nothing.
                if stream.conn.complete_io(&mut stream.sock).is_err() {
                    return;
                }
                let (head, body) = request(&mut stream);
                if !head.is_empty() {
                    let _ = stream.write_all(&answer(head, body));
                    stream.conn.send_close_notify();
                    let _ = stream.flush();
                }
            });
        }
    });
    address
}

/// Passes each request on to a server without TLS.
fn behind_tls(inner: SocketAddr) -> SocketAddr {
    serve_tls(move |head, body| {
        let mut stream = TcpStream::connect(inner).unwrap();
        stream.write_all(format!("{}\r\n\r\n", head.join("\r\n")).as_bytes()).unwrap();
        stream.write_all(&body).unwrap();
        let mut answer = Vec::new();
        stream.read_to_end(&mut answer).unwrap();
        answer
    })
}

/// Serves an archive to requests with this header; gives the address and the headers that came.
fn serve_file(bytes: Vec<u8>, wanted: Option<&'static str>) -> (SocketAddr, Arc<Mutex<Vec<Option<String>>>>) {
    let came = Arc::new(Mutex::new(Vec::new()));
    let noted = came.clone();
    let address = serve_tls(move |head, _| {
        let login = field(&head, "authorization");
        noted.lock().unwrap().push(login.clone());
        if let Some(target) = head[0].split(' ').nth(1).unwrap().strip_prefix("/to/") {
            let location = format!("https://localhost:{target}/a.lbx");
            return format!("HTTP/1.1 302 x\r\nLocation: {location}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
                .into_bytes();
        }
        if wanted.is_some() && login.as_deref() != wanted {
            return b"HTTP/1.1 401 x\r\nContent-Length: 0\r\nConnection: close\r\n\r\n".to_vec();
        }
        let range = field(&head, "range").unwrap();
        let (first, last) = range.strip_prefix("bytes=").unwrap().split_once('-').unwrap();
        let (first, end) = (first.parse::<usize>().unwrap(), (last.parse::<usize>().unwrap() + 1).min(bytes.len()));
        let mut answer = format!(
            "HTTP/1.1 206 x\r\nETag: \"one\"\r\nContent-Range: bytes {first}-{}/{}\r\nContent-Length: {}\r\nConnection: close\r\n\r\n",
            end - 1,
            bytes.len(),
            end - first
        )
        .into_bytes();
        answer.extend_from_slice(&bytes[first..end]);
        answer
    });
    (address, came)
}

fn ca(work_dir: &TestDir) -> PathBuf {
    let path = work_dir.path("ca.pem");
    fs::write(&path, CA).unwrap();
    path
}

fn archive(work_dir: &TestDir) -> Vec<u8> {
    fs::read(work_dir.create_archive("a.lbx")).unwrap()
}

fn listed(work_dir: &TestDir, address: SocketAddr, name: &str, change: impl Fn(&mut Command)) -> RunOutput {
    let mut command = work_dir.command();
    command.env("LOCKBOX_PASSFILE", work_dir.path("pass")).env("XDG_CACHE_HOME", work_dir.path("cache"));
    command.env("HOME", work_dir.path("")).env("SSL_CERT_FILE", ca(work_dir)).env("LOCKBOX_LOG", "trace");
    change(&mut command);
    let address = format!("https://localhost:{}/{name}", address.port());
    output_of(command.args(["ls", "--remote=allow-private,timeout=30s", &address]))
}

#[test]
fn a_ca_that_the_user_names_is_trusted_and_no_other_is() {
    let work_dir = TestDir::new();
    let (address, _) = serve_file(archive(&work_dir), None);
    let trusted = listed(&work_dir, address, "a.lbx", |_| {});
    assert_eq!(trusted.code, 0, "{}", trusted.stderr);
    for other in ["/etc/ssl/certs/ca-certificates.crt", "/nonexistent"] {
        let refused = listed(&work_dir, address, "a.lbx", |command| {
            command.env("SSL_CERT_FILE", other);
        });
        assert_eq!(refused.code, 18, "{}", refused.stderr);
        assert!(refused.stderr.contains("certificate is not trusted"), "{}", refused.stderr);
    }
}

#[test]
fn a_store_is_trusted_by_the_bundle_of_the_profile() {
    let home = Home::bucket();
    let inner = home.endpoint.strip_prefix("http://").unwrap().parse().unwrap();
    let endpoint = format!("https://localhost:{}", behind_tls(inner).port());
    let bundle = ca(&home.work_dir);
    let config = home.work_dir.path("config");
    fs::write(&config, format!("[default]\nca_bundle = {}\n", bundle.display())).unwrap();
    let run = |arguments: &[&str], name: &str, value: &PathBuf| {
        let mut command = home.command(arguments);
        command.args([&home.address, "--remote=allow-private,timeout=30s"]);
        command.env("AWS_ENDPOINT_URL", &endpoint).env_remove("SSL_CERT_FILE").env_remove("AWS_CA_BUNDLE");
        command.env(name, value);
        output_of(&mut command)
    };
    let created = run(&[&["create"][..], &CREATE].concat(), "AWS_CA_BUNDLE", &bundle);
    assert_eq!(created.code, 0, "{}", created.stderr);
    let listed = |name: &str, value: &PathBuf| run(&["ls"], name, value);
    assert_eq!(listed("AWS_CONFIG_FILE", &config).code, 0);
    let refused = listed("UNUSED", &bundle);
    assert!(refused.code == 18 && refused.stderr.contains("certificate is not trusted"), "{refused:?}");
    // A bundle that is named and cannot be used is no reason to trust others.
    let missing = listed("AWS_CA_BUNDLE", &home.work_dir.path("none.pem"));
    assert!(missing.code == 2 && missing.stderr.contains("none.pem"), "{missing:?}");
    let empty = listed("AWS_CA_BUNDLE", &home.work_dir.path("pass"));
    assert!(empty.code == 2 && empty.stderr.contains("has no certificate"), "{empty:?}");
}

#[test]
fn a_login_goes_to_the_server_that_the_address_names_and_nowhere_else() {
    let work_dir = TestDir::new();
    let bytes = archive(&work_dir);
    let (other, others) = serve_file(bytes.clone(), None);
    for (entry, header) in [("login me password hush", "Basic bWU6aHVzaA=="), ("password hush", "Bearer hush")] {
        let (address, came) = serve_file(bytes.clone(), Some(header));
        let file = work_dir.path(".netrc");
        let _ = fs::remove_file(&file);
        let without = listed(&work_dir, address, "a.lbx", |_| {});
        assert!(without.code == 18 && without.stderr.contains("it asks for a login"), "{without:?}");
        fs::write(&file, format!("machine localhost {entry}\n")).unwrap();
        fs::set_permissions(&file, fs::Permissions::from_mode(0o644)).unwrap();
        let open = listed(&work_dir, address, "a.lbx", |_| {});
        assert!(open.code == 18 && open.stderr.contains("others may read it"), "{open:?}");
        assert!(came.lock().unwrap().iter().all(Option::is_none));
        fs::set_permissions(&file, fs::Permissions::from_mode(0o600)).unwrap();
        let run_ok = listed(&work_dir, address, "a.lbx", |_| {});
        assert_eq!(run_ok.code, 0, "{}", run_ok.stderr);
        assert!(!run_ok.stderr.contains("hush") && !run_ok.stderr.contains(header), "{}", run_ok.stderr);
        // A redirect to another port is one to another server.
        let (moved, came) = serve_file(bytes.clone(), None);
        assert_eq!(listed(&work_dir, moved, &format!("to/{}", other.port()), |_| {}).code, 0);
        assert_eq!(came.lock().unwrap()[0].as_deref(), Some(header));
        let named = work_dir.path("logins");
        fs::rename(&file, &named).unwrap();
        assert_eq!(
            listed(&work_dir, address, "a.lbx", |command| {
                command.env("NETRC", &named);
            })
            .code,
            0
        );
    }
    let others = others.lock().unwrap();
    assert!(!others.is_empty() && others.iter().all(Option::is_none), "{others:?}");
}
