//! Containers of Azure Blob Storage: endpoint, account and request signing.
//!
//! The account comes from the sources of the Azure tools: the environment, and the section
//! `[storage]` of their configuration file. Its key signs requests (Shared Key, as in Microsoft's
//! documentation of the REST interface) and is never sent. A SAS token is itself the signature, so
//! it is part of each request URL, and is sent only to the server of its account. Neither is ever
//! displayed.

use std::path::Path;
use std::time::{Duration, SystemTime};

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use lockbox::{Error, Result};
use serde::{Deserialize, Serialize};
use ureq::Body;
use ureq::http::Response;
use url::Url;
use zeroize::{Zeroize, ZeroizeOnDrop, Zeroizing};

use crate::RemoteOptions;
use crate::address::{Cloud, check_scheme, parse_endpoint};
use crate::broker::Broker;
use crate::credentials::{self, CredentialCache, File, Variable, section, variable};
use crate::identity;
use crate::range_source::{RemoteError, RemoteResult};
use crate::retry::with_retry;
use crate::signing::{HttpHeader, SignedRequest, hmac_sha256, percent_encode};
use crate::store_failure::StoreFailure;

/// API version: old enough for the stores that imitate Azure, and of 2021, since when names that
/// XML cannot represent are listed in an encoded form.
const VERSION: &str = "2021-12-02";
const SUFFIX: &str = "core.windows.net";
/// The account of the emulators, as Microsoft's documentation publishes it.
const EMULATOR_ACCOUNT: &str = "devstoreaccount1";
const EMULATOR_KEY: &str = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw==";
const EMULATOR_ENDPOINT: &str = "http://127.0.0.1:10000/devstoreaccount1";

#[derive(PartialEq, Serialize, Deserialize)]
pub(crate) struct AzureAccount {
    /// Account name; empty when the endpoint and a token suffice.
    name: String,
    /// Blob endpoint, without a trailing slash.
    pub(crate) endpoint: String,
    pub(crate) secret: Option<AccountSecret>,
}

#[derive(PartialEq, Serialize, Deserialize, Zeroize, ZeroizeOnDrop)]
pub(crate) enum AccountSecret {
    Key(Vec<u8>),
    /// SAS token: a part of the query.
    Token(String),
    /// Access token of Entra ID: a header.
    Access(String),
}

impl AzureAccount {
    fn of_environment() -> Result<AzureAccount> {
        AzureAccount::of(&variable, &credentials::read_settings)
    }

    /// Resolves the account, and asks for an access token if it has no other secret.
    pub(crate) fn with_secret() -> RemoteResult<AzureAccount> {
        let account = AzureAccount::of_environment().map_err(|error| RemoteError::Unsupported(error.to_string()))?;
        let secret = match account.secret {
            None if account.endpoint.starts_with("https://") => {
                let token = identity::azure_token(&variable, &credentials::read_settings)?;
                token.map(|token| AccountSecret::Access(token.to_string()))
            }
            secret => secret,
        };
        Ok(AzureAccount { secret, ..account })
    }

