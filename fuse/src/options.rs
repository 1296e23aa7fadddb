//! Mount options (`-o`): their parser, and the configuration of a daemon.

use std::ffi::OsString;
use std::fmt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use lockbox::archive::{OpenOptions, RetentionPolicy, RetentionRule};
use lockbox::fs::{Compression, SyncProfile};
use lockbox::keys::{PlaceName, RollbackOptions, UnlockLimits, seen_directory};
use lockbox_host::mount_options::nearest;
use lockbox_host::remote::Remote;
use lockbox_host::secrets::{Cache, Sources, parse_timeout};
use lockbox_terminal::quantity;
use nix::mount::MsFlags;
use nix::unistd::geteuid;
use serde::{Deserialize, Serialize};

use crate::exit::Failure;

/// Minimum for frame cache, node cache, dirty data and space map; below this the caches thrash.
const MIN_MEMORY: u64 = 16 << 20;

/// Minimum size limit: an empty archive has about 3 MiB, and 1 MiB is reserved for deletes and
/// commits.
const MIN_SIZE_LIMIT: u64 = 8 << 20;

/// A year, so that a mistyped number is not taken for never.
const MAX_IDLE: u64 = 366 * 86_400;

/// Maximum interval: with a longer one a replica could miss objects that are removed a day after
/// they became unused.
const MAX_FOLLOW: Duration = Duration::from_secs(3600);

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MountOptions {
    pub read_only: bool,
    pub allow_other: bool,
    pub suid: bool,
    pub dev: bool,
    pub exec: bool,
    pub foreground: bool,
    /// Sources of secrets; the daemon already has its key.
    #[serde(skip)]
    pub sources: Sources,
    #[serde(skip)]
    pub cache: Cache,
    pub sync: SyncOption,
    pub memory: u64,
    /// Maximum size of the archive's file in bytes.
    pub size_limit: Option<u64>,
    pub pack: bool,
    pub compression: Compression,
    /// Update atime when a file is opened for reading.
    pub access_times: bool,
    /// Number of event loops; None for the default of the archive's location
    /// ([`crate::kernel::default_threads`]).
    pub threads: Option<usize>,
    /// Seconds that a busy mount is served after a stop request.
    pub stop_timeout: u64,
    pub log: Option<PathBuf>,
    /// Cost limit of unlocking, in MiB times passes; None for the default.
    pub kdf_limit: Option<u64>,
    pub accept_older: bool,
    pub accept_fork: bool,
    pub accept_other: bool,
    /// Names of the archive's location as given to the mount command; the daemon has only the path
    /// without links.
    #[serde(default)]
    pub places: Vec<PlaceName>,
    /// Whether the daemon and the fetcher enter their sandboxes.
    pub sandbox: bool,
    /// Seconds without use after which the archive is unmounted.
    pub idle: Option<u64>,
    /// Unmount before the machine sleeps.
    pub lock_on_suspend: bool,
    /// A missing archive is not a failure.
    pub nofail: bool,
    /// Mount even if that covers the archive or files of the daemon.
    pub over_archive: bool,
    /// Mount another user's archive even if [`crate::mount`] would refuse it.
    pub trust_owner: bool,
    /// Snapshot that is mounted read-only.
    pub snapshot: Option<String>,
    pub snapshot_dir: SnapshotDir,
    /// Retention rules of scheduled snapshots.
    pub snapshots: RetentionPolicy,
    /// Connection options of a remote archive.
    pub remote: Remote,
    /// Write to a remote archive although another machine seems to be writing.
    pub take_over: bool,
    /// Polling interval for remote writes while the mount is in use; None for never.
    pub follow: Option<Duration>,
}

/// `snapshot-dir=`: whether the root contains `.snapshots`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum SnapshotDir {
    /// Found by name and listed.
    Shown,
    /// Found by name.
    Hidden,
    Off,
}

/// `sync=`; the core's type is not serializable.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum SyncOption {
    Never,
    Periodic,
    Always,
}

