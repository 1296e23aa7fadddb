//! Services of clouds, imitated on this machine.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpListener;
use std::thread;

use aws_lc_rs::encoding::{AsDer, Pkcs8V1Der};
use aws_lc_rs::rsa::KeySize;
use aws_lc_rs::signature::{KeyPair, RSA_PKCS1_2048_8192_SHA256, UnparsedPublicKey};
use base64::engine::general_purpose::STANDARD;

use super::*;
use crate::credentials::{access_token, google_credentials};

/// Request as a service gets it: method and target, headers in lower case, body.
struct Asked {
    line: String,
    headers: BTreeMap<String, String>,
    body: String,
}

impl Asked {
    fn has(&self, name: &str, value: &str) -> bool {
        self.headers.get(name).is_some_and(|found| found == value)
    }

    fn fields(&self) -> BTreeMap<String, String> {
        url::form_urlencoded::parse(self.body.as_bytes()).into_owned().collect()
    }
}

/// Serves until the test ends; returns the address.
fn serve(answer: impl Fn(&Asked) -> (u16, String) + Send + 'static) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = format!("http://{}", listener.local_addr().unwrap());
    thread::spawn(move || {
        for stream in listener.incoming() {
            let mut stream = stream.unwrap();
            let mut reader = BufReader::new(stream.try_clone().unwrap());
            let mut lines = reader.by_ref().lines().map_while(Result::ok).take_while(|line| !line.is_empty());
            let Some(first) = lines.next() else { continue };
            let line = first.trim_end_matches(" HTTP/1.1").to_owned();
            let headers: BTreeMap<String, String> = lines
                .filter_map(|line| line.split_once(": ").map(|(name, value)| (name.to_lowercase(), value.to_owned())))
                .collect();
            let mut body = vec![0; headers.get("content-length").map_or(0, |length| length.parse().unwrap())];
            reader.read_exact(&mut body).unwrap();
            let (status, text) = answer(&Asked { line, headers, body: String::from_utf8(body).unwrap() });
            let length = text.len();
            write!(stream, "HTTP/1.1 {status} x\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n{text}")
                .unwrap();
        }
    });
    address
}

/// Variables and files of a simulated host.
#[derive(Default)]
struct HostSettings {
    variables: BTreeMap<String, String>,
    files: BTreeMap<&'static str, String>,
}

impl HostSettings {
    fn of<const N: usize>(variables: [(&str, &str); N]) -> HostSettings {
        let variables = variables.into_iter().map(|(name, value)| (name.to_owned(), value.to_owned())).collect();
        HostSettings { variables, ..HostSettings::default() }
    }

    fn with(mut self, path: &'static str, text: &str) -> HostSettings {
        self.files.insert(path, text.to_owned());
        self
    }

    fn variable(&self) -> impl Fn(&str) -> Option<String> + '_ {
        |name| self.variables.get(name).cloned()
    }

    fn file(&self) -> impl Fn(&Path) -> Option<String> + '_ {
        |path| self.files.get(path.to_str()?).cloned()
    }

    fn amazon(&self) -> RemoteResult<Option<SessionKey>> {
        let identity = AwsIdentity::role(&self.variable(), "eu-west-1");
        let identity = identity.or_else(|| AwsIdentity::of_host(&self.variable(), &self.file()));
        identity.map_or(Ok(None), |identity| identity.session(&self.file()))
    }

    fn azure(&self) -> RemoteResult<Option<String>> {
        azure_token(&self.variable(), &self.file()).map(|token| token.map(|token| token.to_string()))
    }

    fn google(&self) -> RemoteResult<Option<String>> {
        google_token(&self.variable(), &self.file(), 1_000_000).map(|token| token.map(|token| token.to_string()))
    }
}

fn parts(key: RemoteResult<Option<SessionKey>>) -> Option<(String, String, Option<String>)> {
    key.unwrap().map(|key| (key.id, key.secret.to_string(), key.token.map(|token| token.to_string())))
}

