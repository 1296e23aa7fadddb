//! Checks the requirements of mounting and of keeping keys in memory, and the sandboxes of mounts.
use std::ffi::OsStr;
use std::fs::{self, OpenOptions};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, SystemTime};

use lockbox::keys::state_directory;
use lockbox_host::control::{self, OwnRuntimeDir};
use lockbox_host::help::VERSION;
use lockbox_host::secrets::Keyring;
use lockbox_host::{daemons, proc, shown};
use nix::sys::resource::{Resource, getrlimit};
use nix::unistd::{AccessFlags, access, geteuid};
use serde_json::{Value, json};

use super::Finding;
use crate::commands::mount;

const DEVICE: &str = "/dev/fuse";
const CONFIGURATION: &str = "/etc/fuse.conf";
/// No archive is older than the program's first version: 2026-01-01 00:00:00 UTC.
const EARLIEST: Duration = Duration::from_secs(1_767_225_600);

/// Returns the checks by name. The names are stable, for programs.
pub(super) fn findings() -> Vec<(&'static str, Finding)> {
    vec![
        ("kernel", kernel()),
        ("fuse device", device()),
        ("fusermount3", fusermount()),
        ("user_allow_other", allow_other()),
        ("mount program", mount_program()),
        ("mount -t lockbox", mount_by_type()),
        ("sandbox", sandbox()),
        ("memory lock", memory_lock()),
        ("keyring", keyring()),
        ("clock", clock()),
        ("state directory", state()),
        ("runtime directory", runtime_directory()),
        ("swap", swap()),
    ]
}

fn kernel() -> Finding {
    let release = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    match fs::read_to_string("/proc/filesystems") {
        Ok(types) if types.lines().any(|line| line.trim_start_matches("nodev").trim() == "fuse") => {
            Finding::good(format!("Linux {} with FUSE", release.trim()))
        }
        _ => Finding::bad(
            format!("Linux {} without FUSE", release.trim()),
            "load it: modprobe fuse; in a container, on its host",
        ),
    }
}

fn device() -> Finding {
    match fs::metadata(DEVICE) {
        Ok(metadata) if !metadata.file_type().is_char_device() => {
            Finding::bad(format!("{DEVICE} is not a device"), "remove it and create it again: mknod /dev/fuse c 10 229")
        }
        Ok(_) => match OpenOptions::new().read(true).write(true).open(DEVICE) {
            Ok(_) => Finding::good(format!("{DEVICE} opens")),
            Err(error) => Finding::bad(
                format!("{DEVICE} does not open: {}", reason(&error)),
                "its mode should be 0666: chmod 666 /dev/fuse; in a container, pass the device on",
            ),
        },
        Err(error) => Finding::bad(
            format!("{DEVICE}: {}", reason(&error)),
            "load the module: modprobe fuse; in a container, pass the device on (--device /dev/fuse)",
        ),
    }
}

fn fusermount() -> Finding {
    let Some(program) = in_path("fusermount3") else {
        let advice = "install the package fuse3: users other than root mount through it";
        return match geteuid().is_root() {
            true => Finding::advice("not installed", advice),
            false => Finding::bad("not installed", advice),
        };
    };
    let set_uid = fs::metadata(&program).is_ok_and(|m| m.uid() == 0 && m.mode() & 0o4000 != 0);
    if set_uid || geteuid().is_root() {
        return Finding::good(shown(&program));
    }
    Finding::bad(
        format!("{} is not set-user-id root", shown(&program)),
        "it cannot mount without that bit: reinstall the package fuse3, or chmod 4755",
    )
}

fn allow_other() -> Finding {
    let configuration = fs::read_to_string(CONFIGURATION).unwrap_or_default();
    if configuration.lines().any(|line| line.trim() == "user_allow_other") {
        Finding::good(format!("set in {CONFIGURATION}"))
    } else {
        Finding::good(format!("not set in {CONFIGURATION}: the option allow_other is for root alone"))
    }
}

fn mount_program() -> Finding {
    let program = mount::program();
    let asked = Command::new(&program).arg("--version").stdin(Stdio::null()).stderr(Stdio::null()).output();
    let version = match asked {
        Ok(output) => String::from_utf8_lossy(&output.stdout).trim().to_owned(),
        Err(error) => {
            return Finding::bad(
                format!("{}: {}", shown(&program), reason(&error)),
                "install mount.lockbox in the directory of lockbox or in /sbin",
            );
        }
    };
    if version.split_once(' ').is_some_and(|(_, version)| version == VERSION) {
        return Finding::good(format!("{} {VERSION}", shown(&program)));
    }
    Finding::advice(
        format!("{} says '{version}', and this program is {VERSION}", shown(&program)),
        "install both programs from one version",
    )
}

