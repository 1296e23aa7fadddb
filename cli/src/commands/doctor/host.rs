//! Checks the requirements of mounting and of keeping keys in memory.
use std::ffi::OsStr;
use std::fs::{self, OpenOptions};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, SystemTime};

use lockbox::control::OwnRuntimeDir;
use lockbox::keys::state_directory;
use lockbox_host::secrets::Keyring;
use lockbox_host::{daemons, shown};
use nix::sys::resource::{Resource, getrlimit};
use nix::unistd::{AccessFlags, access, geteuid};
use serde_json::{Value, json};

use super::Finding;
use crate::commands::mount;

const DEVICE: &str = "/dev/fuse";
const CONFIGURATION: &str = "/etc/fuse.conf";
/// No archive is older than the program's first version: 2026-01-01 00:00:00 UTC.
const EARLIEST: Duration = Duration::from_secs(1_767_225_600);

pub(super) fn findings() -> Vec<Finding> {
    vec![
        kernel(),
        device(),
        fusermount(),
        allow_other(),
        mount_program(),
        mount_by_type(),
        sandbox(),
        memory_lock(),
        keyring(),
        clock(),
        state(),
        runtime_directory(),
    ]
}

fn kernel() -> Finding {
    let release = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    match fs::read_to_string("/proc/filesystems") {
        Ok(types) if types.lines().any(|line| line.trim_start_matches("nodev").trim() == "fuse") => {
            Finding::good("kernel", format!("Linux {} with FUSE", release.trim()))
        }
        _ => Finding::bad(
            "kernel",
            format!("Linux {} without FUSE", release.trim()),
            "load it: modprobe fuse; in a container, on its host",
        ),
    }
}

fn device() -> Finding {
    const NAME: &str = "fuse device";
    match fs::metadata(DEVICE) {
        Ok(metadata) if !metadata.file_type().is_char_device() => {
            Finding::bad(NAME, format!("{DEVICE} is no device"), "remove it and make it anew: mknod /dev/fuse c 10 229")
        }
        Ok(_) => match OpenOptions::new().read(true).write(true).open(DEVICE) {
            Ok(_) => Finding::good(NAME, format!("{DEVICE} opens")),
            Err(error) => Finding::bad(
                NAME,
                format!("{DEVICE} does not open: {}", reason(&error)),
                "its mode should be 0666: chmod 666 /dev/fuse; in a container, pass the device on",
            ),
        },
        Err(error) => Finding::bad(
            NAME,
            format!("{DEVICE}: {}", reason(&error)),
            "load the module: modprobe fuse; in a container, pass the device on (--device /dev/fuse)",
        ),
    }
}

fn fusermount() -> Finding {
    const NAME: &str = "fusermount3";
    let Some(program) = in_path("fusermount3") else {
        let advice = "install the package fuse3: users other than root mount through it";
        return match geteuid().is_root() {
            true => Finding::advice(NAME, "not installed", advice),
            false => Finding::bad(NAME, "not installed", advice),
        };
    };
    let set_uid = fs::metadata(&program).is_ok_and(|m| m.uid() == 0 && m.mode() & 0o4000 != 0);
    if set_uid || geteuid().is_root() {
        return Finding::good(NAME, shown(&program));
    }
    Finding::bad(
        NAME,
        format!("{} is not set-user-id root", shown(&program)),
        "it cannot mount without that: install the package fuse3 anew, or chmod 4755",
    )
}

fn allow_other() -> Finding {
    const NAME: &str = "user_allow_other";
    let configuration = fs::read_to_string(CONFIGURATION).unwrap_or_default();
    if configuration.lines().any(|line| line.trim() == "user_allow_other") {
        Finding::good(NAME, format!("set in {CONFIGURATION}"))
    } else {
        Finding::good(NAME, format!("not set in {CONFIGURATION}: the option allow_other is for root alone"))
    }
}

fn mount_program() -> Finding {
    const NAME: &str = "mount program";
    let program = mount::program();
    let asked = Command::new(&program).arg("--version").stdin(Stdio::null()).stderr(Stdio::null()).output();
    let version = match asked {
        Ok(output) => String::from_utf8_lossy(&output.stdout).trim().to_owned(),
        Err(error) => {
            return Finding::bad(
                NAME,
                format!("{}: {}", shown(&program), reason(&error)),
                "install mount.lockbox beside lockbox or in /sbin",
            );
        }
    };
    if version.split(' ').next_back() == Some(env!("CARGO_PKG_VERSION")) {
        return Finding::good(NAME, format!("{} {}", shown(&program), env!("CARGO_PKG_VERSION")));
    }
    Finding::advice(
        NAME,
        format!("{} says '{version}', and this program is {}", shown(&program), env!("CARGO_PKG_VERSION")),
        "install both programs from one version",
    )
}