impl Default for MountOptions {
    fn default() -> MountOptions {
        let open = OpenOptions::default();
        MountOptions {
            read_only: false,
            allow_other: false,
            suid: false,
            dev: false,
            exec: true,
            foreground: false,
            sources: Sources::default(),
            cache: Cache::default(),
            sync: SyncOption::Periodic,
            memory: open.memory,
            size_limit: open.size_limit,
            pack: open.pack,
            compression: open.compression,
            access_times: false,
            threads: None,
            stop_timeout: 60,
            log: None,
            kdf_limit: None,
            accept_older: false,
            accept_fork: false,
            accept_other: false,
            places: Vec::new(),
            sandbox: true,
            idle: None,
            lock_on_suspend: false,
            nofail: false,
            over_archive: false,
            trust_owner: false,
            snapshot: None,
            snapshot_dir: SnapshotDir::Hidden,
            snapshots: RetentionPolicy::default(),
            remote: Remote::default(),
            take_over: false,
            follow: Some(Duration::from_secs(1)),
        }
    }
}

impl MountOptions {
    /// Parses comma-separated lists; a later option overrides an earlier one.
    pub fn parse<S: AsRef<str>>(lists: &[S]) -> Result<MountOptions, Failure> {
        let (options, unknown) = MountOptions::parse_sloppily(lists)?;
        match unknown.first() {
            None => Ok(options),
            Some(name) => {
                let nearest = nearest(name).map_or_else(String::new, |option| format!(", did you mean {option}?"));
                Err(Failure::usage(format!("unknown mount option: {name}{nearest} (all are in mount.lockbox(8))")))
            }
        }
    }

    /// Parses lists, and returns the names of unknown options as well. A wrong value of a known
    /// option is an error.
    pub fn parse_sloppily<S: AsRef<str>>(lists: &[S]) -> Result<(MountOptions, Vec<String>), Failure> {
        let remote = Remote::from_environment().map_err(Failure::usage)?;
        let mut options = MountOptions { remote, ..MountOptions::default() };
        let unknown = options.apply(lists)?;
        Ok((options, unknown))
    }

    /// Applies lists to these options, and returns the names of unknown ones.
    pub fn apply<S: AsRef<str>>(&mut self, lists: &[S]) -> Result<Vec<String>, Failure> {
        let mut unknown = Vec::new();
        for option in lists.iter().flat_map(|list| list.as_ref().split(',')).filter(|option| !option.is_empty()) {
            let (name, known) = match option.split_once('=') {
                Some((name, value)) => (name, self.set_value(name, value)?),
                // The list of rules is split at commas like all others.
                None if option.contains(':') && self.snapshots != RetentionPolicy::default() => {
                    self.snapshots = parse_rule(self.snapshots, option)?;
                    (option, true)
                }
                None => (option, self.set_flag(option) || self.remote.set(option, None).unwrap_or(false)),
            };
            if !known && !is_for_others(option) {
                unknown.push(name.to_owned());
            }
        }
        // mount(8) passes `rw` even if the user gave neither.
        self.read_only |= self.snapshot.is_some() || self.remote.is_unsent();
        Ok(unknown)
    }

    /// Returns whether the option is known.
    fn set_flag(&mut self, name: &str) -> bool {
        match name {
            "ro" => self.read_only = true,
            "rw" => self.read_only = false,
            "allow_other" => self.allow_other = true,
            "suid" | "set-id" | "set_id" => self.suid = true,
            "nosuid" => self.suid = false,
            "dev" | "devices" => self.dev = true,
            "nodev" => self.dev = false,
            "exec" => self.exec = true,
            "noexec" => self.exec = false,
            "foreground" => self.foreground = true,
            "accept-older" | "accept_older" => self.accept_older = true,
            "accept-fork" | "accept_fork" => self.accept_fork = true,
            "accept-other" | "accept_other" => self.accept_other = true,
            "passfile_any" | "passfile-any" => self.sources.passphrase.passfile_any = true,
            "ask_password" | "ask-password" => self.sources.passphrase.ask_password = true,
            "pack" => self.pack = true,
            "compress" => self.compression = Compression::Default,
            "sync" => self.sync = SyncOption::Always,
            "noatime" => self.access_times = false,
            "lock-on-suspend" | "lock_on_suspend" => self.lock_on_suspend = true,
            "nofail" => self.nofail = true,
            "take-over" | "take_over" => self.take_over = true,
            "over-archive" | "over_archive" => self.over_archive = true,
            "trust-owner" | "trust_owner" => self.trust_owner = true,
            _ => return false,
        }
        true
    }

