//! Finds the share daemon and the user's history of shares, and words their errors.
use std::io;
use std::path::PathBuf;

use lockbox::keys::state_directory;
use lockbox_host::{DAMAGED, IN_USE, NO_SPACE, OTHER, daemons, is_full};
use lockbox_share_client::Error;
use lockbox_share_client::history::{HistoryEntry, ShareHistory};
use lockbox_share_client::http::{self, ServerAddress, ShareClient};
use lockbox_share_client::protocol::api;
use lockbox_share_client::protocol::message::ErrorCode;
use lockbox_share_client::protocol::token::OwnerToken;
use lockbox_share_client::refusal;
use nix::unistd::geteuid;

use crate::exit::{self, Failure};
use crate::output::Reader;
use crate::runtime;

/// Socket of a daemon that its systemd unit started.
const SYSTEM_SOCKET: &str = "/run/lockbox-share/lockbox-share.sock";

/// Which share daemon to speak to
#[derive(clap::Args)]
pub(crate) struct ServerArgs {
    /// URL of the share daemon; without it the daemon of this machine
    #[arg(long, value_name = "URL", conflicts_with = "socket")]
    server: Option<String>,
    /// Unix socket of the share daemon
    #[arg(long, value_name = "PATH")]
    socket: Option<PathBuf>,
}

impl ServerArgs {
    pub(crate) fn is_named(&self) -> bool {
        self.server.is_some() || self.socket.is_some()
    }

    pub(crate) fn named(&self) -> Result<Option<ServerAddress>, Failure> {
        match (&self.server, &self.socket) {
            (Some(url), _) => ServerAddress::parse(url).map(Some).map_err(|error| Failure::usage(error.to_string())),
            (None, Some(path)) => Ok(Some(ServerAddress::Socket(runtime::canonical(path)))),
            (None, None) => Ok(None),
        }
    }

    /// Returns the server that was named, else the daemon of this user or of this machine.
    pub(crate) fn find(&self) -> Result<ServerAddress, Failure> {
        if let Some(server) = self.named()? {
            return Ok(server);
        }
        let own = daemons::directory().ready().map(|directory| directory.join(api::SOCKET_NAME));
        let sockets = own.into_iter().chain([PathBuf::from(SYSTEM_SOCKET)]);
        let answers =
            |path: &PathBuf| http::listener_uid(path).is_ok_and(|user| http::is_trusted_listener(path, user, None));
        sockets.into_iter().find(answers).map(ServerAddress::Socket).ok_or_else(|| {
            Failure::new(
                exit::NO_DAEMON,
                "no share daemon runs on this machine: start one with 'lockbox-share serve', or name one with --server URL",
            )
        })
    }
}

/// Returns a client that sends secrets to a socket of another user only when that user is noted or
/// when root placed the socket. `named`: this user has just named the server; the user that listens
/// at its socket is noted then, unless one is noted already.
pub(crate) fn client(book: &mut ShareHistory, server: ServerAddress, named: bool) -> Result<ShareClient, Failure> {
    let mut noted = book.listener_uid(&server);
    if let (ServerAddress::Socket(path), true, None) = (&server, named, noted)
        && let Ok(user) = http::listener_uid(path)
    {
        book.record_listener(&server, user).map_err(|error| failure(&error))?;
        noted = Some(user);
    }
    Ok(ShareClient::new(server, noted))
}

pub(crate) fn state() -> Result<PathBuf, Failure> {
    let environment = std::env::var_os;
    state_directory(environment("XDG_STATE_HOME"), environment("HOME"), geteuid().is_root())
        .map(|directory| directory.join("share"))
        .ok_or_else(|| Failure::other("cannot store the list of shares: neither XDG_STATE_HOME nor HOME is set"))
}

pub(crate) fn book() -> Result<ShareHistory, Failure> {
    ShareHistory::open(&state()?).map_err(|error| failure(&error))
}

/// Returns a remembered share, with the client and token to query it. The history is closed again:
/// other commands may run meanwhile.
pub(crate) fn remembered(wanted: &str) -> Result<(HistoryEntry, ShareClient, OwnerToken), Failure> {
    let mut book = book()?;
    let entry = book.find(wanted).map_err(|error| failure(&error))?.clone();
    let server = entry.server();
    let owner = owner(&mut book, &server)?;
    Ok((entry, client(&mut book, server, false)?, owner))
}

pub(crate) fn owner(book: &mut ShareHistory, server: &ServerAddress) -> Result<OwnerToken, Failure> {
    let token = book.owner_token(server).map_err(|error| failure(&error))?;
    Ok(OwnerToken::new(*token.as_bytes()))
}

pub(crate) fn failure(error: &Error) -> Failure {
    let code = match error {
        Error::NotALink(_) | Error::DamagedLink => exit::NO_LINK,
        Error::Unreachable { .. } | Error::Foreign { .. } => exit::NO_DAEMON,
        Error::Damaged(_) => DAMAGED,
        Error::Refused(refused) => match refused.error {
            ErrorCode::Refused | ErrorCode::Consumed | ErrorCode::Revoked | ErrorCode::Expired => exit::NO_LINK,
            ErrorCode::Leased => IN_USE,
            ErrorCode::NoSpace => NO_SPACE,
            _ => OTHER,
        },
        Error::Io { source, .. } if is_full(source) => NO_SPACE,
        _ => OTHER,
    };
    match error {
        Error::Io { context, source } => Failure::new(code, format!("{context}: {source}")),
        Error::Refused(refused) => Failure::new(code, refusal(refused, &|at| Reader::of(&io::stderr()).seconds(at))),
        other => Failure::new(code, other.to_string()),
    }
}
