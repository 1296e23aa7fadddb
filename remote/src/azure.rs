//! Containers of Azure's blob storage: where one is, who asks it, and how a request says so.
//!
//! The account comes from where the Azure tools have it: the environment, and the section `[storage]` of their file of settings. Its key signs requests (Shared Key, as Microsoft's
//! documentation of the REST interface has it) and is never sent; a SAS token is the signature itself, so it goes along in the address of each request, to its account's server alone.
//! Neither is ever shown.

use std::path::Path;
use std::time::SystemTime;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use lockbox::{Error, Result};
use url::Url;
use zeroize::Zeroizing;

use crate::Options;
use crate::address::check_scheme;
use crate::broker::{Broker, GivenAccount};
use crate::credentials::{Credentials, File, Variable, section, variable};
use crate::range_source::Trouble;
use crate::settings_file;
use crate::signing::{Header, encoded, mac};

/// Of the interface: old enough for the stores that imitate Azure's, and of 2021, so that names which XML cannot have are listed all the same.
const VERSION: &str = "2021-12-02";
const SUFFIX: &str = "core.windows.net";
/// The account of the emulators, as Microsoft's documentation publishes it.
const EMULATED: &str = "devstoreaccount1";
const EMULATED_KEY: &str = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw==";
const EMULATOR: &str = "http://127.0.0.1:10000/devstoreaccount1";

/// An account, and what proves that somebody may ask there.
#[derive(PartialEq)]
pub(crate) struct Account {
    /// Empty where the endpoint and a token say all.
    name: String,
    /// Of its blobs, without a slash at the end.
    endpoint: String,
    proof: Option<Proof>,
}

#[derive(PartialEq)]
pub(crate) enum Proof {
    Key(Zeroizing<Vec<u8>>),
    Token(Zeroizing<String>),
}

impl Account {
    /// # Errors
    /// `Invalid` when the environment names none, or one that cannot be.
    fn of_environment() -> Result<Account> {
        Account::of(&variable, &settings_file::read)
    }

    /// As the Azure tools do, a connection string goes before all else, and a key before a token; what is in the environment before what is in the file.
    pub(crate) fn of(variable: Variable<'_>, file: File<'_>) -> Result<Account> {
        let path = variable("AZURE_CONFIG_DIR").or_else(|| variable("HOME").map(|home| format!("{home}/.azure")));
        let text = path.and_then(|path| file(&Path::new(&path).join("config"))).map(Zeroizing::new).unwrap_or_default();
        let settings = section(&text, "storage").unwrap_or_default();
        let here = |name: &str| variable(&format!("AZURE_STORAGE_{name}")).map(Zeroizing::new);
        let there =
            |name: &str| settings.get(&name.to_ascii_lowercase()).map(|value| Zeroizing::new((*value).to_owned()));
        let (own, filed) = (here("ACCOUNT"), there("ACCOUNT"));
        let (endpoint, filed_endpoint) = (here("SERVICE_ENDPOINT"), there("SERVICE_ENDPOINT"));
        // What is in the file is of the file's account, and for no other server to see.
        let is_filed = own.as_ref().is_none_or(|own| filed.as_ref() == Some(own))
            && endpoint.as_ref().is_none_or(|endpoint| filed_endpoint.as_ref() == Some(endpoint));
        const PROOFS: [&str; 3] = ["CONNECTION_STRING", "KEY", "SAS_TOKEN"];
        let proof = PROOFS
            .iter()
            .find_map(|name| Some((*name, here(name)?)))
            .or_else(|| PROOFS.iter().filter(|_| is_filed).find_map(|name| Some((*name, there(name)?))));
        let endpoint = endpoint.or(filed_endpoint.filter(|_| is_filed));
        let name = own.or(filed);
        let mut given = match &proof {
            Some(("CONNECTION_STRING", text)) => Given::connection(text)?,
            Some(("KEY", key)) => Given { key: Some(key), ..Given::default() },
            Some((_, token)) => Given { token: Some(token), ..Given::default() },
            None => Given::default(),
        };
        given.name = given.name.or(name.as_ref().map(|name| name.as_str()));
        if !matches!(proof, Some(("CONNECTION_STRING", _))) {
            given.endpoint = endpoint.as_ref().map(|endpoint| endpoint.as_str());
        }
        given.account()
    }
}