    /// Returns whether the option is known.
    fn set_value(&mut self, name: &str, value: &str) -> Result<bool, Failure> {
        match name {
            "passfile" => self.sources.passphrase.passfile = Some(PathBuf::from(value)),
            "passfd" => self.sources.passphrase.passfd = Some(parse_number(name, value, 0, i32::MAX as u64)? as i32),
            "passcommand" => self.sources.passphrase.passcommand = Some(value.into()),
            "credential" => self.sources.passphrase.credential = Some(value.into()),
            "keyfile" => self.sources.keyfile = Some(PathBuf::from(value)),
            "recovery-code" | "recovery_code" => self.sources.recovery_code = Some(PathBuf::from(value)),
            "identity" => self.sources.identity.push(PathBuf::from(value)),
            "keyring-cache" | "keyring_cache" => self.cache.keyring_cache = Some(parse_time(name, value)?),
            "log" => self.log = Some(PathBuf::from(value)),
            "sync" => self.sync = parse_sync(value)?,
            "memory" => self.memory = parse_size(name, value, MIN_MEMORY)?,
            "size-limit" => self.size_limit = Some(parse_size(name, value, MIN_SIZE_LIMIT)?),
            "threads" => self.threads = Some(parse_number(name, value, 1, 256)? as usize),
            "stop_timeout" => self.stop_timeout = parse_number(name, value, 0, 86_400)?,
            "pack" => self.pack = parse_switch(name, value)?,
            "compress" => self.compression = parse_compression(name, value)?,
            "kdf-limit" | "kdf_limit" => self.kdf_limit = Some(parse_number(name, value, 1, u64::MAX)?),
            "sandbox" => self.sandbox = parse_switch(name, value)?,
            "atime" => self.access_times = parse_atime(value)?,
            "idle" => self.idle = parse_idle(value)?,
            "follow" => self.follow = parse_follow(value)?,
            "snapshot" => self.snapshot = Some(parse_name(name, value)?),
            "snapshot-dir" | "snapshot_dir" => self.snapshot_dir = parse_snapshot_dir(name, value)?,
            "snapshots" if value == "off" => self.snapshots = RetentionPolicy::default(),
            "snapshots" => self.snapshots = parse_rule(RetentionPolicy::default(), value)?,
            _ => return self.remote.set(name, Some(value)).map_err(Failure::usage),
        }
        Ok(true)
    }

    pub fn open_options(&self) -> OpenOptions {
        OpenOptions {
            read_only: self.read_only,
            memory: self.memory,
            sync: self.sync_profile(),
            pack: self.pack,
            compression: self.compression,
            size_limit: self.size_limit,
        }
    }

    pub fn unlock_limits(&self) -> UnlockLimits {
        lockbox_host::unlock_limits(self.kdf_limit)
    }

    /// Returns the location of this user's rollback state, and which contradictions to it are
    /// accepted.
    pub fn seen_options(&self) -> RollbackOptions {
        let directory =
            seen_directory(std::env::var_os("XDG_STATE_HOME"), std::env::var_os("HOME"), geteuid().is_root());
        // An archive that no store has cannot be mounted again, so nothing is remembered.
        let directory = directory.filter(|_| !self.remote.is_unsent());
        RollbackOptions {
            directory,
            accept_older: self.accept_older,
            accept_fork: self.accept_fork,
            accept_other: self.accept_other,
            places: self.places.clone(),
        }
    }

    pub fn sync_profile(&self) -> SyncProfile {
        match self.sync {
            SyncOption::Never => SyncProfile::Never,
            SyncOption::Periodic => SyncProfile::Periodic,
            SyncOption::Always => SyncProfile::Always,
        }
    }

    pub fn mount_flags(&self) -> MsFlags {
        // The daemon maintains access times; the flag only shows the setting in the mount table.
        let mut flags = MsFlags::empty();
        flags.set(MsFlags::MS_NOATIME, !self.access_times);
        flags.set(MsFlags::MS_RDONLY, self.read_only);
        flags.set(MsFlags::MS_NOSUID, !self.suid);
        flags.set(MsFlags::MS_NODEV, !self.dev);
        flags.set(MsFlags::MS_NOEXEC, !self.exec);
        flags
    }

    pub fn stop_timeout(&self) -> Duration {
        Duration::from_secs(self.stop_timeout)
    }
}