fn session() -> Option<(String, String, Option<String>)> {
    Some(("ASIA".into(), "hush".into(), Some("tok".into())))
}

const SESSION: &str = r#"{"Code":"Success","AccessKeyId":"ASIA","SecretAccessKey":"hush","Token":"tok","Expiration":"2026-11-27T20:00:00Z"}"#;
const TOKEN: &str = r#"{"access_token":"tok","expires_in":3599,"token_type":"Bearer"}"#;

fn token() -> RemoteResult<Option<String>> {
    Ok(Some("tok".into()))
}

#[test]
fn a_machine_of_amazon_has_the_session_of_its_role() {
    let service = |has_role: bool| {
        serve(move |asked| match &*asked.line {
            "PUT /latest/api/token" if asked.has("x-aws-ec2-metadata-token-ttl-seconds", "60") => (200, "s".into()),
            _ if !asked.has("x-aws-ec2-metadata-token", "s") => (401, String::new()),
            "GET /latest/meta-data/iam/security-credentials/" if has_role => (200, "my-role\n".into()),
            "GET /latest/meta-data/iam/security-credentials/my-role" => (200, SESSION.into()),
            _ => (404, String::new()),
        })
    };
    let named = |endpoint: &str| HostSettings::of([("AWS_EC2_METADATA_SERVICE_ENDPOINT", endpoint)]);
    assert_eq!(parts(named(&service(true)).amazon()), session());
    assert_eq!(parts(named(&service(false)).amazon()), None);
    // Found by the firmware alone, and only by that of this cloud (IDENTITY-2).
    let of = |settings: &HostSettings| AwsIdentity::of_host(&settings.variable(), &settings.file());
    let vendor = "/sys/class/dmi/id/sys_vendor";
    let nitro = HostSettings::default().with(vendor, "Amazon EC2\n");
    let expected = AwsIdentity::Machine { endpoint: AWS_METADATA.into(), is_named: false };
    assert_eq!(of(&nitro), Some(expected));
    let xen = HostSettings::default().with("/sys/class/dmi/id/product_version", "4.11.amazon\n");
    assert!(of(&xen).is_some());
    assert_eq!(of(&HostSettings::default().with(vendor, "LENOVO\n")), None);
    let disabled = HostSettings::of([("AWS_EC2_METADATA_DISABLED", "true")]).with(vendor, "Amazon EC2\n");
    assert_eq!(of(&disabled), None);
}

#[test]
fn a_container_shows_its_token_and_asks_no_other_host_without_tls() {
    let address = serve(|asked| match asked.line == "GET /creds" && asked.has("authorization", "Bearer pod") {
        true => (200, SESSION.into()),
        false => (400, "hush".into()),
    });
    let url = format!("{address}/creds");
    let by_file = HostSettings::of([
        ("AWS_CONTAINER_CREDENTIALS_FULL_URI", url.as_str()),
        ("AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE", "/pod"),
    ]);
    assert_eq!(parts(by_file.with("/pod", "Bearer pod\n").amazon()), session());
    let by_value = |url: &str, token: &str| {
        HostSettings::of([("AWS_CONTAINER_CREDENTIALS_FULL_URI", url), ("AWS_CONTAINER_AUTHORIZATION_TOKEN", token)])
    };
    assert_eq!(parts(by_value(&url, "Bearer pod").amazon()), session());
    for (url, token) in [(&*url, "other"), ("http://198.51.100.1/creds", "pod"), ("ftp://localhost/", "pod")] {
        let Err(RemoteError::Denied(message)) = by_value(url, token).amazon() else { panic!("{url}") };
        assert!(message.contains("this container") && !message.contains("pod"), "{message}");
        assert!(!message.contains("hush"), "{message}");
    }
}