/// The parts of an account, as they are written.
#[derive(Default)]
struct Given<'a> {
    name: Option<&'a str>,
    key: Option<&'a str>,
    token: Option<&'a str>,
    endpoint: Option<&'a str>,
    suffix: Option<&'a str>,
    protocol: Option<&'a str>,
}

impl<'a> Given<'a> {
    /// # Errors
    /// `Invalid` for what is none. It is never repeated.
    fn connection(text: &'a str) -> Result<Given<'a>> {
        let mut given = Given::default();
        for part in text.split(';').map(str::trim).filter(|part| !part.is_empty()) {
            let (name, value) = part
                .split_once('=')
                .ok_or_else(|| Error::invalid("AZURE_STORAGE_CONNECTION_STRING has a part that is no NAME=VALUE"))?;
            match &*name.to_ascii_lowercase() {
                "accountname" => given.name = Some(value),
                "accountkey" => given.key = Some(value),
                "sharedaccesssignature" => given.token = Some(value),
                "blobendpoint" => given.endpoint = Some(value),
                "endpointsuffix" => given.suffix = Some(value),
                "defaultendpointsprotocol" => given.protocol = Some(value),
                "usedevelopmentstorage" if value.eq_ignore_ascii_case("true") => {
                    (given.name, given.key, given.endpoint) = (Some(EMULATED), Some(EMULATED_KEY), Some(EMULATOR));
                }
                // Of other services.
                _ => {}
            }
        }
        Ok(given)
    }

    fn account(self) -> Result<Account> {
        let name = self.name.unwrap_or_default();
        // It becomes a part of the server's name.
        let is_name = name.bytes().all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit());
        if !is_name || (name.is_empty() && (self.endpoint.is_none() || self.key.is_some())) {
            return Err(Error::invalid(match name {
                "" => "az:// needs the account in AZURE_STORAGE_ACCOUNT, or AZURE_STORAGE_CONNECTION_STRING",
                _ => "the name of an Azure account has small letters and digits",
            }));
        }
        let endpoint = match self.endpoint {
            Some(endpoint) => endpoint.trim_end_matches('/').to_owned(),
            None => {
                let (protocol, suffix) = (self.protocol.unwrap_or("https"), self.suffix.unwrap_or(SUFFIX));
                format!("{protocol}://{name}.blob.{suffix}")
            }
        };
        let proof = match (self.key, self.token) {
            (Some(key), _) => {
                let key = STANDARD
                    .decode(key.trim())
                    .map_err(|_| Error::invalid("the key of the Azure account is not Base64"))?;
                Some(Proof::Key(Zeroizing::new(key)))
            }
            (None, Some(token)) => {
                let token = token.trim().trim_start_matches('?');
                if token.is_empty() || !token.bytes().all(|byte| byte.is_ascii_graphic() && byte != b'#') {
                    return Err(Error::invalid(
                        "the SAS token of the Azure account is none: it is the query of an address",
                    ));
                }
                Some(Proof::Token(Zeroizing::new(token.to_owned())))
            }
            (None, None) => None,
        };
        Ok(Account { name: name.to_owned(), endpoint, proof })
    }
}

/// Looks for the account; by the broker where this process may not look itself.
pub(crate) fn looked_for(
    broker: Option<Broker>,
) -> impl Fn() -> std::result::Result<Option<Account>, Trouble> + Send + Sync + 'static {
    move || account(broker.as_ref()).map(Some).map_err(|error| Trouble::Refused(error.to_string()))
}

