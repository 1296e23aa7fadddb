//! Mount options (`-o`): their table, their parser, and the options of a mount.

use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use lockbox::archive::{OpenOptions, RetentionPolicy, RetentionRule};
use lockbox::fs::{Compression, SyncProfile};
use lockbox::keys::{PlaceName, RollbackOptions, UnlockLimits, seen_directory};
use lockbox_terminal::quantity;
use nix::mount::MsFlags;
use nix::unistd::geteuid;
use serde::{Deserialize, Serialize};

use crate::list_option::OptionValue::{File, Nothing, OneOf, Text};
use crate::list_option::{self, GivenValue, ListOption, set};
use crate::remote::{self, REMOTE, RemoteOptions};
use crate::secrets::{Cache, Sources, parse_timeout};

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

const STOP_TIMEOUT: u64 = 60;
const FOLLOW: Duration = Duration::from_secs(1);

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
    /// (`default_threads` of the mount program).
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
    /// Mount another user's archive even if the mount program would refuse it.
    pub trust_owner: bool,
    /// Snapshot that is mounted read-only.
    pub snapshot: Option<String>,
    pub snapshot_dir: SnapshotDir,
    /// Retention rules of scheduled snapshots.
    pub snapshots: RetentionPolicy,
    /// Connection options of a remote archive.
    pub remote: RemoteOptions,
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
            stop_timeout: STOP_TIMEOUT,
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
            remote: RemoteOptions::default(),
            take_over: false,
            follow: Some(FOLLOW),
        }
    }
}

type Row = ListOption<MountOptions>;

const SWITCH: &[&str] = &["on", "off"];
const SYNC: &[&str] = &["never", "periodic", "always"];
const SYNC_OPTIONS: [SyncOption; 3] = [SyncOption::Never, SyncOption::Periodic, SyncOption::Always];
/// Names of `Compression::LEVELS`, and another one for the default, which is shown.
const COMPRESS: &[&str] = &["off", "fast", "default", "best", COMPRESS_DEFAULT];
const COMPRESS_DEFAULT: &str = "on";
const SNAPSHOT_DIR: &[&str] = &["shown", "hidden", "off"];
const SNAPSHOT_DIRS: [SnapshotDir; 3] = [SnapshotDir::Shown, SnapshotDir::Hidden, SnapshotDir::Off];

