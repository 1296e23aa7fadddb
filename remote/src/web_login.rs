//! Logins of web servers: a password or a bearer token of the user's netrc file.
//!
//! The file is that of curl: `NETRC`, or `.netrc` in the home directory. The rules:
//!
//! - It counts only when it belongs to the user, and no other user can read it. For root the rules
//!   of all settings hold as well (`credentials.rs`).
//! - An entry counts for the host that it names. An entry `default` would send a password to any
//!   server that an address names, so it counts for none.
//! - A login is sent over TLS alone, to the server that the address names, and to no target of a
//!   redirect.
//! - It is part of no address, message or log.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use rustix::process::geteuid;
use zeroize::Zeroizing;

use crate::broker::Broker;
use crate::credentials::{read_settings, variable};
use crate::range_source::{RemoteError, RemoteResult};

/// Value of the header `Authorization`.
#[derive(PartialEq)]
pub(crate) struct WebLogin(Zeroizing<String>);

impl WebLogin {
    pub(crate) fn new(header: String) -> WebLogin {
        WebLogin(Zeroizing::new(header))
    }

    pub(crate) fn header(&self) -> &str {
        &self.0
    }

    /// Returns the login of the first entry of `host`. An entry without `login` has a token.
    fn of(text: &str, host: &str) -> RemoteResult<Option<WebLogin>> {
        let tokens = tokens(text);
        let mut tokens = tokens.iter().map(|token| token.as_str());
        let (mut is_ours, mut login, mut password) = (false, None, None);
        while let Some(word) = tokens.next() {
            match word {
                "machine" | "default" if is_ours => break,
                "machine" => is_ours = tokens.next().is_some_and(|name| name.eq_ignore_ascii_case(host)),
                "login" => login = tokens.next().filter(|_| is_ours).or(login),
                "password" => password = tokens.next().filter(|_| is_ours).or(password),
                "account" => drop(tokens.next()),
                _ => {}
            }
        }
        let Some(password) = password else { return Ok(None) };
        match login {
            Some(login) => {
                let pair = Zeroizing::new(format!("{login}:{password}"));
                Ok(Some(WebLogin::new(format!("Basic {}", STANDARD.encode(pair.as_bytes())))))
            }
            None if password.bytes().all(|byte| byte.is_ascii_graphic()) => {
                Ok(Some(WebLogin::new(format!("Bearer {password}"))))
            }
            None => Err(RemoteError::Denied("the token in the file of logins has characters that no token has".into())),
        }
    }
}

/// Returns the words of a netrc file, without comments and macros. Words may be in double quotes,
/// in which a backslash precedes a quote or a backslash.
fn tokens(text: &str) -> Vec<Zeroizing<String>> {
    let mut found = Vec::new();
    let mut in_macro = false;
    for line in text.lines().map(str::trim) {
        in_macro &= !line.is_empty();
        if in_macro || line.starts_with('#') {
            continue;
        }
        let mut characters = line.chars().peekable();
        while let Some(first) = characters.find(|character| !character.is_whitespace()) {
            // Long enough for any word, so that no part of a secret stays in a smaller buffer.
            let mut word = Zeroizing::new(String::with_capacity(line.len()));
            if first == '"' {
                while let Some(next) = characters.next().filter(|next| *next != '"') {
                    word.push(if next == '\\' { characters.next().unwrap_or(next) } else { next });
                }
            } else {
                word.push(first);
                while let Some(next) = characters.next_if(|next| !next.is_whitespace()) {
                    word.push(next);
                }
            }
            if first != '"' && *word == "macdef" {
                in_macro = true;
                break;
            }
            found.push(word);
        }
    }
    found
}

/// Returns a function that looks up the login of `host`, through the broker in a sandboxed process.
pub(crate) fn login_lookup(
    host: String,
    broker: Option<Broker>,
) -> impl Fn() -> RemoteResult<Option<WebLogin>> + Send + Sync + 'static {
    move || match &broker {
        Some(broker) => Ok(broker.login()?.map(WebLogin::new)),
        None => login_of_environment(&host),
    }
}

fn login_of_environment(host: &str) -> RemoteResult<Option<WebLogin>> {
    let path = variable("NETRC").or_else(|| variable("HOME").map(|home| format!("{home}/.netrc"))).map(PathBuf::from);
    let Some((path, found)) = path.and_then(|path| fs::metadata(&path).ok().map(|found| (path, found))) else {
        return Ok(None);
    };
    let is_private = found.uid() == geteuid().as_raw() && found.mode() & 0o077 == 0;
    if !is_private {
        let path = path.display();
        tracing::warn!("{path} is not used: it belongs to another user, or others may read it; use chmod 600");
        return Ok(None);
    }
    let Some(text) = read_settings(&path).map(Zeroizing::new) else { return Ok(None) };
    WebLogin::of(&text, host)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn header(text: &str, host: &str) -> Option<String> {
        WebLogin::of(text, host).unwrap().map(|login| login.header().to_owned())
    }

    #[test]
    fn a_login_is_that_of_the_host_and_of_no_other() {
        let text = "# mine\nmachine one.example login me password \"a \\\"b\" account x\n\
            machine two.example\n\tpassword to.ken-1\nmacdef init\nmachine three.example password no\n\n\
            machine four.example login only\ndefault login any password thing\nmachine one.example password second\n";
        assert_eq!(header(text, "ONE.example").as_deref(), Some("Basic bWU6YSAiYg=="));
        assert_eq!(header(text, "two.example").as_deref(), Some("Bearer to.ken-1"));
        for none in ["three.example", "four.example", "five.example", "login", ""] {
            assert_eq!(header(text, none), None, "{none}");
        }
        assert_eq!(header("machine a password x machine b login y", "a").as_deref(), Some("Bearer x"));
        assert!(WebLogin::of("machine a password \"x y\"", "a").is_err());
        for cut in 0..text.len() {
            if let Some(part) = text.get(..cut) {
                let _ = WebLogin::of(part, "one.example");
            }
        }
    }
}