/// Formats the effective options, without the paths of secrets and logs.
impl fmt::Display for MountOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.read_only { "ro" } else { "rw" })?;
        let flags = [("allow_other", self.allow_other), ("suid", self.suid), ("dev", self.dev), ("noexec", !self.exec)];
        for (name, _) in flags.iter().filter(|(_, set)| *set) {
            write!(f, ",{name}")?;
        }
        let sync = match self.sync {
            SyncOption::Never => "never",
            SyncOption::Periodic => "periodic",
            SyncOption::Always => "always",
        };
        let switch = |on| if on { "on" } else { "off" };
        write!(f, ",sync={sync},memory={},pack={}", self.memory, switch(self.pack))?;
        write!(f, ",compress={}", self.compression)?;
        if let Some(threads) = self.threads {
            write!(f, ",threads={threads}")?;
        }
        if self.stop_timeout != MountOptions::default().stop_timeout {
            write!(f, ",stop_timeout={}", self.stop_timeout)?;
        }
        if let Some(seconds) = self.idle {
            write!(f, ",idle={seconds}")?;
        }
        if self.lock_on_suspend {
            f.write_str(",lock-on-suspend")?;
        }
        if !self.sandbox {
            f.write_str(",sandbox=off")?;
        }
        if self.access_times {
            f.write_str(",atime=open")?;
        }
        if let Some(limit) = self.size_limit {
            write!(f, ",size-limit={limit}")?;
        }
        match self.snapshot_dir {
            SnapshotDir::Shown => f.write_str(",snapshot-dir=shown")?,
            SnapshotDir::Hidden => {}
            SnapshotDir::Off => f.write_str(",snapshot-dir=off")?,
        }
        if self.snapshots != RetentionPolicy::default() {
            write!(f, ",snapshots={}", format_rules(&self.snapshots))?;
        }
        if self.follow != MountOptions::default().follow {
            match self.follow {
                Some(time) => write!(f, ",follow={}s", time.as_secs())?,
                None => f.write_str(",follow=off")?,
            }
        }
        match &self.snapshot {
            Some(name) => write!(f, ",snapshot={name}"),
            None => Ok(()),
        }
    }
}

fn parse_sync(value: &str) -> Result<SyncOption, Failure> {
    match value {
        "never" => Ok(SyncOption::Never),
        "periodic" => Ok(SyncOption::Periodic),
        "always" => Ok(SyncOption::Always),
        _ => Err(Failure::usage(format!("sync= takes never, periodic or always, not '{value}'"))),
    }
}

fn parse_snapshot_dir(name: &str, value: &str) -> Result<SnapshotDir, Failure> {
    match value {
        "shown" => Ok(SnapshotDir::Shown),
        "hidden" => Ok(SnapshotDir::Hidden),
        "off" => Ok(SnapshotDir::Off),
        _ => Err(Failure::usage(format!("{name}= takes shown, hidden or off, not '{value}'"))),
    }
}

fn parse_atime(value: &str) -> Result<bool, Failure> {
    match value {
        "off" => Ok(false),
        "open" => Ok(true),
        _ => Err(Failure::usage(format!("atime= takes off or open, not '{value}'"))),
    }
}

fn parse_idle(value: &str) -> Result<Option<u64>, Failure> {
    match (value, quantity::time(value).map(|time| time.as_secs())) {
        ("off", _) => Ok(None),
        (_, Some(seconds @ 1..=MAX_IDLE)) => Ok(Some(seconds)),
        _ => Err(Failure::usage(format!(
            "idle= takes a time such as 90s, 10m or 2h, a year at most, or off, not '{value}'"
        ))),
    }
}

fn parse_follow(value: &str) -> Result<Option<Duration>, Failure> {
    match (value, quantity::time(value)) {
        ("off", _) => Ok(None),
        (_, Some(time)) if (Duration::from_secs(1)..=MAX_FOLLOW).contains(&time) => Ok(Some(time)),
        _ => Err(Failure::usage(format!("follow= takes a time from 1s to 1h, or off, not '{value}'"))),
    }
}

fn parse_name(name: &str, value: &str) -> Result<String, Failure> {
    match value {
        "" => Err(Failure::usage(format!("{name}= takes a name"))),
        value => Ok(value.to_owned()),
    }
}

fn parse_rule(rules: RetentionPolicy, text: &str) -> Result<RetentionPolicy, Failure> {
    match rule_and_count(text) {
        Some((rule, count)) => Ok(rules.with(rule, count)),
        None => Err(Failure::usage(format!(
            "snapshots= takes off, or rules such as hourly:24,daily:7,weekly:4,monthly:12,yearly:5, not '{text}'"
        ))),
    }
}