/// Options for mounts, in the order of the help; the options for requests to servers are in
/// [`REMOTE`].
pub const MOUNT: &[Row] = &[
    Row::new("ro", Nothing, |o, _| set(&mut o.read_only, true)).shown(0, |o| o.read_only.then(String::new)),
    Row::new("rw", Nothing, |o, _| set(&mut o.read_only, false))
        .shown(0, |o| (!o.read_only).then(String::new))
        .help("Read-only or (default) read-write"),
    Row::new("allow_other", Nothing, |o, _| set(&mut o.allow_other, true))
        .shown(1, |o| o.allow_other.then(String::new))
        .help("Let other users in; file permissions apply"),
    Row::new("sync", OneOf(SYNC), |o, v| set(&mut o.sync, SYNC_OPTIONS[v.position]))
        .implies("always")
        .shown(5, |o| Some(SYNC[o.sync as usize].into()))
        .help("How much is durable without fsync\n(default periodic: every 5 seconds)"),
    Row::new("memory", Text("SIZE", &["64M", "256M", "1G"]), |o, v| v.size(MIN_MEMORY).map(|size| o.memory = size))
        .shown(6, |o| Some(o.memory.to_string()))
        .help("Cap of caches and unwritten data, such as 256M"),
    Row::new("size-limit", Text("SIZE", &[]), |o, v| v.size(MIN_SIZE_LIMIT).map(|size| o.size_limit = Some(size)))
        .shown(15, |o| o.size_limit.map(|size| size.to_string()))
        .help("Most that the archive's file may grow to"),
    Row::new("pack", OneOf(SWITCH), |o, v| set(&mut o.pack, v.position == 0))
        .implies("on")
        .shown(7, |o| Some(switch(o.pack))),
    Row::new("compress", OneOf(COMPRESS), |o, v| {
        let named = Compression::LEVELS.into_iter().find(|(name, _)| *name == v.text);
        set(&mut o.compression, named.map_or(Compression::default(), |(_, level)| level))
    })
    .implies(COMPRESS_DEFAULT)
    .shown(8, |o| {
        let is_chosen = |(_, level): &(&str, Compression)| *level == o.compression && *level != Compression::default();
        Some(Compression::LEVELS.into_iter().find(is_chosen).map_or(COMPRESS_DEFAULT, |(name, _)| name).into())
    })
    .help("How new data is stored"),
    Row::new("atime", OneOf(&["off", "open"]), |o, v| set(&mut o.access_times, v.position == 1))
        .shown(14, |o| o.access_times.then(|| "open".into()))
        .help("Access times: as they are set (default), or\nnoted when something is opened for reading"),
    Row::new("threads", Text("N", &[]), |o, v| v.number(1..=256).map(|count| o.threads = Some(count as usize)))
        .shown(9, |o| o.threads.map(|count| count.to_string()))
        .help("Event loops (default: processors, at least 2, and\n8 of an archive at an address)"),
    Row::new("passfile", File, |o, v| set(&mut o.sources.passphrase.passfile, Some(v.text.into()))),
    Row::new("passfd", Text("N", &[]), |o, v| {
        v.number(0..=i32::MAX as u64).map(|number| o.sources.passphrase.passfd = Some(number as i32))
    }),
    Row::new("passcommand", Text("CMD", &[]), |o, v| set(&mut o.sources.passphrase.passcommand, Some(v.text.into()))),
    Row::new("credential", Text("NAME", &[]), |o, v| set(&mut o.sources.passphrase.credential, Some(v.text.into()))),
    Row::new("ask-password", Nothing, |o, _| set(&mut o.sources.passphrase.ask_password, true)),
    Row::new("keyfile", File, |o, v| set(&mut o.sources.keyfile, Some(v.text.into()))),
    Row::new("identity", File, |o, v| {
        o.sources.identity.push(v.text.into());
        Ok(())
    }),
    Row::new("recovery-code", File, |o, v| set(&mut o.sources.recovery_code, Some(v.text.into()))),
    Row::new("passfile-any", Nothing, |o, _| set(&mut o.sources.passphrase.passfile_any, true)),
    Row::new("keyring-cache", Text("TIME", &["10m", "1h", "12h"]), |o, v| {
        set(&mut o.cache.keyring_cache, Some(parse_timeout(v.text).map_err(|why| v.explain(why))?))
    })
    .help("Where secrets come from, as the options with\nthese names"),
    Row::new("stop_timeout", Text("SECONDS", &[]), |o, v| v.number(0..=86_400).map(|time| o.stop_timeout = time))
        .shown(10, |o| Some(o.stop_timeout).filter(|time| *time != STOP_TIMEOUT).map(|time| time.to_string()))
        .help("How long a busy mount is served after the order\nto stop (default 60)"),
    Row::new("accept-older", Nothing, |o, _| set(&mut o.accept_older, true)),
    Row::new("accept-fork", Nothing, |o, _| set(&mut o.accept_fork, true))
        .help("Go on with a copy that is older than, or has\ndiverged from, the state last known to this user"),
    Row::new("accept-other", Nothing, |o, _| set(&mut o.accept_other, true))
        .help("Go on with another archive than the one that this\nuser opened at this place before"),
    Row::new("kdf-limit", Text("N", &[]), |o, v| v.number(1..=u64::MAX).map(|cost| o.kdf_limit = Some(cost)))
        .help("Limit of unlocking costs, in MiB times passes"),
    Row::new("sandbox", OneOf(SWITCH), |o, v| set(&mut o.sandbox, v.position == 0))
        .shown(13, |o| (!o.sandbox).then(|| switch(false)))
        .help("Whether the daemon gives up the files that it does\nnot need (default on)"),
    Row::new("log", File, |o, v| set(&mut o.log, Some(v.text.into()))).help("Log there instead of to the system log"),
    Row::new("idle", Text("TIME", &["10m", "1h", "off"]), |o, v| parse_idle(&v).map(|time| o.idle = time))
        .shown(11, |o| o.idle.map(|seconds| seconds.to_string()))
        .help("Unmount when unused that long, such as 10m"),
    Row::new("lock-on-suspend", Nothing, |o, _| set(&mut o.lock_on_suspend, true))
        .shown(12, |o| o.lock_on_suspend.then(String::new))
        .help("Unmount before the machine sleeps"),
    Row::new("snapshot", Text("NAME", &[]), |o, v| match v.text {
        "" => Err(v.explain("takes a name")),
        name => set(&mut o.snapshot, Some(name.to_owned())),
    })
    .shown(19, |o| o.snapshot.clone())
    .help("Show that snapshot, read-only"),
    Row::new("snapshot-dir", OneOf(SNAPSHOT_DIR), |o, v| set(&mut o.snapshot_dir, SNAPSHOT_DIRS[v.position]))
        .shown(16, |o| (o.snapshot_dir != SnapshotDir::Hidden).then(|| SNAPSHOT_DIR[o.snapshot_dir as usize].into()))
        .help(
            "Whether the root has a directory .snapshots of\nall snapshots (default hidden: found by name\n\
         and not listed)",
        ),
    Row::new(
        "snapshots",
        Text(
            "hourly:N,daily:N,weekly:N,monthly:N,yearly:N | off",
            &["hourly:24", "daily:7", "weekly:4", "monthly:12", "yearly:5", "off"],
        ),
        |o, v| set(&mut o.snapshots, parse_rule(RetentionPolicy::default(), v.text)?),
    )
    .shown(17, |o| o.snapshots.has_rules().then(|| format_rules(&o.snapshots)))
    .help("Take snapshots by itself, and keep so many"),
    Row::new("follow", Text("TIME|off", &["1s", "1m", "off"]), |o, v| parse_follow(&v).map(|time| o.follow = time))
        .shown(18, |o| {
            let text = |time: Option<Duration>| time.map_or("off".into(), |time| format!("{}s", time.as_secs()));
            (o.follow != Some(FOLLOW)).then(|| text(o.follow))
        })
        .help("How often a mount for reading of an archive at an\naddress looks for changes (default 1s)"),
    Row::new("take-over", Nothing, |o, _| set(&mut o.take_over, true))
        .help("Write to an archive at an address although another\nmachine seems to be writing there"),
    Row::new("nofail", Nothing, |o, _| set(&mut o.nofail, true)).help("A missing archive is not a failure"),
    Row::new("over-archive", Nothing, |o, _| set(&mut o.over_archive, true))
        .help("Mount also where that hides the archive, the log,\nor files of the daemon"),
    Row::new("trust-owner", Nothing, |o, _| set(&mut o.trust_owner, true))
        .help("As root, mount another user's archive also on a\ndirectory that is not that user's own and empty"),
    Row::new("foreground", Nothing, |o, _| set(&mut o.foreground, true)).help("As --foreground"),
    Row::new("suid", Nothing, |o, _| set(&mut o.suid, true)).shown(2, |o| o.suid.then(String::new)),
    Row::new("dev", Nothing, |o, _| set(&mut o.dev, true)).shown(3, |o| o.dev.then(String::new)),
    Row::new("exec", Nothing, |o, _| set(&mut o.exec, true)),
    Row::new("nosuid", Nothing, |o, _| set(&mut o.suid, false)),
    Row::new("nodev", Nothing, |o, _| set(&mut o.dev, false)),
    Row::new("noexec", Nothing, |o, _| set(&mut o.exec, false)).shown(4, |o| (!o.exec).then(String::new)),
    Row::new("noatime", Nothing, |o, _| set(&mut o.access_times, false)).help("As in mount(8); default nosuid,nodev"),
    Row::new("set-id", Nothing, |o, _| set(&mut o.suid, true)),
    Row::new("devices", Nothing, |o, _| set(&mut o.dev, true)).help("suid and dev, in words that mount(8) passes on"),
    // The mount program takes it before the others.
    Row::new("remount", Nothing, |_, _| Ok(())).help("Change ro, rw and these of a living mount"),
    // Only `lockbox mount` refuses a directory that has content.
    Row::new("nonempty", Nothing, |_, _| Ok(())),
];

