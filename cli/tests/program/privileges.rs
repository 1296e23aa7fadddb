//! Set-ID bits, devices and attributes that give rights come out of an archive only with `--privileges`, whoever extracts.

use std::fs;
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt, chown, symlink};
use std::os::unix::process::CommandExt;
use std::path::Path;

use nix::sys::stat::{Mode, SFlag, makedev, mknod};
use rustix::fs::XattrFlags;

use crate::support::{PASSPHRASE, TestDir, output_of};

/// An empty capability set.
const CAPABILITIES: &[u8] = b"\x00\x00\x00\x02\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00";

/// What stands for rights of each kind, as far as this user can make it and this host has it; and how many there are.
fn make(root: &Path) -> u64 {
    let set_mode = |name: &str, mode| fs::set_permissions(root.join(name), fs::Permissions::from_mode(mode)).unwrap();
    fs::create_dir(root).unwrap();
    for name in ["plain", "user", "group", "capable"] {
        fs::write(root.join(name), name).unwrap();
    }
    fs::hard_link(root.join("user"), root.join("user again")).unwrap();
    symlink("user", root.join("link")).unwrap();
    mknod(&root.join("fifo"), SFlag::S_IFIFO, Mode::from_bits_truncate(0o640), 0).unwrap();
    fs::create_dir(root.join("shared")).unwrap();
    let is_root = nix::unistd::geteuid().is_root();
    if is_root {
        chown(root.join("user"), Some(1234), Some(1234)).unwrap();
    }
    set_mode("user", 0o4755);
    set_mode("group", 0o2755);
    set_mode("shared", 0o2775);
    let mut count = 2;
    if !is_root {
        return count;
    }
    // Containers may refuse these.
    count +=
        u64::from(mknod(&root.join("device"), SFlag::S_IFCHR, Mode::from_bits_truncate(0o666), makedev(1, 3)).is_ok());
    for (name, value) in [("security.capability", CAPABILITIES), ("trusted.mark", b"root's")] {
        count += u64::from(rustix::fs::setxattr(root.join("capable"), name, value, XattrFlags::empty()).is_ok());
    }
    count
}

fn attributes(path: &Path) -> Vec<String> {
    let mut names = vec![0; 4096];
    let length = rustix::fs::llistxattr(path, &mut names[..]).unwrap_or(0);
    let names = names[..length].split(|&b| b == 0).map(|name| String::from_utf8_lossy(name).into_owned());
    let rights = names.filter(|name| name.starts_with("security.capability") || name.starts_with("trusted."));
    let mut rights: Vec<_> = rights.collect();
    rights.sort();
    rights
}

#[test]
fn root_makes_what_lends_rights_only_when_told_to() {
    let work_dir = TestDir::new();
    work_dir.create_archive("a.lbx");
    let rights = make(&work_dir.path("tree"));
    work_dir.run_ok(&["add", "a.lbx", "tree"]);
    if !nix::unistd::geteuid().is_root() {
        let output = work_dir.run(&["extract", "a.lbx", "--to", "out"]);
        assert!(output.code == 0 && output.stderr.contains("2 privileges were left out"), "{}", output.stderr);
        assert_eq!(work_dir.path("out/tree/user").metadata().unwrap().mode() & 0o7777, 0o755);
        work_dir.run_ok(&["extract", "a.lbx", "--to", "all", "--privileges"]);
        assert_eq!(work_dir.path("all/tree/user").metadata().unwrap().mode() & 0o7777, 0o4755);
        return;
    }
    for command in ["extract", "rescue"] {
        println!("{command}");
        let (plain, all) = (format!("{command} plain"), format!("{command} all"));
        let output = work_dir.run(&[command, "a.lbx", "--to", &plain, "--json"]);
        assert_eq!(output.code, 0, "{}", output.stderr);
        assert_eq!(output.stderr.lines().count(), 1, "{}", output.stderr);
        let said = format!("lockbox: {rights} privileges were left out (the first: tree/");
        assert!(output.stderr.starts_with(&said), "{}", output.stderr);
        let last = String::from_utf8(output.stdout).unwrap().lines().last().unwrap().to_owned();
        let summary: serde_json::Value = serde_json::from_str(&last).unwrap();
        let summary = if command == "rescue" { &summary["summary"] } else { &summary };
        assert_eq!(summary["privileges_left"], rights);
        assert_eq!(summary["attributes_left"], 0);
        let out = work_dir.path(&plain).join("tree");
        let mode = |name: &str| out.join(name).symlink_metadata().unwrap().mode() & 0o7777;
        assert_eq!((mode("user"), mode("group"), mode("shared"), mode("fifo")), (0o755, 0o755, 0o2775, 0o640));
        assert_eq!(out.join("user").metadata().unwrap().uid(), 1234, "owners are kept");
        assert_eq!(out.join("user again").metadata().unwrap().nlink(), 2);
        assert!(!out.join("device").exists());
        assert_eq!(attributes(&out.join("capable")), [""; 0]);

        work_dir.run_ok(&[command, "a.lbx", "--to", &all, "--privileges"]);
        let out = work_dir.path(&all).join("tree");
        let mode = |name: &str| out.join(name).symlink_metadata().unwrap().mode() & 0o7777;
        assert_eq!((mode("user"), mode("group")), (0o4755, 0o2755));
        if let Ok(device) = work_dir.path("tree/device").metadata() {
            let made = out.join("device").metadata().unwrap();
            assert!(made.file_type().is_char_device() && made.rdev() == device.rdev());
        }
        assert_eq!(attributes(&out.join("capable")), attributes(&work_dir.path("tree/capable")));
    }
}