fn account(broker: Option<&Broker>) -> Result<Account> {
    let Some(broker) = broker else { return Account::of_environment() };
    let given = broker.account().map_err(Error::invalid)?;
    let key = given.key.clone().map(|key| Proof::Key(Zeroizing::new(key)));
    let proof = key.or_else(|| given.token.clone().map(|token| Proof::Token(Zeroizing::new(token))));
    Ok(Account { name: given.name.clone(), endpoint: given.endpoint.clone(), proof })
}

/// Where the account's blobs are.
///
/// # Errors
/// `Invalid` when the environment names no account, or one that cannot be.
pub(crate) fn endpoint(broker: Option<&Broker>) -> Result<String> {
    Ok(account(broker)?.endpoint)
}

/// That of the environment, as it is passed on between processes.
///
/// # Errors
/// `Invalid` when the environment names none, or one that cannot be.
pub(crate) fn given() -> Result<GivenAccount> {
    let Account { name, endpoint, proof } = Account::of_environment()?;
    let (key, token) = match proof {
        Some(Proof::Key(key)) => (Some(key.to_vec()), None),
        Some(Proof::Token(token)) => (None, Some(token.to_string())),
        None => (None, None),
    };
    Ok(GivenAccount { name, endpoint, key, token })
}

impl Account {
    /// Whether there is something that proves who asks.
    pub(crate) fn is_somebody(&self) -> bool {
        self.proof.is_some()
    }
}

/// A container, and who asks it.
pub(crate) struct Container {
    /// Of the account.
    name: String,
    endpoint: String,
    url: Url,
    accounts: Credentials<Account>,
}

/// The same with the credentials of one request.
pub(crate) struct Asker<'a> {
    container: &'a Container,
    proof: Option<&'a Proof>,
}

/// A request, but for its body. Its address may be a secret.
pub(crate) struct Request {
    pub(crate) url: Url,
    pub(crate) headers: Vec<Header>,
}

impl Container {
    /// # Errors
    /// `Invalid` when there is no account, or for an endpoint that cannot be.
    pub(crate) fn new(container: &str, options: &Options) -> Result<Container> {
        Container::at(container, account(options.broker.as_ref())?, looked_for(options.broker.clone()), options)
    }

    pub(crate) fn at(
        container: &str,
        account: Account,
        look: impl Fn() -> std::result::Result<Option<Account>, Trouble> + Send + Sync + 'static,
        options: &Options,
    ) -> Result<Container> {
        let Account { name, endpoint, .. } = account;
        // What follows the path of one may be a secret, and it is not shown.
        let wrong = || Error::invalid("the endpoint of the Azure account is no address of a server");
        let url = Url::parse(&endpoint).ok().filter(|url| url.query().is_none() && url.fragment().is_none());
        let mut url = url
            .filter(|url| url.has_host() && url.username().is_empty() && url.password().is_none())
            .ok_or_else(wrong)?;
        check_scheme(&url, options.allow_http)?;
        url.path_segments_mut().map_err(|()| wrong())?.pop_if_empty().push(container);
        Ok(Container { name, endpoint, url, accounts: Credentials::new(look) })
    }