fn switch(on: bool) -> String {
    SWITCH[usize::from(!on)].to_owned()
}

fn parse_idle(given: &GivenValue<'_>) -> Result<Option<u64>, String> {
    let seconds = quantity::time(given.text).map(|time| time.as_secs()).filter(|time| (1..=MAX_IDLE).contains(time));
    let idle = if given.text == "off" { Some(None) } else { seconds.map(Some) };
    given.parsed(idle, "a time such as 90s, 10m or 2h, a year at most, or off")
}

fn parse_follow(given: &GivenValue<'_>) -> Result<Option<Duration>, String> {
    let time = quantity::time(given.text).filter(|time| (Duration::from_secs(1)..=MAX_FOLLOW).contains(time));
    given.parsed(if given.text == "off" { Some(None) } else { time.map(Some) }, "a time from 1s to 1h, or off")
}

fn parse_rule(rules: RetentionPolicy, text: &str) -> Result<RetentionPolicy, String> {
    match (text, rule_and_count(text)) {
        ("off", _) => Ok(RetentionPolicy::default()),
        (_, Some((rule, count))) => Ok(rules.with(rule, count)),
        _ => Err(format!(
            "snapshots= takes off, or rules such as hourly:24,daily:7,weekly:4,monthly:12,yearly:5, not '{text}'"
        )),
    }
}

