//! What a person is asked and shown, and what is on the disk afterwards.

use std::fs;

use clap::Parser;

use super::*;

/// Gives these answers, one after the other, and keeps what was shown.
#[derive(Default)]
struct Person {
    answers: Vec<&'static str>,
    shown: String,
    is_there: bool,
}

impl Person {
    fn answering(answers: &[&'static str]) -> Person {
        Person { answers: answers.iter().rev().copied().collect(), shown: String::new(), is_there: true }
    }
}

impl SetupDialog for Person {
    fn is_interactive(&self) -> bool {
        self.is_there
    }

    fn ask(
        &mut self,
        _: &str,
        usual: Option<&str>,
        option: &str,
        check: &dyn Fn(&str) -> Result<(), String>,
    ) -> Result<String, String> {
        if !self.is_there {
            return usual.map(str::to_owned).ok_or_else(|| option.to_owned());
        }
        loop {
            let said = self.answers.pop().ok_or("no answer is left")?;
            let said = if said.is_empty() { usual.unwrap_or_default() } else { said };
            match check(said) {
                Ok(()) => return Ok(said.to_owned()),
                Err(told) => self.print(&told),
            }
        }
    }

    fn confirm(&mut self, _: &str) -> Option<bool> {
        self.is_there.then(|| self.answers.pop() == Some("y"))
    }

