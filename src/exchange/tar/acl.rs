//! Access control lists as text, as tar programs write them:
//! `user::rw-,user:1000:r--,group::r--,mask::r--,other::---`.

use std::fmt::Write;

use nix::unistd::{Group, User};

const VERSION: u32 = 2;
const ENTRY: usize = 8;
/// Id of entries without a qualifier.
const UNDEFINED: u32 = u32::MAX;

/// Converts a list from the kernel's format to text, with numeric ids; `None` for a malformed list.
pub(super) fn to_text(value: &[u8]) -> Option<String> {
    let (head, rest) = value.split_first_chunk::<4>()?;
    let (entries, []) = rest.as_chunks::<ENTRY>() else { return None };
    if u32::from_le_bytes(*head) != VERSION {
        return None;
    }
    let mut text = String::new();
    for &[t0, t1, p0, p1, i0, i1, i2, i3] in entries {
        let id = u32::from_le_bytes([i0, i1, i2, i3]).to_string();
        let (word, id) = match u16::from_le_bytes([t0, t1]) {
            0x01 => ("user", ""),
            0x02 => ("user", &id[..]),
            0x04 => ("group", ""),
            0x08 => ("group", &id[..]),
            0x10 => ("mask", ""),
            0x20 => ("other", ""),
            _ => return None,
        };
        let bits = u16::from_le_bytes([p0, p1]);
        let letter = |bit: u16, letter: char| if bits & bit != 0 { letter } else { '-' };
        let comma = if text.is_empty() { "" } else { "," };
        // Writing to a String does not fail.
        let _ = write!(text, "{comma}{word}:{id}:{}{}{}", letter(4, 'r'), letter(2, 'w'), letter(1, 'x'));
    }
    Some(text)
}

/// Converts text to the kernel's format; `None` for a malformed list, or names unknown on this
/// machine.
pub(super) fn from_text(text: &[u8]) -> Option<Vec<u8>> {
    let text = std::str::from_utf8(text).ok()?;
    let mut entries = Vec::new();
    for entry in text.split([',', '\n']).map(|entry| entry.split('#').next().unwrap_or_default().trim()) {
        if !entry.is_empty() {
            entries.push(parse_entry(entry)?);
        }
    }
    // The kernel requires this order.
    entries.sort_by_key(|&(tag, _, id)| (tag, id));
    let mut value = VERSION.to_le_bytes().to_vec();
    for (tag, bits, id) in entries {
        value.extend_from_slice(&tag.to_le_bytes());
        value.extend_from_slice(&bits.to_le_bytes());
        value.extend_from_slice(&id.to_le_bytes());
    }
    Some(value)
}

fn parse_entry(entry: &str) -> Option<(u16, u16, u32)> {
    let fields: Vec<&str> = entry.split(':').collect();
    let (word, name, letters, number) = match fields[..] {
        [word, name, letters] => (word, name, letters, None),
        // The number of the name, as star and bsdtar write it.
        [word, name, letters, number] => (word, name, letters, Some(number)),
        // mask:rwx and other:rwx, which have no name field.
        [word, letters] => (word, "", letters, None),
        _ => return None,
    };
    let (tag, named) = match word {
        "user" | "u" => (0x01, Some(0x02)),
        "group" | "g" => (0x04, Some(0x08)),
        "mask" | "m" => (0x10, None),
        "other" | "o" => (0x20, None),
        _ => return None,
    };
    let mut bits = 0;
    for letter in letters.chars() {
        bits |= match letter {
            'r' => 4,
            'w' => 2,
            'x' => 1,
            '-' => 0,
            _ => return None,
        };
    }
    if name.is_empty() {
        return Some((tag, bits, UNDEFINED));
    }
    let known = || match tag {
        0x01 => User::from_name(name).ok().flatten().map(|user| user.uid.as_raw()),
        _ => Group::from_name(name).ok().flatten().map(|group| group.gid.as_raw()),
    };
    let id = number.and_then(|number| number.parse().ok()).or_else(|| name.parse().ok()).or_else(known)?;
    Some((named?, bits, id))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_list_comes_back_from_its_text() {
        let text = "user::rwx,user:7:r--,user:1000:---,group::r-x,group:5:rw-,mask::rwx,other::--x";
        let value = from_text(text.as_bytes()).unwrap();
        assert_eq!(value.len(), 4 + 7 * ENTRY);
        assert_eq!(to_text(&value).unwrap(), text);
    }

    #[test]
    fn other_programs_ways_of_writing_are_understood() {
        let expected = from_text(b"user::rw-,user:0:r--,group::r--,mask::r--,other::---").unwrap();
        for text in [
            "user::rw-\nuser:root:r--\ngroup::r--\nmask::r--\nother::---\n",
            "u::rw,u:nobody-here:r:0,g::r,m::r,o::-",
            "other:---,mask:r--\t#effective,group::r--,user:root:r--:0,user::rw-",
        ] {
            assert_eq!(from_text(text.as_bytes()).as_ref(), Some(&expected), "{text}");
        }
        for bad in ["user", "user:nobody-here-at-all:rwx", "user::rwz", "mask:7:rwx", "a:b:c:d:e", "king::rwx"] {
            assert_eq!(from_text(bad.as_bytes()), None, "{bad}");
        }
        assert_eq!(to_text(b"\x03\0\0\0"), None);
        assert_eq!(to_text(b"\x02\0\0\0\x01"), None);
    }
}