/// The names under which mount(8) and umount(8) look.
fn mount_by_type() -> Finding {
    let names = ["/sbin/mount.lockbox", "/sbin/umount.lockbox"];
    let missing: Vec<_> = names.into_iter().filter(|name| fs::metadata(name).is_err()).collect();
    if missing.is_empty() {
        return Finding::good(names.join(", "));
    }
    Finding::advice(
        format!("{} missing", missing.join(", ")),
        "mount -t lockbox, lines of fstab, and umount waiting for the last commit need them; 'lockbox mount' does not",
    )
}

/// Support of the kernel for the sandbox of daemons.
pub(super) struct KernelSandbox {
    /// None where /sys does not tell.
    landlock: Option<bool>,
    seccomp: bool,
    /// Calls that are refused are named in the log.
    refusals_named: bool,
}

impl KernelSandbox {
    pub(super) fn of_host() -> KernelSandbox {
        let actions = fs::read_to_string("/proc/sys/kernel/seccomp/actions_avail").unwrap_or_default();
        let has = |wanted: &str| actions.split_whitespace().any(|action| action == wanted);
        let modules = fs::read_to_string("/sys/kernel/security/lsm").ok();
        let landlock = modules.map(|modules| modules.trim().split(',').any(|module| module == "landlock"));
        KernelSandbox { landlock, seccomp: has("errno"), refusals_named: has("user_notif") }
    }

    pub(super) fn json(&self) -> Value {
        json!({"landlock": self.landlock, "seccomp": self.seccomp, "refusals_named": self.refusals_named})
    }
}

fn sandbox() -> Finding {
    let KernelSandbox { landlock, seccomp, refusals_named } = KernelSandbox::of_host();
    let named = if refusals_named { "" } else { ", without the names of refused calls in the log" };
    match (landlock, seccomp) {
        (Some(true), true) => Finding::good(format!("Landlock, and a list of system calls{named}")),
        (Some(true), false) => Finding::advice(
            "the kernel has no filters of system calls (seccomp): a daemon that is led astray can still connect to local services",
            "use a kernel with CONFIG_SECCOMP_FILTER",
        ),
        (Some(false), _) => Finding::advice(
            "the kernel runs without Landlock: daemons keep access to all files of their user",
            "add landlock to the kernel's parameter lsm=",
        ),
        (None, true) => Finding::good(format!(
            "a list of system calls{named}; cannot examine Landlock: /sys/kernel/security is not mounted"
        )),
        (None, false) => Finding::good("unknown: /sys/kernel/security is not mounted"),
    }
}

fn memory_lock() -> Finding {
    let limit = getrlimit(Resource::RLIMIT_MEMLOCK).map_or(0, |(soft, _)| soft);
    if limit == nix::libc::RLIM_INFINITY {
        return Finding::good("no limit: daemons keep all of their memory out of swap");
    }
    if proc::may_lock_beyond_the_limit() {
        return Finding::good("permitted beyond the limit: daemons keep all of their memory out of swap");
    }
    Finding::advice(
        format!("limited to {} KiB: keys of mounted archives may reach swap", limit >> 10),
        "set memlock to unlimited in /etc/security/limits.conf, or LimitMEMLOCK=infinity in a unit; or encrypt swap",
    )
}

fn keyring() -> Finding {
    match Keyring::open() {
        Ok(_) => Finding::good("available to --keyring-cache"),
        Err(error) => Finding::good(format!("--keyring-cache cannot be used: {error}")),
    }
}

fn clock() -> Finding {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    if now >= EARLIEST {
        return Finding::good("plausible");
    }
    Finding::advice(
        "before the year of this program's first version",
        "set it: files get wrong times, and messages about older copies name wrong dates",
    )
}

/// Checks the directory in which this user's programs remember archives.
fn state() -> Finding {
    let root = geteuid().is_root();
    let directory = state_directory(std::env::var_os("XDG_STATE_HOME"), std::env::var_os("HOME"), root);
    let Some(directory) = directory else {
        return Finding::advice(
            "none: neither XDG_STATE_HOME nor HOME is set",
            "set HOME: without it an older copy of an archive is not noticed",
        );
    };
    let existing = directory.ancestors().find(|path| path.exists()).unwrap_or(Path::new("/"));
    if access(existing, AccessFlags::W_OK | AccessFlags::X_OK).is_ok() {
        return Finding::good(shown(&directory));
    }
    Finding::advice(
        format!("{} cannot be written", shown(&directory)),
        "make it writable: without it, lockbox cannot detect an older copy of an archive",
    )
}