    /// Resolves the account with the precedence of the Azure tools: connection string, then key,
    /// then token; the environment before the file.
    pub(crate) fn of(variable: Variable<'_>, file: File<'_>) -> Result<AzureAccount> {
        let path = variable("AZURE_CONFIG_DIR").or_else(|| variable("HOME").map(|home| format!("{home}/.azure")));
        let text = path.and_then(|path| file(&Path::new(&path).join("config"))).map(Zeroizing::new).unwrap_or_default();
        let file_settings = section(&text, "storage").unwrap_or_default();
        let from_env = |name: &str| variable(&format!("AZURE_STORAGE_{name}")).map(Zeroizing::new);
        let from_file =
            |name: &str| file_settings.get(&name.to_ascii_lowercase()).map(|value| Zeroizing::new((*value).to_owned()));
        let (env_account, file_account) = (from_env("ACCOUNT"), from_file("ACCOUNT"));
        let (endpoint, file_endpoint) = (from_env("SERVICE_ENDPOINT"), from_file("SERVICE_ENDPOINT"));
        // Secrets of the file belong to the account of the file: no other server may see them.
        let is_file_account = env_account.as_ref().is_none_or(|env_account| file_account.as_ref() == Some(env_account))
            && endpoint.as_ref().is_none_or(|endpoint| file_endpoint.as_ref() == Some(endpoint));
        const SECRETS: [&str; 3] = ["CONNECTION_STRING", "KEY", "SAS_TOKEN"];
        let secret = SECRETS
            .iter()
            .find_map(|name| Some((*name, from_env(name)?)))
            .or_else(|| SECRETS.iter().filter(|_| is_file_account).find_map(|name| Some((*name, from_file(name)?))));
        let endpoint = endpoint.or(file_endpoint.filter(|_| is_file_account));
        let name = env_account.or(file_account);
        let mut settings = match &secret {
            Some(("CONNECTION_STRING", text)) => AccountSettings::connection(text)?,
            Some(("KEY", key)) => AccountSettings { key: Some(key), ..AccountSettings::default() },
            Some((_, token)) => AccountSettings { token: Some(token), ..AccountSettings::default() },
            None => AccountSettings::default(),
        };
        settings.name = settings.name.or(name.as_ref().map(|name| name.as_str()));
        if !matches!(secret, Some(("CONNECTION_STRING", _))) {
            settings.endpoint = endpoint.as_ref().map(|endpoint| endpoint.as_str());
        }
        settings.account()
    }
}

#[derive(Default)]
struct AccountSettings<'a> {
    name: Option<&'a str>,
    key: Option<&'a str>,
    token: Option<&'a str>,
    endpoint: Option<&'a str>,
    suffix: Option<&'a str>,
    protocol: Option<&'a str>,
}

impl<'a> AccountSettings<'a> {
    /// Errors: `Invalid` for a malformed string; its content is never repeated.
    fn connection(text: &'a str) -> Result<AccountSettings<'a>> {
        let mut settings = AccountSettings::default();
        for part in text.split(';').map(str::trim).filter(|part| !part.is_empty()) {
            let (name, value) = part
                .split_once('=')
                .ok_or_else(|| Error::invalid("AZURE_STORAGE_CONNECTION_STRING has a part that is not NAME=VALUE"))?;
            match &*name.to_ascii_lowercase() {
                "accountname" => settings.name = Some(value),
                "accountkey" => settings.key = Some(value),
                "sharedaccesssignature" => settings.token = Some(value),
                "blobendpoint" => settings.endpoint = Some(value),
                "endpointsuffix" => settings.suffix = Some(value),
                "defaultendpointsprotocol" => settings.protocol = Some(value),
                "usedevelopmentstorage" if value.eq_ignore_ascii_case("true") => {
                    (settings.name, settings.key, settings.endpoint) =
                        (Some(EMULATOR_ACCOUNT), Some(EMULATOR_KEY), Some(EMULATOR_ENDPOINT));
                }
                // Settings of other services.
                _ => {}
            }
        }
        Ok(settings)
    }

    fn account(self) -> Result<AzureAccount> {
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
        let secret = match (self.key, self.token) {
            (Some(key), _) => {
                let key = STANDARD
                    .decode(key.trim())
                    .map_err(|_| Error::invalid("the key of the Azure account is not Base64"))?;
                Some(AccountSecret::Key(key))
            }
            (None, Some(token)) => {
                let token = token.trim().trim_start_matches('?');
                if token.is_empty() || !token.bytes().all(|byte| byte.is_ascii_graphic() && byte != b'#') {
                    return Err(Error::invalid(
                        "the SAS token of the Azure account is malformed: it must be the query of an address",
                    ));
                }
                Some(AccountSecret::Token(token.to_owned()))
            }
            (None, None) => None,
        };
        Ok(AzureAccount { name: name.to_owned(), endpoint, secret })
    }
}

/// Returns a function that looks the account up, through the broker in a sandboxed process.
pub(crate) fn account_lookup(
    broker: Option<Broker>,
) -> impl Fn() -> RemoteResult<Option<AzureAccount>> + Send + Sync + 'static {
    move || broker.as_ref().map_or_else(AzureAccount::with_secret, Broker::account).map(Some)
}