fn parse_switch(name: &str, value: &str) -> Result<bool, Failure> {
    match value {
        "on" => Ok(true),
        "off" => Ok(false),
        _ => Err(Failure::usage(format!("{name}= takes on or off, not '{value}'"))),
    }
}

fn parse_compression(name: &str, value: &str) -> Result<Compression, Failure> {
    match value {
        "on" => Ok(Compression::Default),
        level => level
            .parse()
            .map_err(|_| Failure::usage(format!("{name}= takes off, fast, default or best, not '{value}'"))),
    }
}

fn parse_time(name: &str, value: &str) -> Result<Duration, Failure> {
    parse_timeout(value).map_err(|sentence| Failure::usage(format!("{name}= {sentence}")))
}

fn parse_number(name: &str, value: &str, least: u64, most: u64) -> Result<u64, Failure> {
    match value.parse() {
        Ok(number) if (least..=most).contains(&number) => Ok(number),
        _ => Err(Failure::usage(format!("{name}= takes a number from {least} to {most}, not '{value}'"))),
    }
}

fn parse_size(name: &str, value: &str, least: u64) -> Result<u64, Failure> {
    match quantity::size(value) {
        Some(bytes) if bytes >= least => Ok(bytes),
        _ => Err(Failure::usage(format!(
            "{name}= takes a size such as 64M or 1G, {} MiB at least, not '{value}'",
            least >> 20
        ))),
    }
}

/// Options that mount(8) passes on although they are meant for it, and those that state this file
/// system's default or that FUSE cannot do. They occur in fstab files, and ignoring them makes no
/// mount less strict than requested.
const WORDS: [&str; 32] = [
    "_netdev",
    "async",
    "atime",
    "auto",
    "default_permissions",
    "defaults",
    "diratime",
    "group",
    "iversion",
    "lazytime",
    "loud",
    "mand",
    "noauto",
    "nodiratime",
    "nogroup",
    "noiversion",
    "nolazytime",
    "nomand",
    "noowner",
    "norelatime",
    "nostrictatime",
    "nouser",
    "nousers",
    "owner",
    "relatime",
    "silent",
    "strictatime",
    "user",
    "users",
    "acl",
    "user_xattr",
    "nonempty",
];

/// Options with a value of the same kind. `helper`, `uhelper` and `user` occur in libmount's table
/// of mounts.
const SETTINGS: [&str; 5] = ["comment", "helper", "uhelper", "user", "fstype"];

/// Returns whether the option is meant for another program and can be ignored.
fn is_for_others(option: &str) -> bool {
    if option.starts_with("x-") || option.starts_with("X-") {
        return true;
    }
    match option.split_once('=') {
        Some((name, _)) => SETTINGS.contains(&name),
        None => WORDS.contains(&option) || option == "comment",
    }
}

/// Upper limit of snapshots per rule.
const MAX_COUNT: u32 = 100_000;

/// Formats rules as the option does: `hourly:24,daily:7`.
pub(crate) fn format_rules(keep: &RetentionPolicy) -> String {
    keep.rules().map(|(rule, count)| format!("{}:{count}", rule.word())).collect::<Vec<_>>().join(",")
}

/// Parses one rule of the option. Returns None for an unknown period, or a number outside 1 to
/// 100,000.
fn rule_and_count(text: &str) -> Option<(RetentionRule, u32)> {
    let (word, count) = text.split_once(':')?;
    let rule = RetentionRule::ALL.into_iter().find(|rule| *rule != RetentionRule::Last && rule.word() == word)?;
    Some((rule, count.parse().ok().filter(|count| (1..=MAX_COUNT).contains(count))?))
}

/// Configuration that the mount command passes to the daemon: the archive, its mount point and its
/// options. Paths are absolute and may have any encoding.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct DaemonConfig {
    pub archive: OsString,
    pub point: OsString,
    pub options: MountOptions,
    pub verbose: bool,
    /// The mount point was created for this mount and is removed after the unmount.
    #[serde(default)]
    pub made: bool,
}

impl DaemonConfig {
    pub fn archive(&self) -> &Path {
        Path::new(&self.archive)
    }

    pub fn point(&self) -> &Path {
        Path::new(&self.point)
    }
}

#[cfg(test)]
mod tests {
    use lockbox_host::USAGE;
    use lockbox_host::mount_options::{self, OptionValue};

    use super::*;