/// The archive's author names the victim's uid as the owner, for which nobody needs any right: a tar can say so.
#[test]
fn an_ordinary_user_makes_no_set_id_file_that_an_archives_author_chose() {
    if !nix::unistd::geteuid().is_root() {
        println!("not tested: only root can become the user whom the archive names");
        return;
    }
    const VICTIM: u32 = 1234; // the owner that `make` gives to "user"
    // Beside the others, whose directory is closed to this user.
    let work_dir = TestDir::new();
    work_dir.create_archive("a.lbx");
    let rights = make(&work_dir.path("tree"));
    work_dir.run_ok(&["add", "a.lbx", "tree"]);
    let own = tempfile::tempdir().unwrap();
    let path = |name: &str| own.path().join(name);
    // By another process: a descriptor of this one, open for writing, is inherited by what other
    // tests start meanwhile, and a program that is open for writing cannot run.
    let copied = std::process::Command::new("cp").arg(env!("CARGO_BIN_EXE_lockbox")).arg(path("lockbox")).status();
    assert!(copied.unwrap().success());
    fs::copy(work_dir.path("a.lbx"), path("a.lbx")).unwrap();
    fs::write(path("pass"), PASSPHRASE).unwrap();
    for (name, mode) in [("lockbox", 0o755), ("a.lbx", 0o600), ("pass", 0o600)] {
        fs::set_permissions(path(name), fs::Permissions::from_mode(mode)).unwrap();
        chown(path(name), Some(VICTIM), Some(VICTIM)).unwrap();
    }
    chown(own.path(), Some(VICTIM), Some(VICTIM)).unwrap();
    let run = |arguments: &[&str]| {
        let mut command = std::process::Command::new(path("lockbox"));
        command.current_dir(own.path()).env_clear().env("HOME", own.path()).uid(VICTIM).gid(VICTIM);
        output_of(command.args(arguments).args(["--passfile", "pass"]))
    };
    fs::create_dir(path("cp")).unwrap();
    chown(path("cp"), Some(VICTIM), Some(VICTIM)).unwrap();
    let ways: [(&str, &[&str]); 3] = [
        ("extract", &["extract", "a.lbx", "--to", "extract"]),
        ("rescue", &["rescue", "a.lbx", "--to", "rescue"]),
        ("cp", &["cp", "-r", "a.lbx:tree", "cp"]),
    ];
    for (way, arguments) in ways {
        println!("{way}");
        let output = run(arguments);
        assert_eq!(output.code, 0, "{}", output.stderr);
        let said = format!("lockbox: {rights} privileges were left out (the first: tree/");
        assert!(output.stderr.starts_with(&said), "{}", output.stderr);
        let out = path(way).join("tree");
        let mode = |name: &str| out.join(name).symlink_metadata().unwrap().mode() & 0o7777;
        assert_eq!((mode("user"), mode("group")), (0o755, 0o755));
        assert_eq!(out.join("user").metadata().unwrap().uid(), VICTIM);
        assert!(!out.join("device").exists());
        assert_eq!(attributes(&out.join("capable")), [""; 0]);
    }
    // With the option it is what this user's own programs could do: the file is the user's, the device is not to be had.
    let output = run(&["extract", "a.lbx", "tree/user", "tree/group", "--to", "all", "--privileges"]);
    assert_eq!(output.code, 0, "{}", output.stderr);
    let mode = |name: &str| path("all").join(name).metadata().unwrap().mode() & 0o7777;
    assert_eq!((mode("user"), mode("group")), (0o4755, 0o755), "a bit of another owner's file");
}
