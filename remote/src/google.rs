//! Requests to Google's store, signed with an HMAC key as its documentation says (V4, `GOOG4-HMAC-SHA256`): as Amazon's are, with other words.

use jiff::Timestamp;
use sha2::{Digest, Sha256};
use url::Url;
use zeroize::Zeroizing;

use crate::digits::hex;
use crate::signing::{Header, SIGNED_FOR, encoded, mac};

pub(crate) const ENDPOINT: &str = "https://storage.googleapis.com";
/// Any is taken; this is what Google's libraries say.
pub(crate) const LOCATION: &str = "auto";
/// With 0: on the condition that there is no object of the name.
pub(crate) const IF_GENERATION: &str = "x-goog-if-generation-match";
const ALGORITHM: &str = "GOOG4-HMAC-SHA256";

/// The address with a signature over it and `headers`, which go with the request.
pub(crate) fn sign(
    method: &str,
    mut url: Url,
    headers: &[Header],
    credentials: &rusty_s3::Credentials,
    now: Timestamp,
) -> Url {
    let (time, day) = (now.strftime("%Y%m%dT%H%M%SZ").to_string(), now.strftime("%Y%m%d").to_string());
    let scope = format!("{day}/{LOCATION}/storage/goog4_request");
    let host = match url.port() {
        Some(port) => format!("{}:{port}", url.host_str().unwrap_or_default()),
        None => url.host_str().unwrap_or_default().to_owned(),
    };
    let mut headers: Vec<(&str, &str)> = headers.iter().map(|(name, value)| (*name, value.as_str())).collect();
    headers.push(("host", &host));
    headers.sort_unstable();
    let names = headers.iter().map(|(name, _)| *name).collect::<Vec<_>>().join(";");
    let mut query: Vec<(String, String)> = url.query_pairs().into_owned().collect();
    let parameters = [
        ("X-Goog-Algorithm", ALGORITHM),
        ("X-Goog-Credential", &format!("{}/{scope}", credentials.key())),
        ("X-Goog-Date", &time),
        ("X-Goog-Expires", &SIGNED_FOR.as_secs().to_string()),
        ("X-Goog-SignedHeaders", &names),
    ];
    query.extend(parameters.map(|(name, value)| (name.to_owned(), value.to_owned())));
    let mut query: Vec<String> =
        query.iter().map(|(name, value)| format!("{}={}", encoded(name, ""), encoded(value, ""))).collect();
    query.sort_unstable();
    let mut query = query.join("&");
    let headers: String = headers.iter().map(|(name, value)| format!("{name}:{value}\n")).collect();
    let request = format!("{method}\n{}\n{query}\n{headers}\n{names}\nUNSIGNED-PAYLOAD", url.path());
    let text = format!("{ALGORITHM}\n{time}\n{scope}\n{}", hex(&Sha256::digest(request)));
    let mut key = Zeroizing::new(format!("GOOG4{}", credentials.secret()).into_bytes());
    for part in [&*day, LOCATION, "storage", "goog4_request"] {
        key = Zeroizing::new(mac(&key, part));
    }
    query.push_str("&X-Goog-Signature=");
    query.push_str(&hex(&mac(&key, &text)));
    url.set_query(Some(&query));
    url
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What `hmac` and `hashlib` of Python make of the same request, put together by hand as the documentation says.
    #[test]
    fn a_request_is_signed_as_the_documentation_says() {
        let url = Url::parse("https://storage.googleapis.com/some-bucket/p/name?prefix=a%2Fb").unwrap();
        let credentials = rusty_s3::Credentials::new("GOOG1EXAMPLE", "secret/key+with=signs");
        let headers = [("content-md5", "aGFzaA==".to_owned()), (IF_GENERATION, "0".to_owned())];
        let url = sign("PUT", url, &headers, &credentials, Timestamp::from_second(1_800_000_000).unwrap());
        let wanted = "https://storage.googleapis.com/some-bucket/p/name?X-Goog-Algorithm=GOOG4-HMAC-SHA256\
            &X-Goog-Credential=GOOG1EXAMPLE%2F20270115%2Fauto%2Fstorage%2Fgoog4_request&X-Goog-Date=20270115T080000Z\
            &X-Goog-Expires=900&X-Goog-SignedHeaders=content-md5%3Bhost%3Bx-goog-if-generation-match&prefix=a%2Fb\
            &X-Goog-Signature=23dabc279ce6aa95f4be63dada48cd030f9f00abf651146e8784d970e966d0d8";
        assert_eq!(url.as_str(), wanted);
    }
}
