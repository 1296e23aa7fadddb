//! Client address of a request: the peer of the connection, or the address from a listed proxy.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::str::FromStr;

use hyper::{HeaderMap, header};

use super::admission::SlotOwner;
use crate::limiter::ClientId;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Peer {
    Local,
    /// Proxy of the Unix socket for proxies: the kernel reported a listed user.
    Proxy,
    Address(IpAddr),
}

/// An address, or all that begin as it does: `192.0.2.0/24`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Network {
    address: IpAddr,
    bits: u8,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("an address or a network such as 192.0.2.0/24 or 2001:db8::/32 is expected")]
pub struct NetworkError;

impl FromStr for Network {
    type Err = NetworkError;

    fn from_str(text: &str) -> Result<Network, NetworkError> {
        let (address, bits) = match text.split_once('/') {
            None => (text, None),
            Some((address, bits)) => (address, Some(bits.parse::<u8>().map_err(|_| NetworkError)?)),
        };
        let address: IpAddr = address.parse().map_err(|_| NetworkError)?;
        let width = if address.is_ipv4() { 32 } else { 128 };
        let bits = bits.unwrap_or(width);
        if bits > width {
            return Err(NetworkError);
        }
        Ok(Network { address, bits })
    }
}

impl Network {
    fn holds(self, address: IpAddr) -> bool {
        let common_bits = match (self.address, address.to_canonical()) {
            (IpAddr::V4(net), IpAddr::V4(other)) => (net.to_bits() ^ other.to_bits()).leading_zeros(),
            (IpAddr::V6(net), IpAddr::V6(other)) => (net.to_bits() ^ other.to_bits()).leading_zeros(),
            _ => return false,
        };
        common_bits >= u32::from(self.bits)
    }
}

fn is_trusted(address: IpAddr, trusted: &[Network]) -> bool {
    trusted.iter().any(|network| network.holds(address))
}

/// Returns the owner of a new connection's slot, before the connection has sent anything.
pub(super) fn slot_owner(peer: Peer, trusted: &[Network]) -> SlotOwner {
    match peer {
        Peer::Local => SlotOwner::Client(ClientId::Local),
        Peer::Proxy => SlotOwner::Proxy,
        Peer::Address(address) if is_trusted(address, trusted) => SlotOwner::Proxy,
        Peer::Address(address) => SlotOwner::Client(ClientId::at(address)),
    }
}

/// Returns the client for the rate limiter. `X-Forwarded-For` is trusted only from a listed proxy,
/// and is read from its right end: the last address that is not a listed proxy is the client,
/// because the client itself wrote the entries left of it.
pub(super) fn client(peer: Peer, headers: &HeaderMap, trusted: &[Network]) -> ClientId {
    let mut client = match peer {
        Peer::Local => return ClientId::Local,
        Peer::Address(address) if !is_trusted(address, trusted) => return ClientId::at(address),
        Peer::Address(address) => address,
        // All clients that the proxy does not name are one.
        Peer::Proxy => IpAddr::V4(Ipv4Addr::UNSPECIFIED),
    };
    let fields: Vec<&[u8]> = headers.get_all("x-forwarded-for").iter().map(|value| value.as_bytes()).collect();
    for entry in fields.iter().rev().flat_map(|field| field.rsplit(|&byte| byte == b',')) {
        let Some(named) = parse(entry) else { break };
        client = named;
        if !is_trusted(named, trusted) {
            break;
        }
    }
    ClientId::at(client)
}

/// Headers that a proxy adds about its client or itself.
const FORWARDED: [&str; 5] = ["x-forwarded-for", "forwarded", "x-real-ip", "via", "x-forwarded-host"];

/// Returns whether a request comes from this machine: over the Unix socket, or from a loopback
/// address to one, without a trace of a proxy. A proxy on the same machine that hides both the
/// client and the requested name is indistinguishable from a local program; therefore an
/// administrator that sets a public URL or a trusted proxy must choose the creator policy
/// (`serve`).
pub(super) fn is_of_this_machine(peer: Peer, headers: &HeaderMap) -> bool {
    let address = match peer {
        Peer::Local => return true,
        Peer::Proxy => return false,
        Peer::Address(address) => address,
    };
    address.to_canonical().is_loopback()
        && !FORWARDED.iter().any(|name| headers.contains_key(*name))
        && headers.get(header::HOST).is_some_and(|host| is_loopback_authority(host.as_bytes()))
}

/// `localhost`, `127.0.0.1:7377`, `[::1]:7377`. Another name may be a web page's (DNS rebinding).
pub(super) fn is_loopback_authority(authority: &[u8]) -> bool {
    let Ok(text) = std::str::from_utf8(authority) else { return false };
    let name = match text.rsplit_once(':') {
        Some((name, port)) if port.bytes().all(|byte| byte.is_ascii_digit()) => name,
        _ => text,
    };
    let name = name.strip_prefix('[').and_then(|name| name.strip_suffix(']')).unwrap_or(name);
    name.eq_ignore_ascii_case("localhost") || name.parse::<IpAddr>().is_ok_and(|ip| ip.to_canonical().is_loopback())
}

