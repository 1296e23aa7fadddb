//! Files of a setup: configuration of nginx, Caddy and systemd, its comparison with the disk, and
//! atomic writing.

use std::fs;
use std::io::{self, Write};
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use super::Proxy;
use super::asking::SetupDialog;

/// The unit of the package, for machines where no package brought it.
const UNIT: &str = include_str!("../../../../../../packaging/lockbox-share.service");
/// The program in it.
const PACKAGED: &str = "/usr/bin/lockbox-share";
/// Arguments common to all variants.
const SERVE: &str = "serve --state-dir %S/lockbox-share --unix-socket %t/lockbox-share/lockbox-share.sock";
/// Where the proxy finds the daemon.
const PROXY_SOCKET: &str = "/run/lockbox-share/proxy.sock";
const UNIT_NAME: &str = "lockbox-share.service";
/// Where a package puts units.
const UNITS: [&str; 2] = ["usr/lib/systemd/system", "lib/systemd/system"];

/// Answers and options of the setup.
pub(super) struct SetupPlan {
    pub(super) name: String,
    pub(super) proxy: Proxy,
    /// User that runs the proxy.
    pub(super) proxy_user: String,
    /// None when the proxy gets its certificate by itself.
    pub(super) tls: Option<CertificatePaths>,
    pub(super) program: PathBuf,
}

/// Where a certificate is.
pub(super) struct CertificatePaths {
    pub(super) certificate: PathBuf,
    pub(super) key: PathBuf,
}

/// A file to be written.
pub(super) struct SetupFile {
    /// From the root.
    pub(super) path: PathBuf,
    pub(super) text: String,
}

impl SetupPlan {
    pub(super) fn files(&self, root: &Path) -> Vec<SetupFile> {
        let mut files = Vec::new();
        if !UNITS.iter().any(|directory| root.join(directory).join(UNIT_NAME).exists()) {
            let text = UNIT.replace(PACKAGED, &self.program.display().to_string());
            files.push(SetupFile { path: format!("etc/systemd/system/{UNIT_NAME}").into(), text });
        }
        files.push(SetupFile {
            path: format!("etc/systemd/system/{UNIT_NAME}.d/setup.conf").into(),
            text: self.drop_in(),
        });
        match (&self.proxy, &self.tls) {
            (Proxy::Nginx, Some(tls)) => {
                files.push(SetupFile { path: "etc/nginx/conf.d/lockbox-share.conf".into(), text: self.nginx(tls) });
            }
            (Proxy::Caddy, _) => {
                files.push(SetupFile { path: "etc/caddy/lockbox-share.caddy".into(), text: self.caddy() })
            }
            _ => {}
        }
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
    pub(super) fn advice(&self, root: &Path) -> Vec<String> {
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
    pub(super) fn next(&self) -> Vec<String> {
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
pub(super) enum FileStatus {
    New,
    /// It is there as it would be written.
    Same,
    /// Another one is there.
    Differs,
}

/// The directory that stands for the root.
pub(super) struct TargetRoot<'a> {
    root: &'a Path,
}

impl<'a> TargetRoot<'a> {
    pub(super) fn new(root: &'a Path) -> TargetRoot<'a> {
        TargetRoot { root }
    }

    fn path(&self, file: &SetupFile) -> PathBuf {
        self.root.join(&file.path)
    }

    /// Shows the planned file and its status.
    ///
    /// # Errors
    /// When the existing file cannot be read, or is not a regular file.
    pub(super) fn show(&mut self, file: &SetupFile, person: &mut dyn SetupDialog) -> Result<FileStatus, String> {
        let path = self.path(file);
        let outcome = match path.symlink_metadata() {
            Err(error) if error.kind() == io::ErrorKind::NotFound => FileStatus::New,
            Err(error) => return Err(format!("cannot look at {}: {error}", path.display())),
            Ok(there) if !there.is_file() => {
                return Err(format!("{} is there and no file: it is left as it is", path.display()));
            }
            Ok(_) => match fs::read(&path) {
                Ok(bytes) if bytes == file.text.as_bytes() => FileStatus::Same,
                Ok(_) => FileStatus::Differs,
                Err(error) => return Err(format!("cannot read {}: {error}", path.display())),
            },
        };
        let how = match outcome {
            FileStatus::New => "new",
            FileStatus::Same => "there already, as it should be",
            FileStatus::Differs => "another one is there",
        };
        person.print(&format!("--- {} ({how})", path.display()));
        if outcome != FileStatus::Same {
            person.print(file.text.trim_end());
        }
        Ok(outcome)
    }

    /// Replaces the file atomically.
    ///
    /// # Errors
    /// When the host fails; the existing file is unchanged then.
    pub(super) fn write(&mut self, file: &SetupFile) -> Result<(), String> {
        let path = self.path(file);
        let failed = |error: io::Error| format!("cannot write {}: {error}", path.display());
        let directory = path.parent().unwrap_or(self.root);
        fs::create_dir_all(directory).map_err(failed)?;
        // A name that neither nginx nor systemd reads; left by an interruption, the next call takes
        // it over.
        let partial = directory.join(".lockbox-share-setup.new");
        match fs::remove_file(&partial) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(failed(error)),
            _ => {}
        }
        let mut options = std::fs::File::options();
        let opened = options.write(true).create_new(true).mode(0o644).open(&partial).map_err(failed)?;
        // Whatever the umask is: proxies read it as users of their own.
        opened.set_permissions(fs::Permissions::from_mode(0o644)).map_err(failed)?;
        let written = (&opened).write_all(file.text.as_bytes()).and_then(|()| opened.sync_all());
        let placed = written.and_then(|()| fs::rename(&partial, &path));
        placed.inspect_err(|_| drop(fs::remove_file(&partial))).map_err(failed)?;
        std::fs::File::open(directory).and_then(|directory| directory.sync_all()).map_err(failed)
    }
}
