//! `lockbox-share setup`: leads from a machine to links that others open: a name, a certificate, a
//! proxy, a unit. It shows each file before it writes it.

use std::fs;
use std::io::{self, BufRead, IsTerminal, Write};
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use clap::{Args, ValueEnum};
use lockbox_share_protocol::link_scope::LinkScope;
use lockbox_terminal::sentence;

/// Lead through name, certificate, proxy and unit, so that others can open the links
///
/// On a terminal it asks for values that no option gives, and before it writes a file. Without a terminal it shows the files and writes none,
/// unless --yes is given.
#[derive(Args)]
pub(crate) struct Setup {
    /// Name under which others reach this machine, such as share.example.org
    #[arg(long, value_name = "NAME", value_parser = host_name)]
    name: Option<String>,
    /// Reverse proxy in front of the daemon; `none` for its own HTTPS
    #[arg(long, value_enum)]
    proxy: Option<Proxy>,
    /// Certificate chain, PEM, for nginx and for the daemon's own HTTPS
    #[arg(long, value_name = "FILE", value_parser = absolute)]
    cert: Option<PathBuf>,
    /// Its private key, PEM
    #[arg(long, value_name = "FILE", value_parser = absolute)]
    key: Option<PathBuf>,
    /// User that runs nginx or Caddy; only this user may connect to the socket for proxies
    #[arg(long, value_name = "USER", value_parser = user_name)]
    proxy_user: Option<String>,
    /// The program that the unit starts; this one unless given
    #[arg(long, value_name = "FILE", value_parser = absolute)]
    program: Option<PathBuf>,
    /// Directory below which the files go
    #[arg(long, value_name = "DIR", default_value = "/")]
    root: PathBuf,
    /// Show the files and write none
    #[arg(long, conflicts_with = "yes")]
    dry_run: bool,
    /// Write without asking; a file that is there already and differs is left as it is
    #[arg(long)]
    yes: bool,
}

/// Reverse proxy in front of the daemon.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Proxy {
    /// nginx, with a certificate of yours
    Nginx,
    /// Caddy, which gets a certificate by itself
    Caddy,
    /// Nothing: the daemon itself listens on port 443
    None,
}

/// Asks for missing values, shows and writes the files, and prints the next steps. Errors: when a
/// value is missing and there is no terminal, or a file cannot be written or is left unchanged.
pub(crate) fn run(arguments: &Setup) -> Result<(), String> {
    let is_interactive = io::stdin().is_terminal() && io::stdout().is_terminal();
    setup(arguments, &mut Terminal { is_interactive })
}

fn setup(arguments: &Setup, person: &mut dyn SetupDialog) -> Result<(), String> {
    let plan = plan(arguments, person)?;
    for advice in plan.advice(&arguments.root) {
        person.print(&advice);
    }
    let mut left = Vec::new();
    for file in plan.files(&arguments.root) {
        let shown = file.show(&arguments.root, person)?;
        if shown == FileStatus::Same || arguments.dry_run {
            continue;
        }
        let question = if shown == FileStatus::New { "Write it?" } else { "Replace the existing file?" };
        let may = if arguments.yes { shown == FileStatus::New } else { person.confirm(question).unwrap_or(false) };
        if may {
            file.write(&arguments.root)?;
        } else {
            left.push(file.path.display().to_string());
        }
    }
    if arguments.dry_run || left.is_empty() {
        for next in plan.next() {
            person.print(&next);
        }
        return Ok(());
    }
    if !arguments.yes && !person.is_interactive() {
        person.print("nothing was written: --yes writes these files, and on a terminal each is asked about");
        return Ok(());
    }
    Err(format!("not written: {}", left.join(", ")))
}