fn runtime_directory() -> Finding {
    match daemons::directory() {
        OwnRuntimeDir::Ready(path) if access(&path, AccessFlags::W_OK | AccessFlags::X_OK).is_ok() => {
            Finding::good(shown(&path))
        }
        OwnRuntimeDir::Ready(path) => {
            Finding::bad(format!("{} cannot be written", shown(&path)), "mounts need a socket there")
        }
        OwnRuntimeDir::Missing(path) => Finding::good(format!("{}, which the first mount creates", shown(&path))),
        OwnRuntimeDir::NotPrivate(path) => Finding::good(format!(
            "next to {}, which is not a private directory of this user; the first mount creates it",
            shown(&path)
        )),
    }
}

fn in_path(program: impl AsRef<OsStr>) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let candidates = std::env::split_paths(&path).map(|directory| directory.join(program.as_ref()));
    candidates.into_iter().find(|candidate| access(candidate, AccessFlags::X_OK).is_ok() && candidate.is_file())
}

fn reason(error: &std::io::Error) -> String {
    lockbox_terminal::without_numbers(error.to_string())
}

/// Devices lie on devices on devices, but not deeper.
const DEEPEST: u32 = 16;

fn swap() -> Finding {
    let advice = "encrypt swap (crypttab with a random key) or use zram: content that programs read from archives may be written there";
    let Ok(table) = fs::read_to_string("/proc/swaps") else {
        return Finding::advice("unknown: /proc/swaps is not readable", advice);
    };
    let spaces = spaces(&table);
    if spaces.is_empty() {
        return Finding::good("none");
    }
    let plain: Vec<_> = spaces.iter().filter(|path| !is_encrypted(path)).map(|path| shown(path)).collect();
    if plain.is_empty() {
        return Finding::good("encrypted or in memory");
    }
    Finding::advice(format!("apparently not encrypted: {}", plain.join(", ")), advice)
}

fn spaces(table: &str) -> Vec<PathBuf> {
    table.lines().skip(1).filter_map(|line| line.split_whitespace().next()).map(PathBuf::from).collect()
}

/// The device, or the one under the file, or any device below that.
fn is_encrypted(space: &Path) -> bool {
    if space.file_name().is_some_and(|name| name.to_string_lossy().starts_with("zram")) {
        return true;
    }
    let Ok(metadata) = fs::metadata(space) else { return false };
    let is_device = metadata.file_type().is_block_device();
    let number = if is_device { metadata.rdev() } else { metadata.dev() };
    let (major, minor) = (nix::sys::stat::major(number), nix::sys::stat::minor(number));
    crypt_below(&PathBuf::from(format!("/sys/dev/block/{major}:{minor}")), 0)
}

/// Returns whether dm-crypt is the device of this directory in /sys, or all devices below it.
fn crypt_below(device: &Path, depth: u32) -> bool {
    let uuid = fs::read_to_string(device.join("dm/uuid")).unwrap_or_default();
    if uuid.starts_with("CRYPT-") {
        return true;
    }
    let entries = fs::read_dir(device.join("slaves")).into_iter().flatten().flatten();
    let slaves: Vec<PathBuf> = entries.map(|entry| entry.path()).collect();
    depth < DEEPEST && !slaves.is_empty() && slaves.iter().all(|slave| crypt_below(slave, depth + 1))
}

/// CAP_IPC_LOCK, the one capability that a daemon keeps, and CAP_DAC_OVERRIDE, which a fetcher
/// keeps for objects in a directory of another user.
const KEPT: u64 = 1 << 14 | 1 << 1;

/// One process of a mount.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Confined {
    archive: String,
    pid: u32,
    /// `daemon` or `fetcher`.
    process: &'static str,
    no_new_privs: bool,
    /// A filter of system calls binds it.
    seccomp: bool,
    capabilities: u64,
}

impl Confined {
    fn of(archive: &str, pid: u32, process: &'static str) -> Option<Confined> {
        Confined::parse(&fs::read_to_string(format!("/proc/{pid}/status")).ok()?, archive, pid, process)
    }

    fn parse(status: &str, archive: &str, pid: u32, process: &'static str) -> Option<Confined> {
        let field = |name: &str| {
            let line = status.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
            line.map(str::trim)
        };
        Some(Confined {
            archive: archive.to_owned(),
            pid,
            process,
            no_new_privs: field("NoNewPrivs")? == "1",
            seccomp: field("Seccomp")? == "2",
            capabilities: proc::bits(status, "CapEff")?,
        })
    }

    pub(super) fn json(&self) -> Value {
        json!({
            "archive": self.archive,
            "pid": self.pid,
            "process": self.process,
            "no_new_privs": self.no_new_privs,
            "seccomp": self.seccomp,
            "capabilities": format!("{:016x}", self.capabilities),
        })
    }

