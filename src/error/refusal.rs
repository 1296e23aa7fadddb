//! Refused requests for which there is a remedy. Carries the facts; the calling program words the
//! remedy.

/// Request that was refused although there is a remedy.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// Trying a key slot costs more than the caller allows; memory in MiB, cost in MiB times
    /// passes.
    #[error(
        "deriving the key of slot {slot} costs more than the limit: memory={memory} MiB passes={passes} limit={most_cost} MiB x passes, \
         {most_memory} MiB"
    )]
    Costly { slot: usize, memory: u32, passes: u32, most_cost: u64, most_memory: u32 },
    #[error("{name}: the identity file is encrypted")]
    EncryptedIdentity { name: String },
    /// The file to be replaced has other hard links.
    #[error("{path} has {links} names (hard links), and the others would keep the old file")]
    Links { path: String, links: u64 },
    #[error("the archive's passphrase goes with a key file")]
    PassphraseWithKeyFile,
    /// An existing object must not be replaced; the clause names object and path.
    #[error("{what}")]
    InTheWay { what: String },
    #[error("several key slots have a passphrase")]
    SeveralPassphrases,
    #[error("key slot {slot} has no passphrase that could be changed: it is a {kind}")]
    NoPassphrase { slot: usize, kind: &'static str },
    #[error("key slot {slot} is of a kind that this program does not know, and cannot be kept")]
    UnknownKey { slot: usize },
    #[error("key slot {slot} was made by an older program, and cannot be kept without its secret")]
    UndescribedKey { slot: usize },
    #[error("key slot {slot} cannot be kept: {reason}")]
    UnkeptKey { slot: usize, reason: String },
    #[error("the archive has no snapshot '{name}'")]
    NoSnapshot { name: String },
    #[error("the archive has a snapshot '{name}' already")]
    SnapshotExists { name: String },
    #[error("{why}; it was left as it is")]
    Destination { why: &'static str },
    /// The earlier backup cannot be read, while the archive can.
    #[error("damaged backup: {detail}; make one under another name, and keep this one until then")]
    DamagedBackup { detail: String },
    /// The backup's medium failed, while the archive is usable.
    #[error("{detail}")]
    FailedBackup { detail: String },
    #[error("'{name}' is a name as mounts with a schedule give and remove by themselves")]
    NameOfSchedule { name: String },
}