fn plan(arguments: &Setup, person: &mut dyn SetupDialog) -> Result<SetupPlan, String> {
    let name = match &arguments.name {
        Some(name) => name.clone(),
        None => person.ask(
            "Name under which others reach this machine, such as share.example.org",
            None,
            "--name",
            &|text| host_name(text).map(drop),
        )?,
    };
    let proxy = match arguments.proxy {
        Some(proxy) => proxy,
        None => {
            let is_there = |name: &&str| arguments.root.join("etc").join(name).exists();
            let usual = ["caddy", "nginx"].into_iter().find(is_there).unwrap_or("none");
            let question = "Reverse proxy in front of the daemon: nginx, caddy, or none for its own HTTPS";
            let said = person.ask(question, Some(usual), "--proxy", &|text| Proxy::from_str(text, true).map(drop))?;
            Proxy::from_str(&said, true)?
        }
    };
    let tls = if proxy == Proxy::Caddy { None } else { Some(certificate(arguments, &name, person)?) };
    let program = match &arguments.program {
        Some(program) => program.clone(),
        None => {
            let own =
                std::env::current_exe().map_err(|error| format!("cannot find the path of this program: {error}"))?;
            absolute(&own.to_string_lossy()).map_err(|told| format!("{}: {told}; see --program", own.display()))?
        }
    };
    let proxy_user = arguments.proxy_user.clone().unwrap_or_else(|| usual_user(proxy, &arguments.root));
    Ok(SetupPlan { name, proxy, proxy_user, tls, program })
}

/// User of the distributions' packages: nginx runs as www-data in Debian, as nginx in others.
fn usual_user(proxy: Proxy, root: &Path) -> String {
    let users = fs::read_to_string(root.join("etc/passwd")).unwrap_or_default();
    let is_there = |name: &str| users.lines().any(|line| line.split(':').next() == Some(name));
    match proxy {
        Proxy::Caddy => "caddy",
        _ if is_there("nginx") && !is_there("www-data") => "nginx",
        _ => "www-data",
    }
    .to_owned()
}

/// A user's name that no unit takes for more.
fn user_name(text: &str) -> Result<String, String> {
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"_-.".contains(&byte);
    if text.is_empty() || text.starts_with('-') || !text.bytes().all(is_plain) {
        return Err("the name of a user is expected, such as www-data".into());
    }
    Ok(text.to_owned())
}

/// Where certbot and most others that get certificates put them.
fn certificate(arguments: &Setup, name: &str, person: &mut dyn SetupDialog) -> Result<CertificatePaths, String> {
    let mut file = |given: &Option<PathBuf>, usual: &str, what: &str, option: &str| match given {
        Some(path) => Ok(path.clone()),
        None => {
            let usual = format!("/etc/letsencrypt/live/{name}/{usual}");
            person.ask(what, Some(&usual), option, &|text| absolute(text).map(drop)).map(PathBuf::from)
        }
    };
    Ok(CertificatePaths {
        certificate: file(&arguments.cert, "fullchain.pem", "Certificate chain, PEM", "--cert")?,
        key: file(&arguments.key, "privkey.pem", "Its private key, PEM", "--key")?,
    })
}

/// A name with a dot and nothing that a configuration file could take for more than a name.
fn host_name(text: &str) -> Result<String, String> {
    let is_part = |part: &str| {
        let inside = part.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'-');
        (1..=63).contains(&part.len()) && inside && !part.starts_with('-') && !part.ends_with('-')
    };
    let is_number = text.rsplit('.').next().is_some_and(|last| last.bytes().all(|byte| byte.is_ascii_digit()));
    if text.len() > 253 || !text.contains('.') || is_number || !text.split('.').all(is_part) {
        return Err("a name with a dot is expected, such as share.example.org, without https:// and port".into());
    }
    match LinkScope::of_url(&format!("https://{text}")) {
        LinkScope::Anyone => Ok(text.to_ascii_lowercase()),
        _ => Err(format!("{text} resolves in one network only; machines of other networks cannot open its links")),
    }
}

/// A path that means the same to every program, and that no configuration file takes for more than a path.
fn absolute(text: &str) -> Result<PathBuf, String> {
    let is_plain = text.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"/._-+@,".contains(&byte));
    if !Path::new(text).is_absolute() || !is_plain {
        return Err("a path from the root is expected, of letters, digits and / . _ - + @ ,".into());
    }
    Ok(text.into())
}

/// Interactive user, or its absence.
trait SetupDialog {
    fn is_interactive(&self) -> bool;