/// Resolves the account for a container, without an access token in an unconfined process. A broker
/// that cannot get a token for now is asked again until the timeout. Errors: `Invalid` when the
/// environment names no account, or an invalid one; failures of the broker's request for a token.
pub(crate) fn account(container: &str, broker: Option<&Broker>, timeout: Option<Duration>) -> Result<AzureAccount> {
    let Some(broker) = broker else { return AzureAccount::of_environment() };
    with_retry(&|| timeout, &mut || broker.account()).map_err(|error| match error {
        RemoteError::Unsupported(why) => Error::invalid(why),
        error => error.into_error(&format!("az://{container}")),
    })
}

pub(crate) struct AzureContainer {
    name: String,
    endpoint: String,
    url: Url,
    accounts: CredentialCache<AzureAccount>,
}

/// Signs requests to a container with the credentials of one attempt.
pub(crate) struct AzureSigner<'a> {
    container: &'a AzureContainer,
    secret: Option<&'a AccountSecret>,
}

impl AzureContainer {
    /// Errors: as of [`account`]; `Invalid` for an endpoint that cannot be.
    pub(crate) fn new(container: &str, options: &RemoteOptions) -> Result<AzureContainer> {
        let account = account(container, options.broker.as_ref(), options.timeout)?;
        AzureContainer::at(container, account, account_lookup(options.broker.clone()), options)
    }

    pub(crate) fn at(
        container: &str,
        account: AzureAccount,
        lookup: impl Fn() -> RemoteResult<Option<AzureAccount>> + Send + Sync + 'static,
        options: &RemoteOptions,
    ) -> Result<AzureContainer> {
        let AzureAccount { name, endpoint, .. } = account;
        let wrong = || Error::invalid("the endpoint of the Azure account is not an address of a server");
        let mut url = parse_endpoint(&endpoint).ok_or_else(wrong)?;
        check_scheme(&url, options.allow_http)?;
        url.path_segments_mut().map_err(|()| wrong())?.pop_if_empty().push(container);
        // An account without a secret is no credentials: it does not replace one with a secret.
        let lookup = move || Ok(lookup()?.filter(|account| account.secret.is_some()));
        Ok(AzureContainer { name, endpoint, url, accounts: CredentialCache::new(lookup) })
    }

    /// Calls `ask` with a signer; see [`CredentialCache::with`]. Fails if the environment names
    /// another account by now: the secret of one account is not shown to another.
    pub(crate) fn with<T>(&self, ask: impl Fn(&AzureSigner<'_>) -> RemoteResult<T>) -> RemoteResult<T> {
        self.accounts.with(|account| match account {
            Some(account) if account.name != self.name || account.endpoint != self.endpoint => {
                Err(RemoteError::Denied("the environment names another Azure account now".into()))
            }
            account => {
                ask(&AzureSigner { container: self, secret: account.and_then(|account| account.secret.as_ref()) })
            }
        })
    }
}

impl AzureSigner<'_> {
    pub(crate) fn failure(&self, response: &Response<Body>) -> RemoteError {
        StoreFailure::from_azure(response).into_error(Cloud::Azure, self.secret.is_some())
    }

