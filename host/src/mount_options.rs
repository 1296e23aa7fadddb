//! Words of the lists given with `-o`, for completion. Their parser is in `fuse/src/options.rs`,
//! and a test there compares the two.

/// Kind of value that follows an option.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OptionValue {
    Nothing,
    /// One of these.
    OneOf(&'static [&'static str]),
    /// The path of a file.
    File,
    /// Text without suggestions, or with an example at most.
    Text,
}

/// Returns the option that a misspelt name was probably meant to be.
pub fn nearest(name: &str) -> Option<&'static str> {
    let likeness = |option: &str| strsim::jaro(&option.replace('_', "-"), &name.replace('_', "-"));
    let all = MOUNT.iter().chain(&REMOTE).map(|(option, _)| (likeness(option), *option));
    let (likeness, option) = all.max_by(|one, other| one.0.total_cmp(&other.0))?;
    (likeness > 0.7).then_some(option)
}

const SWITCH: OptionValue = OptionValue::OneOf(&["on", "off"]);

/// Options for requests to the server of an archive at an address; `--remote` takes these too.
pub const REMOTE: [(&str, OptionValue); 5] = [
    ("allow-http", OptionValue::Nothing),
    ("allow-private", OptionValue::Nothing),
    ("cache-size", OptionValue::Text),
    ("timeout", OptionValue::OneOf(&["30s", "5m", "hard"])),
    ("unsent", OptionValue::Nothing),
];

/// All other options. One with both a dash and an underscore spelling is listed as the manual has
/// it.
pub const MOUNT: [(&str, OptionValue); 49] = [
    ("ro", OptionValue::Nothing),
    ("rw", OptionValue::Nothing),
    ("allow_other", OptionValue::Nothing),
    ("sync", OptionValue::OneOf(&["never", "periodic", "always"])),
    ("memory", OptionValue::OneOf(&["64M", "256M", "1G"])),
    ("size-limit", OptionValue::Text),
    ("pack", SWITCH),
    ("compress", SWITCH),
    ("atime", OptionValue::OneOf(&["off", "open"])),
    ("threads", OptionValue::Text),
    ("passfile", OptionValue::File),
    ("passfd", OptionValue::Text),
    ("passcommand", OptionValue::Text),
    ("credential", OptionValue::Text),
    ("ask-password", OptionValue::Nothing),
    ("keyfile", OptionValue::File),
    ("identity", OptionValue::File),
    ("recovery-code", OptionValue::File),
    ("passfile-any", OptionValue::Nothing),
    ("keyring-cache", OptionValue::OneOf(&["10m", "1h", "12h"])),
    ("stop_timeout", OptionValue::Text),
    ("accept-older", OptionValue::Nothing),
    ("accept-fork", OptionValue::Nothing),
    ("accept-other", OptionValue::Nothing),
    ("kdf-limit", OptionValue::Text),
    ("sandbox", SWITCH),
    ("log", OptionValue::File),
    ("idle", OptionValue::OneOf(&["10m", "1h", "off"])),
    ("lock-on-suspend", OptionValue::Nothing),
    ("snapshot", OptionValue::Text),
    ("snapshot-dir", OptionValue::OneOf(&["shown", "hidden", "off"])),
    ("snapshots", OptionValue::OneOf(&["hourly:24", "daily:7", "weekly:4", "monthly:12", "yearly:5", "off"])),
    ("follow", OptionValue::OneOf(&["1s", "1m", "off"])),
    ("take-over", OptionValue::Nothing),
    ("nofail", OptionValue::Nothing),
    ("over-archive", OptionValue::Nothing),
    ("trust-owner", OptionValue::Nothing),
    ("foreground", OptionValue::Nothing),
    ("suid", OptionValue::Nothing),
    ("dev", OptionValue::Nothing),
    ("exec", OptionValue::Nothing),
    ("nosuid", OptionValue::Nothing),
    ("nodev", OptionValue::Nothing),
    ("noexec", OptionValue::Nothing),
    ("noatime", OptionValue::Nothing),
    ("set-id", OptionValue::Nothing),
    ("devices", OptionValue::Nothing),
    ("remount", OptionValue::Nothing),
    ("nonempty", OptionValue::Nothing),
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_misspelt_option_has_a_nearest_one_and_a_strange_one_none() {
        for (name, meant) in [("allow-other", "allow_other"), ("snapshot_s", "snapshots"), ("sizelimit", "size-limit")]
        {
            assert_eq!(nearest(name), Some(meant));
        }
        assert_eq!(nearest("quota"), None);
    }
}