    /// See [`Credentials::with`]. What proves something to one account is shown to no other one.
    pub(crate) fn with<T>(
        &self,
        ask: impl Fn(&Asker<'_>) -> std::result::Result<T, Trouble>,
    ) -> std::result::Result<T, Trouble> {
        self.accounts.with(|account| match account {
            Some(account) if account.name != self.name || account.endpoint != self.endpoint => {
                Err(Trouble::Refused("the environment names another Azure account now".into()))
            }
            account => ask(&Asker { container: self, proof: account.and_then(|account| account.proof.as_ref()) }),
        })
    }
}

impl Asker<'_> {
    /// A request about a blob, or about the container where `name` is empty. `headers` are those that signatures name, but for the length of the body.
    pub(crate) fn request(
        &self,
        method: &str,
        name: &str,
        query: &[(&str, &str)],
        headers: &[Header],
        length: usize,
    ) -> Request {
        let mut url = self.container.url.clone();
        if !name.is_empty() {
            let path = format!("{}/{}", url.path(), encoded(name, "/"));
            url.set_path(&path);
        }
        let mut headers = headers.to_vec();
        headers.push(("x-ms-version", VERSION.into()));
        if let Some(Proof::Key(key)) = self.proof {
            headers.push(("x-ms-date", httpdate::fmt_http_date(SystemTime::now())));
            let account = &self.container.name;
            let signature = mac(key, &to_sign(account, method, url.path(), query, &headers, length));
            headers.push(("authorization", format!("SharedKey {account}:{}", STANDARD.encode(signature))));
        }
        let mut parts: Vec<String> =
            query.iter().map(|(name, value)| format!("{}={}", encoded(name, ""), encoded(value, ""))).collect();
        if let Some(Proof::Token(token)) = self.proof {
            parts.push(token.to_string());
        }
        url.set_query((!parts.is_empty()).then(|| parts.join("&")).as_deref());
        Request { url, headers }
    }
}

