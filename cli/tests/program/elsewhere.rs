//! Archives at addresses: what is kept of them, and what servers can do.

use std::collections::BTreeMap;
use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::net::TcpListener;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::PathBuf;
use std::thread;

use nix::sys::signal::Signal;
use serde_json::Value;

use crate::support::{RunOutput, TestDir, noise, output_of, stop};

/// More than a record takes, so that there is a segment.
const CONTENT: usize = 9_000_000;

/// With the caches in the place's directory.
fn run(work_dir: &TestDir, arguments: &[&str]) -> RunOutput {
    let mut command = work_dir.command();
    command.env("LOCKBOX_PASSFILE", work_dir.path("pass")).env("XDG_CACHE_HOME", work_dir.path("cache"));
    output_of(command.args(arguments))
}

fn run_ok(work_dir: &TestDir, arguments: &[&str]) -> String {
    let output = run(work_dir, arguments);
    assert_eq!((output.code, output.stderr.as_str()), (0, ""), "{arguments:?}");
    String::from_utf8(output.stdout).unwrap()
}

/// Reads what is at an address, which says that it is a backup.
fn read(work_dir: &TestDir, address: &str) {
    let output = run(work_dir, &["cat", address, "content"]);
    assert_eq!((output.code, output.stdout.len()), (0, CONTENT), "{}", output.stderr);
}

/// An archive whose backups are at addresses; gives those.
fn backed_up<const N: usize>(work_dir: &TestDir, names: [&str; N]) -> [String; N] {
    work_dir.create_archive("a.lbx");
    fs::write(work_dir.path("content"), noise(CONTENT)).unwrap();
    work_dir.run_ok(&["add", "a.lbx", "content"]);
    names.map(|name| {
        let address = format!("file://{}", work_dir.path(name).display());
        run_ok(work_dir, &["backup", "a.lbx", &address]);
        address
    })
}

#[test]
fn what_is_kept_on_disk_is_listed_and_removed_and_fetched_again() {
    let work_dir = TestDir::new();
    let [one, other] = backed_up(&work_dir, ["one", "other"]);
    assert_eq!(run_ok(&work_dir, &["cache", "ls"]), "");
    assert_eq!(run_ok(&work_dir, &["cache", "clear"]), "Nothing was cached.\n");
    assert!(!work_dir.path("cache").exists());
    for address in [&one, &other] {
        read(&work_dir, address);
    }
    let listed = run_ok(&work_dir, &["cache", "ls", "--json"]);
    let listed: Vec<Value> = listed.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(listed.len(), 2);
    for (object, address) in listed.iter().zip([&one, &other]) {
        assert_eq!(object["address"], address.as_str());
        assert!(object["bytes"].as_u64().unwrap() > 0 && object["used"].as_str().unwrap().ends_with('Z'), "{object}");
        assert!(object["bytes"].as_u64() <= object["most_bytes"].as_u64(), "{object}");
        assert!(work_dir.path("cache/lockbox").join(object["file"].as_str().unwrap()).is_file());
    }
    let lines = run_ok(&work_dir, &["cache", "ls"]);
    let first = lines.lines().next().unwrap();
    assert!(first.contains(&format!("{} bytes  2", listed[0]["bytes"])) && first.ends_with(&one), "{lines}");
    // The Tab key offers what is known, and nothing of it is a question to anybody.
    let offered = run_ok(&work_dir, &["complete", "fish", "--", "cache", "clear", "file://"]);
    assert!(offered.contains(&one) && offered.contains(&other), "{offered}");
    // What is no address stops it before anything is removed.
    let refused = run(&work_dir, &["cache", "clear", &one, "a.lbx"]);
    assert_eq!(refused.code, 2);
    assert!(refused.stderr.contains("a.lbx: addresses begin with"), "{}", refused.stderr);
    let cleared: Value = serde_json::from_str(&run_ok(&work_dir, &["cache", "clear", "--json", &one])).unwrap();
    assert_eq!((&cleared["removed"], &cleared["in_use"]), (&1.into(), &0.into()));
    assert_eq!(cleared["bytes"], listed[0]["bytes"]);
    assert!(run_ok(&work_dir, &["cache", "ls"]).ends_with(&format!("{other}\n")));
    assert_eq!(run_ok(&work_dir, &["cache", "clear", &one]), "Nothing was cached.\n");
    read(&work_dir, &one);
    assert!(run_ok(&work_dir, &["cache", "clear"]).starts_with("Cleared the cache of 2 archives: "));
    assert_eq!(run_ok(&work_dir, &["cache", "ls"]), "");
}