    /// Signs a request for a blob, or for the container if `name` is empty. `headers` are the
    /// headers that the signature covers, except the length of the body.
    pub(crate) fn request(
        &self,
        method: &str,
        name: &str,
        query: &[(&str, &str)],
        headers: &[HttpHeader],
        length: usize,
    ) -> SignedRequest {
        let mut url = self.container.url.clone();
        if !name.is_empty() {
            let path = format!("{}/{}", url.path(), percent_encode(name, "/"));
            url.set_path(&path);
        }
        let mut headers = headers.to_vec();
        headers.push(("x-ms-version", VERSION.into()));
        if let Some(AccountSecret::Access(token)) = self.secret {
            headers.push(("authorization", format!("Bearer {}", token.as_str())));
        }
        if let Some(AccountSecret::Key(key)) = self.secret {
            headers.push(("x-ms-date", httpdate::fmt_http_date(SystemTime::now())));
            let account = &self.container.name;
            let signature = hmac_sha256(key, &string_to_sign(account, method, url.path(), query, &headers, length));
            headers.push(("authorization", format!("SharedKey {account}:{}", STANDARD.encode(signature))));
        }
        let mut parts: Vec<String> = query
            .iter()
            .map(|(name, value)| format!("{}={}", percent_encode(name, ""), percent_encode(value, "")))
            .collect();
        if let Some(AccountSecret::Token(token)) = self.secret {
            parts.push(token.to_string());
        }
        url.set_query((!parts.is_empty()).then(|| parts.join("&")).as_deref());
        (url, headers)
    }
}

