//! Reads the fields of the kernel's tables in /proc, each a line of a name, a colon and a value.

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
