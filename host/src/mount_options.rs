//! The words of the lists given with `-o`, for whoever offers them. Their parser is in `fuse/src/options.rs`, and a test there compares the two.

/// What follows a word.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Takes {
    Nothing,
    /// One of these.
    OneOf(&'static [&'static str]),
    /// The path of a file.
    File,
    /// What nobody can suggest, or only an example of it.
    Text,
}

const SWITCH: Takes = Takes::OneOf(&["on", "off"]);

/// How the server of an archive at an address is asked; `--remote` takes these too.
pub const REMOTE: [(&str, Takes); 5] = [
    ("allow-http", Takes::Nothing),
    ("allow-private", Takes::Nothing),
    ("cache-size", Takes::Text),
    ("timeout", Takes::OneOf(&["30s", "5m", "hard"])),
    ("unsent", Takes::Nothing),
];

/// All others. What is written with a dash and with an underscore stands here as the manual has it.
pub const MOUNT: [(&str, Takes); 49] = [
    ("ro", Takes::Nothing),
    ("rw", Takes::Nothing),
    ("allow_other", Takes::Nothing),
    ("sync", Takes::OneOf(&["never", "periodic", "always"])),
    ("memory", Takes::OneOf(&["64M", "256M", "1G"])),
    ("size-limit", Takes::Text),
    ("pack", SWITCH),
    ("compress", SWITCH),
    ("atime", Takes::OneOf(&["off", "open"])),
    ("threads", Takes::Text),
    ("passfile", Takes::File),
    ("passfd", Takes::Text),
    ("passcommand", Takes::Text),
    ("credential", Takes::Text),
    ("ask-password", Takes::Nothing),
    ("keyfile", Takes::File),
    ("identity", Takes::File),
    ("recovery-code", Takes::File),
    ("passfile-any", Takes::Nothing),
    ("keyring-cache", Takes::OneOf(&["10m", "1h", "12h"])),
    ("stop_timeout", Takes::Text),
    ("accept-older", Takes::Nothing),
    ("accept-fork", Takes::Nothing),
    ("accept-other", Takes::Nothing),
    ("kdf-limit", Takes::Text),
    ("sandbox", SWITCH),
    ("log", Takes::File),
    ("idle", Takes::OneOf(&["10m", "1h", "off"])),
    ("lock-on-suspend", Takes::Nothing),
    ("snapshot", Takes::Text),
    ("snapshot-dir", Takes::OneOf(&["shown", "hidden", "off"])),
    ("snapshots", Takes::OneOf(&["hourly:24", "daily:7", "weekly:4", "monthly:12", "yearly:5", "off"])),
    ("follow", Takes::OneOf(&["1s", "1m", "off"])),
    ("take-over", Takes::Nothing),
    ("nofail", Takes::Nothing),
    ("over-archive", Takes::Nothing),
    ("trust-owner", Takes::Nothing),
    ("foreground", Takes::Nothing),
    ("suid", Takes::Nothing),
    ("dev", Takes::Nothing),
    ("exec", Takes::Nothing),
    ("nosuid", Takes::Nothing),
    ("nodev", Takes::Nothing),
    ("noexec", Takes::Nothing),
    ("noatime", Takes::Nothing),
    ("set-id", Takes::Nothing),
    ("devices", Takes::Nothing),
    ("remount", Takes::Nothing),
    ("nonempty", Takes::Nothing),
];