#[test]
fn a_workload_of_amazon_changes_its_token_for_the_session_of_its_role() {
    let address = serve(|asked| {
        let fields = asked.fields();
        let has = |name: &str, value: &str| fields.get(name).is_some_and(|found| found == value);
        match has("Action", "AssumeRoleWithWebIdentity")
            && has("WebIdentityToken", "j.w.t")
            && has("RoleArn", "arn:r/x")
        {
            true => (
                200,
                "<AssumeRoleWithWebIdentityResponse xmlns=\"https://sts.amazonaws.com/doc/2011-06-15/\">\
                 <AssumeRoleWithWebIdentityResult><SubjectFromWebIdentityToken>s</SubjectFromWebIdentityToken>\
                 <Credentials><SessionToken>tok</SessionToken><SecretAccessKey>hush</SecretAccessKey>\
                 <Expiration>2026-11-27T20:00:00Z</Expiration><AccessKeyId>ASIA</AccessKeyId></Credentials>\
                 </AssumeRoleWithWebIdentityResult><ResponseMetadata><RequestId>i</RequestId></ResponseMetadata>\
                 </AssumeRoleWithWebIdentityResponse>"
                    .into(),
            ),
            false => (403, "<ErrorResponse><Message>hush</Message></ErrorResponse>".into()),
        }
    });
    let settings = |role: &str| {
        HostSettings::of([
            ("AWS_ROLE_ARN", role),
            ("AWS_WEB_IDENTITY_TOKEN_FILE", "/token"),
            ("AWS_ENDPOINT_URL_STS", address.as_str()),
        ])
    };
    assert_eq!(parts(settings("arn:r/x").with("/token", "j.w.t\n").amazon()), session());
    for wrong in [settings("arn:other").with("/token", "j.w.t"), settings("arn:r/x")] {
        let Err(RemoteError::Denied(message)) = wrong.amazon() else { panic!("no token, or another role") };
        assert!(!message.contains("hush") && !message.contains("j.w.t"), "{message}");
    }
}

#[test]
fn azure_gives_a_token_to_a_workload_and_to_a_machine() {
    let address = serve(|asked| {
        let fields = asked.fields();
        let has = |name: &str, value: &str| fields.get(name).is_some_and(|found| found == value);
        let is_workload = asked.line == "POST /tenant/oauth2/v2.0/token"
            && has("scope", "https://storage.azure.com/.default")
            && has("client_id", "client")
            && (has("client_assertion", "j.w.t") || has("client_secret", "word"));
        let machine =
            "GET /metadata/identity/oauth2/token?api-version=2018-02-01&resource=https%3A%2F%2Fstorage.azure.com%2F";
        let service = "GET /msi?api-version=2019-08-01&resource=https%3A%2F%2Fstorage.azure.com%2F&client_id=client";
        let is_machine = asked.line == machine && asked.has("metadata", "true");
        let is_service = asked.line == service && asked.has("x-identity-header", "proof");
        if is_workload || is_machine || is_service { (200, TOKEN.into()) } else { (400, "hush".into()) }
    });
    let workload = |name: &str, value: &str| {
        HostSettings::of([
            ("AZURE_CLIENT_ID", "client"),
            ("AZURE_TENANT_ID", "tenant"),
            ("AZURE_AUTHORITY_HOST", address.as_str()),
            (name, value),
        ])
    };
    assert_eq!(workload("AZURE_FEDERATED_TOKEN_FILE", "/token").with("/token", "j.w.t\n").azure(), token());
    assert_eq!(workload("AZURE_CLIENT_SECRET", "word").azure(), token());
    let Err(RemoteError::Denied(message)) = workload("AZURE_CLIENT_SECRET", "wrong").azure() else { panic!() };
    assert!(!message.contains("hush") && !message.contains("wrong"), "{message}");
    assert_eq!(HostSettings::of([("AZURE_POD_IDENTITY_AUTHORITY_HOST", &*address)]).azure(), token());
    let endpoint = format!("{address}/msi");
    let service = HostSettings::of([
        ("IDENTITY_ENDPOINT", &*endpoint),
        ("IDENTITY_HEADER", "proof"),
        ("AZURE_CLIENT_ID", "client"),
    ]);
    assert_eq!(service.azure(), token());
    assert_eq!(HostSettings::default().azure(), Ok(None));
    let local = HostSettings::default().with("/sys/class/dmi/id/sys_vendor", "Microsoft Corporation\n");
    assert_eq!(local.azure(), Ok(None), "a machine of Hyper-V is not one of Azure");
}