#[test]
fn caches_in_a_directory_that_others_can_write_to_are_not_touched_and_links_are_not_followed() {
    let work_dir = TestDir::new();
    let [one] = backed_up(&work_dir, ["one"]);
    read(&work_dir, &one);
    let caches = work_dir.path("cache/lockbox");
    let file = fs::read_dir(&caches).unwrap().next().unwrap().unwrap().path();
    // A link in the place of a cache is none, and what it leads to stays.
    fs::rename(&file, work_dir.path("precious")).unwrap();
    symlink(work_dir.path("precious"), &file).unwrap();
    assert_eq!(run_ok(&work_dir, &["cache", "ls"]), "");
    assert_eq!(run_ok(&work_dir, &["cache", "clear"]), "Nothing was cached.\n");
    assert_eq!(run_ok(&work_dir, &["cache", "clear", &one]), "Nothing was cached.\n");
    assert!(work_dir.path("precious").exists() && file.is_symlink());
    fs::remove_file(&file).unwrap();
    fs::rename(work_dir.path("precious"), &file).unwrap();
    fs::set_permissions(&caches, fs::Permissions::from_mode(0o777)).unwrap();
    for arguments in [&["cache", "ls"][..], &["cache", "clear"], &["cache", "clear", &one]] {
        let output = run(&work_dir, arguments);
        assert_eq!((output.code, output.stdout.len()), (2, 0), "{output:?}");
        assert!(output.stderr.contains("not this user's alone"), "{}", output.stderr);
    }
    assert!(file.is_file());
}

/// A web server of one file, which answers as `answer` says: given the range and whether there was a condition, head lines and the body's bytes.
fn serve(answer: impl Fn(std::ops::Range<usize>, bool) -> (String, Vec<u8>) + Send + 'static) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = format!("http://{}/a.lbx", listener.local_addr().unwrap());
    // It ends with the test.
    thread::spawn(move || {
        for stream in listener.incoming() {
            let mut stream = stream.unwrap();
            let mut lines = BufReader::new(stream.try_clone().unwrap()).lines();
            let head: Vec<String> = lines.by_ref().map_while(Result::ok).take_while(|line| !line.is_empty()).collect();
            let of =
                |name: &str| head.iter().find_map(|line| line.to_lowercase().strip_prefix(name).map(str::to_owned));
            let range = of("range: bytes=").unwrap();
            let (first, last) = range.split_once('-').unwrap();
            let (head, body) =
                answer(first.parse().unwrap()..last.parse::<usize>().unwrap() + 1, of("if-match:").is_some());
            write!(stream, "HTTP/1.1 {head}\r\nContent-Length: {}\r\nConnection: close\r\n\r\n", body.len()).unwrap();
            let _ = stream.write_all(&body);
        }
    });
    address
}

/// What is found, by name: its state.
fn states(work_dir: &TestDir, address: &str) -> (i32, BTreeMap<String, String>, String) {
    let output = run(work_dir, &["doctor", "--json", "--remote", "allow-http,allow-private,timeout=60s", address]);
    let told = String::from_utf8(output.stdout).unwrap();
    let object: Value = serde_json::from_str(&told).unwrap_or_else(|_| panic!("{told}{}", output.stderr));
    assert_eq!(object["ok"], output.code == 0, "{told}");
    let text = |value: &Value| value.as_str().unwrap().to_owned();
    let checks = object["checks"].as_array().unwrap();
    let states = checks.iter().map(|check| (text(&check["name"]), text(&check["state"]))).collect();
    (output.code, states, told)
}

fn only(states: &BTreeMap<String, String>, state: &str) -> Vec<String> {
    states.iter().filter(|(_, it)| *it == state).map(|(name, _)| name.clone()).collect()
}