    fn is_in_force(&self) -> bool {
        self.no_new_privs && self.seccomp && self.capabilities & !KEPT == 0
    }
}

pub(super) fn processes() -> Vec<Confined> {
    let mut found = Vec::new();
    for place in daemons::places() {
        for (_, status) in control::list_daemons(&place).unwrap_or_default() {
            found.extend(Confined::of(&status.archive, status.pid, "daemon"));
            found.extend(fetcher(status.pid).and_then(|pid| Confined::of(&status.archive, pid, "fetcher")));
        }
    }
    found
}

/// Returns the fetcher of a daemon; None if the kernel does not list children.
fn fetcher(daemon: u32) -> Option<u32> {
    // Each thread has children of its own.
    let threads = fs::read_dir(format!("/proc/{daemon}/task")).ok()?.flatten();
    let children: String =
        threads.filter_map(|thread| fs::read_to_string(thread.path().join("children")).ok()).collect();
    children.split_whitespace().filter_map(|pid| pid.parse().ok()).find(|pid: &u32| {
        let arguments = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        arguments.split(|byte| *byte == 0).nth(1) == Some(b"--fetcher")
    })
}

pub(super) fn confinement(processes: &[Confined]) -> Finding {
    let free: Vec<_> = processes.iter().filter(|process| !process.is_in_force()).collect();
    match (processes.len(), free.as_slice()) {
        (0, _) => Finding::good("none of this user"),
        (count, []) => Finding::good(format!(
            "{count} processes, all in a sandbox: no capability but to lock memory, no new privileges, a list of system calls"
        )),
        (_, free) => {
            let named = free
                .iter()
                .map(|one| format!("the {} of {} (process {})", one.process, shown(one.archive.as_ref()), one.pid));
            Finding::advice(
                format!("without a whole sandbox: {}", named.collect::<Vec<_>>().join(", ")),
                "mount again without sandbox=off; the daemon's log names the reason",
            )
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernels_table_is_read() {
        let table = "Filename\t\t\t\tType\t\tSize\t\tUsed\t\tPriority\n/dev/dm-1                               partition\t8388604\t0\t-2\n\
                     /swap                                   file\t1024\t0\t-3\n";
        assert_eq!(spaces(table), [Path::new("/dev/dm-1"), Path::new("/swap")]);
        assert!(spaces("Filename Type\n").is_empty());
    }

    #[test]
    fn a_volume_on_encrypted_devices_alone_is_encrypted() {
        let directory = tempfile::tempdir().unwrap();
        let place = directory.path();
        let make = |name: &str, uuid: Option<&str>, slaves: &[&str]| {
            fs::create_dir_all(place.join(name).join("slaves")).unwrap();
            if let Some(uuid) = uuid {
                fs::create_dir_all(place.join(name).join("dm")).unwrap();
                fs::write(place.join(name).join("dm/uuid"), uuid).unwrap();
            }
            for slave in slaves {
                std::os::unix::fs::symlink(place.join(slave), place.join(name).join("slaves").join(slave)).unwrap();
            }
        };
        make("crypt", Some("CRYPT-LUKS2-0123-cryptswap\n"), &["disk"]);
        make("disk", None, &[]);
        make("on-crypt", Some("LVM-0123"), &["crypt"]);
        make("on-both", Some("LVM-4567"), &["crypt", "disk"]);
        let encrypted = |name: &str| crypt_below(&place.join(name), 0);
        let found = ["crypt", "disk", "on-crypt", "on-both", "missing"].map(encrypted);
        assert_eq!(found, [true, false, true, false, false]);
    }

    #[test]
    fn a_process_is_in_force_with_all_three_parts() {
        let of = |privileges: &str, seccomp: &str, capabilities: &str| {
            let status = format!("Name:\tx\nCapEff:\t{capabilities}\nNoNewPrivs:\t{privileges}\nSeccomp:\t{seccomp}\n");
            Confined::parse(&status, "/a.lbx", 7, "daemon").unwrap()
        };
        let whole = of("1", "2", "0000000000004000");
        assert!(whole.is_in_force());
        for part in [of("0", "2", "0"), of("1", "0", "0"), of("1", "2", "000001ffffffffff"), of("1", "2", "200000")] {
            assert!(!part.is_in_force(), "{part:?}");
            let found = confinement(&[part]);
            assert!(found.found.contains("the daemon of /a.lbx (process 7)") && found.advice.is_some());
        }
        assert!(confinement(&[whole]).advice.is_none() && confinement(&[]).advice.is_none());
        assert_eq!(Confined::parse("Name:\tx\n", "/a.lbx", 7, "daemon"), None);
    }
}