    /// Asks until `check` accepts the answer; an empty answer means `usual`. Without a user,
    /// returns `usual`. Errors: when there is neither a user nor a default; the message names the
    /// option to set.
    fn ask(
        &mut self,
        question: &str,
        usual: Option<&str>,
        option: &str,
        check: &dyn Fn(&str) -> Result<(), String>,
    ) -> Result<String, String>;

    /// Asks for yes or no; `None` without a user.
    fn confirm(&mut self, question: &str) -> Option<bool>;

    /// One sentence or one file.
    fn print(&mut self, text: &str);
}

struct Terminal {
    is_interactive: bool,
}

impl Terminal {
    fn answer(&mut self, question: &str) -> Result<String, String> {
        let failed = |error: io::Error| format!("cannot ask: {error}");
        let mut out = io::stdout().lock();
        write!(out, "{question}: ").and_then(|()| out.flush()).map_err(failed)?;
        let mut line = String::new();
        match io::stdin().lock().read_line(&mut line).map_err(failed)? {
            0 => Err("no answer on standard input; files not asked about yet are unchanged".into()),
            _ => Ok(line.trim().to_owned()),
        }
    }
}

impl SetupDialog for Terminal {
    fn is_interactive(&self) -> bool {
        self.is_interactive
    }

    fn ask(
        &mut self,
        question: &str,
        usual: Option<&str>,
        option: &str,
        check: &dyn Fn(&str) -> Result<(), String>,
    ) -> Result<String, String> {
        if !self.is_interactive {
            let missing = || format!("{option} is required when not running on a terminal");
            return usual.map(str::to_owned).ok_or_else(missing);
        }
        let question = usual.map_or_else(|| question.to_owned(), |usual| format!("{question} [{usual}]"));
        loop {
            let said = self.answer(&question)?;
            let said = if said.is_empty() { usual.unwrap_or_default().to_owned() } else { said };
            match check(&said) {
                Ok(()) => return Ok(said),
                Err(told) => self.print(&told),
            }
        }
    }

    fn confirm(&mut self, question: &str) -> Option<bool> {
        if !self.is_interactive {
            return None;
        }
        // Without an answer nothing is done.
        let said = self.answer(&format!("{question} [y, n]")).unwrap_or_default();
        Some(["y", "yes"].iter().any(|word| said.eq_ignore_ascii_case(word)))
    }

    #[allow(clippy::print_stdout)] // the result
    fn print(&mut self, text: &str) {
        text.lines().for_each(|line| println!("{}", sentence(line)));
    }
}

/// The unit of the package, for machines where no package brought it.
const UNIT: &str = include_str!("../../../../../../packaging/lockbox-share.service");
/// The program in it.
const PACKAGED: &str = "/usr/bin/lockbox-share";
const SERVE: &str = "serve --state-dir %S/lockbox-share --unix-socket %t/lockbox-share/lockbox-share.sock";
/// Where the proxy finds the daemon.
const PROXY_SOCKET: &str = "/run/lockbox-share/proxy.sock";
const UNIT_NAME: &str = "lockbox-share.service";
/// Where a package puts units.
const UNITS: [&str; 2] = ["usr/lib/systemd/system", "lib/systemd/system"];

struct SetupPlan {
    name: String,
    proxy: Proxy,
    /// User that runs the proxy.
    proxy_user: String,
    /// None when the proxy gets its certificate by itself.
    tls: Option<CertificatePaths>,
    program: PathBuf,
}

struct CertificatePaths {
    certificate: PathBuf,
    key: PathBuf,
}

struct SetupFile {
    /// From the root.
    path: PathBuf,
    text: String,
}

impl SetupPlan {
    fn files(&self, root: &Path) -> Vec<SetupFile> {
        let mut files = Vec::new();
        if !UNITS.iter().any(|directory| root.join(directory).join(UNIT_NAME).exists()) {
            let text = UNIT.replace(PACKAGED, &self.program.display().to_string());
            files.push(SetupFile { path: format!("etc/systemd/system/{UNIT_NAME}").into(), text });
        }
        let path = format!("etc/systemd/system/{UNIT_NAME}.d/setup.conf").into();
        files.push(SetupFile { path, text: self.drop_in() });
        let (path, text) = match (&self.proxy, &self.tls) {
            (Proxy::Nginx, Some(tls)) => ("etc/nginx/conf.d/lockbox-share.conf", self.nginx(tls)),
            (Proxy::Caddy, _) => ("etc/caddy/lockbox-share.caddy", self.caddy()),
            _ => return files,
        };
        files.push(SetupFile { path: path.into(), text });
        files
    }

