//! Sanitizes the name of a received file: a sender must not choose the directory or the terminal
//! output.

/// Maximum length of a name in bytes; Linux allows 255, and the temporary file's name needs some.
pub const MAX_NAME: usize = 200;
const UNNAMED: &str = "received";

/// One path component without control characters, separators, text direction marks, leading dots
/// and dashes, and trailing dots and blanks; at most [`MAX_NAME`] bytes, with its ending kept.
/// Total.
pub fn safe(name: &str) -> String {
    let last = name.rsplit(['/', '\\']).find(|part| !part.trim_matches(['.', ' ']).is_empty()).unwrap_or_default();
    let shown: String = last.chars().map(|c| if is_harmful(c) { '_' } else { c }).collect();
    let trimmed = shown.trim_end_matches(['.', ' ']).trim_start();
    // A hidden file could be the settings of a program, and a dash is an option of the next one.
    let visible = match trimmed.chars().next() {
        None => UNNAMED.to_owned(),
        Some('.' | '-' | '~') => format!("_{}", &trimmed[1..]),
        Some(_) => trimmed.to_owned(),
    };
    shortened(&visible)
}

fn is_harmful(c: char) -> bool {
    c.is_control()
        // Marks that turn the direction of text, and invisible letters: "fdp.exe" could be shown as
        // "exe.pdf".
        || matches!(c, '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{206f}' | '\u{feff}' | '\u{61c}' | '\u{fffd}')
        || matches!(c, ':' | '*' | '?' | '"' | '<' | '>' | '|')
}

fn shortened(name: &str) -> String {
    if name.len() <= MAX_NAME {
        return name.to_owned();
    }
    let ending = match name.rfind('.') {
        Some(dot) if name.len() - dot <= 16 => &name[dot..],
        _ => "",
    };
    let mut end = MAX_NAME - ending.len();
    while !name.is_char_boundary(end) {
        end -= 1;
    }
    format!("{}{ending}", name[..end].trim_end_matches(['.', ' ']))
}

/// `report (2).pdf` for `report.pdf`: how a second file of the same name is called.
pub fn numbered(name: &str, number: u32) -> String {
    match name.rfind('.') {
        Some(dot) if dot > 0 => format!("{} ({number}){}", &name[..dot], &name[dot..]),
        _ => format!("{name} ({number})"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn names_lose_what_could_harm() {
        for (name, expected) in [
            ("report.pdf", "report.pdf"),
            ("Bericht über Öl.pdf", "Bericht über Öl.pdf"),
            ("../../etc/passwd", "passwd"),
            ("/etc/", "etc"),
            ("C:\\autoexec.bat", "autoexec.bat"),
            ("..", "received"),
            ("", "received"),
            ("/", "received"),
            (" . ", "received"),
            (".bashrc", "_bashrc"),
            ("-rf", "_rf"),
            ("~", "_"),
            ("a\nb\u{1b}[31m\0", "a_b_[31m_"),
            ("invoice\u{202e}fdp.exe", "invoice_fdp.exe"),
            ("photo. ", "photo"),
        ] {
            assert_eq!(safe(name), expected, "{name:?}");
        }
    }

    #[test]
    fn long_names_keep_their_ending() {
        let safe = safe(&format!("{}.tar.gz", "ä".repeat(200)));
        assert!(safe.len() <= MAX_NAME && safe.ends_with("ä.gz"), "{safe}");
    }

    #[test]
    fn a_second_file_has_a_number() {
        assert_eq!(numbered("report.pdf", 2), "report (2).pdf");
        assert_eq!(numbered("Makefile", 3), "Makefile (3)");
    }

    proptest! {
        #[test]
        fn every_name_becomes_one_visible_component(name in any::<String>()) {
            let safe = safe(&name);
            prop_assert!(!safe.is_empty() && safe.len() <= MAX_NAME);
            prop_assert!(!safe.starts_with(['.', '-']) && !safe.contains(['/', '\0']) && !safe.chars().any(char::is_control));
            prop_assert_eq!(super::safe(&safe), safe);
        }
    }
}