/// The names under which mount(8) and umount(8) look.
fn mount_by_type() -> Finding {
    const NAME: &str = "mount -t lockbox";
    let names = ["/sbin/mount.lockbox", "/sbin/umount.lockbox"];
    let missing: Vec<_> = names.into_iter().filter(|name| fs::metadata(name).is_err()).collect();
    if missing.is_empty() {
        return Finding::good(NAME, names.join(", "));
    }
    Finding::advice(
        NAME,
        format!("{} missing", missing.join(", ")),
        "mount -t lockbox, lines of fstab, and umount waiting for the last commit need them; 'lockbox mount' does not",
    )
}

/// Support of the kernel for the sandbox of daemons.
pub(super) struct KernelSandbox {
    /// None where /sys does not tell.
    landlock: Option<bool>,
    /// Lists of system calls.
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
    const NAME: &str = "sandbox";
    let KernelSandbox { landlock, seccomp, refusals_named } = KernelSandbox::of_host();
    let named = if refusals_named { "" } else { ", without the names of refused calls in the log" };
    match (landlock, seccomp) {
        (Some(true), true) => Finding::good(NAME, format!("Landlock, and a list of system calls{named}")),
        (Some(true), false) => Finding::advice(
            NAME,
            "the kernel has no filters of system calls (seccomp): a daemon that is led astray can still connect to local services",
            "use a kernel with CONFIG_SECCOMP_FILTER",
        ),
        (Some(false), _) => Finding::advice(
            NAME,
            "the kernel runs without Landlock: daemons keep access to all files of their user",
            "add landlock to the kernel's parameter lsm=",
        ),
        (None, true) => Finding::good(
            NAME,
            format!("a list of system calls{named}; cannot examine Landlock: /sys/kernel/security is not mounted"),
        ),
        (None, false) => Finding::good(NAME, "unknown: /sys/kernel/security is not mounted"),
    }
}

fn memory_lock() -> Finding {
    const NAME: &str = "memory lock";
    let limit = getrlimit(Resource::RLIMIT_MEMLOCK).map_or(0, |(soft, _)| soft);
    if limit == nix::libc::RLIM_INFINITY {
        return Finding::good(NAME, "no limit: daemons keep all of their memory out of swap");
    }
    if lockbox_host::harden::may_lock_beyond_the_limit() {
        return Finding::good(NAME, "permitted beyond the limit: daemons keep all of their memory out of swap");
    }
    Finding::advice(
        NAME,
        format!("limited to {} KiB: keys of mounted archives may reach swap", limit >> 10),
        "set memlock to unlimited in /etc/security/limits.conf, or LimitMEMLOCK=infinity in a unit; or encrypt swap",
    )
}

fn keyring() -> Finding {
    match Keyring::open() {
        Ok(_) => Finding::good("keyring", "available to --keyring-cache"),
        Err(error) => Finding::good("keyring", format!("--keyring-cache cannot be used: {error}")),
    }
}

fn clock() -> Finding {
    const NAME: &str = "clock";
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    if now >= EARLIEST {
        return Finding::good(NAME, "plausible");
    }
    Finding::advice(
        NAME,
        "before the year of this program's first version",
        "set it: files get wrong times, and messages about older copies name wrong dates",
    )
}

/// Checks the directory in which this user's programs remember archives.
fn state() -> Finding {
    const NAME: &str = "state directory";
    let root = geteuid().is_root();
    let directory = state_directory(std::env::var_os("XDG_STATE_HOME"), std::env::var_os("HOME"), root);
    let Some(directory) = directory else {
        return Finding::advice(
            NAME,
            "none: neither XDG_STATE_HOME nor HOME is set",
            "set HOME: without it an older copy of an archive is not noticed",
        );
    };
    let existing = directory.ancestors().find(|path| path.exists()).unwrap_or(Path::new("/"));
    if access(existing, AccessFlags::W_OK | AccessFlags::X_OK).is_ok() {
        return Finding::good(NAME, shown(&directory));
    }
    Finding::advice(
        NAME,
        format!("{} cannot be written", shown(&directory)),
        "make it writable: without it an older copy of an archive is not noticed",
    )
}

fn runtime_directory() -> Finding {
    const NAME: &str = "runtime directory";
    match daemons::directory() {
        OwnRuntimeDir::Ready(path) if access(&path, AccessFlags::W_OK | AccessFlags::X_OK).is_ok() => {
            Finding::good(NAME, shown(&path))
        }
        OwnRuntimeDir::Ready(path) => {
            Finding::bad(NAME, format!("{} cannot be written", shown(&path)), "mounts need a socket there")
        }
        OwnRuntimeDir::Missing(path) => Finding::good(NAME, format!("{}, to be made by the first mount", shown(&path))),
        OwnRuntimeDir::NotPrivate(path) => Finding::good(
            NAME,
            format!(
                "next to {}, which is not a private directory of this user, to be made by the first mount",
                shown(&path)
            ),
        ),
    }
}

fn in_path(program: impl AsRef<OsStr>) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let candidates = std::env::split_paths(&path).map(|directory| directory.join(program.as_ref()));
    candidates.into_iter().find(|candidate| access(candidate, AccessFlags::X_OK).is_ok() && candidate.is_file())
}

/// Returns the host's words without its number for them.
fn reason(error: &std::io::Error) -> String {
    lockbox_terminal::without_numbers(error.to_string())
}
