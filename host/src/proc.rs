//! Reads the kernel's tables in /proc, and from them the memory that this process may take.

use std::fs;
use std::path::Path;

use nix::libc::RLIM_INFINITY;
use nix::sys::resource::{Resource, getrlimit};

/// Returns the value of a field: each is a line of a name, a colon and a value.
fn field<'a>(table: &'a str, name: &str) -> Option<&'a str> {
    table.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':')).map(str::trim)
}

/// Parses a set of bits in hex digits.
pub fn bits(table: &str, name: &str) -> Option<u64> {
    u64::from_str_radix(field(table, name)?, 16).ok()
}

pub fn kib(table: &str, name: &str) -> Option<u64> {
    field(table, name)?.trim_end_matches("kB").trim_end().parse().ok()
}

/// Memory controller of control groups v1 and v2: its name in the table, its directory, limit and
/// use.
const GROUPS: [[&str; 4]; 2] = [
    ["", "sys/fs/cgroup", "memory.max", "memory.current"],
    ["memory", "sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"],
];

/// Returns the KiB that this process may take without swapping or ending other processes: the
/// unused ones, on the machine and below the limits of the control groups. Returns 0 if the process
/// has a limit of its own: that makes allocations fail instead of ending programs, and its user
/// chose it.
pub(crate) fn available_kib() -> u64 {
    let limits = [Resource::RLIMIT_AS, Resource::RLIMIT_DATA];
    if limits.into_iter().any(|limit| getrlimit(limit).is_ok_and(|(soft, _)| soft != RLIM_INFINITY)) {
        return 0;
    }
    of_host(Path::new("/"))
}

fn of_host(root: &Path) -> u64 {
    let read = |path: &str| fs::read_to_string(root.join(path)).unwrap_or_default();
    let free = kib(&read("proc/meminfo"), "MemAvailable").unwrap_or(0);
    let table = read("proc/self/cgroup");
    let groups = table.lines().filter_map(|line| {
        let [_, controllers, path] = line.splitn(3, ':').collect::<Vec<_>>().try_into().ok()?;
        let layout = GROUPS.iter().find(|[name, ..]| controllers.split(',').any(|controller| controller == *name))?;
        // A group's limit applies to all groups below it. Those above the root of a container are
        // not visible, but neither is its name then.
        Path::new(path).ancestors().filter_map(|group| left_in(root, layout, group)).min()
    });
    groups.min().map_or(free, |left| left.min(free))
}

/// Returns the KiB left below the limit of a group; None without a limit.
fn left_in(root: &Path, [_, directory, limit, used]: &[&str; 4], group: &Path) -> Option<u64> {
    let directory = root.join(directory).join(group.strip_prefix("/").ok()?);
    let read = |name: &str| fs::read_to_string(directory.join(name)).ok()?.trim().parse::<u64>().ok();
    Some(read(limit)?.saturating_sub(read(used)?) / 1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_tightest_limit_of_all_groups_counts() {
        let root = tempfile::tempdir().unwrap();
        let write = |path: &str, text: &str| {
            let path = root.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        let spare = || of_host(root.path());
        assert_eq!(spare(), 0);
        write("proc/meminfo", "MemTotal: 9000 kB\nMemAvailable: 8000 kB\n");
        assert_eq!(spare(), 8000);
        write("proc/self/cgroup", "4:cpu,memory:/job\n0::/user.slice/app:1.scope\n");
        assert_eq!(spare(), 8000, "groups without limits");
        let group = |name: &str, limit: &str, used: &str| {
            write(&format!("sys/fs/cgroup/{name}memory.max"), limit);
            write(&format!("sys/fs/cgroup/{name}memory.current"), used);
        };
        group("user.slice/app:1.scope/", "max\n", "1048576\n");
        assert_eq!(spare(), 8000);
        group("user.slice/", "7168000\n", "1024000\n");
        assert_eq!(spare(), 6000);
        group("user.slice/app:1.scope/", "2048000\n", "1024000\n");
        assert_eq!(spare(), 1000);
        group("user.slice/app:1.scope/", "1024000\n", "2048000\n");
        assert_eq!(spare(), 0, "beyond its limit");
        group("user.slice/app:1.scope/", "max\n", "1048576\n");
        write("sys/fs/cgroup/memory/memory.limit_in_bytes", "3072000\n");
        write("sys/fs/cgroup/memory/memory.usage_in_bytes", "1024000\n");
        assert_eq!(spare(), 2000, "of the older version, at the root of a container");
    }
}