/// Builds the string to sign of Shared Key since version 2015: an empty body has no length, and the
/// date is in a header of Azure's own.
fn string_to_sign(
    account: &str,
    method: &str,
    path: &str,
    query: &[(&str, &str)],
    headers: &[HttpHeader],
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
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    const CONFIG: &str = "[storage]\naccount = filed\nkey = a2V5\n[core]\n";

    fn found(variables: &[(&str, &str)]) -> Result<AzureAccount> {
        let variable =
            |name: &str| variables.iter().find(|(key, _)| *key == name).map(|(_, value)| (*value).to_owned());
        AzureAccount::of(&variable, &|path| (path == Path::new("/h/.azure/config")).then(|| CONFIG.to_owned()))
    }

    fn shown(variables: &[(&str, &str)]) -> (String, String, String) {
        let AzureAccount { name, endpoint, secret } = found(variables).unwrap();
        let secret = match &secret {
            Some(AccountSecret::Key(key)) => format!("key {}", String::from_utf8_lossy(key)),
            Some(AccountSecret::Token(token)) => format!("token {token}"),
            Some(AccountSecret::Access(_)) => "an access token".into(),
            None => "none".into(),
        };
        (name, endpoint, secret)
    }

    fn is(found: (String, String, String), name: &str, endpoint: &str, secret: &str) {
        assert_eq!((&*found.0, &*found.1, &*found.2), (name, endpoint, secret));
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
        let emulated = String::from_utf8_lossy(&STANDARD.decode(EMULATOR_KEY).unwrap()).into_owned();
        is(connection("UseDevelopmentStorage=true;"), EMULATOR_ACCOUNT, EMULATOR_ENDPOINT, &format!("key {emulated}"));
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
            (&[("AZURE_STORAGE_CONNECTION_STRING", "s3cr3t")], "not NAME=VALUE"),
        ] {
            let message = found(variables).err().unwrap().to_string();
            assert!(message.contains(why) && !message.contains("s3cr3t"), "{message}");
        }
        let wrong = "BlobEndpoint=https://h/?sig=s3cr3t;SharedAccessSignature=sig=s3cr3t";
        let account = found(&[("AZURE_STORAGE_CONNECTION_STRING", wrong)]).unwrap();
        let message =
            AzureContainer::at("c", account, || Ok(None), &RemoteOptions::default()).err().unwrap().to_string();
        assert!(message.contains("not an address of a server") && !message.contains("s3cr3t"), "{message}");
        let plain = found(&[("AZURE_STORAGE_CONNECTION_STRING", "UseDevelopmentStorage=true")]).unwrap();
        let message = AzureContainer::at("c", plain, || Ok(None), &RemoteOptions::default()).err().unwrap().to_string();
        assert!(message.contains("to allow it, use --remote allow-http"), "{message}");
    }

    #[test]
    fn a_token_goes_along_and_a_key_does_not() {
        let account = |variables| found(variables).unwrap();
        let signed_request = |variables: &'static [(&'static str, &'static str)]| {
            let lookup = move || Ok(Some(account(variables)));
            let container = AzureContainer::at("box", account(variables), lookup, &RemoteOptions::default()).unwrap();
            container
                .with(|signer| {
                    let headers = [("range", "bytes=0-9".to_owned())];
                    Ok(signer.request("GET", "a b/c", &[("comp", "list"), ("prefix", "x/y")], &headers, 0))
                })
                .unwrap()
        };
        let (url, headers) =
            signed_request(&[("AZURE_STORAGE_ACCOUNT", "one"), ("AZURE_STORAGE_SAS_TOKEN", "?sv=1&sig=a%2Fb%3D")]);
        let wanted = "https://one.blob.core.windows.net/box/a%20b/c?comp=list&prefix=x%2Fy&sv=1&sig=a%2Fb%3D";
        assert_eq!(url.as_str(), wanted);
        assert!(!headers.iter().any(|(name, _)| *name == "authorization"), "{headers:?}");
        let (url, headers) = signed_request(&[("AZURE_STORAGE_ACCOUNT", "one"), ("AZURE_STORAGE_KEY", "a2V5")]);
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
        let text = string_to_sign("one", "PUT", "/one/box/a%20b", &[("comp", "list"), ("a", "x/y")], &headers, 11);
        let wanted = "PUT\n\n\n11\naGFzaA==\n\n\n\n\n*\n\n\n\
            x-ms-blob-type:BlockBlob\nx-ms-date:Thu, 26 Nov 2026 01:00:00 GMT\nx-ms-version:2021-12-02\n\
            /one/one/box/a%20b\na:x/y\ncomp:list";
        assert_eq!(text, wanted);
        let text = string_to_sign("one", "GET", "/box/a", &[], &[("range", "bytes=0-9".to_owned())], 0);
        assert_eq!(text, "GET\n\n\n\n\n\n\n\n\n\n\nbytes=0-9\n/one/box/a");
    }

    #[test]
    fn an_account_that_loses_its_secret_is_a_failed_renewal() {
        let one = [("AZURE_STORAGE_ACCOUNT", "one"), ("AZURE_STORAGE_SAS_TOKEN", "sig=a")];
        let lookups = AtomicUsize::new(0);
        let lookup = move || Ok(found(&one[..if lookups.fetch_add(1, Ordering::SeqCst) == 0 { 2 } else { 1 }]).ok());
        let container = AzureContainer::at("box", found(&one).unwrap(), lookup, &RemoteOptions::default()).unwrap();
        let denied = container.with(|signer| match signer.secret {
            Some(_) => Err::<(), _>(RemoteError::Denied("expired".into())),
            None => Err(RemoteError::Denied("not signed".into())),
        });
        assert!(denied.as_ref().is_err_and(RemoteError::is_transient), "{denied:?}");
    }

    #[test]
    fn nothing_is_proved_to_another_account_than_the_one_that_was_opened() {
        let one = [("AZURE_STORAGE_ACCOUNT", "one"), ("AZURE_STORAGE_SAS_TOKEN", "sig=a")];
        let two =
            || Ok(Some(found(&[("AZURE_STORAGE_ACCOUNT", "two"), ("AZURE_STORAGE_SAS_TOKEN", "sig=b")]).unwrap()));
        let container = AzureContainer::at("box", found(&one).unwrap(), two, &RemoteOptions::default()).unwrap();
        let result = container.with(|_| Ok(()));
        assert!(matches!(result, Err(RemoteError::Denied(why)) if why.contains("another Azure account")));
    }
}
