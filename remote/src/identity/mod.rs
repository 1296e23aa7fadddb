//! Credentials that a cloud gives to a machine, a container or a workload.
//!
//! # Invariants
//! IDENTITY-1  A request goes to the address that the cloud documents, or to one that a variable of
//!     the environment or a file of settings names. It has nothing of an archive in it.
//! IDENTITY-2  The link-local service is asked only on a machine with the firmware of its cloud, or
//!     when the environment names the service: on any other network another machine of the link
//!     could answer.
//! IDENTITY-3  Plain http goes to loopback and link-local addresses only, past any proxy; all else
//!     is TLS. No redirect is followed, and an answer has bounds of time and size.
//! IDENTITY-4  Neither a credential nor an answer is part of a message or a log.
//!
//! These addresses are private ones, which no archive may be at without `allow-private`. The rule
//! protects services of the network from an address that a user was given, and from redirects. Here
//! no such address takes part, and no answer but credentials is used.
//!
//! The lookups run in the command, or in the broker of a mount: the sandboxed fetcher does not
//! reach these services.

use std::io::Read;
use std::net::Ipv6Addr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use aws_lc_rs::rand::SystemRandom;
use aws_lc_rs::signature::{RSA_PKCS1_SHA256, RsaKeyPair};
use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use instant_xml::FromXml;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::json;
use ureq::Agent;
use ureq::http::{Request, StatusCode};
use ureq::tls::{PemItem, RootCerts, TlsConfig, parse_pem};
use url::{Host, Url};
use zeroize::Zeroizing;

use crate::range_source::{RemoteError, RemoteResult};
use crate::signing::percent_encode;
use crate::transport::{SOCKS_PROXY, check_proxy};

pub(crate) type Variable<'a> = &'a dyn Fn(&str) -> Option<String>;
pub(crate) type File<'a> = &'a dyn Fn(&Path) -> Option<String>;

/// Maximum length of an answer in bytes: tokens have some kilobytes.
const MAX_ANSWER: u64 = 64 << 10;
/// Time limits of a service on the link, which answers in milliseconds, and of a remote one.
/// Longer in tests: their machine may be busy, and none of them waits for it.
const LINK_TIMEOUT: Duration = Duration::from_secs(if cfg!(test) { 60 } else { 3 });
const TIMEOUT: Duration = Duration::from_secs(15);
/// Lifetime of the session with Amazon's metadata service: more than one lookup takes.
const SESSION_SECONDS: &str = "60";
/// Lifetime of a signed assertion for Google, the longest that it takes.
const ASSERTION_SECONDS: i64 = 3600;

const AWS_METADATA: &str = "http://169.254.169.254";
const AWS_CONTAINERS: &str = "http://169.254.170.2";
const AZURE_METADATA: &str = "http://169.254.169.254";
const AZURE_LOGIN: &str = "https://login.microsoftonline.com";
const AZURE_RESOURCE: &str = "https://storage.azure.com/";
const GOOGLE_METADATA: &str = "169.254.169.254";
const GOOGLE_TOKENS: &str = "https://oauth2.googleapis.com/token";
const GOOGLE_SCOPE: &str = "https://www.googleapis.com/auth/devstorage.read_write";
/// Asset tag of each virtual machine of Azure; a machine of a local Hyper-V has another.
const AZURE_TAG: &str = "7783-7084-3265-9085-8269-3286-77";

/// Access key with the token of its session.
pub(crate) struct SessionKey {
    pub(crate) id: String,
    pub(crate) secret: Zeroizing<String>,
    pub(crate) token: Option<Zeroizing<String>>,
}

#[derive(Debug, PartialEq, Eq)]
pub(crate) enum AwsIdentity {
    /// Role of a workload, given for a token of its cluster.
    Role { role: String, token_file: PathBuf, session: String, endpoint: String },
    /// Container of ECS or EKS.
    Container { url: String, authorization: Option<String>, authorization_file: Option<PathBuf> },
    /// Role of the machine.
    Machine { endpoint: String, is_named: bool },
}

impl AwsIdentity {
    /// Returns the workload's role, which precedes profiles.
    pub(crate) fn role(variable: Variable<'_>, region: &str) -> Option<AwsIdentity> {
        let china = if region.starts_with("cn-") { ".cn" } else { "" };
        Some(AwsIdentity::Role {
            role: variable("AWS_ROLE_ARN")?,
            token_file: variable("AWS_WEB_IDENTITY_TOKEN_FILE")?.into(),
            session: variable("AWS_ROLE_SESSION_NAME").unwrap_or_else(|| "lockbox".to_owned()),
            endpoint: variable("AWS_ENDPOINT_URL_STS")
                .unwrap_or_else(|| format!("https://sts.{region}.amazonaws.com{china}")),
        })
    }

