//! Reads times and sizes as they are written in options.

use std::time::Duration;

/// `90s`, `15m`, `2h`, `7d`, or seconds.
pub(super) fn time(text: &str) -> Result<Duration, String> {
    let (digits, unit) = match text.strip_suffix(['s', 'm', 'h', 'd']) {
        Some(digits) => (digits, text.as_bytes()[text.len() - 1]),
        None => (text, b's'),
    };
    let number: u64 = digits.parse().map_err(|_| "a number with s, m, h or d is expected".to_owned())?;
    let factor = match unit {
        b'm' => 60,
        b'h' => 3600,
        b'd' => 86400,
        _ => 1,
    };
    number.checked_mul(factor).map(Duration::from_secs).ok_or_else(|| "the time is too long".into())
}

/// `512`, `8K`, `64M`, `16G`, `1T`, in powers of 1,024.
pub(super) fn size(text: &str) -> Result<u64, String> {
    let (digits, shift) = match text.strip_suffix(['K', 'M', 'G', 'T']) {
        Some(digits) => (digits, 10 * (1 + "KMGT".find(&text[text.len() - 1..]).unwrap_or(0))),
        None => (text, 0),
    };
    let number: u64 = digits.parse().map_err(|_| "a number with K, M, G or T is expected".to_owned())?;
    number.checked_mul(1 << shift).ok_or_else(|| "the size is too large".into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_and_sizes_are_read() {
        assert_eq!(time("15m"), Ok(Duration::from_secs(900)));
        assert_eq!(time("7d"), Ok(Duration::from_secs(604_800)));
        assert_eq!(time("90"), Ok(Duration::from_secs(90)));
        assert!(
            time("").is_err() && time("x").is_err() && time("m").is_err() && time("99999999999999999999d").is_err()
        );
        assert_eq!(size("16G"), Ok(16 << 30));
        assert_eq!(size("512"), Ok(512));
        assert!(size("").is_err() && size("G").is_err() && size("99999999999T").is_err());
    }
}