    #[test]
    fn lists_are_read_in_order() {
        let options = MountOptions::parse(&[
            "ro,allow_other,memory=64M",
            "rw,sync=never,pack=off,threads=3,stop_timeout=5,size-limit=2T",
        ])
        .unwrap();
        assert!(!options.read_only);
        assert!(options.allow_other);
        assert_eq!(options.memory, 64 << 20);
        assert_eq!(options.size_limit, Some(2 << 40));
        assert_eq!(options.sync_profile(), SyncProfile::Never);
        assert!(!options.pack);
        assert_eq!(options.compression, Compression::Default);
        assert_eq!(options.threads, Some(3));
        assert_eq!(MountOptions::parse(&[options.to_string()]).unwrap(), options);
    }

    #[test]
    fn options_that_mount_8_passes_from_fstab_are_accepted() {
        let list = "rw,defaults,noauto,nofail,user,x-systemd.automount,x-gvfs-name=Box,nosuid,nodev,noexec,noatime";
        let options = MountOptions::parse(&[list]).unwrap();
        let expected = MsFlags::MS_NOSUID | MsFlags::MS_NODEV | MsFlags::MS_NOEXEC | MsFlags::MS_NOATIME;
        assert_eq!(options.mount_flags(), expected);
    }

    #[test]
    fn unknown_options_are_named_and_can_be_ignored() {
        let (options, unknown) = MountOptions::parse_sloppily(&["ro,bogus,quux=7", "x-gvfs-show,comment=a"]).unwrap();
        assert!(options.read_only);
        assert_eq!(unknown, ["bogus", "quux"]);
        assert_eq!(MountOptions::parse_sloppily(&["memory=1"]).unwrap_err().code, USAGE);
    }

    #[test]
    fn idle_times_have_units() {
        for (value, seconds) in [("90", 90), ("90s", 90), ("10m", 600), ("2h", 7200), ("1d", 86_400)] {
            let options = MountOptions::parse(&[format!("lock-on-suspend,idle={value}")]).unwrap();
            assert_eq!(options.idle, Some(seconds));
            assert_eq!(MountOptions::parse(&[options.to_string()]).unwrap(), options);
        }
        assert_eq!(MountOptions::parse(&["idle=5,idle=off"]).unwrap().idle, None);
        for value in ["", "0", "m", "10x", "-1", "367d", "99999999999999999999d"] {
            assert_eq!(MountOptions::parse(&[format!("idle={value}")]).unwrap_err().code, USAGE, "{value}");
        }
    }

    #[test]
    fn a_snapshot_is_mounted_read_only_whatever_mount_8_says() {
        for list in ["snapshot=monday", "snapshot=monday,rw", "rw,snapshot=monday", "snapshot=sunday,snapshot=monday"] {
            let options = MountOptions::parse(&[list]).unwrap();
            assert_eq!(options.snapshot.as_deref(), Some("monday"), "{list}");
            assert!(options.read_only && options.mount_flags().contains(MsFlags::MS_RDONLY), "{list}");
            assert_eq!(MountOptions::parse(&[options.to_string()]).unwrap(), options);
        }
        for list in ["snapshot=", "snapshot"] {
            assert_eq!(MountOptions::parse(&[list]).unwrap_err().code, USAGE, "{list}");
        }
    }

    #[test]
    fn the_directory_of_snapshots_is_hidden_unless_asked_for() {
        assert_eq!(MountOptions::parse(&[""]).unwrap().snapshot_dir, SnapshotDir::Hidden);
        for (list, dir) in [
            ("snapshot-dir=shown", SnapshotDir::Shown),
            ("snapshot_dir=off", SnapshotDir::Off),
            ("snapshot-dir=off,snapshot-dir=hidden", SnapshotDir::Hidden),
        ] {
            let options = MountOptions::parse(&[list]).unwrap();
            assert_eq!(options.snapshot_dir, dir, "{list}");
            assert_eq!(MountOptions::parse(&[options.to_string()]).unwrap(), options);
        }
        assert_eq!(MountOptions::parse(&["snapshot-dir=yes"]).unwrap_err().code, USAGE);
    }

