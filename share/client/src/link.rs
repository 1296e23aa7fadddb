//! A one-time link: `https://host/s/HANDLE#FRAGMENT`, written, and read in the shapes that mail
//! programs and people leave it in; and the secret of a share, which the fragment spells.
//!
//! The secret is an age identity. The fragment is the part of the identity's usual spelling after
//! `AGE-SECRET-KEY-1`, in small letters: 52 letters of data and 6 of checksum, of an alphabet
//! (Bech32) without capitals, punctuation and look-alikes. Mail programs and telephones do not
//! break it, and with the prefix restored `age` reads it.

use std::str::FromStr;

use bech32::primitives::decode::CheckedHrpstring;
use bech32::{Bech32, Hrp};
use hkdf::Hkdf;
use lockbox_share_protocol::api;
use lockbox_share_protocol::token::{Auth, Handle};
use sha2::Sha256;
use zeroize::{Zeroize, ZeroizeOnDrop, Zeroizing};

use crate::http::ServerAddress;
use crate::{Error, Result};

/// Longer input is a mistake, such as a whole file.
pub const MAX_TEXT: usize = 64 << 10;

const NO_LINK: &str = "it begins with https:// and has a part after '#'";
const NO_HANDLE: &str = "its address does not end with /s/ and 7 to 13 digits";
const NO_SECRET: &str =
    "the part after '#' is missing, and the link does not work without it; ask for the complete link";

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

    pub fn handle(&self) -> Handle {
        self.handle
    }

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

fn split_url(url: &str) -> Option<(&str, Handle)> {
    let at = url.to_ascii_lowercase().rfind(api::PAGE)?;
    let (base, handle) = (&url[..at], &url[at + api::PAGE.len()..]);
    let host = base.split_once("://")?.1;
    if host.is_empty() || host.starts_with('/') {
        return None;
    }
    Some((base, handle.parse().ok()?))
}

/// Removes blanks, invisible letters, `>` of quotes, line ends (also `=` of quoted-printable mail).
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

pub(crate) const FRAGMENT_LETTERS: usize = 58;
const PREFIX: &str = "age-secret-key-";
/// HKDF label of the proof that claims a share.
const AUTH_LABEL: &[u8] = b"lockbox.share/v1/auth";

/// X25519 secret key of a share: decrypts its content and derives the proof for a claim.
#[derive(Zeroize, ZeroizeOnDrop)]
pub struct Secret([u8; 32]);

impl Secret {
    /// # Errors
    /// When the system has no randomness.
    pub fn generate() -> Result<Secret> {
        let mut secret = Secret([0; 32]);
        getrandom::fill(&mut secret.0).map_err(|_| Error::NoRandomness)?;
        Ok(secret)
    }

    /// Parses a fragment and repairs common damage: capitals, line breaks, punctuation around it,
    /// and look-alikes of letters that the alphabet leaves out.
    ///
    /// # Errors
    /// [`Error::DamagedLink`] when the checksum does not match.
    pub fn from_fragment(text: &str) -> Result<Secret> {
        let letters = letters(text);
        let full = Zeroizing::new(format!("{PREFIX}1{}", *letters));
        let decoded = CheckedHrpstring::new::<Bech32>(&full).map_err(|_| Error::DamagedLink)?;
        let mut secret = Secret([0; 32]);
        let mut count = 0;
        for byte in decoded.byte_iter() {
            *secret.0.get_mut(count).ok_or(Error::DamagedLink)? = byte;
            count += 1;
        }
        if count == secret.0.len() { Ok(secret) } else { Err(Error::DamagedLink) }
    }

    pub fn fragment(&self) -> Zeroizing<String> {
        let full = self.to_bech32();
        Zeroizing::new(full[PREFIX.len() + 1..].to_owned())
    }

    /// `AGE-SECRET-KEY-1...`, a line of an identity file for `age -d -i`.
    pub fn identity_line(&self) -> Zeroizing<String> {
        Zeroizing::new(self.to_bech32().to_uppercase())
    }

    /// Derives the proof that the daemon requires for a claim. It reveals nothing about the secret.
    pub fn auth(&self) -> Auth {
        let mut auth = Zeroizing::new([0; Auth::LENGTH]);
        self.derive(AUTH_LABEL, &mut auth[..]);
        Auth::new(*auth)
    }

    /// Derives the name of the note about the link; it reveals neither the secret nor the proof.
    pub(crate) fn note_name(&self) -> String {
        let mut name = [0; 16];
        self.derive(b"lockbox.share/v1/note", &mut name);
        lockbox_terminal::hex(&name)
    }

    pub(crate) fn identity(&self) -> Result<age::x25519::Identity> {
        age::x25519::Identity::from_str(&self.identity_line()).map_err(|_| Error::DamagedLink)
    }

    fn to_bech32(&self) -> Zeroizing<String> {
        // Room for all of it: a text that grew would leave copies behind.
        let mut text = Zeroizing::new(String::with_capacity(PREFIX.len() + 1 + FRAGMENT_LETTERS));
        bech32::encode_lower_to_fmt::<Bech32, String>(&mut text, Hrp::parse_unchecked(PREFIX), &self.0)
            .expect("74 letters are fewer than the code allows, and writing to a text never fails");
        text
    }

