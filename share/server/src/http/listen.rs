//! Listening sockets of the workers, and the certificate of HTTPS ones.

use std::net::{SocketAddr, TcpListener};
use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::{fs, io};

use socket2::{Domain, Protocol, SockAddr, Socket, Type};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::ServerConfig;
use tokio_rustls::rustls::crypto::aws_lc_rs;
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer};

/// Connections that wait to be accepted; the kernel cuts it to net.core.somaxconn.
const BACKLOG: i32 = 4096;

/// One listener for each worker on the same address: the kernel spreads connections over them, and
/// no two workers wake for one.
pub struct Tcp {
    /// Bound address, with the port chosen by the kernel if none was requested.
    pub address: SocketAddr,
    /// One listener per worker.
    pub listeners: Vec<TcpListener>,
}

/// Listens at `address` for so many workers.
///
/// # Errors
/// When the address is taken or not this machine's; the sentence names it.
pub fn tcp(address: SocketAddr, workers: usize) -> Result<Tcp, String> {
    spread(address, workers.max(1)).map_err(|error| format!("cannot listen on {address}: {error}"))
}

fn spread(address: SocketAddr, workers: usize) -> io::Result<Tcp> {
    // Without SO_REUSEPORT first: with it a second daemon of the same user would share the address
    // in silence.
    drop(bind(address, false)?);
    let first = bind(address, true)?;
    first.listen(BACKLOG)?;
    let first = TcpListener::from(first);
    let bound = first.local_addr()?;
    let mut listeners = vec![first];
    for _ in 1..workers {
        let socket = bind(bound, true)?;
        socket.listen(BACKLOG)?;
        listeners.push(socket.into());
    }
    Ok(Tcp { address: bound, listeners })
}

fn bind(address: SocketAddr, shared: bool) -> io::Result<Socket> {
    let socket = Socket::new(Domain::for_address(address), Type::STREAM.nonblocking(), Some(Protocol::TCP))?;
    socket.set_reuse_address(true)?;
    if address.is_ipv6() {
        socket.set_only_v6(true)?;
    }
    if shared {
        socket.set_reuse_port(true)?;
    }
    socket.bind(&address.into())?;
    // Until it listens, an address that was bound with SO_REUSEADDR only can be bound again.
    if !shared {
        socket.listen(1)?;
    }
    Ok(socket)
}

/// The Unix socket of the daemon, removed when it is dropped.
pub struct UnixSocket {
    path: PathBuf,
    listener: UnixListener,
}

impl UnixSocket {
    /// Listens at `path` for this user alone. The socket of a dead daemon is replaced.
    ///
    /// # Errors
    /// When another daemon serves there, or the path is not a socket.
    pub fn bind(path: &Path) -> io::Result<UnixSocket> {
        UnixSocket::bind_for(path, 0o600)
    }

    /// The same for any user, as the kernel names the user of each connection: all users may
    /// connect.
    ///
    /// # Errors
    /// As of [`UnixSocket::bind`].
    pub fn bind_for_all(path: &Path) -> io::Result<UnixSocket> {
        UnixSocket::bind_for(path, 0o666)
    }

    fn bind_for(path: &Path, mode: u32) -> io::Result<UnixSocket> {
        if let Ok(metadata) = fs::symlink_metadata(path) {
            if !metadata.file_type().is_socket() {
                return Err(io::Error::other("there is something else with this name"));
            }
            if UnixStream::connect(path).is_ok() {
                return Err(io::Error::new(io::ErrorKind::AddrInUse, "another daemon serves there"));
            }
            fs::remove_file(path)?;
        }
        let socket = Socket::new(Domain::UNIX, Type::STREAM.nonblocking(), None)?;
        socket.bind(&SockAddr::unix(path)?)?;
        // Nobody can connect before it listens, so nobody slips in before the mode.
        fs::set_permissions(path, fs::Permissions::from_mode(mode))?;
        socket.listen(BACKLOG)?;
        Ok(UnixSocket { path: path.into(), listener: socket.into() })
    }

    /// One descriptor of it for each worker.
    ///
    /// # Errors
    /// Without descriptors.
    pub fn listeners(&self, workers: usize) -> io::Result<Vec<UnixListener>> {
        (0..workers).map(|_| self.listener.try_clone()).collect()
    }

    /// Returns its address.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for UnixSocket {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.path);
    }
}

/// Accepts TLS 1.2 and 1.3 with this certificate chain and key, both in PEM.
///
/// # Errors
/// One sentence that names the file.
pub fn tls_acceptor(certificate: &Path, key: &Path) -> Result<TlsAcceptor, String> {
    let chain = CertificateDer::pem_file_iter(certificate)
        .and_then(Iterator::collect::<Result<Vec<_>, _>>)
        .map_err(|error| format!("cannot read certificates from {}: {error}", certificate.display()))?;
    if chain.is_empty() {
        return Err(format!("{} holds no certificate", certificate.display()));
    }
    let secret = PrivateKeyDer::from_pem_file(key)
        .map_err(|error| format!("cannot read a private key from {}: {error}", key.display()))?;
    let mut config = ServerConfig::builder_with_provider(Arc::new(aws_lc_rs::default_provider()))
        .with_safe_default_protocol_versions()
        .map_err(|error| error.to_string())?
        .with_no_client_auth()
        .with_single_cert(chain, secret)
        .map_err(|error| format!("the certificate and the key do not serve TLS: {error}"))?;
    config.alpn_protocols = vec![b"http/1.1".to_vec()];
    Ok(TlsAcceptor::from(Arc::new(config)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn workers_share_an_address_and_a_second_daemon_does_not() {
        let Tcp { address, listeners } = tcp("127.0.0.1:0".parse().unwrap(), 3).unwrap();
        assert_ne!(address.port(), 0);
        assert_eq!(listeners.len(), 3);
        assert!(listeners.iter().all(|listener| listener.local_addr().unwrap() == address));
        assert_eq!(spread(address, 1).err().unwrap().kind(), io::ErrorKind::AddrInUse);
    }

    #[test]
    fn the_unix_socket_is_private_and_replaces_only_a_dead_one() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("x.sock");
        let socket = UnixSocket::bind(&path).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        assert_eq!(UnixSocket::bind(&path).err().unwrap().kind(), io::ErrorKind::AddrInUse);
        drop(socket);
        assert!(!path.exists());
        drop(std::os::unix::net::UnixListener::bind(&path).unwrap());
        drop(UnixSocket::bind(&path).unwrap());
        fs::write(&path, "precious").unwrap();
        assert!(UnixSocket::bind(&path).is_err());
        assert_eq!(fs::read(&path).unwrap(), b"precious");
    }
}