#[test]
fn doctor_says_what_a_web_server_can_do() {
    let work_dir = TestDir::new();
    let archive = fs::read(work_dir.create_archive("a.lbx")).unwrap();
    let part = |archive: &[u8], range: std::ops::Range<usize>, more: &str| {
        let range = range.start..range.end.min(archive.len());
        let (last, length) = (range.end - 1, archive.len());
        let head = format!("206 Partial\r\nContent-Range: bytes {}-{last}/{length}{more}", range.start);
        (head, archive[range].to_vec())
    };
    let run_ok = archive.clone();
    let url = serve(move |range, condition| match condition {
        true => ("412 No".into(), Vec::new()),
        false => part(&run_ok, range, "\r\nETag: \"one\""),
    });
    let (code, found, told) = states(&work_dir, &url);
    assert_eq!((code, only(&found, "advice")), (0, vec!["transport".into()]), "{told}");
    assert_eq!(only(&found, "ok"), ["archive", "conditions", "file", "ranges", "version"], "{told}");
    let passes = archive.clone();
    let url = serve(move |range, _| part(&passes, range, "\r\nETag: \"one\""));
    let (code, found, told) = states(&work_dir, &url);
    assert_eq!((code, only(&found, "advice")), (0, vec!["conditions".into(), "transport".into()]), "{told}");
    let untagged = archive.clone();
    let url = serve(move |range, _| part(&untagged, range, "\r\nETag: W/\"one\""));
    let (code, found, told) = states(&work_dir, &url);
    assert_eq!((code, only(&found, "advice")), (0, vec!["transport".into(), "version".into()]), "{told}");
    let whole = archive.clone();
    let url = serve(move |_, _| ("200 OK\r\nETag: \"one\"".into(), whole.clone()));
    let (code, found, told) = states(&work_dir, &url);
    assert_eq!((code, only(&found, "bad")), (2, vec!["ranges".into()]), "{told}");
    let url = serve(move |range, _| part(&vec![7; 100_000], range, "\r\nETag: \"one\""));
    let (code, found, told) = states(&work_dir, &url);
    assert_eq!((code, only(&found, "bad")), (2, vec!["archive".into()]), "{told}");
    let url = serve(|_, _| ("404 None".into(), Vec::new()));
    let output = run(&work_dir, &["doctor", "--remote", "allow-http,allow-private", &url]);
    assert_eq!(output.code, 2);
    assert!(String::from_utf8(output.stdout).unwrap().contains("bad     file               the name does not exist\n"));
    assert!(output.stderr.contains("one fault keeps lockbox from using this server"), "{}", output.stderr);
    // What an address needs is said as ever.
    let refused = run(&work_dir, &["doctor", "http://127.0.0.1:1/a.lbx"]);
    assert_eq!(refused.code, 2);
    assert!(refused.stderr.contains("use --remote allow-http"), "{}", refused.stderr);
}

#[test]
fn doctor_tries_a_directory_of_objects_and_leaves_it_as_it_was() {
    let work_dir = TestDir::new();
    let [one] = backed_up(&work_dir, ["one"]);
    fs::create_dir(work_dir.path("empty")).unwrap();
    let empty = format!("file://{}", work_dir.path("empty").display());
    let names = || fs::read_dir(work_dir.path("one")).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    let before: std::collections::BTreeSet<_> = names();
    let all = ["archive", "clock", "conditions", "lists", "one writer", "order", "ranges", "removal", "writes"];
    for address in [&empty, &one] {
        let (code, found, told) = states(&work_dir, address);
        assert_eq!((code, &only(&found, "ok")[..]), (0, &all.map(str::to_owned)[..]), "{told}");
        assert_eq!(found.len(), all.len(), "{told}");
        let has = told.contains("there is one, of ");
        assert!(has == (*address == one) && told.contains("no archive there yet") == (*address == empty), "{told}");
    }
    assert_eq!(fs::read_dir(work_dir.path("empty")).unwrap().count(), 0);
    assert_eq!(names(), before);
    assert!(!work_dir.path("cache").exists(), "who only looks keeps nothing");
    // The place of a new archive, which is created for as long as it is tried.
    let (code, found, told) = states(&work_dir, &format!("file://{}", work_dir.path("new").display()));
    assert_eq!((code, only(&found, "ok").len()), (0, all.len()), "{told}");
    assert!(told.contains("no archive there yet") && !work_dir.path("new").exists(), "{told}");
    let missing = run(&work_dir, &["doctor", &format!("file://{}", work_dir.path("none/new").display())]);
    assert_eq!(missing.code, 19);
    assert!(missing.stderr.contains("new: No such file") && !work_dir.path("none").exists(), "{}", missing.stderr);
}