/// Returns the option that a misspelt name was probably meant to be.
fn nearest(name: &str) -> Option<&'static str> {
    let likeness = |option: &str| strsim::jaro(&option.replace('_', "-"), &name.replace('_', "-"));
    let names = MOUNT.iter().map(|row| row.name).chain(REMOTE.iter().map(|row| row.name));
    let (likeness, option) = names.map(|option| (likeness(option), option)).max_by(|a, b| a.0.total_cmp(&b.0))?;
    (likeness > 0.7).then_some(option)
}

impl MountOptions {
    /// Parses comma-separated lists; a later option overrides an earlier one.
    ///
    /// # Errors
    /// A sentence about an option.
    pub fn parse<S: AsRef<str>>(lists: &[S]) -> Result<MountOptions, String> {
        let (options, unknown) = MountOptions::parse_sloppily(lists)?;
        let Some(name) = unknown.first() else { return Ok(options) };
        let is_alone = lists.iter().flat_map(|list| list.as_ref().split(',')).any(|option| option == name);
        let advice = match nearest(name) {
            Some(option) if option == name && is_alone => {
                return Err(format!("{name} needs a value, as in {name}=...: see mount.lockbox(8)"));
            }
            Some(option) if option == name => return Err(format!("{name} takes no value")),
            Some(option) => format!(", did you mean {option}?"),
            None => String::new(),
        };
        Err(format!("unknown mount option: {name}{advice} (all are in mount.lockbox(8))"))
    }

    /// Parses lists, and returns the names of unknown options as well. A wrong value of a known
    /// option is an error.
    pub fn parse_sloppily<S: AsRef<str>>(lists: &[S]) -> Result<(MountOptions, Vec<String>), String> {
        let mut options = MountOptions { remote: remote::from_environment()?, ..MountOptions::default() };
        let unknown = options.apply(lists)?;
        Ok((options, unknown))
    }

    /// Applies lists to these options, and returns the names of unknown ones.
    pub fn apply<S: AsRef<str>>(&mut self, lists: &[S]) -> Result<Vec<String>, String> {
        let mut unknown = Vec::new();
        for option in lists.iter().flat_map(|list| list.as_ref().split(',')).filter(|option| !option.is_empty()) {
            // The list of rules is split at commas like all others.
            if !option.contains('=') && option.contains(':') && self.snapshots.has_rules() {
                self.snapshots = parse_rule(self.snapshots, option)?;
            } else if !list_option::apply(MOUNT, option, self)?
                && !list_option::apply(REMOTE, option, &mut self.remote)?
                && !is_for_others(option)
            {
                unknown.push(option.split('=').next().unwrap_or(option).to_owned());
            }
        }
        // mount(8) passes `rw` even if the user gave neither.
        self.read_only |= self.snapshot.is_some() || self.remote.unsent;
        Ok(unknown)
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
        crate::unlock_limits(self.kdf_limit)
    }

    /// Returns the location of this user's rollback state, and which contradictions to it are
    /// accepted.
    pub fn seen_options(&self) -> RollbackOptions {
        let directory =
            seen_directory(std::env::var_os("XDG_STATE_HOME"), std::env::var_os("HOME"), geteuid().is_root());
        // An archive that no store has cannot be mounted again, so nothing is remembered.
        let directory = directory.filter(|_| !self.remote.unsent);
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
        f.write_str(&list_option::list_of(MOUNT, self))
    }
}

