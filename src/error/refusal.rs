//! What is refused and can be had in another way: the facts. How it is asked for is known by the program that speaks.

/// A request that its own program knows a remedy for.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// Trying a key slot costs more than the caller allows; memory in MiB, cost in MiB times passes.
    #[error(
        "deriving the key of slot {slot} costs more than the limit: memory={memory} MiB passes={passes} limit={most_cost} MiB x passes, \
         {most_memory} MiB"
    )]
    Costly { slot: usize, memory: u32, passes: u32, most_cost: u64, most_memory: u32 },
    #[error("{name}: the identity file is encrypted")]
    EncryptedIdentity { name: String },
    /// A file that is to be replaced has other names.
    #[error("{path} has {links} names (hard links), and the others would keep the old file")]
    Links { path: String, links: u64 },
    #[error("the archive's passphrase goes with a key file")]
    PassphraseWithKeyFile,
    /// Something that was not to be replaced; a clause that says what and where.
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
    /// What an earlier backup left cannot be read, while the archive can.
    #[error("damaged backup: {detail}; make one under another name, and keep this one until then")]
    DamagedBackup { detail: String },
    /// The medium of a backup fails, while the archive goes on.
    #[error("{detail}")]
    FailedBackup { detail: String },
    #[error("'{name}' is a name as mounts with a schedule give and remove by themselves")]
    NameOfSchedule { name: String },
}