/// `192.0.2.1`, `192.0.2.1:80`, `2001:db8::1`, `[2001:db8::1]:80`.
fn parse(entry: &[u8]) -> Option<IpAddr> {
    let text = std::str::from_utf8(entry).ok()?.trim();
    text.parse()
        .ok()
        .or_else(|| text.parse::<SocketAddr>().ok().map(|socket| socket.ip()))
        .or_else(|| text.strip_prefix('[')?.strip_suffix(']')?.parse::<Ipv6Addr>().ok().map(IpAddr::V6))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ask(peer: &str, forwarded: &[&str], trusted: &[&str]) -> ClientId {
        let mut headers = HeaderMap::new();
        for value in forwarded {
            headers.append("x-forwarded-for", value.parse().unwrap());
        }
        let trusted: Vec<Network> = trusted.iter().map(|text| text.parse().unwrap()).collect();
        client(Peer::Address(peer.parse().unwrap()), &headers, &trusted)
    }

    fn at(text: &str) -> ClientId {
        ClientId::at(text.parse().unwrap())
    }

    #[test]
    fn a_stranger_cannot_name_another_client() {
        assert_eq!(ask("198.51.100.1", &["192.0.2.1"], &[]), at("198.51.100.1"));
        assert_eq!(ask("198.51.100.1", &["192.0.2.1"], &["10.0.0.0/8"]), at("198.51.100.1"));
    }

    #[test]
    fn a_listed_proxy_names_its_client_and_the_rest_is_not_believed() {
        let proxies = ["10.0.0.0/8", "::1"];
        assert_eq!(ask("10.1.2.3", &["192.0.2.1"], &proxies), at("192.0.2.1"));
        // The client sent the first entry itself.
        assert_eq!(ask("10.1.2.3", &["203.0.113.9, 192.0.2.1"], &proxies), at("192.0.2.1"));
        assert_eq!(ask("10.1.2.3", &["203.0.113.9", "192.0.2.1, 10.9.9.9"], &proxies), at("192.0.2.1"));
        assert_eq!(ask("::1", &["[2001:db8::7]:4711"], &proxies), at("2001:db8::7"));
        assert_eq!(ask("10.1.2.3", &["192.0.2.1, nonsense"], &proxies), at("10.1.2.3"));
        assert_eq!(ask("::ffff:10.1.2.3", &["192.0.2.1:99"], &proxies), at("192.0.2.1"));
    }

    #[test]
    fn behind_the_socket_of_proxies_is_whom_they_name_and_nobody_of_this_machine() {
        let of = |values: &[&str]| {
            let mut headers = HeaderMap::new();
            for value in values {
                headers.append("x-forwarded-for", value.parse().unwrap());
            }
            assert!(!is_of_this_machine(Peer::Proxy, &headers));
            client(Peer::Proxy, &headers, &[])
        };
        assert_eq!(of(&["192.0.2.1"]), at("192.0.2.1"));
        assert_eq!(of(&["203.0.113.9, 192.0.2.1"]), at("192.0.2.1"), "the client sent the first entry itself");
        assert_eq!(of(&["127.0.0.1"]), at("127.0.0.1"));
        assert_eq!(of(&[]), at("0.0.0.0"));
        assert_eq!(of(&["nonsense"]), at("0.0.0.0"));
        assert_eq!(slot_owner(Peer::Proxy, &[]), SlotOwner::Proxy);
    }

    #[test]
    fn only_requests_without_a_trace_of_a_proxy_are_of_this_machine() {
        let ask = |peer: &str, headers: &[(&'static str, &str)]| {
            let mut map = HeaderMap::new();
            for (name, value) in headers {
                map.append(*name, value.parse().unwrap());
            }
            is_of_this_machine(Peer::Address(peer.parse().unwrap()), &map)
        };
        for host in ["localhost", "LOCALHOST:7377", "127.0.0.1:7377", "127.9.9.9", "[::1]:7377", "[::ffff:127.0.0.1]"] {
            assert!(ask("127.0.0.1", &[("host", host)]), "{host}");
        }
        assert!(ask("::1", &[("host", "localhost")]) && ask("::ffff:127.0.0.1", &[("host", "localhost")]));
        assert!(is_of_this_machine(Peer::Local, &HeaderMap::new()));
        for host in
            ["share.example.org", "localhost.example.org", "192.0.2.1:7377", "127.0.0.1.example.org", "", "[::2]"]
        {
            assert!(!ask("127.0.0.1", &[("host", host)]), "{host}");
        }
        assert!(!ask("127.0.0.1", &[]));
        for peer in ["192.0.2.1", "10.0.0.1", "2001:db8::1", "fe80::1"] {
            assert!(!ask(peer, &[("host", "localhost")]), "{peer}");
        }
        for name in FORWARDED {
            assert!(!ask("127.0.0.1", &[("host", "localhost"), (name, "127.0.0.1")]), "{name}");
        }
    }

    #[test]
    fn networks_are_read() {
        for (text, inside, outside) in [
            ("192.0.2.0/24", "192.0.2.255", "192.0.3.0"),
            ("192.0.2.1", "192.0.2.1", "192.0.2.2"),
            ("2001:db8::/32", "2001:db8:ffff::1", "2001:db9::"),
            ("0.0.0.0/0", "255.1.1.1", "::1"),
        ] {
            let network: Network = text.parse().unwrap();
            assert!(network.holds(inside.parse().unwrap()), "{text}");
            assert!(!network.holds(outside.parse().unwrap()), "{text}");
        }
        for text in ["", "10.0.0.0/33", "::/129", "10.0.0/8", "localhost", "10.0.0.0/x"] {
            assert_eq!(text.parse::<Network>(), Err(NetworkError), "{text}");
        }
    }
}