    fn drop_in(&self) -> String {
        let (name, program) = (&self.name, self.program.display());
        let head = "# Written by 'lockbox-share setup'. The empty line takes the packaged command away.\n[Service]\nExecStart=\n";
        match &self.tls {
            Some(CertificatePaths { certificate, key }) if self.proxy == Proxy::None => {
                let (certificate, key) = (certificate.display(), key.display());
                format!(
                    "{head}ExecStart={program} {SERVE} --public-url https://{name} --listen none \
                     --tls-listen 0.0.0.0:443 --tls-listen [::]:443 --tls-cert %d/cert.pem --tls-key %d/key.pem\n\
                     # The daemon has no way to the files itself; it reads them when it starts: restart it after a renewal.\n\
                     LoadCredential=cert.pem:{certificate}\n\
                     LoadCredential=key.pem:{key}\n\
                     # For port 443, which a user namespace could not open.\n\
                     PrivateUsers=no\n\
                     CapabilityBoundingSet=CAP_NET_BIND_SERVICE\n\
                     AmbientCapabilities=CAP_NET_BIND_SERVICE\n"
                )
            }
            _ => {
                let user = &self.proxy_user;
                format!(
                    "{head}ExecStart={program} {SERVE} --public-url https://{name} --listen none \
                     --proxy-socket %t/lockbox-share/proxy.sock --proxy-user {user}\n\
                     # No port: every user of this machine could connect there and name another client in each request. The kernel tells\n\
                     # which user connects to the socket, and in a user namespace it could not.\n\
                     PrivateUsers=no\n"
                )
            }
        }
    }

    fn nginx(&self, tls: &CertificatePaths) -> String {
        let (name, certificate, key) = (&self.name, tls.certificate.display(), tls.key.display());
        format!(
            r#"# Written by 'lockbox-share setup'.
server {{
    listen 443 ssl;
    listen [::]:443 ssl;
    server_name {name};
    ssl_certificate {certificate};
    ssl_certificate_key {key};
    # A log would hold which links are opened from where.
    access_log off;
    # Files pass in both directions as they come, however large; the daemon has the limits.
    client_max_body_size 0;
    proxy_request_buffering off;
    proxy_buffering off;
    location / {{
        proxy_pass http://unix:{PROXY_SOCKET};
        proxy_http_version 1.1;
        proxy_set_header Host $host;
        proxy_set_header X-Forwarded-For $remote_addr;
        proxy_set_header Connection "";
        # A client that watches a share may wait for a minute.
        proxy_read_timeout 90s;
        proxy_send_timeout 90s;
    }}
}}
server {{
    listen 80;
    listen [::]:80;
    server_name {name};
    access_log off;
    location / {{
        return 301 https://$host$request_uri;
    }}
}}
"#
        )
    }

    fn caddy(&self) -> String {
        let name = &self.name;
        format!(
            "# Written by 'lockbox-share setup'. Caddy gets the certificate, sends plain http to https, and keeps no log of requests.\n\
             {name} {{\n    reverse_proxy unix/{PROXY_SOCKET} {{\n        # Files pass as they come.\n        flush_interval -1\n    }}\n}}\n"
        )
    }

    /// Returns warnings about missing prerequisites.
    fn advice(&self, root: &Path) -> Vec<String> {
        let mut advice = Vec::new();
        if let Some(tls) = &self.tls {
            let there = |path: &Path| root.join(path.strip_prefix("/").unwrap_or(path)).exists();
            if let Some(missing) = [&tls.certificate, &tls.key].into_iter().find(|path| !there(path)) {
                // What certbot keeps and does again at each renewal. It listens on port 80 itself
                // meanwhile.
                let hooks = match self.proxy {
                    Proxy::Nginx => "--pre-hook 'systemctl stop nginx' --post-hook 'systemctl start nginx'",
                    _ => "--deploy-hook 'systemctl restart lockbox-share'",
                };
                advice.push(format!(
                    "{} is not there yet; this gets a certificate, and has it renewed: certbot certonly --standalone {hooks} -d {}",
                    missing.display(),
                    self.name
                ));
            }
        }
        if ["/home", "/root", "/tmp"].iter().any(|closed| self.program.starts_with(closed)) {
            advice.push(format!(
                "the unit cannot see {}: copy the program to /usr/local/bin and name it with --program",
                self.program.display()
            ));
        }
        advice
    }

