//! Points in time as the daemon tells them, for people.

/// `2024-02-29 12:34:56 UTC` for seconds since 1970.
pub fn utc(seconds: u64) -> String {
    format!("{} UTC", lockbox_terminal::utc(i64::try_from(seconds).unwrap_or(i64::MAX)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_told_in_utc() {
        for (seconds, told) in [
            (0, "1970-01-01 00:00:00 UTC"),
            (951_782_400, "2000-02-29 00:00:00 UTC"),
            (1_709_209_296, "2024-02-29 12:21:36 UTC"),
            (4_107_542_399, "2100-02-28 23:59:59 UTC"),
            (4_107_542_400, "2100-03-01 00:00:00 UTC"),
        ] {
            assert_eq!(utc(seconds), told);
        }
    }
}
