//! Archives that live at addresses: made, changed and read there, in a directory of objects and in a store that speaks S3, or what Google's and Azure's do.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::support::{RunOutput, TestDir, noise, output_of, output_with_input};

pub(crate) const CREATE: [&str; 4] = ["--kdf-memory=1", "--kdf-passes=1", "--weak-kdf", "--quiet"];

/// A store in memory that speaks S3, and to who speaks to it as to Google's or Azure's store, what those do.
#[derive(Default)]
pub(crate) struct Store {
    pub(crate) objects: Mutex<BTreeMap<String, Vec<u8>>>,
    /// What was asked for, by method and kind of object.
    asked: Mutex<Vec<String>>,
    /// Records are carried out, and nobody hears of it.
    pub(crate) silent: AtomicBool,
    /// How many requests are answered from now on, when not all are.
    pub(crate) answers: Mutex<Option<usize>>,
    /// Status and code with which each request is refused.
    refusal: Mutex<Option<(u16, &'static str)>>,
}

impl Store {
    /// Serves until the test ends; gives the endpoint.
    fn serve(self: &Arc<Store>) -> String {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let endpoint = format!("http://{}", listener.local_addr().unwrap());
        let store = self.clone();
        thread::spawn(move || {
            for stream in listener.incoming() {
                let (store, stream) = (store.clone(), stream.unwrap());
                thread::spawn(move || store.answer(stream));
            }
        });
        endpoint
    }

    fn answer(&self, mut stream: TcpStream) {
        let mut reader = BufReader::new(stream.try_clone().unwrap());
        let mut head = Vec::new();
        while let Some(line) = reader.by_ref().lines().next() {
            match line {
                Ok(line) if !line.is_empty() => head.push(line),
                _ => break,
            }
        }
        let Some(first) = head.first() else { return };
        match &mut *self.answers.lock().unwrap() {
            Some(0) => return,
            left => *left = left.map(|left| left - 1),
        }
        let mut words = first.split(' ');
        let (method, target) = (words.next().unwrap(), words.next().unwrap());
        let field = |name: &str| {
            head.iter().find_map(|line| {
                let (key, value) = line.split_once(':')?;
                key.eq_ignore_ascii_case(name).then(|| value.trim().to_owned())
            })
        };
        let mut body = vec![0; field("content-length").map_or(0, |length| length.parse().unwrap())];
        reader.read_exact(&mut body).unwrap();
        let (path, query) = target.split_once('?').unwrap_or((target, ""));
        let key = path.trim_start_matches("/bucket").trim_start_matches('/').to_owned();
        let spoken = match () {
            () if field("x-ms-version").is_some() => Spoken::Azure,
            () if field("authorization").is_some_and(|signed| signed.starts_with("GOOG4-HMAC-SHA256 ")) => {
                Spoken::Google
            }
            () => Spoken::S3,
        };
        let condition = match spoken {
            Spoken::Google => field("x-goog-if-generation-match").filter(|generation| generation == "0"),
            Spoken::S3 | Spoken::Azure => field("if-none-match").filter(|tag| tag == "*"),
        };
        // Whoever made it proves by this that it has what was sent.
        let hash = field("content-md5").unwrap_or_default();
        let is_silent = method == "PUT" && key.contains("/log/") && self.silent.load(Ordering::Relaxed);
        let refusal = *self.refusal.lock().unwrap();
        let (status, mut more, content) = match refusal {
            Some((status, code)) => (status, String::new(), format!("<Error><Code>{code}</Code></Error>").into_bytes()),
            None => self.carry_out(spoken, method, &key, query, field("range"), condition.is_some(), body),
        };
        if method == "PUT" && status < 400 {
            more += &format!("x-goog-hash: md5={hash}\r\nContent-MD5: {hash}\r\nETag: \"0x8D4BCC2E4835CD0\"\r\n");
        }
        if is_silent {
            return;
        }
        let id = match spoken {
            Spoken::S3 => "x-amz-request-id",
            Spoken::Google => "x-guploader-uploadid",
            Spoken::Azure => "x-ms-request-id",
        };
        let date = format!("Date: Wed, 25 Nov 2026 12:00:00 GMT\r\n{id}: 4442587FB7D0A2F9");
        let length = content.len();
        let _ = write!(
            stream,
            "HTTP/1.1 {status} x\r\n{date}\r\nContent-Length: {length}\r\nConnection: close\r\n{more}\r\n"
        );
        let _ = stream.write_all(&content);
    }

