//! A one-time link: `https://host/s/HANDLE#FRAGMENT`, written, and read in the shapes that mail
//! programs and people leave it in.

use lockbox_share_protocol::api;
use lockbox_share_protocol::handle::Handle;
use zeroize::Zeroizing;

use crate::error::{Error, Result};
use crate::http::ServerAddress;
use crate::secret::{FRAGMENT_LETTERS, Secret};

/// Longer input is a mistake, such as a whole file.
pub const MAX_TEXT: usize = 64 << 10;

const NO_LINK: &str = "it begins with https:// and has a part behind '#'";
const NO_HANDLE: &str = "its address does not end with /s/ and 7 to 13 digits";
const NO_SECRET: &str = "the part behind '#' is missing, without which nothing opens; ask for the whole link";

/// One-time link: server, handle and secret.
pub struct Link {
    base: String,
    handle: Handle,
    secret: Secret,
}

impl Link {
    /// Creates the link of a new share from the server's `url` for it.
    ///
    /// # Errors
    /// When `url` is not the URL of a share: the receiver opens it, and a terminal shows it.
    pub fn new(url: &str, secret: Secret) -> Result<Link> {
        let is_plain =
            |base: &str| base.bytes().all(|byte| byte.is_ascii_graphic()) && ServerAddress::parse(base).is_ok();
        let (base, handle) = split_url(url)
            .filter(|(base, _)| is_plain(base))
            .ok_or(Error::NotALink("the server named its share in an unknown way"))?;
        Ok(Link { base: base.to_owned(), handle, secret })
    }

    /// Parses a link and repairs common damage: brackets, quotes and punctuation around it, line
    /// breaks and blanks inside, capitals, `%23` for `#`, parameters added by trackers, and the
    /// wrapping of mail filters that pass links through their own server.
    ///
    /// # Errors
    /// [`Error::NotALink`] when there is none in the text, [`Error::DamagedLink`] when its secret
    /// cannot be read.
    pub fn parse(text: &str) -> Result<Link> {
        if text.len() > MAX_TEXT {
            return Err(Error::NotALink("the text is longer than 64 KiB"));
        }
        let text = join_lines(text);
        let text = unescape(&text);
        // A mail filter's link has ours inside, and a mail may name other pages.
        let lower = Zeroizing::new(text.to_ascii_lowercase());
        let starts = lower.match_indices("http").map(|(at, _)| at);
        let mut best = Error::NotALink(NO_LINK);
        for start in starts.filter(|&at| lower[at..].starts_with("http://") || lower[at..].starts_with("https://")) {
            match Link::at_start(&text[start..]) {
                Ok(link) => return Ok(link),
                Err(error) if parse_progress(&error) >= parse_progress(&best) => best = error,
                Err(_) => {}
            }
        }
        Err(best)
    }

    fn at_start(text: &str) -> Result<Link> {
        let (url, fragment) = text.split_once('#').ok_or(Error::NotALink(NO_SECRET))?;
        let url = url.split('?').next().unwrap_or_default().trim_end_matches('/');
        let (base, handle) = split_url(url).ok_or(Error::NotALink(NO_HANDLE))?;
        Ok(Link { base: lowercase_host(base), handle, secret: Secret::from_fragment(fragment)? })
    }

    /// Returns whether the text ends within the secret: the rest of a broken line may follow.
    pub fn may_go_on(text: &str) -> bool {
        let text = unescape(&join_lines(text)).to_string();
        let letters = |part: &str| part.chars().filter(char::is_ascii_alphanumeric).count();
        text.split_once('#').is_none_or(|(_, fragment)| letters(fragment) < FRAGMENT_LETTERS)
    }

    /// `https://host`, or with a path before `/s/`.
    pub fn base(&self) -> &str {
        &self.base
    }

    /// The public name of the share.
    pub fn handle(&self) -> Handle {
        self.handle
    }

    /// Secret that opens the share.
    pub fn secret(&self) -> &Secret {
        &self.secret
    }

    /// Returns the link's text, which is as secret as the content that it opens.
    pub fn to_text(&self) -> Zeroizing<String> {
        Zeroizing::new(format!("{}{}{}#{}", self.base, api::PAGE, self.handle, *self.secret.fragment()))
    }
}

/// Ranks parse errors by progress: the most specific one is reported.
fn parse_progress(error: &Error) -> u8 {
    match error {
        Error::NotALink(NO_LINK) => 0,
        Error::NotALink(NO_HANDLE) => 1,
        Error::NotALink(_) => 2,
        _ => 3,
    }
}

/// The base and the handle of a share's URL.
fn split_url(url: &str) -> Option<(&str, Handle)> {
    let at = url.to_ascii_lowercase().rfind(api::PAGE)?;
    let (base, handle) = (&url[..at], &url[at + api::PAGE.len()..]);
    let host = base.split_once("://")?.1;
    if host.is_empty() || host.starts_with('/') {
        return None;
    }
    Some((base, handle.parse().ok()?))
}

/// Removes blanks, line ends (also of quoted-printable mail, `=` at the end of a line, and
/// the marks of quoted lines) and invisible letters.
fn join_lines(text: &str) -> Zeroizing<String> {
    let mut whole = Zeroizing::new(String::with_capacity(text.len()));
    for line in text.lines() {
        let line = line.trim();
        let line = line.trim_start_matches(['>', '|', ' ']);
        let line = line.strip_suffix('=').unwrap_or(line);
        whole.extend(line.chars().filter(|c| {
            !c.is_whitespace()
                && !c.is_control()
                && !matches!(c, '\u{200b}'..='\u{200f}' | '\u{2060}' | '\u{feff}' | '\u{ad}')
        }));
    }
    whole
}