    /// Returns the remaining steps for the administrator.
    fn next(&self) -> Vec<String> {
        let name = &self.name;
        let mut next = vec![
            format!(
                "1. {name} must lead to this machine (an A or AAAA record), and ports 80 and 443 must be open to others"
            ),
            "2. systemctl daemon-reload && systemctl enable --now lockbox-share && systemctl restart lockbox-share"
                .into(),
        ];
        next.extend(match self.proxy {
            Proxy::Nginx => Some("3. nginx -t && systemctl reload nginx".to_owned()),
            Proxy::Caddy => Some(
                "3. put 'import lockbox-share.caddy' into /etc/caddy/Caddyfile, then: systemctl reload caddy".into(),
            ),
            Proxy::None => None,
        });
        next.push(format!(
            "then, as root: lockbox share FILE; others open https://{name}, see CREATORS in lockbox-share(8)"
        ));
        next
    }
}

/// Relation of a planned file to the one on disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum FileStatus {
    New,
    /// It is there as it would be written.
    Same,
    /// Another one is there.
    Differs,
}

impl SetupFile {
    /// Shows the planned file and its status. Errors: when the existing file is not readable or
    /// regular.
    fn show(&self, root: &Path, person: &mut dyn SetupDialog) -> Result<FileStatus, String> {
        let path = root.join(&self.path);
        let outcome = match path.symlink_metadata() {
            Err(error) if error.kind() == io::ErrorKind::NotFound => FileStatus::New,
            Err(error) => return Err(format!("cannot inspect {}: {error}", path.display())),
            Ok(there) if !there.is_file() => {
                return Err(format!("{} exists and is not a regular file; left unchanged", path.display()));
            }
            Ok(_) => match fs::read(&path) {
                Ok(bytes) if bytes == self.text.as_bytes() => FileStatus::Same,
                Ok(_) => FileStatus::Differs,
                Err(error) => return Err(format!("cannot read {}: {error}", path.display())),
            },
        };
        let how = match outcome {
            FileStatus::New => "new",
            FileStatus::Same => "already exists, unchanged",
            FileStatus::Differs => "already exists, differs",
        };
        person.print(&format!("--- {} ({how})", path.display()));
        if outcome != FileStatus::Same {
            person.print(self.text.trim_end());
        }
        Ok(outcome)
    }

    /// Replaces the file atomically. Errors: the host's; the existing file is unchanged then.
    fn write(&self, root: &Path) -> Result<(), String> {
        let path = root.join(&self.path);
        let failed = |error: io::Error| format!("cannot write {}: {error}", path.display());
        let directory = path.parent().unwrap_or(root);
        fs::create_dir_all(directory).map_err(failed)?;
        // A name that neither nginx nor systemd reads; left by an interruption, the next call takes
        // it over.
        let partial = directory.join(".lockbox-share-setup.new");
        match fs::remove_file(&partial) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(failed(error)),
            _ => {}
        }
        let mut options = fs::File::options();
        let opened = options.write(true).create_new(true).mode(0o644).open(&partial).map_err(failed)?;
        // Whatever the umask is: proxies read it as users of their own.
        opened.set_permissions(fs::Permissions::from_mode(0o644)).map_err(failed)?;
        let written = (&opened).write_all(self.text.as_bytes()).and_then(|()| opened.sync_all());
        let placed = written.and_then(|()| fs::rename(&partial, &path));
        placed.inspect_err(|_| drop(fs::remove_file(&partial))).map_err(failed)?;
        fs::File::open(directory).and_then(|directory| directory.sync_all()).map_err(failed)
    }
}

#[cfg(test)]
mod tests;