    /// HKDF-SHA-256 without a salt: the secret is uniform. X25519 and HKDF may share it, because
    /// the output of neither reveals that of the other.
    fn derive(&self, label: &[u8], output: &mut [u8]) {
        Hkdf::<Sha256>::new(None, &self.0).expand(label, output).expect("32 bytes are fewer than 255 times 32");
    }
}

fn letters(text: &str) -> Zeroizing<String> {
    let mut letters = Zeroizing::new(String::with_capacity(text.len()));
    for letter in text.chars().flat_map(char::to_lowercase).filter(char::is_ascii_alphanumeric) {
        letters.push(match letter {
            'o' => '0',
            'i' | '1' => 'l',
            other => other,
        });
    }
    // An identity in full, in which the 1 was just made an l.
    if let Some(rest) = letters.strip_prefix("agesecretkeyl") {
        return Zeroizing::new(rest.chars().take(FRAGMENT_LETTERS).collect());
    }
    letters.truncate(FRAGMENT_LETTERS);
    letters
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    impl Secret {
        /// The bytes 1 to 32.
        pub(crate) fn sample() -> Secret {
            let mut bytes = [0; 32];
            bytes.iter_mut().zip(1..).for_each(|(byte, value)| *byte = value);
            Secret(bytes)
        }
    }

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
        assert!(told(link.split('#').next().unwrap()).contains("after '#' is missing"));
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

    /// The alphabet of Bech32, in the order of its values.
    const ALPHABET: &str = "qpzry9x8gf2tvdw0s3jn54khce6mua7l";
    const FRAGMENT: &str = "qypqxpq9qcrsszg2pvxq6rs0zqg3yyc5z5tpwxqergd3c8g7rusqgpqyee";

    #[test]
    fn a_fragment_is_an_age_identity_without_its_prefix() {
        let secret = Secret::sample();
        assert_eq!(*secret.fragment(), FRAGMENT);
        assert_eq!(*secret.identity_line(), format!("AGE-SECRET-KEY-1{}", FRAGMENT.to_uppercase()));
        assert!(secret.identity().is_ok());
    }

    /// The page derives the same, and its test names the same values.
    #[test]
    fn the_proof_is_derived_as_documented() {
        assert_eq!(*Secret::sample().auth().to_text(), "VmnHhOnvChivN_gYLC5tAQxVR6mKuxoCjtiZZUyu3f8");
    }

    #[test]
    fn what_mail_programs_and_telephones_do_is_undone() {
        for damage in [
            FRAGMENT.to_uppercase(),
            format!("Q{}", &FRAGMENT[1..]),
            format!(" {FRAGMENT}. "),
            format!("{FRAGMENT}>,"),
            format!("{}=\r\n{}", &FRAGMENT[..20], &FRAGMENT[20..]),
            format!("{}\u{200b}{}\u{ad}{}", &FRAGMENT[..7], &FRAGMENT[7..9], &FRAGMENT[9..]),
            FRAGMENT.replace('0', "O").replace('l', "I"),
            format!("{FRAGMENT}&utm_source=mail"),
            format!("{FRAGMENT} Greetings, Ann"),
            format!("AGE-SECRET-KEY-1{}", FRAGMENT.to_uppercase()),
        ] {
            assert_eq!(Secret::from_fragment(&damage).map(|s| s.0).ok(), Some(Secret::sample().0), "{damage}");
        }
    }

    proptest! {
        #[test]
        fn every_secret_is_read_as_it_is_spelled(bytes in any::<[u8; 32]>()) {
            let spelled = Secret(bytes).fragment();
            prop_assert_eq!(spelled.len(), FRAGMENT_LETTERS);
            prop_assert_eq!(Secret::from_fragment(&spelled).unwrap().0, bytes);
        }

        /// The code tells up to four wrong letters.
        #[test]
        fn wrong_letters_are_noticed(
            bytes in any::<[u8; 32]>(), places in proptest::collection::btree_map(0..FRAGMENT_LETTERS, 1usize..32, 1..=4),
        ) {
            let mut spelled = Secret(bytes).fragment().as_bytes().to_vec();
            for (place, step) in places {
                let value = ALPHABET.find(char::from(spelled[place])).unwrap();
                spelled[place] = ALPHABET.as_bytes()[(value + step) % 32];
            }
            prop_assert!(Secret::from_fragment(std::str::from_utf8(&spelled).unwrap()).is_err());
        }

        #[test]
        fn a_cut_fragment_is_noticed(bytes in any::<[u8; 32]>(), length in 0..FRAGMENT_LETTERS) {
            prop_assert!(Secret::from_fragment(&Secret(bytes).fragment()[..length]).is_err());
        }

        #[test]
        fn no_fragment_makes_it_fall(text in "\\PC{0,100}") {
            let _ = Secret::from_fragment(&text);
        }
    }
}