    #[test]
    fn rules_for_snapshots_are_a_list_within_the_list() {
        let options = MountOptions::parse(&["snapshots=hourly:24,daily:7,weekly:4,noexec"]).unwrap();
        assert!(options.to_string().ends_with(",snapshots=hourly:24,daily:7,weekly:4"), "{options}");
        assert_eq!(MountOptions::parse(&[options.to_string()]).unwrap(), options);
        let again =
            MountOptions::parse(&["snapshots=hourly:24,daily:7", "noexec,snapshots=yearly:2,hourly:3"]).unwrap();
        assert!(again.to_string().ends_with(",snapshots=hourly:3,yearly:2"), "{again}");
        assert_eq!(
            MountOptions::parse(&["snapshots=hourly:24,daily:7,snapshots=off"]).unwrap(),
            MountOptions::default()
        );
        for list in [
            "snapshots=",
            "snapshots=often",
            "snapshots=hourly",
            "snapshots=hourly:0",
            "snapshots=hourly:2,dayly:3",
            "snapshots=hourly:2,daily:x",
            "daily:3",
            "snapshots=off,daily:3",
        ] {
            assert_eq!(MountOptions::parse(&[list]).unwrap_err().code, USAGE, "{list}");
        }
    }

    #[test]
    fn access_times_are_kept_on_request() {
        for (list, kept) in
            [("", false), ("atime=open", true), ("atime=open,noatime", false), ("noatime,atime=open", true)]
        {
            let options = MountOptions::parse(&[list]).unwrap();
            assert_eq!(options.access_times, kept, "{list}");
            assert_eq!(options.mount_flags().contains(MsFlags::MS_NOATIME), !kept, "{list}");
            assert_eq!(MountOptions::parse(&[options.to_string()]).unwrap(), options);
        }
        assert_eq!(MountOptions::parse(&["atime=open,atime=off"]).unwrap(), MountOptions::default());
        assert_eq!(MountOptions::parse(&["atime=always"]).unwrap_err().code, USAGE);
    }

    #[test]
    fn every_word_that_is_offered_is_taken_with_what_is_offered_for_it() {
        let accepted = |option: &str| MountOptions::parse(&[option]).is_ok();
        // That one is read before the others, and not by this parser.
        for (word, takes) in
            mount_options::MOUNT.iter().chain(&mount_options::REMOTE).filter(|(word, _)| *word != "remount")
        {
            match takes {
                OptionValue::Nothing => assert!(accepted(word) && !accepted(&format!("{word}=\u{1}")), "{word}"),
                OptionValue::OneOf(values) => {
                    assert!(values.iter().all(|value| accepted(&format!("{word}={value}"))), "{word}");
                    assert!(!accepted(&format!("{word}=bogus")), "{word}");
                }
                OptionValue::File => assert!(accepted(&format!("{word}=/a")) && !accepted(word), "{word}"),
                OptionValue::Text => assert!(!accepted(word), "{word}"),
            }
        }
    }

    #[test]
    fn an_unknown_option_is_refused_by_name() {
        for (list, name) in [("ro,blksize=512", "blksize"), ("allow_root", "allow_root"), ("fsname=x", "fsname")] {
            let failure = MountOptions::parse(&[list]).unwrap_err();
            assert_eq!(failure.code, USAGE);
            assert!(failure.message.contains(name), "{failure}");
        }
    }

    #[test]
    fn bad_values_are_refused() {
        for list in [
            "sync=often",
            "memory=1M",
            "memory=M",
            "memory=99999999999G",
            "memory=",
            "threads=0",
            "pack=no",
            "size-limit=1M",
        ] {
            assert_eq!(MountOptions::parse(&[list]).unwrap_err().code, USAGE, "{list}");
        }
        assert_eq!(MountOptions::parse(&["memory=1048576k"]).unwrap().memory, 1 << 30);
    }

    #[test]
    fn options_of_other_programs_differ_from_ours() {
        for option in ["users", "x-systemd.automount", "x-systemd.idle-timeout=1min", "comment=a b", "uhelper=lockbox"]
        {
            assert!(is_for_others(option), "{option}");
        }
        for option in ["users=1", "passfile", "nosymfollow", "context=x", "fsname=x", "xino", ""] {
            assert!(!is_for_others(option), "{option}");
        }
    }

    #[test]
    fn rules_are_periods_with_numbers() {
        assert_eq!(rule_and_count("weekly:4"), Some((RetentionRule::Weekly, 4)));
        for text in
            ["weekly", "weekly:", "weekly:0", "weekly:100001", "weekly:-1", "last:3", "minutely:3", ":3", "Weekly:3"]
        {
            assert_eq!(rule_and_count(text), None, "{text}");
        }
    }
}