    #[allow(clippy::too_many_arguments)]
    fn carry_out(
        &self,
        spoken: Spoken,
        method: &str,
        key: &str,
        query: &str,
        range: Option<String>,
        is_conditional: bool,
        body: Vec<u8>,
    ) -> (u16, String, Vec<u8>) {
        let kind = key.rsplit('/').nth(1).filter(|kind| ["log", "seg", "map"].contains(kind)).unwrap_or("-");
        self.asked.lock().unwrap().push(format!("{method} {kind}"));
        let mut objects = self.objects.lock().unwrap();
        match method {
            "PUT" => {
                assert!(is_conditional, "an object that overwrites");
                if objects.contains_key(key) {
                    return match spoken {
                        Spoken::Azure => (409, "x-ms-error-code: BlobAlreadyExists\r\n".to_owned(), Vec::new()),
                        Spoken::S3 | Spoken::Google => (412, String::new(), Vec::new()),
                    };
                }
                objects.insert(key.to_owned(), body);
                (if spoken == Spoken::Azure { 201 } else { 200 }, String::new(), Vec::new())
            }
            "DELETE" => {
                objects.remove(key);
                (204, String::new(), Vec::new())
            }
            "GET" if key.is_empty() => {
                let asked = |name: &str| {
                    let value = query.split('&').find_map(|part| part.strip_prefix(name)?.strip_prefix('='));
                    value.unwrap_or_default().replace("%2F", "/")
                };
                let (prefix, after) = (asked("prefix"), asked("start-after").max(asked("marker")));
                let most = asked("max-keys").parse().or(asked("maxresults").parse()).unwrap_or(1000);
                let mut found =
                    objects.iter().filter(|(name, _)| name.starts_with(&prefix) && **name > after).peekable();
                let (mut entries, mut last) = (String::new(), "");
                for (name, bytes) in found.by_ref().take(most) {
                    let size = bytes.len();
                    last = name;
                    entries += &match spoken {
                        Spoken::Azure => format!(
                            "<Blob><Name>{name}</Name><Properties><Last-Modified>Wed, 25 Nov 2026 12:00:00 GMT</Last-Modified><Content-Length>{size}</Content-Length></Properties></Blob>"
                        ),
                        Spoken::S3 | Spoken::Google => format!(
                            "<Contents><Key>{name}</Key><LastModified>2026-11-25T12:00:00.000Z</LastModified><ETag>\"x\"</ETag><Size>{size}</Size><StorageClass>STANDARD</StorageClass></Contents>"
                        ),
                    };
                }
                let marker = found.peek().map(|_| last).unwrap_or_default();
                let list = match spoken {
                    Spoken::Azure => format!(
                        "<EnumerationResults><Blobs>{entries}</Blobs><NextMarker>{marker}</NextMarker></EnumerationResults>"
                    ),
                    Spoken::Google => format!(
                        "<ListBucketResult xmlns='http://doc.s3.amazonaws.com/2006-03-01'><Name>bucket</Name>{entries}</ListBucketResult>"
                    ),
                    Spoken::S3 => format!(
                        "<ListBucketResult xmlns=\"http://s3.amazonaws.com/doc/2006-03-01/\"><Name>bucket</Name><Prefix></Prefix><MaxKeys>1000</MaxKeys><IsTruncated>false</IsTruncated>{entries}</ListBucketResult>"
                    ),
                };
                (200, String::new(), list.into_bytes())
            }
            _ => {
                let Some(bytes) = objects.get(key) else { return (404, String::new(), Vec::new()) };
                let range = range.unwrap();
                let (first, last) = range.strip_prefix("bytes=").unwrap().split_once('-').unwrap();
                let length = bytes.len();
                let range = match first {
                    "" => length.saturating_sub(last.parse().unwrap())..length,
                    first => first.parse().unwrap()..(last.parse::<usize>().unwrap() + 1).min(length),
                };
                if range.start >= length {
                    return (416, String::new(), Vec::new());
                }
                let told = format!("Content-Range: bytes {}-{}/{length}\r\n", range.start, range.end - 1);
                (206, told, bytes[range].to_vec())
            }
        }
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Spoken {
    S3,
    Google,
    Azure,
}

/// Where an archive lives: its address, and how it is asked for.
pub(crate) struct Home {
    pub(crate) work_dir: TestDir,
    pub(crate) address: String,
    pub(crate) store: Arc<Store>,
    pub(crate) endpoint: String,
}

impl Home {
    pub(crate) fn directory() -> Home {
        let work_dir = TestDir::new();
        let address = format!("file://{}", work_dir.path("objects").display());
        Home { work_dir, address, store: Arc::default(), endpoint: String::new() }
    }

    pub(crate) fn bucket() -> Home {
        Home::store("s3://bucket/some/name")
    }

    fn store(address: &str) -> Home {
        let store = Arc::new(Store::default());
        let endpoint = store.serve();
        Home { work_dir: TestDir::new(), address: address.into(), store, endpoint }
    }

    pub(crate) fn command(&self, arguments: &[&str]) -> std::process::Command {
        let mut command = self.work_dir.command();
        command.env("LOCKBOX_PASSFILE", self.work_dir.path("pass")).env("XDG_CACHE_HOME", self.work_dir.path("cache"));
        command.env("AWS_ACCESS_KEY_ID", "key").env("AWS_SECRET_ACCESS_KEY", "secret").env("AWS_REGION", "x");
        command.env("AWS_ENDPOINT_URL", &self.endpoint);
        command.env("GS_ACCESS_KEY_ID", "GOOG1").env("GS_SECRET_ACCESS_KEY", "secret");
        command.env("STORAGE_EMULATOR_HOST", &self.endpoint);
        command.env("AZURE_STORAGE_ACCOUNT", "account").env("AZURE_STORAGE_KEY", "c2VjcmV0");
        command.env("AZURE_STORAGE_SERVICE_ENDPOINT", &self.endpoint);
        command.args(arguments);
        // Before what is no option.
        let is_asked = |argument: &&str| ["s3://", "gs://", "az://"].iter().any(|scheme| argument.starts_with(scheme));
        if !self.endpoint.is_empty() && arguments.iter().any(is_asked) {
            // A store that drops connections is waited for as long as this.
            let timeout = if self.store.answers.lock().unwrap().is_some() { "1s" } else { "60s" };
            command.args(["--remote", &format!("allow-http,allow-private,timeout={timeout}")]);
        }
        command
    }

    pub(crate) fn run(&self, arguments: &[&str]) -> RunOutput {
        output_of(&mut self.command(arguments))
    }

    pub(crate) fn run_ok(&self, arguments: &[&str]) -> String {
        let output = self.run(arguments);
        assert_eq!((output.code, output.stderr.as_str()), (0, ""), "{arguments:?}");
        String::from_utf8(output.stdout).unwrap()
    }

    pub(crate) fn create(&self) {
        self.run_ok(&[&["create", &self.address][..], &CREATE].concat());
    }

    /// A path in the archive.
    pub(crate) fn within(&self, path: &str) -> String {
        format!("{}:{path}", self.address)
    }

    /// What a machine finds that has nothing but the store: names by their content.
    pub(crate) fn found(&self, name: &str) -> Vec<u8> {
        let _ = fs::remove_dir_all(self.work_dir.path("cache"));
        let output = self.run(&["cat", &self.address, name]);
        assert_eq!((output.code, output.stderr.as_str()), (0, ""), "{name}");
        output.stdout
    }
}

pub(crate) fn homes() -> [Home; 2] {
    [Home::directory(), Home::bucket()]
}

#[test]
fn an_archive_is_made_changed_and_read_at_an_address() {
    for home in homes() {
        let (work_dir, address) = (&home.work_dir, home.address.as_str());
        home.create();
        assert_eq!(home.run_ok(&["ls", address]), "");
        let large = noise(20 << 20);
        fs::create_dir(work_dir.path("tree")).unwrap();
        fs::write(work_dir.path("tree/small"), "small").unwrap();
        fs::write(work_dir.path("tree/large"), &large).unwrap();
        home.run_ok(&["add", address, "tree"]);
        assert!(home.found("tree/small") == b"small" && home.found("tree/large") == large);
        home.run_ok(&["mkdir", &home.within("/made/deep"), "-p"]);
        home.run_ok(&["cp", "tree/small", &home.within("/made/copy")]);
        home.run_ok(&["mv", &home.within("/made/copy"), &home.within("/made/deep/moved")]);
        assert_eq!(home.found("made/deep/moved"), b"small");
        home.run_ok(&["cp", &home.within("/tree/small"), &home.within("/made/inside")]);
        home.run_ok(&["cp", &home.within("/made/inside"), "out"]);
        assert_eq!(fs::read(work_dir.path("out")).unwrap(), b"small");
        home.run_ok(&["snapshot", "create", address, "before"]);
        home.run_ok(&["rm", "-r", &home.within("/tree")]);
        assert_eq!(home.run(&["cat", address, "tree/small"]).code, 2);
        assert_eq!(home.run_ok(&["snapshot", "ls", address]).lines().count(), 1);
        home.run_ok(&["snapshot", "restore", address, "before", "tree"]);
        assert!(home.found("tree/large") == large);
        assert!(home.run_ok(&["snapshot", "ls", address]).contains("before"));
        home.run_ok(&["snapshot", "rm", address, "*"]);
        home.run_ok(&["snapshot", "prune", address, "--keep-last=1"]);
        let output = output_with_input(&mut home.command(&["env", "set", address, "NAME"]), "value");
        assert_eq!((output.code, output.stderr.as_str()), (0, ""));
        assert_eq!(home.run_ok(&["env", "get", address, "NAME"]), "value\n");
        let tar = home.run(&["export-tar", address]).stdout;
        home.run_ok(&["purge", address]);
        let mut import = home.command(&["import-tar", address, "--to=imported"]);
        let mut child = import.stdin(std::process::Stdio::piped()).spawn().unwrap();
        child.stdin.take().unwrap().write_all(&tar).unwrap();
        assert!(child.wait().unwrap().success());
        assert!(home.found("imported/tree/large") == large);
        let told = home.run_ok(&["check", "--full", address]);
        assert!(told.contains("sound"), "{told}");
        home.run_ok(&["remote", "check", "--full", address]);
        // What it was, in a file.
        home.run_ok(&["backup", address, "copy.lbx"]);
        let listed = |archive: &str| home.run(&["ls", "-R", archive]).stdout;
        assert!(listed("copy.lbx") == listed(address) && !listed(address).is_empty());
    }
}

#[test]
fn an_archive_lives_in_googles_and_azures_stores_too() {
    for address in ["gs://bucket/some/name", "az://bucket/some/name"] {
        let home = Home::store(address);
        home.create();
        let large = noise(10 << 20);
        fs::create_dir(home.work_dir.path("tree")).unwrap();
        fs::write(home.work_dir.path("tree/small"), "small").unwrap();
        fs::write(home.work_dir.path("tree/large"), &large).unwrap();
        home.run_ok(&["add", address, "tree"]);
        assert!(home.found("tree/small") == b"small" && home.found("tree/large") == large);
        home.run_ok(&["rm", &home.within("/tree/small")]);
        assert_eq!(home.run(&["cat", address, "tree/small"]).code, 2);
        assert!(home.run_ok(&["check", "--full", address]).contains("sound"));
        home.run_ok(&["compact", address]);
        home.run_ok(&["remote", "check", "--full", address]);
        home.run_ok(&["remote", "collect", address]);
        let listed = home.run_ok(&["remote", "ls", &address[..11]]);
        assert!(listed.lines().count() == 1 && listed.contains(address), "{listed}");
        home.run_ok(&["backup", address, "copy.lbx"]);
        // The file of an archive as one object.
        let bytes = fs::read(home.work_dir.path("copy.lbx")).unwrap();
        home.store.objects.lock().unwrap().insert("one.lbx".into(), bytes);
        assert_eq!(home.run(&["ls", &format!("{}one.lbx", &address[..12])]).stdout, b"tree\n");
        // Doubled by whoever does not look at the condition: the first one is there still.
        assert_eq!(home.run(&[&["create", address][..], &CREATE].concat()).code, 2);
    }
}

#[test]
fn keys_are_changed_at_an_address() {
    for home in homes() {
        let (work_dir, address) = (&home.work_dir, home.address.as_str());
        let output = home.run(&[&["create", address, "--generate-recovery-code"][..], &CREATE].concat());
        assert_eq!(output.code, 0, "{}", output.stderr);
        let told = String::from_utf8(output.stdout).unwrap();
        let code = told.lines().find(|line| line.starts_with("    ")).unwrap().trim().to_owned();
        work_dir.write_passfile("code", &code);
        assert_eq!(home.run_ok(&["key", "ls", address]).lines().count(), 2);
        work_dir.write_passfile("new", "another one");
        home.run_ok(&["passwd", address, "--new-passfile=new", "--kdf-memory=1", "--kdf-passes=1", "--weak-kdf"]);
        assert_eq!(home.run(&["ls", address]).code, 10);
        home.run_ok(&["ls", address, "--passfile=new"]);
        work_dir.write_passfile("third", "a third one");
        let recovery = [
            "recovery",
            address,
            "--recovery-code=code",
            "--new-passfile=third",
            "--kdf-memory=1",
            "--kdf-passes=1",
            "--weak-kdf",
        ];
        assert!(home.run_ok(&recovery).contains("has the new passphrase"));
        home.run_ok(&["ls", address, "--passfile=third"]);
        home.run_ok(&["key", "add", address, "--new-keyfile=key", "--generate", "--label=stick", "--passfile=third"]);
        assert!(home.run_ok(&["key", "test", address, "--keyfile=key"]).contains("stick"));
        home.run_ok(&["key", "rm", address, "stick", "--passfile=third"]);
        assert_eq!(home.run(&["ls", address, "--keyfile=key"]).code, 10);
    }
}

#[test]
fn what_is_there_is_not_made_again_and_what_is_not_is_not_changed() {
    for home in homes() {
        let address = home.address.as_str();
        let none = home.run(&["mkdir", &home.within("/a")]);
        assert_eq!(none.code, 19, "{}", none.stderr);
        assert!(home.store.objects.lock().unwrap().is_empty() && !home.work_dir.path("objects").exists());
        home.create();
        let before = home.store.objects.lock().unwrap().clone();
        let again = home.run(&[&["create", address][..], &CREATE].concat());
        assert_eq!(again.code, 2);
        assert!(again.stderr.contains("already exists and was not changed"), "{}", again.stderr);
        assert!(*home.store.objects.lock().unwrap() == before);
        // A wrong passphrase changes nothing, and is in nobody's way.
        home.work_dir.write_passfile("wrong", "wrong");
        assert_eq!(home.run(&["mkdir", &home.within("/a"), "--passfile=wrong"]).code, 10);
        home.run_ok(&["mkdir", &home.within("/a")]);
    }
    let work_dir = TestDir::new();
    let file = work_dir.run(&[&["create", "a.lbx", "--take-over"][..], &CREATE].concat());
    assert!(file.code == 1 && file.stderr.contains("--take-over is for archives in object stores"), "{file:?}");
    let web = work_dir.run(&[&["create", "https://example.invalid/a.lbx"][..], &CREATE].concat());
    assert!(web.code == 2 && web.stderr.contains("a web server can only be read"), "{web:?}");
}

#[test]
fn a_script_can_tell_the_failures_of_a_store_apart() {
    let home = Home::bucket();
    home.create();
    let address = home.address.as_str();
    fs::write(home.work_dir.path("file"), "x").unwrap();
    let commands = [&["ls", address][..], &["mkdir", &home.within("/a")], &["add", address, "file"]];
    let expect = |code: i32, words: &str| {
        for command in commands {
            let output = home.run(command);
            assert!(output.code == code && output.stderr.contains(words), "{command:?}: {output:?}");
        }
    };
    for (refusal, code, words) in [
        ((403, "InvalidAccessKeyId"), 18, "cannot access"),
        ((403, "SignatureDoesNotMatch"), 18, "cannot access"),
        ((404, "NoSuchBucket"), 19, "bucket"),
    ] {
        *home.store.refusal.lock().unwrap() = Some(refusal);
        expect(code, words);
    }
    *home.store.refusal.lock().unwrap() = None;
    *home.store.answers.lock().unwrap() = Some(0);
    expect(17, "does not answer");
    *home.store.answers.lock().unwrap() = None;
    assert_eq!(home.run(&["ls", "s3://bucket/another"]).code, 19);
    // A missing file of this host is a source, also with an archive in a store.
    for command in [
        &["add", address, "missing"][..],
        &["add", address, "missing", "--mirror"],
        &["add", address, "missing", "--mirror", "--dry-run"],
        &["cp", "missing", &home.within("/")],
        &["diff", &home.within("/"), "missing"],
    ] {
        let output = home.run(command);
        assert!(output.code == 22 && output.stderr.contains("missing"), "{command:?}: {output:?}");
    }
    // And a missing directory to copy to is neither.
    assert_eq!(home.run(&["cp", &home.within("/file"), "missing/file"]).code, 2);
}

/// What `edit` runs: it says that it is there, and waits until it may end.
pub(crate) fn editor(home: &Home) -> std::process::Child {
    let script = "echo edited > \"$1\"\n: > ready\nwhile [ ! -e go ]; do sleep 0.05; done\n";
    let path = home.work_dir.path("editor");
    fs::write(&path, script).unwrap();
    let mut command = home.command(&["edit", &home.within("/text"), "--in=."]);
    // Run by sh: execve(2) fails while a child of another test has the script open for writing.
    command.env("VISUAL", format!("sh '{}'", path.display()));
    command.stdout(std::process::Stdio::null()).stderr(std::process::Stdio::piped());
    let mut child = command.spawn().unwrap();
    while !home.work_dir.path("ready").exists() {
        if child.try_wait().unwrap().is_some() {
            panic!("the command ended before its editor started: {}", child.wait_with_output_of().1);
        }
        thread::yield_now();
    }
    child
}

#[test]
fn a_living_writer_is_told_of_and_one_that_was_overtaken_commits_nothing() {
    let home = Home::directory();
    home.create();
    let mut child = editor(&home);
    let told = home.run(&["mkdir", &home.within("/other")]);
    assert_eq!(told.code, 13, "{}", told.stderr);
    assert!(told.stderr.contains("a writer on") && told.stderr.contains("--take-over goes on"), "{}", told.stderr);
    // Who has not the key ends nobody's work.
    home.work_dir.write_passfile("wrong", "wrong");
    assert_eq!(home.run(&["mkdir", "--take-over", &home.within("/other"), "--passfile=wrong"]).code, 10);
    home.run_ok(&["mkdir", "--take-over", &home.within("/other")]);
    fs::write(home.work_dir.path("go"), "").unwrap();
    let output = child.wait_with_output_of();
    assert_eq!(output.0, Some(13), "{}", output.1);
    assert!(output.1.contains("another writer took over"), "{}", output.1);
    assert_eq!(home.run_ok(&["ls", &home.address]), "other\n");
}

pub(crate) trait Ending {
    fn wait_with_output_of(&mut self) -> (Option<i32>, String);
}

impl Ending for std::process::Child {
    fn wait_with_output_of(&mut self) -> (Option<i32>, String) {
        let mut told = String::new();
        self.stderr.take().unwrap().read_to_string(&mut told).unwrap();
        (self.wait().unwrap().code(), told)
    }
}

#[test]
fn a_writer_that_was_killed_is_followed_on_its_machine_and_left_the_state_of_before() {
    let home = Home::directory();
    home.create();
    home.run_ok(&["mkdir", &home.within("/kept")]);
    let mut child = editor(&home);
    kill(Pid::from_raw(child.id() as i32), Signal::SIGKILL).unwrap();
    fs::write(home.work_dir.path("go"), "").unwrap();
    child.wait().unwrap();
    assert_eq!(home.run_ok(&["ls", &home.address]), "kept\n");
    // Where the machine has a name: its processes are known to be gone.
    let has_name = fs::read_to_string("/etc/machine-id").is_ok_and(|id| !id.trim().is_empty());
    let more: &[&str] = if has_name { &[] } else { &["--take-over"] };
    home.run_ok(&[&["mkdir", &home.within("/next")][..], more].concat());
    assert_eq!(home.run_ok(&["ls", &home.address]), "kept\nnext\n");
    assert!(home.run_ok(&["check", "--full", &home.address]).contains("sound"));
}

#[test]
fn requests_of_small_changes_are_few() {
    let home = Home::bucket();
    let spent = || {
        let asked: Vec<String> = std::mem::take(&mut home.store.asked.lock().unwrap());
        let made = asked.iter().filter(|what| *what == "PUT log").count();
        (asked.len(), made, asked)
    };
    home.create();
    let (all, made, asked) = spent();
    // Whether something is there, below the name, with a list beside, or of it; the marker, twice, and the record of who came; the one with the whole archive.
    assert_eq!((all, made), (10, 2), "{asked:?}");
    home.run_ok(&["mkdir", &home.within("/a")]);
    let (all, made, asked) = spent();
    // Who comes: marker, probe, newest record, with which the start of the archive comes, own record, newest again; four commits, and who goes.
    assert_eq!((all, made), (11, 6), "{asked:?}");
}

#[test]
fn without_the_stores_word_no_command_succeeds() {
    let home = Home::bucket();
    home.create();
    home.run_ok(&["mkdir", &home.within("/before")]);
    home.store.silent.store(true, Ordering::Relaxed);
    let output = home.run(&["mkdir", "--take-over", &home.within("/lost")]);
    assert_ne!(output.code, 0);
    assert!(output.stderr.contains("does not answer"), "{}", output.stderr);
    home.store.silent.store(false, Ordering::Relaxed);
    let found: BTreeSet<String> = home.run_ok(&["ls", &home.address]).lines().map(str::to_owned).collect();
    assert!(found.contains("before"), "{found:?}");
    home.run_ok(&["mkdir", "--take-over", &home.within("/after")]);
    assert!(home.run_ok(&["ls", &home.address]).contains("after"));
}
