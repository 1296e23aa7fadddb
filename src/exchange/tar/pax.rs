//! Pax records: `LENGTH KEY=VALUE\n`, where the length includes the whole record and a value may
//! contain any byte.

use crate::error::{Error, Result, Timestamp};

/// Maximum records of one member: a file's attributes have names of 64 KiB together; times, owners
/// and ranges of sparse files are few in comparison.
pub(super) const MOST: usize = 1 << 16;

/// Keys and values in stream order.
pub(super) type Records = Vec<(Vec<u8>, Vec<u8>)>;

/// Parses a sequence of records.
///
/// # Errors
/// `Invalid` for anything but complete records, and for more of them than any real member has.
pub(super) fn parse(mut bytes: &[u8]) -> Result<Records> {
    let mut records = Records::new();
    while !bytes.is_empty() {
        let (record, rest) = split_record(bytes).ok_or_else(|| Error::invalid("a pax header is malformed"))?;
        records.push(record);
        bound(records.len())?;
        bytes = rest;
    }
    Ok(records)
}

/// Checks the number of records.
///
/// # Errors
/// `Invalid` for more records than any real member has: each takes more memory than space in the
/// tar.
pub(super) fn bound(records: usize) -> Result<()> {
    match records {
        0..=MOST => Ok(()),
        _ => Err(Error::invalid("the tar has more records for one member than any real one")),
    }
}

type Record = (Vec<u8>, Vec<u8>);

fn split_record(bytes: &[u8]) -> Option<(Record, &[u8])> {
    // A length of more digits would exceed any buffer.
    let space = bytes.iter().take(20).position(|&byte| byte == b' ')?;
    let length = usize::try_from(decimal(&bytes[..space])?).ok()?;
    let record = bytes.get(space + 1..length)?.strip_suffix(b"\n")?;
    let equals = record.iter().position(|&byte| byte == b'=')?;
    Some(((record[..equals].to_vec(), record[equals + 1..].to_vec()), &bytes[length..]))
}

pub(super) fn push(out: &mut Vec<u8>, key: &[u8], value: &[u8]) {
    // Space, equals sign and newline.
    let rest = key.len() + value.len() + 3;
    let mut length = rest + 1;
    while length.to_string().len() + rest != length {
        length = length.to_string().len() + rest;
    }
    out.extend_from_slice(length.to_string().as_bytes());
    out.push(b' ');
    out.extend_from_slice(key);
    out.push(b'=');
    out.extend_from_slice(value);
    out.push(b'\n');
}

/// Parses ASCII digits.
pub(super) fn decimal(digits: &[u8]) -> Option<u64> {
    if digits.is_empty() || !digits.iter().all(u8::is_ascii_digit) {
        return None;
    }
    std::str::from_utf8(digits).ok()?.parse().ok()
}

/// Parses seconds with an optional fraction, truncated to nanoseconds.
pub(super) fn parse_time(text: &[u8]) -> Option<Timestamp> {
    let (negative, text) = match text.strip_prefix(b"-") {
        Some(text) => (true, text),
        None => (false, text),
    };
    let mut parts = text.splitn(2, |&byte| byte == b'.');
    let seconds = i64::try_from(decimal(parts.next()?)?).ok()?;
    let mut nanos = 0;
    if let Some(fraction) = parts.next().filter(|fraction| !fraction.is_empty()) {
        decimal(&fraction[..fraction.len().min(9)])?;
        for place in 0..9 {
            nanos = nanos * 10 + u32::from(fraction.get(place).copied().unwrap_or(b'0').wrapping_sub(b'0'));
        }
    }
    Some(match (negative, nanos) {
        (false, nanos) => Timestamp { seconds, nanos },
        (true, 0) => Timestamp { seconds: -seconds, nanos },
        (true, nanos) => Timestamp { seconds: -seconds - 1, nanos: 1_000_000_000 - nanos },
    })
}

pub(super) fn time(time: Timestamp) -> String {
    let Timestamp { seconds, nanos } = time;
    match (seconds < 0, nanos) {
        (_, 0) => seconds.to_string(),
        (false, nanos) => format!("{seconds}.{nanos:09}"),
        // `seconds + 1` is negated, because i64::MIN has no positive counterpart.
        (true, nanos) => format!("-{}.{:09}", -(seconds + 1), 1_000_000_000 - nanos),
    }
}

/// Escapes attribute names as GNU tar does, because they may contain the sign that ends a key.
pub(super) fn escaped(name: &[u8]) -> Vec<u8> {
    let escape = |byte: &u8| match byte {
        b'%' => b"%25".to_vec(),
        b'=' => b"%3D".to_vec(),
        byte => vec![*byte],
    };
    name.iter().flat_map(escape).collect()
}

pub(super) fn unescaped(name: &[u8]) -> Vec<u8> {
    let mut out = Vec::with_capacity(name.len());
    let mut rest = name;
    while let Some((&first, after)) = rest.split_first() {
        let (byte, next) = match (rest.strip_prefix(b"%25"), rest.strip_prefix(b"%3D")) {
            (Some(next), _) => (b'%', next),
            (_, Some(next)) => (b'=', next),
            _ => (first, after),
        };
        out.push(byte);
        rest = next;
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_counts_itself_and_may_hold_any_byte() {
        for length in [0, 1, 90, 91, 92, 93, 980, 990, 991, 992, 70_000] {
            let value = vec![b'\n'; length];
            let mut out = Vec::new();
            push(&mut out, b"key", &value);
            push(&mut out, b"next", b"a=b");
            let expected = vec![(b"key".to_vec(), value), (b"next".to_vec(), b"a=b".to_vec())];
            assert_eq!(parse(&out).unwrap(), expected, "{length}");
        }
    }

    #[test]
    fn what_is_no_record_is_refused() {
        let bad: [&[u8]; 8] = [
            b"6 a=b\nx",
            b"99 a=b\n",
            b"5 a=b",
            b"6 a=bb\n",
            b" a=b\n",
            b"-6 a=b\n",
            b"6 aab\n",
            b"99999999999999999999 a=b\n",
        ];
        for bytes in bad {
            assert!(parse(bytes).is_err(), "{}", String::from_utf8_lossy(bytes));
        }
    }

    #[test]
    fn times_come_back() {
        for seconds in [i64::MIN + 1, -1_000_000, -2, -1, 0, 1, 1_709_209_296, i64::MAX] {
            for nanos in [0, 1, 500_000_000, 999_999_999] {
                let given = Timestamp { seconds, nanos };
                assert_eq!(parse_time(time(given).as_bytes()), Some(given), "{}", time(given));
            }
        }
        assert_eq!(parse_time(b"12.3456789019"), Some(Timestamp { seconds: 12, nanos: 345_678_901 }));
        for bad in ["", "-", "1e9", "1.x", "+1", "99999999999999999999"] {
            assert_eq!(parse_time(bad.as_bytes()), None, "{bad}");
        }
    }

    #[test]
    fn names_of_attributes_are_escaped() {
        assert_eq!(escaped(b"user.a=b%25"), b"user.a%3Db%2525");
        assert_eq!(unescaped(b"user.a%3Db%2525%"), b"user.a=b%25%");
    }
}