    /// Returns the identity of the container or of the machine, which follow profiles.
    pub(crate) fn of_host(variable: Variable<'_>, file: File<'_>) -> Option<AwsIdentity> {
        let relative = variable("AWS_CONTAINER_CREDENTIALS_RELATIVE_URI").map(|path| format!("{AWS_CONTAINERS}{path}"));
        if let Some(url) = relative.or_else(|| variable("AWS_CONTAINER_CREDENTIALS_FULL_URI")) {
            return Some(AwsIdentity::Container {
                url,
                authorization: variable("AWS_CONTAINER_AUTHORIZATION_TOKEN"),
                authorization_file: variable("AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE").map(PathBuf::from),
            });
        }
        if variable("AWS_EC2_METADATA_DISABLED").is_some_and(|it| it.eq_ignore_ascii_case("true")) {
            return None;
        }
        let named = variable("AWS_EC2_METADATA_SERVICE_ENDPOINT");
        let is_named = named.is_some();
        let endpoint = named.or_else(|| is_of_amazon(file).then(|| AWS_METADATA.to_owned()))?;
        Some(AwsIdentity::Machine { endpoint: endpoint.trim_end_matches('/').to_owned(), is_named })
    }

    /// Asks for the session; None on a machine without a role.
    pub(crate) fn session(&self, file: File<'_>) -> RemoteResult<Option<SessionKey>> {
        match self {
            AwsIdentity::Role { role, token_file, session, endpoint } => {
                const ROLE: &str = "the role of this workload";
                let token = read_token(token_file, file)?;
                let form = form(&[
                    ("Action", "AssumeRoleWithWebIdentity"),
                    ("Version", "2011-06-15"),
                    ("RoleArn", role.as_str()),
                    ("RoleSessionName", session.as_str()),
                    ("WebIdentityToken", token.trim()),
                ]);
                let answer = Question::new(ROLE, endpoint).form(form).text()?;
                let found: AssumedRole = instant_xml::from_str(&answer).map_err(|_| unusable(ROLE))?;
                let RoleCredentials { id, secret, token } = found.result.credentials;
                Ok(Some(SessionKey { id, secret: Zeroizing::new(secret), token: Some(Zeroizing::new(token)) }))
            }
            AwsIdentity::Container { url, authorization, authorization_file } => {
                let mut question = Question::new("the credentials of this container", url);
                let authorization = match (authorization_file, authorization) {
                    (Some(path), _) => Some(read_token(path, file)?.trim().to_owned()),
                    (None, known) => known.clone(),
                };
                if let Some(authorization) = authorization {
                    question = question.header("authorization", &authorization);
                }
                question.session().map(Some)
            }
            AwsIdentity::Machine { endpoint, is_named } => {
                const ROLE: &str = "the role of this machine";
                let of_machine = |path: &str| Question::new(ROLE, &format!("{endpoint}/latest/{path}"));
                let session = Question { method: "PUT", ..of_machine("api/token") };
                let session = match session.header("x-aws-ec2-metadata-token-ttl-seconds", SESSION_SECONDS).text() {
                    // Firmware of this cloud, without its service: a container that cannot reach it.
                    Err(RemoteError::Transient(_)) if !is_named => return Ok(None),
                    session => session?,
                };
                let ask = |path: &str| of_machine(path).header("x-aws-ec2-metadata-token", &session);
                let roles = match ask("meta-data/iam/security-credentials/").text() {
                    Err(RemoteError::NotFound) => return Ok(None),
                    roles => roles?,
                };
                let Some(role) = roles.lines().next().filter(|role| !role.is_empty()) else { return Ok(None) };
                let role = percent_encode(role, "");
                ask(&format!("meta-data/iam/security-credentials/{role}")).session().map(Some)
            }
        }
    }
}

fn is_of_amazon(file: File<'_>) -> bool {
    // Xen machines of before 2018 have the name in their version alone.
    firmware("sys_vendor", file) == "Amazon EC2" || firmware("product_version", file).ends_with(".amazon")
}