#[test]
fn doctor_shows_no_credentials() {
    // Nobody is there.
    const NOBODY: &str = "http://127.0.0.1:1";
    let amazon = [
        ("AWS_ACCESS_KEY_ID", "AKIDSHOWN"),
        ("AWS_SECRET_ACCESS_KEY", "s3cr3t"),
        ("AWS_SESSION_TOKEN", "t0k3n"),
        ("AWS_ENDPOINT_URL", NOBODY),
    ];
    let google =
        [("GS_ACCESS_KEY_ID", "GOOGSHOWN"), ("GS_SECRET_ACCESS_KEY", "s3cr3t"), ("STORAGE_EMULATOR_HOST", NOBODY)];
    let key = [
        ("AZURE_STORAGE_ACCOUNT", "account"),
        ("AZURE_STORAGE_KEY", "czNjcjN0"),
        ("AZURE_STORAGE_SERVICE_ENDPOINT", NOBODY),
    ];
    let token = [key[0], ("AZURE_STORAGE_SAS_TOKEN", "sv=2021-12-02&sig=s3cr3t"), key[2]];
    let connection = [(
        "AZURE_STORAGE_CONNECTION_STRING",
        "BlobEndpoint=http://127.0.0.1:1;SharedAccessSignature=sv=2021-12-02&sig=s3cr3t",
    )];
    const SECRETS: [&str; 8] = ["AKIDSHOWN", "GOOGSHOWN", "s3cr3t", "t0k3n", "czNjcjN0", "X-Amz", "X-Goog", "sig="];
    for (address, variables) in [
        ("s3://bucket/name", &amazon[..]),
        ("gs://bucket/name", &google),
        ("az://bucket/name", &key),
        ("az://bucket/name", &token),
        ("az://bucket/name", &connection),
    ] {
        let work_dir = TestDir::new();
        let run = |arguments: &[&str], code: i32| {
            let mut command = work_dir.command();
            command.envs(variables.iter().copied()).env("LOCKBOX_LOG", "trace");
            let output =
                output_of(command.args(arguments).args(["--remote", "allow-http,allow-private,timeout=1s", address]));
            let told = String::from_utf8(output.stdout).unwrap() + &output.stderr;
            assert_eq!(output.code, code, "{told}");
            assert!(!SECRETS.iter().any(|secret| told.contains(secret)), "{told}");
            told
        };
        let told = run(&["doctor"], 2);
        assert!(
            told.contains("credentials        found") && told.contains("bad     lists              it does not answer"),
            "{told}"
        );
        run(&["ls"], 17);
    }
}

/// The objects of the archive in this directory whose names have this.
fn objects(work_dir: &TestDir, name: &str, part: &str) -> Vec<PathBuf> {
    let mut found = Vec::new();
    let mut below = vec![work_dir.path(name)];
    while let Some(directory) = below.pop() {
        for entry in fs::read_dir(directory).unwrap() {
            let path = entry.unwrap().path();
            match path.is_dir() {
                true => below.push(path),
                false if path.to_str().unwrap().contains(part) => found.push(path),
                false => {}
            }
        }
    }
    found
}