/// The text that a Shared Key is put over, of versions since 2015: the length of an empty body is not said, and the date is in a header of Azure's own.
fn to_sign(
    account: &str,
    method: &str,
    path: &str,
    query: &[(&str, &str)],
    headers: &[Header],
    length: usize,
) -> String {
    let value = |name: &str| headers.iter().find(|(known, _)| *known == name).map_or("", |(_, value)| value.as_str());
    let length = if length == 0 { String::new() } else { length.to_string() };
    let mut lines = vec![method, "", "", &length, value("content-md5"), value("content-type"), ""];
    lines.extend(["if-modified-since", "if-match", "if-none-match", "if-unmodified-since", "range"].map(value));
    let mut own: Vec<String> = headers
        .iter()
        .filter(|(name, _)| name.starts_with("x-ms-"))
        .map(|(name, value)| format!("{name}:{value}"))
        .collect();
    own.sort_unstable();
    let mut query: Vec<String> = query.iter().map(|(name, value)| format!("{name}:{value}")).collect();
    query.sort_unstable();
    let resource = format!("/{account}{path}");
    lines.extend(own.iter().map(String::as_str));
    lines.push(&resource);
    lines.extend(query.iter().map(String::as_str));
    lines.join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    const CONFIG: &str = "[storage]\naccount = filed\nkey = a2V5\n[core]\n";

    fn found(variables: &[(&str, &str)]) -> Result<Account> {
        let variable =
            |name: &str| variables.iter().find(|(key, _)| *key == name).map(|(_, value)| (*value).to_owned());
        Account::of(&variable, &|path| (path == Path::new("/h/.azure/config")).then(|| CONFIG.to_owned()))
    }

    fn shown(variables: &[(&str, &str)]) -> (String, String, String) {
        let Account { name, endpoint, proof } = found(variables).unwrap();
        let proof = match proof {
            Some(Proof::Key(key)) => format!("key {}", String::from_utf8_lossy(&key)),
            Some(Proof::Token(token)) => format!("token {}", *token),
            None => "none".into(),
        };
        (name, endpoint, proof)
    }

    fn is(found: (String, String, String), name: &str, endpoint: &str, proof: &str) {
        assert_eq!((&*found.0, &*found.1, &*found.2), (name, endpoint, proof));
    }

    #[test]
    fn accounts_come_from_where_the_azure_tools_have_them() {
        let of = |name: &str| format!("https://{name}.blob.core.windows.net");
        is(shown(&[("AZURE_STORAGE_ACCOUNT", "public")]), "public", &of("public"), "none");
        is(shown(&[("HOME", "/h")]), "filed", &of("filed"), "key key");
        // What is in the environment goes before what is in the file, whatever it is.
        let token = [("HOME", "/h"), ("AZURE_STORAGE_SAS_TOKEN", "?sv=1&sig=a%3D")];
        is(shown(&token), "filed", &of("filed"), "token sv=1&sig=a%3D");
        let both = [("AZURE_STORAGE_ACCOUNT", "here"), ("AZURE_STORAGE_KEY", "aGVyZQ=="), token[1]];
        is(shown(&both), "here", &of("here"), "key here");
        let connection = |text| shown(&[("HOME", "/h"), ("AZURE_STORAGE_CONNECTION_STRING", text), both[0], both[1]]);
        let text =
            "DefaultEndpointsProtocol=https;AccountName=con;AccountKey=Y29u;EndpointSuffix=core.chinacloudapi.cn";
        is(connection(text), "con", "https://con.blob.core.chinacloudapi.cn", "key con");
        let text = "BlobEndpoint=https://con.example.org/;SharedAccessSignature=sv=1&sig=b;QueueEndpoint=https://q.example.org";
        is(connection(text), "here", "https://con.example.org", "token sv=1&sig=b");
        let emulated = String::from_utf8_lossy(&STANDARD.decode(EMULATED_KEY).unwrap()).into_owned();
        is(connection("UseDevelopmentStorage=true;"), EMULATED, EMULATOR, &format!("key {emulated}"));
        let elsewhere = [both[0], both[1], ("AZURE_STORAGE_SERVICE_ENDPOINT", "http://127.0.0.1:1/here")];
        is(shown(&elsewhere), "here", "http://127.0.0.1:1/here", "key here");
        // A string says all of it.
        let text = "AccountName=con;SharedAccessSignature=sig=b";
        let string = [elsewhere[2], ("AZURE_STORAGE_CONNECTION_STRING", text)];
        is(shown(&string), "con", &of("con"), "token sig=b");
    }

    /// A token goes along with each request: whoever is asked could use it.
    #[test]
    fn what_proves_something_to_the_account_of_the_file_goes_to_no_other_one() {
        let other = [("HOME", "/h"), ("AZURE_STORAGE_ACCOUNT", "other")];
        is(shown(&other), "other", "https://other.blob.core.windows.net", "none");
        let elsewhere = [("HOME", "/h"), ("AZURE_STORAGE_SERVICE_ENDPOINT", "https://other.example.org")];
        is(shown(&elsewhere), "filed", "https://other.example.org", "none");
        let same = [("HOME", "/h"), ("AZURE_STORAGE_ACCOUNT", "filed")];
        is(shown(&same), "filed", "https://filed.blob.core.windows.net", "key key");
    }

    #[test]
    fn what_is_no_account_is_told_without_its_secrets() {
        for (variables, why) in [
            (&[][..], "AZURE_STORAGE_ACCOUNT"),
            (&[("AZURE_STORAGE_KEY", "s3cr3t==")], "AZURE_STORAGE_ACCOUNT"),
            (&[("AZURE_STORAGE_ACCOUNT", "evil.example.org/")], "small letters"),
            (&[("AZURE_STORAGE_ACCOUNT", "a"), ("AZURE_STORAGE_KEY", "s3cr3t!")], "not Base64"),
            (&[("AZURE_STORAGE_ACCOUNT", "a"), ("AZURE_STORAGE_SAS_TOKEN", "s3cr3t and more")], "SAS token"),
            (&[("AZURE_STORAGE_CONNECTION_STRING", "s3cr3t")], "no NAME=VALUE"),
        ] {
            let told = found(variables).err().unwrap().to_string();
            assert!(told.contains(why) && !told.contains("s3cr3t"), "{told}");
        }
        let wrong = "BlobEndpoint=https://h/?sig=s3cr3t;SharedAccessSignature=sig=s3cr3t";
        let account = found(&[("AZURE_STORAGE_CONNECTION_STRING", wrong)]).unwrap();
        let told = Container::at("c", account, || Ok(None), &Options::default()).err().unwrap().to_string();
        assert!(told.contains("no address of a server") && !told.contains("s3cr3t"), "{told}");
        let plain = found(&[("AZURE_STORAGE_CONNECTION_STRING", "UseDevelopmentStorage=true")]).unwrap();
        let told = Container::at("c", plain, || Ok(None), &Options::default()).err().unwrap().to_string();
        assert!(told.contains("needs allow-http"), "{told}");
    }

    #[test]
    fn a_token_goes_along_and_a_key_does_not() {
        let account = |variables| found(variables).unwrap();
        let asked = |variables: &'static [(&'static str, &'static str)]| {
            let look = move || Ok(Some(account(variables)));
            let container = Container::at("box", account(variables), look, &Options::default()).unwrap();
            container
                .with(|asker| {
                    let headers = [("range", "bytes=0-9".to_owned())];
                    Ok(asker.request("GET", "a b/c", &[("comp", "list"), ("prefix", "x/y")], &headers, 0))
                })
                .unwrap()
        };
        let Request { url, headers } =
            asked(&[("AZURE_STORAGE_ACCOUNT", "one"), ("AZURE_STORAGE_SAS_TOKEN", "?sv=1&sig=a%2Fb%3D")]);
        let wanted = "https://one.blob.core.windows.net/box/a%20b/c?comp=list&prefix=x%2Fy&sv=1&sig=a%2Fb%3D";
        assert_eq!(url.as_str(), wanted);
        assert!(!headers.iter().any(|(name, _)| *name == "authorization"), "{headers:?}");
        let Request { url, headers } = asked(&[("AZURE_STORAGE_ACCOUNT", "one"), ("AZURE_STORAGE_KEY", "a2V5")]);
        assert_eq!(url.as_str(), "https://one.blob.core.windows.net/box/a%20b/c?comp=list&prefix=x%2Fy");
        let authorization = headers.iter().find(|(name, _)| *name == "authorization").unwrap();
        assert!(authorization.1.starts_with("SharedKey one:"), "{headers:?}");
    }

    /// The text is put together by hand as the documentation says.
    #[test]
    fn the_text_that_is_signed_is_that_of_the_documentation() {
        let headers = [
            ("content-md5", "aGFzaA==".to_owned()),
            ("if-none-match", "*".to_owned()),
            ("x-ms-version", "2021-12-02".to_owned()),
            ("x-ms-blob-type", "BlockBlob".to_owned()),
            ("x-ms-date", "Thu, 26 Nov 2026 01:00:00 GMT".to_owned()),
        ];
        let text = to_sign("one", "PUT", "/one/box/a%20b", &[("comp", "list"), ("a", "x/y")], &headers, 11);
        let wanted = "PUT\n\n\n11\naGFzaA==\n\n\n\n\n*\n\n\n\
            x-ms-blob-type:BlockBlob\nx-ms-date:Thu, 26 Nov 2026 01:00:00 GMT\nx-ms-version:2021-12-02\n\
            /one/one/box/a%20b\na:x/y\ncomp:list";
        assert_eq!(text, wanted);
        let text = to_sign("one", "GET", "/box/a", &[], &[("range", "bytes=0-9".to_owned())], 0);
        assert_eq!(text, "GET\n\n\n\n\n\n\n\n\n\n\nbytes=0-9\n/one/box/a");
    }

    #[test]
    fn nothing_is_proved_to_another_account_than_the_one_that_was_opened() {
        let one = [("AZURE_STORAGE_ACCOUNT", "one"), ("AZURE_STORAGE_SAS_TOKEN", "sig=a")];
        let two =
            || Ok(Some(found(&[("AZURE_STORAGE_ACCOUNT", "two"), ("AZURE_STORAGE_SAS_TOKEN", "sig=b")]).unwrap()));
        let container = Container::at("box", found(&one).unwrap(), two, &Options::default()).unwrap();
        let asked = container.with(|_| Ok(()));
        assert!(matches!(asked, Err(Trouble::Refused(why)) if why.contains("another Azure account")));
    }
}