/// Returns a field of the firmware that each process can read.
fn firmware(field: &str, file: File<'_>) -> String {
    file(&Path::new("/sys/class/dmi/id").join(field)).map(|text| text.trim().to_owned()).unwrap_or_default()
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct AwsSession {
    access_key_id: String,
    secret_access_key: String,
    token: Option<String>,
}

const STS: &str = "https://sts.amazonaws.com/doc/2011-06-15/";

#[derive(FromXml)]
#[xml(rename = "AssumeRoleWithWebIdentityResponse", ns(STS))]
struct AssumedRole {
    result: RoleResult,
}

#[derive(FromXml)]
#[xml(rename = "AssumeRoleWithWebIdentityResult", ns(STS))]
struct RoleResult {
    credentials: RoleCredentials,
}

#[derive(FromXml)]
#[xml(rename = "Credentials", ns(STS))]
struct RoleCredentials {
    #[xml(rename = "AccessKeyId")]
    id: String,
    #[xml(rename = "SecretAccessKey")]
    secret: String,
    #[xml(rename = "SessionToken")]
    token: String,
}

/// Asks for an access token of Azure's: that of the workload, else that of the machine. None when
/// neither is known here.
pub(crate) fn azure_token(variable: Variable<'_>, file: File<'_>) -> RemoteResult<Option<Zeroizing<String>>> {
    const WORKLOAD: &str = "the token of this workload";
    const MACHINE: &str = "the token of this machine";
    let client = variable("AZURE_CLIENT_ID");
    if let (Some(client), Some(tenant)) = (&client, variable("AZURE_TENANT_ID")) {
        let host = variable("AZURE_AUTHORITY_HOST").unwrap_or_else(|| AZURE_LOGIN.to_owned());
        let url = format!("{}/{}/oauth2/v2.0/token", host.trim_end_matches('/'), percent_encode(&tenant, ""));
        let scope = format!("{AZURE_RESOURCE}.default");
        let secret = match (variable("AZURE_FEDERATED_TOKEN_FILE"), variable("AZURE_CLIENT_SECRET")) {
            (Some(path), _) => Some(("client_assertion", read_token(Path::new(&path), file)?)),
            (None, Some(secret)) => Some(("client_secret", Zeroizing::new(secret))),
            (None, None) => None,
        };
        if let Some((name, secret)) = secret {
            let mut fields = vec![
                ("client_id", client.as_str()),
                ("scope", scope.as_str()),
                ("grant_type", "client_credentials"),
                (name, secret.trim()),
            ];
            if name == "client_assertion" {
                fields.push(("client_assertion_type", "urn:ietf:params:oauth:client-assertion-type:jwt-bearer"));
            }
            return Question::new(WORKLOAD, &url).form(form(&fields)).token().map(Some);
        }
    }
    let resource = percent_encode(AZURE_RESOURCE, "");
    let client = client.map(|client| format!("&client_id={}", percent_encode(&client, ""))).unwrap_or_default();
    // Services that run containers name an endpoint with a header of its own.
    if let (Some(endpoint), Some(header)) = (variable("IDENTITY_ENDPOINT"), variable("IDENTITY_HEADER")) {
        let url = format!("{endpoint}?api-version=2019-08-01&resource={resource}{client}");
        return Question::new(WORKLOAD, &url).header("x-identity-header", &header).token().map(Some);
    }
    let named = variable("AZURE_POD_IDENTITY_AUTHORITY_HOST");
    let is_named = named.is_some();
    let of_firmware = || (firmware("chassis_asset_tag", file) == AZURE_TAG).then(|| AZURE_METADATA.to_owned());
    let Some(endpoint) = named.or_else(of_firmware) else { return Ok(None) };
    let path = format!("metadata/identity/oauth2/token?api-version=2018-02-01&resource={resource}{client}");
    let url = format!("{}/{path}", endpoint.trim_end_matches('/'));
    match Question::new(MACHINE, &url).header("metadata", "true").token() {
        // A machine without an identity.
        Err(RemoteError::NotFound | RemoteError::Denied(_) | RemoteError::Transient(_)) if !is_named => Ok(None),
        token => token.map(Some),
    }
}

/// File of Google's tools with an account.
#[derive(Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
enum GoogleAccount {
    ServiceAccount {
        client_email: String,
        private_key: String,
        private_key_id: Option<String>,
        token_uri: Option<String>,
    },
    AuthorizedUser {
        client_id: String,
        client_secret: String,
        refresh_token: String,
        token_uri: Option<String>,
    },
    #[serde(other)]
    Other,
}

/// Asks for an access token of Google's: that of the account in the file of its tools, else that of
/// the machine. None when neither is known here. `now`: seconds since 1970.
pub(crate) fn google_token(
    variable: Variable<'_>,
    file: File<'_>,
    now: i64,
) -> RemoteResult<Option<Zeroizing<String>>> {
    const ACCOUNT: &str = "the token of the account in the file of credentials";
    let named = variable("GOOGLE_APPLICATION_CREDENTIALS").map(PathBuf::from);
    let of_gcloud = || {
        let directory = variable("CLOUDSDK_CONFIG").map(PathBuf::from);
        let directory = directory.or_else(|| variable("HOME").map(|home| Path::new(&home).join(".config/gcloud")))?;
        file(&directory.join("application_default_credentials.json"))
    };
    let text = match &named {
        Some(path) => Some(read_token(path, file)?),
        None => of_gcloud().map(Zeroizing::new),
    };
    let Some(text) = text else {
        let host = variable("GCE_METADATA_HOST");
        let is_named = host.is_some();
        let of_firmware =
            || firmware("sys_vendor", file) == "Google" && firmware("product_name", file).starts_with("Google");
        let Some(host) = host.or_else(|| of_firmware().then(|| GOOGLE_METADATA.to_owned())) else { return Ok(None) };
        let url = format!("http://{host}/computeMetadata/v1/instance/service-accounts/default/token");
        return match Question::new("the token of this machine", &url).header("metadata-flavor", "Google").token() {
            Err(RemoteError::NotFound | RemoteError::Transient(_)) if !is_named => Ok(None),
            token => token.map(Some),
        };
    };
    let unreadable = || RemoteError::Denied("the file of Google's credentials has none that can be used".into());
    let (uri, form) = match serde_json::from_str(&text).map_err(|_| unreadable())? {
        GoogleAccount::ServiceAccount { client_email, private_key, private_key_id, token_uri } => {
            let uri = token_uri.unwrap_or_else(|| GOOGLE_TOKENS.to_owned());
            let head = json!({"alg": "RS256", "typ": "JWT", "kid": private_key_id});
            let (from, until) = (now, now + ASSERTION_SECONDS);
            let claim = json!({"iss": client_email, "scope": GOOGLE_SCOPE, "aud": uri, "iat": from, "exp": until});
            let assertion = sign(&head, &claim, &Zeroizing::new(private_key)).ok_or_else(unreadable)?;
            let kind = "urn:ietf:params:oauth:grant-type:jwt-bearer";
            (uri, form(&[("grant_type", kind), ("assertion", assertion.as_str())]))
        }
        GoogleAccount::AuthorizedUser { client_id, client_secret, refresh_token, token_uri } => {
            let secrets = [Zeroizing::new(client_secret), Zeroizing::new(refresh_token)];
            let form = form(&[
                ("grant_type", "refresh_token"),
                ("client_id", client_id.as_str()),
                ("client_secret", secrets[0].as_str()),
                ("refresh_token", secrets[1].as_str()),
            ]);
            (token_uri.unwrap_or_else(|| GOOGLE_TOKENS.to_owned()), form)
        }
        GoogleAccount::Other => return Err(unreadable()),
    };
    Question::new(ACCOUNT, &uri).form(form).token().map(Some)
}

/// Returns a signed JSON Web Token (RS256); None for a key that is not one of RSA in PEM.
fn sign(head: &serde_json::Value, claim: &serde_json::Value, key: &str) -> Option<String> {
    let private = |item| if let Ok(PemItem::PrivateKey(key)) = item { Some(key) } else { None };
    let key = parse_pem(key.as_bytes()).find_map(private)?;
    let key = RsaKeyPair::from_pkcs8(key.der()).ok()?;
    let part = |part: &serde_json::Value| URL_SAFE_NO_PAD.encode(part.to_string());
    let text = format!("{}.{}", part(head), part(claim));
    let mut signature = vec![0; key.public_modulus_len()];
    key.sign(&RSA_PKCS1_SHA256, &SystemRandom::new(), text.as_bytes(), &mut signature).ok()?;
    Some(format!("{text}.{}", URL_SAFE_NO_PAD.encode(signature)))
}

fn read_token(path: &Path, file: File<'_>) -> RemoteResult<Zeroizing<String>> {
    let unreadable = || RemoteError::Denied(format!("cannot read the credentials in {}", path.display()));
    file(path).map(Zeroizing::new).ok_or_else(unreadable)
}

fn form(fields: &[(&str, &str)]) -> Zeroizing<String> {
    let fields: Vec<_> = fields.iter().map(|(name, value)| format!("{name}={}", percent_encode(value, ""))).collect();
    Zeroizing::new(fields.join("&"))
}

fn unusable(subject: &str) -> RemoteError {
    RemoteError::Denied(format!("cannot use {subject}: the answer has no credentials"))
}

/// Request to a service that gives credentials.
struct Question {
    /// Names the credentials in messages.
    subject: &'static str,
    url: String,
    method: &'static str,
    headers: Vec<(&'static str, String)>,
    form: Option<Zeroizing<String>>,
}

#[derive(Deserialize)]
struct TokenAnswer {
    access_token: String,
}

impl Question {
    fn new(subject: &'static str, url: &str) -> Question {
        Question { subject, url: url.to_owned(), method: "GET", headers: Vec::new(), form: None }
    }

    fn header(mut self, name: &'static str, value: &str) -> Question {
        self.headers.push((name, value.to_owned()));
        self
    }

    fn form(self, form: Zeroizing<String>) -> Question {
        let asked = Question { method: "POST", form: Some(form), ..self };
        asked.header("content-type", "application/x-www-form-urlencoded")
    }

    fn ask(self) -> RemoteResult<Zeroizing<Vec<u8>>> {
        let subject = self.subject;
        let agent = agent(&self.url).ok_or_else(|| {
            RemoteError::Denied(format!("cannot ask for {subject}: its address is neither https nor local"))
        })?;
        let mut request = Request::builder().method(self.method).uri(&self.url);
        for (name, value) in self.headers {
            request = request.header(name, value);
        }
        // Not the cause: it may have the address, and that a secret.
        let wrong = |_| RemoteError::Denied(format!("cannot ask for {subject}: its address or token is malformed"));
        let silent = || RemoteError::Transient(format!("the service for {subject} does not answer"));
        let refused = |_| RemoteError::Unsupported(format!("cannot ask for {subject}: {SOCKS_PROXY}"));
        if let Some(uri) = request.uri_ref() {
            check_proxy(agent.config(), uri).map_err(refused)?;
        }
        let response = match &self.form {
            Some(form) => agent.run(request.body(form.as_bytes()).map_err(wrong)?),
            None => agent.run(request.body(()).map_err(wrong)?),
        };
        let response = response.map_err(|_| silent())?;
        let status = response.status();
        if !status.is_success() {
            return Err(match status {
                StatusCode::NOT_FOUND => RemoteError::NotFound,
                _ if status.is_server_error() || status == StatusCode::TOO_MANY_REQUESTS => silent(),
                _ => RemoteError::Denied(format!("cannot get {subject}: it is refused (status {})", status.as_u16())),
            });
        }
        let mut answer = Zeroizing::new(Vec::with_capacity(MAX_ANSWER as usize));
        response.into_body().into_reader().take(MAX_ANSWER).read_to_end(&mut answer).map_err(|_| silent())?;
        Ok(answer)
    }

    fn text(self) -> RemoteResult<Zeroizing<String>> {
        let subject = self.subject;
        let answer = self.ask()?;
        std::str::from_utf8(&answer).map(|text| Zeroizing::new(text.to_owned())).map_err(|_| unusable(subject))
    }

    fn json<T: DeserializeOwned>(self) -> RemoteResult<T> {
        let subject = self.subject;
        serde_json::from_slice(&self.ask()?).map_err(|_| unusable(subject))
    }

    fn session(self) -> RemoteResult<SessionKey> {
        let AwsSession { access_key_id: id, secret_access_key, token } = self.json()?;
        Ok(SessionKey { id, secret: Zeroizing::new(secret_access_key), token: token.map(Zeroizing::new) })
    }

    fn token(self) -> RemoteResult<Zeroizing<String>> {
        self.json().map(|TokenAnswer { access_token }| Zeroizing::new(access_token))
    }
}

/// Returns a client for this address, with the limits of IDENTITY-3; None where no request may go.
fn agent(url: &str) -> Option<Agent> {
    let url = Url::parse(url).ok()?;
    let is_on_link = match url.host()? {
        Host::Ipv4(address) => address.is_loopback() || address.is_link_local(),
        // The second one is the service of EKS.
        Host::Ipv6(address) => address.is_loopback() || address == EKS_CONTAINERS,
        Host::Domain(name) => name == "localhost",
    };
    let tls = TlsConfig::builder()
        .root_certs(RootCerts::PlatformVerifier)
        .unversioned_rustls_crypto_provider(Arc::new(rustls::crypto::aws_lc_rs::default_provider()))
        .build();
    let config = Agent::config_builder().http_status_as_error(false).max_redirects(0).tls_config(tls);
    match url.scheme() {
        "http" if is_on_link => Some(config.proxy(None).timeout_global(Some(LINK_TIMEOUT)).build().into()),
        "https" => Some(config.timeout_global(Some(TIMEOUT)).build().into()),
        _ => None,
    }
}

/// Address at which EKS gives credentials to pods over IPv6.
const EKS_CONTAINERS: Ipv6Addr = Ipv6Addr::new(0xfd00, 0xec2, 0, 0, 0, 0, 0, 0x23);

#[cfg(test)]
mod tests;
