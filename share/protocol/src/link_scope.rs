//! Determines from the base URL of a link which machines can open it.

use std::net::{IpAddr, Ipv6Addr};

/// Suffixes of names that resolve in one network only: RFC 6762, RFC 8375, many routers' default.
const LOCAL_ENDINGS: [&str; 3] = [".local", ".home.arpa", ".lan"];
/// Remedy for the administrator of the daemon.
const REMEDY: &str = "for others the daemon needs a name and a certificate: 'lockbox-share setup' guides through both, \
    and 'lockbox-share serve --public-url URL' sets the name";

/// Set of machines that can open links of a base URL.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LinkScope {
    /// Nothing in the address is against it.
    Anyone,
    /// Any client except browsers: over plain HTTP the page opens nothing.
    NoBrowsers,
    /// Machines of one network.
    Network,
    /// The machine itself.
    Machine,
    /// The address stands for all addresses of a machine, and for none that others can use.
    Unreachable,
}

impl LinkScope {
    /// Returns the scope of a URL with a host; total.
    pub fn of_url(url: &str) -> LinkScope {
        let host = host(url).to_ascii_lowercase();
        let name = host.trim_end_matches('.');
        let reach = match name.parse::<IpAddr>() {
            Ok(address) => address_scope(address.to_canonical()),
            Err(_) if name == "localhost" || name.ends_with(".localhost") => LinkScope::Machine,
            Err(_) if !name.contains('.') || LOCAL_ENDINGS.iter().any(|ending| name.ends_with(ending)) => {
                LinkScope::Network
            }
            Err(_) => LinkScope::Anyone,
        };
        let is_plain = url.get(..7).is_some_and(|scheme| scheme.eq_ignore_ascii_case("http://"));
        if reach == LinkScope::Anyone && is_plain { LinkScope::NoBrowsers } else { reach }
    }

    /// Returns the warning for links that begin with `url`; `None` when any client can open them.
    pub fn warning(url: &str) -> Option<String> {
        let scope = match LinkScope::of_url(url) {
            LinkScope::Anyone => return None,
            LinkScope::NoBrowsers => {
                return Some(format!(
                    "{url} is plain http: browsers do not open its links, only 'lockbox receive' does; \
                     'lockbox-share setup' leads to a certificate, and 'lockbox-share serve --public-url https://NAME' names it"
                ));
            }
            LinkScope::Network => "only machines in the same network can open links of",
            LinkScope::Machine => "only programs on the machine of the share daemon can open links of",
            LinkScope::Unreachable => "no other machine can open links of",
        };
        Some(format!("{scope} {url}; {REMEDY}"))
    }
}

/// Returns the host of a URL, without scheme, user, port and path.
fn host(url: &str) -> &str {
    let behind = url.split_once("://").map_or(url, |(_, behind)| behind);
    let authority = behind.split(['/', '?', '#']).next().unwrap_or_default();
    let authority = authority.rsplit_once('@').map_or(authority, |(_, host)| host);
    match authority.strip_prefix('[') {
        Some(rest) => rest.split(']').next().unwrap_or_default(),
        None => authority.split(':').next().unwrap_or_default(),
    }
}

fn address_scope(address: IpAddr) -> LinkScope {
    if address.is_unspecified() {
        return LinkScope::Unreachable;
    }
    if address.is_loopback() {
        return LinkScope::Machine;
    }
    let is_near = match address {
        // 100.64.0.0/10 is between a provider and its customers (RFC 6598).
        IpAddr::V4(v4) => {
            v4.is_private() || v4.is_link_local() || (v4.octets()[0] == 100 && v4.octets()[1] & 0xc0 == 64)
        }
        IpAddr::V6(v6) => Ipv6Addr::is_unique_local(&v6) || v6.is_unicast_link_local(),
    };
    if is_near { LinkScope::Network } else { LinkScope::Anyone }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_tell_who_can_open_a_link() {
        for (reach, urls) in [
            (
                LinkScope::Unreachable,
                &["http://0.0.0.0:7377", "https://[::]:7377", "http://0.0.0.0", "http://[::ffff:0.0.0.0]"][..],
            ),
            (
                LinkScope::Machine,
                &[
                    "http://127.0.0.1:7377",
                    "http://127.8.8.8",
                    "https://[::1]:1/x",
                    "http://LOCALHOST:1",
                    "https://a.localhost",
                    "https://[::ffff:127.0.0.1]",
                ],
            ),
            (
                LinkScope::Network,
                &[
                    "http://10.0.0.1",
                    "https://172.16.0.1",
                    "https://172.31.255.255:8",
                    "http://192.168.1.5:7377",
                    "http://169.254.1.1",
                    "http://100.64.0.1",
                    "http://100.127.255.255",
                    "https://[fd00::1]",
                    "https://[fe80::1]:7377",
                    "https://nas.local",
                    "https://nas.local./x",
                    "http://nas:7377",
                    "https://x.home.arpa",
                ],
            ),
            (
                LinkScope::NoBrowsers,
                &[
                    "http://share.example.org",
                    "HTTP://192.0.2.1",
                    "http://172.32.0.1",
                    "http://100.128.0.1",
                    "http://11.0.0.1",
                ],
            ),
            (
                LinkScope::Anyone,
                &[
                    "https://share.example.org/links",
                    "https://203.0.113.1:7377",
                    "https://[2001:db8::1]",
                    "https://local.example.org",
                    "https://127.0.0.1.example.org",
                    "https://100.63.0.1",
                ],
            ),
        ] {
            for url in urls {
                assert_eq!(LinkScope::of_url(url), reach, "{url}");
                assert_eq!(LinkScope::warning(url).is_none(), reach == LinkScope::Anyone, "{url}");
            }
        }
        for text in ["", "://", "http://", "[", "http://[", "@", "ö", "http:/ö"] {
            LinkScope::of_url(text);
        }
    }

    #[test]
    fn the_warning_names_the_way() {
        for (url, who) in [
            ("http://0.0.0.0:1", "no other machine"),
            ("http://127.0.0.1:1", "on the machine"),
            ("http://10.0.0.1", "same network"),
            ("http://a.example", "browsers"),
        ] {
            let told = LinkScope::warning(url).unwrap();
            assert!(
                told.contains(who)
                    && told.contains(url)
                    && told.contains("lockbox-share setup")
                    && told.contains("--public-url"),
                "{told}"
            );
        }
    }
}