    fn print(&mut self, text: &str) {
        self.shown.push_str(text);
        self.shown.push('\n');
    }
}

#[derive(Parser)]
struct Line {
    #[command(flatten)]
    setup: Setup,
}

fn options(root: &Path, more: &[&str]) -> Setup {
    let line = ["setup", "--root", root.to_str().unwrap(), "--program", "/usr/bin/lockbox-share"];
    Line::try_parse_from(line.iter().chain(more)).unwrap().setup
}

fn all_files(root: &Path) -> Vec<String> {
    let mut found = Vec::new();
    let mut left = vec![root.to_owned()];
    while let Some(directory) = left.pop() {
        for entry in fs::read_dir(directory).unwrap().map(Result::unwrap) {
            let path = entry.path();
            if path.is_dir() {
                left.push(path);
            } else {
                found.push(path.strip_prefix(root).unwrap().display().to_string());
            }
        }
    }
    found.sort();
    found
}

const UNIT: &str = "etc/systemd/system/lockbox-share.service";
const DROP_IN: &str = "etc/systemd/system/lockbox-share.service.d/setup.conf";
const NGINX: &str = "etc/nginx/conf.d/lockbox-share.conf";

#[test]
fn each_file_is_shown_and_asked_about_before_it_is_written() {
    let root = tempfile::tempdir().unwrap();
    let mut person = Person::answering(&["https://x", "share.example.org", "nginx", "", "", "y", "n", "y"]);
    let told = setup(&options(root.path(), &[]), &mut person).unwrap_err();
    assert!(told.contains(DROP_IN) && !told.contains(NGINX), "{told}");
    assert!(person.answers.is_empty());
    assert_eq!(all_files(root.path()), [NGINX, UNIT]);
    for part in
        ["a name with a dot", "certbot", "--public-url https://share.example.org", "server_name share.example.org;"]
    {
        assert!(person.shown.contains(part), "{part}: {}", person.shown);
    }
    let nginx = fs::read_to_string(root.path().join(NGINX)).unwrap();
    assert!(person.shown.contains(nginx.trim_end()));
    assert!(nginx.contains("ssl_certificate /etc/letsencrypt/live/share.example.org/fullchain.pem;"));
}

#[test]
fn without_a_person_files_are_shown_and_written_only_when_told() {
    let root = tempfile::tempdir().unwrap();
    let said = ["--name", "share.example.org", "--proxy", "nginx"];
    for more in [&[][..], &["--dry-run"]] {
        let mut nobody = Person::default();
        setup(&options(root.path(), &[&said[..], more].concat()), &mut nobody).unwrap();
        assert!(nobody.shown.contains("proxy_pass"), "{}", nobody.shown);
        assert_eq!(all_files(root.path()), [] as [&str; 0]);
    }
    assert_eq!(setup(&options(root.path(), &said[2..]), &mut Person::default()), Err("--name".into()));
    setup(&options(root.path(), &[&said[..], &["--yes"]].concat()), &mut Person::default()).unwrap();
    assert_eq!(all_files(root.path()), [NGINX, UNIT, DROP_IN]);
}

#[test]
fn nothing_is_replaced_without_being_asked_about() {
    let root = tempfile::tempdir().unwrap();
    let said = ["--name", "share.example.org", "--proxy", "nginx", "--cert", "/c.pem", "--key", "/k.pem"];
    let yes = options(root.path(), &[&said[..], &["--yes"]].concat());
    setup(&yes, &mut Person::default()).unwrap();
    let nginx = root.path().join(NGINX);
    fs::write(&nginx, "mine").unwrap();
    let told = setup(&yes, &mut Person::default()).unwrap_err();
    assert!(told.contains(NGINX) && !told.contains(UNIT), "{told}");
    assert_eq!(fs::read(&nginx).unwrap(), b"mine");
    let mut person = Person::answering(&["n"]);
    assert!(setup(&options(root.path(), &said), &mut person).is_err());
    assert!(person.answers.is_empty() && person.shown.contains("already exists, differs"), "{}", person.shown);
    assert_eq!(fs::read(&nginx).unwrap(), b"mine");
    setup(&options(root.path(), &said), &mut Person::answering(&["y"])).unwrap();
    assert_ne!(fs::read(&nginx).unwrap(), b"mine");
    // A link's target is somebody else's file.
    fs::remove_file(&nginx).unwrap();
    fs::write(root.path().join("elsewhere"), "mine").unwrap();
    std::os::unix::fs::symlink(root.path().join("elsewhere"), &nginx).unwrap();
    assert!(setup(&options(root.path(), &said), &mut Person::answering(&["y"])).is_err());
    assert_eq!(fs::read(root.path().join("elsewhere")).unwrap(), b"mine");
}

#[test]
fn a_packaged_unit_is_kept_and_each_proxy_has_its_file() {
    for (proxy, files, parts) in [
        (
            "caddy",
            &["etc/caddy/lockbox-share.caddy", DROP_IN][..],
            &["--proxy-user caddy", "reverse_proxy unix//run/lockbox-share/proxy.sock"][..],
        ),
        ("none", &[DROP_IN], &["--tls-listen [::]:443", "LoadCredential=key.pem:/k.pem", "CAP_NET_BIND_SERVICE"]),
    ] {
        let root = tempfile::tempdir().unwrap();
        fs::create_dir_all(root.path().join("usr/lib/systemd/system")).unwrap();
        let packaged = "usr/lib/systemd/system/lockbox-share.service";
        fs::write(root.path().join(packaged), "packaged").unwrap();
        let said = ["--name", "share.example.org", "--proxy", proxy, "--cert", "/c.pem", "--key", "/k.pem", "--yes"];
        let mut nobody = Person::default();
        setup(&options(root.path(), &said), &mut nobody).unwrap();
        assert_eq!(all_files(root.path()), [files, &[packaged]].concat());
        for part in parts {
            assert!(nobody.shown.contains(part), "{part}: {}", nobody.shown);
        }
    }
}

#[test]
fn names_and_paths_are_no_configuration() {
    for name in ["share.example.org", "a-b.example", "SHARE.example.org", "xn--bcher-kva.example"] {
        assert_eq!(host_name(name), Ok(name.to_ascii_lowercase()));
    }
    for name in [
        "",
        "localhost",
        "nas.local",
        "a b.c",
        "a.b;",
        "https://a.b",
        "a.b:80",
        "a..b",
        "-a.b",
        "a.b/",
        "10.0.0.1",
        "a.b\n}",
        "é.fr",
    ] {
        assert!(host_name(name).is_err(), "{name:?}");
    }
    assert!(absolute("/etc/ssl/a_b-c@d.pem").is_ok());
    for path in ["", "cert.pem", "/a b", "/a;b", "/a\nb", "/a%i", "/a{", "/a$b"] {
        assert!(absolute(path).is_err(), "{path:?}");
    }
}

/// A port of this machine is everybody's to connect to, and what a listed proxy says of its client is believed.
#[test]
fn no_user_of_this_machine_is_a_trusted_proxy() {
    for (proxy, user, more) in
        [("nginx", "www-data", &[][..]), ("caddy", "caddy", &[]), ("nginx", "web", &["--proxy-user", "web"])]
    {
        let root = tempfile::tempdir().unwrap();
        let said = ["--name", "share.example.org", "--proxy", proxy, "--cert", "/c.pem", "--key", "/k.pem", "--yes"];
        setup(&options(root.path(), &[&said[..], more].concat()), &mut Person::default()).unwrap();
        let drop_in = fs::read_to_string(root.path().join(DROP_IN)).unwrap();
        assert!(
            drop_in
                .contains(&format!("--listen none --proxy-socket %t/lockbox-share/proxy.sock --proxy-user {user}\n"))
        );
        assert!(!drop_in.contains("--trusted-proxy") && !drop_in.contains("127.0.0.1"), "{drop_in}");
        let file = if proxy == "nginx" { NGINX } else { "etc/caddy/lockbox-share.caddy" };
        let text = fs::read_to_string(root.path().join(file)).unwrap();
        assert!(text.contains("/run/lockbox-share/proxy.sock") && !text.contains("127.0.0.1"), "{text}");
    }
    // Where only nginx' own user is there.
    let root = tempfile::tempdir().unwrap();
    fs::create_dir(root.path().join("etc")).unwrap();
    fs::write(root.path().join("etc/passwd"), "root:x:0:0::/root:/bin/sh\nnginx:x:99:99::/:/bin/false\n").unwrap();
    assert_eq!(usual_user(Proxy::Nginx, root.path()), "nginx");
    assert!(user_name("www-data").is_ok());
    for name in ["", "-x", "a b", "a;b", "a%i"] {
        assert!(user_name(name).is_err(), "{name:?}");
    }
}