fn json(text: &str) -> Vec<Value> {
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

#[test]
fn archives_in_a_store_are_listed_without_a_key() {
    let work_dir = TestDir::new();
    for directory in ["store", "store/deep"] {
        fs::create_dir(work_dir.path(directory)).unwrap();
    }
    let [one, two] = backed_up(&work_dir, ["store/one", "store/deep/two"]);
    fs::write(work_dir.path("store/notes"), b"none of ours").unwrap();
    let store = format!("file://{}", work_dir.path("store").display());
    let found = json(&run_ok(&work_dir, &["remote", "ls", "--json", &format!("{store}/")]));
    assert_eq!(found.iter().map(|it| it["address"].as_str().unwrap()).collect::<Vec<_>>(), [&*two, &*one]);
    for (object, name) in found.iter().zip(["store/deep/two", "store/one"]) {
        let all = objects(&work_dir, name, "");
        let bytes: u64 = all.iter().map(|path| path.metadata().unwrap().len()).sum();
        assert_eq!((&object["objects"], &object["bytes"]), (&all.len().into(), &bytes.into()));
        assert!(
            object["stored"].as_str().unwrap().ends_with('Z') && object["length"].as_u64().unwrap() > 0,
            "{object}"
        );
        assert!(object["writer"].is_null() && object["error"].is_null() && object["record"].as_u64().unwrap() > 1);
    }
    let lines = run_ok(&work_dir, &["remote", "ls", &one]);
    assert!(lines.contains(&format!("{} bytes  2", found[1]["bytes"])), "{lines}");
    assert!(lines.ends_with(&format!("  {one}  (record {})\n", found[1]["record"])), "{lines}");
    // A directory that cannot be looked into does not hide what is elsewhere; here root cannot either.
    let shut = (0..40).fold(work_dir.path("store/another"), |path, _| path.join("d"));
    fs::create_dir_all(&shut).unwrap();
    let output = run(&work_dir, &["remote", "ls", &store]);
    let told = String::from_utf8(output.stdout).unwrap();
    assert_eq!((output.code, told.lines().count()), (2, 3), "{told}");
    assert_eq!(told.matches("  (record ").count(), 2, "{told}");
    assert!(told.lines().any(|line| line.trim_start().starts_with("-  - ") && line.contains("/another/d/")), "{told}");
    assert!(!told.contains("server"), "a directory has none: {told}");
    assert_eq!(output.stderr, "lockbox: not all of these can be read; see above\n");
    fs::remove_dir_all(work_dir.path("store/another")).unwrap();
    // One that is damaged does not hide the others.
    fs::write(work_dir.path("store/deep/two/lockbox"), b"x").unwrap();
    let output = run(&work_dir, &["remote", "ls", &store]);
    let told = String::from_utf8(output.stdout).unwrap();
    assert_eq!((output.code, told.lines().count()), (12, 2), "{told}");
    assert!(told.contains("damaged") && told.contains("(record "), "{told}");
    // What is listed can be typed.
    fs::rename(work_dir.path("store/one"), work_dir.path("store/odd %20?#")).unwrap();
    let odd = format!("{store}/odd%20%2520%3F%23");
    let line = format!("  {odd}  (record ");
    let told = String::from_utf8(run(&work_dir, &["remote", "ls", &store]).stdout).unwrap();
    assert!(told.contains(&line), "{told}");
    assert!(run_ok(&work_dir, &["remote", "ls", &format!("{odd}/")]).contains(&line));
    let web = run(&work_dir, &["remote", "ls", "https://example.org/a.lbx"]);
    assert_eq!(web.code, 2);
    assert!(web.stderr.contains("archives are listed in s3://BUCKET"), "{}", web.stderr);
    assert!(!work_dir.path("cache").exists());
}

#[test]
fn what_a_store_lost_is_named_and_what_nothing_names_is_collected() {
    let work_dir = TestDir::new();
    let [one] = backed_up(&work_dir, ["one"]);
    let check = |more: &[&str]| {
        let output = run(&work_dir, &[&["remote", "check", "--json", &one], more].concat());
        (output.code, json(&String::from_utf8(output.stdout).unwrap()).remove(0))
    };
    let (code, sound) = check(&["--full"]);
    assert_eq!((code, &sound["sound"], &sound["bytes_read"]), (0, &true.into(), &sound["needed"]["bytes"]), "{sound}");
    assert_eq!(check(&[]).1["bytes_read"], 0);
    let segment = objects(&work_dir, "one", "/seg/").remove(0);
    let content = fs::read(&segment).unwrap();
    let name = segment.file_name().unwrap().to_str().unwrap();
    let mut altered = content.clone();
    altered[5000] ^= 1;
    fs::write(&segment, &altered).unwrap();
    assert_eq!(check(&[]).0, 0, "only who reads it sees that");
    assert_eq!(check(&["--full"]).1["findings"], Value::from(vec![format!("segment {name} has altered content")]));
    // Also where no page has the byte.
    let mut unused = content.clone();
    *unused.last_mut().unwrap() ^= 1;
    fs::write(&segment, &unused).unwrap();
    let full = run(&work_dir, &["check", "--full", "--json", &one]);
    let told = json(&String::from_utf8(full.stdout).unwrap()).remove(0);
    let found = told["findings"].as_array().unwrap();
    assert_eq!((full.code, &told["sound"]), (12, &false.into()), "{told}");
    assert!(
        found.iter().any(|finding| finding["kind"] == "object" && finding["message"].as_str().unwrap().contains(name)),
        "{told}"
    );
    assert_eq!(run(&work_dir, &["check", &one]).code, 0, "{told}");
    fs::write(&segment, &altered).unwrap();
    fs::write(&segment, &content[..content.len() - 4096]).unwrap();
    assert_eq!(check(&[]).0, 12);
    fs::remove_file(&segment).unwrap();
    let told = run(&work_dir, &["remote", "check", &one]);
    assert_eq!(told.code, 12);
    assert!(String::from_utf8(told.stdout).unwrap().starts_with(&format!("segment {name} is missing\n")));
    assert!(told.stderr.ends_with("1 missing or corrupt object (listed above)\n"), "{}", told.stderr);
    fs::write(&segment, &content).unwrap();
    // What a run that was killed sent.
    fs::write(segment.with_file_name("9".repeat(64)), b"sent").unwrap();
    assert_eq!(check(&[]).1["unnamed"], serde_json::json!({"objects": 1, "bytes": 4}));
    let collected = &json(&run_ok(&work_dir, &["remote", "collect", "--json", &one]))[0];
    assert_eq!((&collected["found"], &collected["removed"]), (&1.into(), &0.into()), "a day has to pass");
    assert_eq!(check(&["--full"]).1["unnamed"]["objects"], 0);
    assert!(run_ok(&work_dir, &["remote", "collect", &one]).contains("0 objects found unreferenced"));
    read(&work_dir, &one);
    // Nothing is made where there is no archive.
    fs::create_dir(work_dir.path("empty")).unwrap();
    for command in ["check", "collect"] {
        let none = run(&work_dir, &["remote", command, &format!("file://{}", work_dir.path("empty").display())]);
        assert_eq!(none.code, 19);
        assert!(none.stderr.contains("No such file"), "{}", none.stderr);
    }
    assert_eq!(fs::read_dir(work_dir.path("empty")).unwrap().count(), 0);
}

#[test]
fn a_check_of_a_store_that_is_interrupted_says_that_nothing_was_changed() {
    let work_dir = TestDir::new();
    work_dir.create_archive("a.lbx");
    fs::write(work_dir.path("large"), noise(64 << 20)).unwrap();
    work_dir.run_ok(&["add", "a.lbx", "large"]);
    let address = format!("file://{}", work_dir.path("one").display());
    run_ok(&work_dir, &["backup", "a.lbx", &address]);
    let output = (0..100).find_map(|_| {
        let child = work_dir.start(&mut work_dir.command(), &["remote", "check", "--full", &address]);
        // Some of it is read.
        let counts = format!("/proc/{}/io", child.id());
        let begun = || {
            let counts = fs::read_to_string(&counts).unwrap_or_default();
            let read = counts.lines().find_map(|line| line.strip_prefix("rchar: ")?.parse::<u64>().ok());
            read.is_some_and(|read| read > 12 << 20)
        };
        stop(child, Signal::SIGINT, begun)
    });
    let (code, stderr) = output.expect("no check could be stopped");
    assert_eq!((code, stderr.as_str()), (Some(130), "lockbox: interrupted; nothing was changed\n"));
}