#[test]
fn google_gives_a_token_to_an_account_a_user_and_a_machine() {
    let key = RsaKeyPair::generate(KeySize::Rsa2048).unwrap();
    let der = AsDer::<Pkcs8V1Der<'_>>::as_der(&key).unwrap();
    let pem = format!("-----BEGIN PRIVATE KEY-----\n{}\n-----END PRIVATE KEY-----\n", STANDARD.encode(der.as_ref()));
    let public = key.public_key().as_ref().to_vec();
    let address = serve(move |asked| {
        let fields = asked.fields();
        let has = |name: &str, value: &str| fields.get(name).is_some_and(|found| found == value);
        let is_signed = fields.get("assertion").is_some_and(|assertion| {
            let (text, signature) = assertion.rsplit_once('.').unwrap();
            let signature = URL_SAFE_NO_PAD.decode(signature).unwrap();
            let claim = URL_SAFE_NO_PAD.decode(text.split_once('.').unwrap().1).unwrap();
            let claim: serde_json::Value = serde_json::from_slice(&claim).unwrap();
            let public = UnparsedPublicKey::new(&RSA_PKCS1_2048_8192_SHA256, &public);
            public.verify(text.as_bytes(), &signature).is_ok()
                && (&claim["iss"], &claim["iat"], &claim["exp"])
                    == (&json!("a@p"), &json!(1_000_000), &json!(1_003_600))
                && claim["scope"] == GOOGLE_SCOPE
        });
        let is_user = has("grant_type", "refresh_token") && has("refresh_token", "r") && has("client_secret", "s");
        let machine = "GET /computeMetadata/v1/instance/service-accounts/default/token";
        let is_machine = asked.line == machine && asked.has("metadata-flavor", "Google");
        if is_signed || is_user || is_machine { (200, TOKEN.into()) } else { (400, "hush".into()) }
    });
    let account = json!({"type": "service_account", "client_email": "a@p", "private_key": pem, "token_uri": address});
    let named = || HostSettings::of([("GOOGLE_APPLICATION_CREDENTIALS", "/account")]);
    assert_eq!(named().with("/account", &account.to_string()).google(), token());
    let user = |refresh: &str| {
        let user = json!({"type": "authorized_user", "client_id": "c", "client_secret": "s", "refresh_token": refresh,
            "token_uri": address});
        let path = "/h/.config/gcloud/application_default_credentials.json";
        HostSettings::of([("HOME", "/h")]).with(path, &user.to_string())
    };
    assert_eq!(user("r").google(), token());
    let host = address.strip_prefix("http://").unwrap();
    assert_eq!(HostSettings::of([("GCE_METADATA_HOST", host)]).google(), token());
    assert_eq!(HostSettings::default().google(), Ok(None));
    let other = json!({"type": "external_account"}).to_string();
    let wrong_key = account.to_string().replace("PRIVATE KEY", "PUBLIC KEY");
    for wrong in [user("other"), named(), named().with("/account", &other), named().with("/account", &wrong_key)] {
        let Err(RemoteError::Denied(message)) = wrong.google() else { panic!("it has no token") };
        assert!(!message.contains("hush") && !message.contains("other"), "{message}");
    }
}

#[test]
fn google_needs_no_working_profile_of_amazon() {
    let address = serve(|_| (200, TOKEN.into()));
    let host = address.strip_prefix("http://").unwrap();
    let config = "[default]\ncredential_process = exit 1\n";
    for profile in ["default", "missing"] {
        let settings = HostSettings::of([("HOME", "/h"), ("AWS_PROFILE", profile), ("GCE_METADATA_HOST", host)]);
        let settings = settings.with("/h/.aws/config", config);
        let found = google_credentials(&settings.variable(), &settings.file()).unwrap().unwrap();
        assert_eq!(access_token(&found), Some("tok"), "{profile}");
    }
}
