//! Tells what keeps a mount busy, as far as the kernel shows it to this user.
use std::fs;
use std::path::Path;

use lockbox_host::mounts::{self, Mounted};
use lockbox_host::{point, shown};

/// More would not help anybody.
const MOST: usize = 3;

/// What is certain to use the mount, in words; None when this user may not see any of it. The mount's own daemon is not asked.
pub(crate) fn by_whom(mounted: &Mounted) -> Option<String> {
    let mut found: Vec<String> = mounts::all()
        .iter()
        .filter(|other| other.parent == mounted.id)
        .map(|other| format!("something is mounted at {}", shown(&other.point)))
        .collect();
    found.extend(
        numbers(Path::new("/proc")).filter(|&pid| pid != std::process::id()).filter_map(|pid| use_of(pid, mounted)),
    );
    let more = found.len().saturating_sub(MOST);
    found.truncate(MOST);
    if more > 0 {
        found.push(format!("and {more} more"));
    }
    (!found.is_empty()).then(|| found.join(", "))
}

fn use_of(pid: u32, mounted: &Mounted) -> Option<String> {
    let process = Path::new("/proc").join(pid.to_string());
    let within = |link: &Path| lies_within(link, mounted);
    let what = if within(&process.join("cwd")) {
        "has its working directory there"
    } else if within(&process.join("root")) {
        "has its root directory there"
    } else if within(&process.join("exe")) {
        "is a program from there"
    } else {
        let files = process.join("fd");
        numbers(&files).any(|number| within(&files.join(number.to_string()))).then_some("has something open there")?
    };
    let name = fs::read_to_string(process.join("comm")).unwrap_or_default();
    Some(format!("process {pid} ({}) {what}", name.trim_end()))
}

/// The text of the link is compared first, which costs little; it may name what lies below the mount, or once did, so the mount itself decides.
fn lies_within(link: &Path, mounted: &Mounted) -> bool {
    fs::read_link(link).is_ok_and(|target| target.starts_with(&mounted.point))
        && point::mount_of(link) == Some(mounted.id)
}

fn numbers(directory: &Path) -> impl Iterator<Item = u32> {
    directory.read_dir().into_iter().flatten().flatten().filter_map(|entry| entry.file_name().to_str()?.parse().ok())
}

#[cfg(test)]
mod tests {
    use std::process::{Child, Command, Stdio};

    use super::*;

    fn started(command: &mut Command) -> Child {
        command.arg("600").stdin(Stdio::null()).spawn().unwrap()
    }

    #[test]
    fn a_working_directory_and_an_open_file_are_told_apart() {
        let mut at: Vec<Mounted> = mounts::all();
        let scratch = tempfile::tempdir().unwrap();
        let id = point::mount_of(scratch.path()).unwrap();
        at.retain(|mounted| mounted.id == id);
        // As if the scratch directory were the mount's root: only what is below it counts.
        let mut mounted = at.remove(0);
        mounted.point = scratch.path().into();
        let file = fs::File::create(scratch.path().join("file")).unwrap();
        let mut inside = started(Command::new("sleep").current_dir(scratch.path()));
        let mut reads = started(Command::new("sleep").current_dir("/").stdout(file));
        let told = |child: &Child| use_of(child.id(), &mounted);
        // The exec comes a moment after the start.
        while [&inside, &reads].map(told).iter().any(|use_| use_.as_ref().is_none_or(|told| !told.contains("(sleep)")))
        {
            std::thread::yield_now();
        }
        let expected = |child: &Child, what| Some(format!("process {} (sleep) {what}", child.id()));
        assert_eq!(told(&inside), expected(&inside, "has its working directory there"));
        assert_eq!(told(&reads), expected(&reads, "has something open there"));
        mounted.id += 1;
        assert_eq!(use_of(inside.id(), &mounted), None, "another mount of that name");
        for child in [&mut inside, &mut reads] {
            child.kill().unwrap();
            child.wait().unwrap();
        }
    }
}