/// Decodes `%3A`, `%2F`, `%23` and `%25`, also when they were escaped repeatedly.
fn unescape(text: &str) -> Zeroizing<String> {
    let mut text = Zeroizing::new(text.replace("&amp;", "&").replace("&#35;", "#"));
    // Escaping what is escaped gives %2523; three times is more than any chain of programs was seen
    // to do.
    for _ in 0..3 {
        for (escaped, letter) in [("%3a", ":"), ("%2f", "/"), ("%23", "#"), ("%25", "%"), ("%3A", ":"), ("%2F", "/")] {
            if text.contains(escaped) {
                *text = text.replace(escaped, letter);
            }
        }
    }
    text
}

/// Scheme and host in small letters; the path stays.
fn lowercase_host(base: &str) -> String {
    let host = base.find("://").map_or(0, |at| at + 3);
    let end = base[host..].find('/').map_or(base.len(), |at| host + at);
    format!("{}{}", base[..end].to_ascii_lowercase(), &base[end..])
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn whole() -> String {
        let fragment = Secret::sample().fragment();
        format!("https://share.example.org/s/1482719382210#{}", *fragment)
    }

    #[test]
    fn a_link_is_read_as_it_is_written() {
        for base in
            ["https://share.example.org", "http://127.0.0.1:7777", "https://example.org/some/path", "http://[::1]:80"]
        {
            let link = whole().replace("https://share.example.org", base);
            let read = Link::parse(&link).unwrap();
            assert_eq!((*read.to_text()).as_str(), link);
            assert_eq!(read.base(), base);
            assert_eq!(read.handle().to_string(), "1482719382210");
        }
    }

    #[test]
    fn what_programs_and_people_do_to_links_is_undone() {
        let link = whole();
        let (url, fragment) = link.split_once('#').unwrap();
        let escaped = link.replace(':', "%3A").replace('/', "%2F").replace('#', "%23");
        for mangled in [
            format!("<{link}>"),
            format!("  \"{link}\".\r\n"),
            format!("{link})."),
            format!("Here it is: {link}\n\nGreetings,\nAnn"),
            link.to_uppercase(),
            link.replace('#', "%23"),
            link.replace('#', "%2523"),
            link.replace('#', "/#"),
            link.replace('#', "?utm_source=mail&utm_medium=x#"),
            format!("{url}=\r\n#{}=\r\n{}", &fragment[..30], &fragment[30..]),
            format!("> {url}#{}\n> {}", &fragment[..30], &fragment[30..]),
            format!("{} {} {}", &link[..20], &link[20..50], &link[50..]),
            format!("https://eur01.safelinks.protection.example.com/?url={escaped}&data=05%7C01%7Cann&reserved=0"),
            format!("[{link}]({link})"),
            format!("{link}\n-- \nAnn, https://ann.example.org"),
        ] {
            let read = Link::parse(&mangled).map(|read| read.to_text().to_string());
            assert_eq!(read.as_deref().ok(), Some(link.as_str()), "{mangled}");
        }
    }

    #[test]
    fn a_server_names_its_shares_by_plain_urls_only() {
        let named = |base: &str| Link::new(&format!("{base}/s/1482719382210"), Secret::sample()).is_ok();
        for base in
            ["https://share.example.org", "http://127.0.0.1:7377", "https://example.org/some/path", "http://[::1]:80"]
        {
            assert!(named(base), "{base}");
        }
        for base in [
            "file:///etc",
            "javascript://x",
            "ftp://example.org",
            "https://a\u{1b}]0;owned\u{7}",
            "https://a\nhttps://b",
            "https://a b",
            "https://a/\u{9b}31m",
            "https://ex\u{e4}mple.org",
            "https://a/\u{202e}moc",
            "https://a/?x=1",
            "https://a/#x",
            "https://",
        ] {
            assert!(!named(base), "{base:?}");
        }
    }

    #[test]
    fn what_is_missing_is_named() {
        let told = |text: &str| Link::parse(text).map(drop).unwrap_err().to_string();
        let link = whole();
        assert!(told(&link[..link.len() - 1]).starts_with("damaged link"));
        assert!(told(&link.replace('#', "#q")).starts_with("damaged link"));
        assert!(told(link.split('#').next().unwrap()).contains("behind '#' is missing"));
        assert!(told("hello").contains("begins with https://"));
        assert!(told("https://example.org/#x").contains("7 to 13 digits"));
        assert!(told(&link.replace("/s/", "/x/")).contains("7 to 13 digits"));
        assert!(told(&"x".repeat(MAX_TEXT + 1)).contains("64 KiB"));
    }

    #[test]
    fn a_broken_line_asks_for_its_rest() {
        let link = whole();
        assert!(Link::may_go_on(&link[..30]) && Link::may_go_on(&link[..90]));
        assert!(!Link::may_go_on(&link) && !Link::may_go_on(&format!("{link} bye")));
    }

    proptest! {
        #[test]
        fn no_text_makes_it_fall(text in "\\PC{0,200}") {
            let _ = (Link::parse(&text), Link::may_go_on(&text));
        }

        #[test]
        fn cuts_are_noticed(length in 0usize..100) {
            let link = whole();
            prop_assume!(length < link.len());
            prop_assert!(Link::parse(&link[..length]).is_err());
        }
    }
}