/// Options that mount(8) passes on although they are meant for it, that state this file system's
/// default, or that FUSE cannot do. They occur in fstab files, and ignoring them makes no
/// mount less strict than requested.
const WORDS: [&str; 31] = [
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
pub fn format_rules(keep: &RetentionPolicy) -> String {
    keep.rules().map(|(rule, count)| format!("{}:{count}", rule.word())).collect::<Vec<_>>().join(",")
}

/// Parses one rule of the option. Returns None for an unknown period, or a number outside 1 to
/// 100,000.
fn rule_and_count(text: &str) -> Option<(RetentionRule, u32)> {
    let (word, count) = text.split_once(':')?;
    let rule = RetentionRule::ALL.into_iter().find(|rule| *rule != RetentionRule::Last && rule.word() == word)?;
    Some((rule, count.parse().ok().filter(|count| (1..=MAX_COUNT).contains(count))?))
}

#[cfg(test)]
mod tests {
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
    fn the_text_has_all_options_that_differ_from_the_default_in_their_order() {
        let text = "ro,allow_other,suid,dev,noexec,sync=always,memory=67108864,pack=off,compress=best,threads=3,\
                    stop_timeout=5,idle=90,lock-on-suspend,sandbox=off,atime=open,size-limit=1073741824,\
                    snapshot-dir=shown,snapshots=hourly:24,daily:7,follow=off,snapshot=monday";
        let secret = "passfile=/a,keyfile=/b,log=/c,accept-older,take-over,nofail";
        assert_eq!(MountOptions::parse(&[text, secret]).unwrap().to_string(), text);
        let plain = MountOptions { memory: 7, ..MountOptions::default() };
        assert_eq!(plain.to_string(), "rw,sync=periodic,memory=7,pack=on,compress=on");
    }

    #[test]
    fn mounts_and_commands_name_the_same_levels_of_compression() {
        for (word, level) in Compression::LEVELS {
            let options = MountOptions::parse(&[format!("compress={word}")]).unwrap();
            assert_eq!(options.open_options().compression, level);
            assert_eq!(MountOptions::parse(&[options.to_string()]).unwrap(), options);
        }
        assert_eq!(COMPRESS.len(), Compression::LEVELS.len() + 1);
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
        assert!(MountOptions::parse_sloppily(&["memory=1"]).is_err());
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
            assert!(MountOptions::parse(&[format!("idle={value}")]).is_err(), "{value}");
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
            assert!(MountOptions::parse(&[list]).is_err(), "{list}");
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
        assert!(MountOptions::parse(&["snapshot-dir=yes"]).is_err());
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
            assert!(MountOptions::parse(&[list]).is_err(), "{list}");
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
        assert!(MountOptions::parse(&["atime=always"]).is_err());
    }

    #[test]
    fn every_word_that_is_offered_is_taken_with_what_is_offered_for_it() {
        let accepted = |option: &str| MountOptions::parse(&[option]).is_ok();
        let rows = MOUNT.iter().map(|row| (row.name, row.value));
        for (word, takes) in rows.chain(REMOTE.iter().map(|row| (row.name, row.value))) {
            match takes {
                Nothing => assert!(!accepted(&format!("{word}=\u{1}")), "{word}"),
                File => assert!(accepted(&format!("{word}=/a")), "{word}"),
                OneOf(values) | Text(_, values) => {
                    assert!(values.iter().all(|value| accepted(&format!("{word}={value}"))), "{word}");
                    assert!(values.is_empty() || !accepted(&format!("{word}=bogus")), "{word}");
                }
            }
            let is_alone = matches!(takes, Nothing) || ["sync", "pack", "compress", "atime"].contains(&word);
            assert_eq!(accepted(word), is_alone, "{word}");
        }
    }

    #[test]
    fn dashes_may_be_underscores() {
        let value = |takes| match takes {
            Nothing => String::new(),
            File => "=/a".to_owned(),
            OneOf(words) | Text(_, words) => format!("={}", words.first().unwrap_or(&"1G")),
        };
        for row in MOUNT.iter().filter(|row| row.name.contains('-') && row.name != "kdf-limit") {
            let parsed = |name: &str| MountOptions::parse(&[format!("{name}{}", value(row.value))]).unwrap();
            assert_eq!(parsed(&row.name.replace('-', "_")), parsed(row.name));
        }
        assert_eq!(MountOptions::parse(&["kdf_limit=7"]).unwrap().kdf_limit, Some(7));
        for (list, message) in [
            ("size_limit=1M", "size_limit= takes a size such as 64M or 1G, 8 MiB at least, not '1M'"),
            ("snapshot_dir=x", "snapshot_dir= takes shown, hidden or off, not 'x'"),
            ("threads=0", "threads= takes a number from 1 to 256, not '0'"),
            ("sandbox", "sandbox needs a value, as in sandbox=...: see mount.lockbox(8)"),
            ("nofail=1", "nofail takes no value"),
            (
                "allow-other",
                "unknown mount option: allow-other, did you mean allow_other? (all are in mount.lockbox(8))",
            ),
        ] {
            assert_eq!(MountOptions::parse(&[list]).unwrap_err(), message);
        }
    }

    #[test]
    fn a_misspelt_option_has_a_nearest_one_and_a_strange_one_none() {
        for (name, meant) in [("allow-other", "allow_other"), ("snapshot_s", "snapshots"), ("sizelimit", "size-limit")]
        {
            assert_eq!(nearest(name), Some(meant));
        }
        assert_eq!(nearest("quota"), None);
    }

    #[test]
    fn an_unknown_option_is_refused_by_name() {
        for (list, name) in [("ro,blksize=512", "blksize"), ("allow_root", "allow_root"), ("fsname=x", "fsname")] {
            let message = MountOptions::parse(&[list]).unwrap_err();
            assert!(message.contains(name), "{message}");
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
            assert!(MountOptions::parse(&[list]).is_err(), "{list}");
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
