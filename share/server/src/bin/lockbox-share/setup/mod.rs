//! `lockbox-share setup`: leads from a machine to links that others open: a name, a certificate, a
//! proxy, a unit. It shows each file before it writes it.

mod asking;
mod files;

use std::path::{Path, PathBuf};

use clap::{Args, ValueEnum};
use lockbox_share_protocol::link_scope::LinkScope;

use self::asking::SetupDialog;
use self::files::{CertificatePaths, FileStatus, SetupPlan, TargetRoot};

/// Lead through name, certificate, proxy and unit, so that others can open the links
///
/// On a terminal it asks for what the options do not say, and before it writes a file. Without a terminal it shows the files and writes none,
/// unless --yes is given.
#[derive(Args)]
pub(crate) struct Setup {
    /// Name under which others reach this machine, such as share.example.org
    #[arg(long, value_name = "NAME", value_parser = host_name)]
    name: Option<String>,
    /// What stands in front of the daemon; `none` for its own HTTPS
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

/// What stands in front of the daemon.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Proxy {
    /// nginx, with a certificate of yours
    Nginx,
    /// Caddy, which gets a certificate by itself
    Caddy,
    /// Nothing: the daemon itself listens on port 443
    None,
}

/// Asks for missing values, shows and writes the files, and prints the next steps.
///
/// # Errors
/// When a value is missing and there is no terminal, or a file cannot be written or is left
/// unchanged.
pub(crate) fn run(arguments: &Setup) -> Result<(), String> {
    setup(arguments, &mut asking::Terminal::new())
}

fn setup(arguments: &Setup, person: &mut dyn SetupDialog) -> Result<(), String> {
    let plan = plan(arguments, person)?;
    for advice in plan.advice(&arguments.root) {
        person.print(&advice);
    }
    let mut place = TargetRoot::new(&arguments.root);
    let mut left = Vec::new();
    for file in plan.files(&arguments.root) {
        let shown = place.show(&file, person)?;
        if shown == FileStatus::Same || arguments.dry_run {
            continue;
        }
        let question = if shown == FileStatus::New { "Write it?" } else { "Replace what is there?" };
        let may = if arguments.yes { shown == FileStatus::New } else { person.confirm(question).unwrap_or(false) };
        if may {
            place.write(&file)?;
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

/// Builds the plan from the options and the user's answers.
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
            let there = |path: &str| arguments.root.join(path).exists();
            let usual = if there("etc/caddy") {
                "caddy"
            } else if there("etc/nginx") {
                "nginx"
            } else {
                "none"
            };
            let question = "What stands in front of the daemon: nginx, caddy, or none for its own HTTPS";
            let said = person.ask(question, Some(usual), "--proxy", &|text| Proxy::from_str(text, true).map(drop))?;
            Proxy::from_str(&said, true)?
        }
    };
    let tls = if proxy == Proxy::Caddy { None } else { Some(certificate(arguments, &name, person)?) };
    let program = match &arguments.program {
        Some(program) => program.clone(),
        None => {
            let own = std::env::current_exe().map_err(|error| format!("cannot tell where this program is: {error}"))?;
            absolute(&own.to_string_lossy()).map_err(|told| format!("{}: {told}; see --program", own.display()))?
        }
    };
    let proxy_user = arguments.proxy_user.clone().unwrap_or_else(|| usual_user(proxy, &arguments.root));
    Ok(SetupPlan { name, proxy, proxy_user, tls, program })
}

/// User of the distributions' packages: nginx runs as www-data in Debian and its derivatives, as
/// nginx in others.
fn usual_user(proxy: Proxy, root: &Path) -> String {
    let users = std::fs::read_to_string(root.join("etc/passwd")).unwrap_or_default();
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
    match !text.is_empty() && !text.starts_with('-') && text.bytes().all(is_plain) {
        true => Ok(text.to_owned()),
        false => Err("the name of a user is expected, such as www-data".into()),
    }
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
        _ => Err(format!("{text} is a name of one network alone, which others cannot open")),
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

#[cfg(test)]
mod tests;
