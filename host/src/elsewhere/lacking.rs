//! A program that was built without archives at addresses: it knows one when it sees it.

use std::io;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::time::SystemTime;

use lockbox::storage::Storage;
use lockbox::{Error, Result};

use super::{Apart, Remote};

/// Whether this is the address of an archive and not the path of one.
pub fn is_elsewhere(name: &Path) -> bool {
    ["https://", "http://", "s3://", "gs://", "az://", "file://"]
        .iter()
        .any(|scheme| name.as_os_str().as_encoded_bytes().starts_with(scheme.as_bytes()))
}

/// Nothing is opened there.
pub fn spelled(_name: &Path) -> Option<String> {
    None
}

fn lacking() -> Error {
    Error::Unsupported("this program was built without archives on servers".into())
}

pub(super) fn open(_name: &Path, _how: &Remote) -> Result<Arc<dyn Storage>> {
    Err(lacking())
}

pub(super) fn salvage(_name: &Path, _how: &Remote) -> Result<Arc<dyn Storage>> {
    Err(lacking())
}

pub(super) fn change(_name: &Path, _how: &Remote, _take_over: bool) -> Result<(Arc<dyn Storage>, Option<String>)> {
    Err(lacking())
}

pub(super) fn open_apart(_command: &mut Command, _name: &Path, _how: &Remote, _access: Access) -> Result<Apart> {
    Err(lacking())
}

/// What nobody does here.
#[derive(Clone, Copy)]
pub enum Access {
    Read,
    Write { take_over: bool },
}

/// What nobody has here.
pub enum Bucket {}

impl Bucket {
    pub fn notice(&self) -> Option<&str> {
        match *self {}
    }

    pub fn existing(&mut self) -> Result<Option<Arc<dyn Storage>>> {
        match *self {}
    }

    pub fn fresh(&mut self) -> Result<Arc<dyn Storage>> {
        match *self {}
    }

    pub fn publish(self) -> Result<()> {
        match self {}
    }
}

/// # Errors
/// Always.
pub fn write(_name: &Path, _how: &Remote, _take_over: bool, _is_ours: bool) -> Result<Bucket> {
    Err(lacking())
}

/// # Errors
/// Always.
pub fn check_writable(_name: &Path) -> Result<()> {
    Err(lacking())
}

/// None: nothing is read there.
pub fn directory(_name: &Path) -> Option<PathBuf> {
    None
}

/// # Errors
/// Always.
pub fn fetch(
    _control: UnixStream,
    _broker: Option<UnixStream>,
    _confine: impl FnOnce(&FetcherReach),
) -> io::Result<()> {
    Err(io::ErrorKind::Unsupported.into())
}

/// # Errors
/// Always.
pub fn answer_fetcher(_control: UnixStream) -> io::Result<()> {
    Err(io::ErrorKind::Unsupported.into())
}

/// What no fetcher needs here.
#[derive(Clone, Debug, Default)]
pub struct FetcherReach {
    pub written: Vec<PathBuf>,
    pub read: Vec<PathBuf>,
    pub ports: Option<Vec<u16>>,
}

/// What nobody has here.
pub struct Kept {
    pub file: String,
    pub address: Option<String>,
    pub bytes: u64,
    pub most: u64,
    pub used: SystemTime,
}

/// # Errors
/// Always.
pub fn kept() -> Result<Vec<Kept>> {
    Err(lacking())
}

/// # Errors
/// Always.
pub fn remove_kept(_of: Option<&[PathBuf]>) -> Result<Vec<(Kept, bool)>> {
    Err(lacking())
}

/// What nobody keeps here.
pub struct Unsent {
    pub file: String,
    pub address: String,
    pub bytes: u64,
    pub time: SystemTime,
    pub refused: bool,
    pub used: bool,
}

/// # Errors
/// Always.
pub fn unsent() -> Result<Vec<Unsent>> {
    Err(lacking())
}

/// # Errors
/// Always.
pub fn forget_unsent(_name: &Path) -> Result<Vec<Unsent>> {
    Err(lacking())
}

/// What nobody finds here.
pub struct Finding {
    pub name: &'static str,
    pub works: bool,
    pub found: String,
    pub advice: Option<&'static str>,
}

/// # Errors
/// Always.
pub fn probe(_name: &Path, _how: &Remote, _goes_on: &mut dyn FnMut() -> Result<()>) -> Result<Vec<Finding>> {
    Err(lacking())
}

pub(super) type Step<'a> = dyn FnMut(u64, u64) -> Result<()> + 'a;

#[derive(Clone, Copy)]
pub struct Amount {
    pub objects: u64,
    pub bytes: u64,
}

pub struct Stored {
    pub address: String,
    pub amount: Amount,
    pub time: Option<u64>,
    pub newest: Result<Option<Newest>>,
}

pub struct Newest {
    pub number: u64,
    pub length: u64,
    pub writer: Option<String>,
}

pub struct Examined {
    pub number: u64,
    pub needed: Amount,
    pub faults: Vec<String>,
    pub dead: Amount,
    pub unnamed: Amount,
    pub records: Amount,
    pub read: u64,
}

pub struct Collected {
    pub removed: u64,
    pub found: u64,
    pub waiting: u64,
    pub notice: Option<String>,
}

/// # Errors
/// Always.
pub fn archives(_place: &Path, _how: &Remote, _step: &mut Step<'_>) -> Result<Vec<Stored>> {
    Err(lacking())
}

/// # Errors
/// Always.
pub fn examine(_name: &Path, _how: &Remote, _whole: bool, _step: &mut Step<'_>) -> Result<Examined> {
    Err(lacking())
}

/// # Errors
/// Always.
pub fn compare(_name: &Path, _how: &Remote, _step: &mut Step<'_>) -> Result<Option<Examined>> {
    Err(lacking())
}

/// # Errors
/// Always.
pub fn collect(_name: &Path, _how: &Remote, _take_over: bool) -> Result<Collected> {
    Err(lacking())
}
