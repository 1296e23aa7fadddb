//! The options `--exclude` and `--include`: patterns as in a .gitignore file.
use std::ffi::OsStr;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use ignore::gitignore::{Gitignore, GitignoreBuilder};
use lockbox::exchange::Filter;
use lockbox_host::shown;

use crate::exit::Failure;

/// What of a tree is left out
#[derive(clap::Args)]
pub(crate) struct PatternArgs {
    /// Leave out what PATTERN matches, a line of a .gitignore file at the top of each item: *.o, /target, cache/, a/**/b
    #[arg(long, value_name = "PATTERN", group = "rules")]
    exclude: Vec<String>,
    /// Leave out what the lines of FILE match, which is a .gitignore file
    #[arg(long, value_name = "FILE", group = "rules")]
    exclude_from: Vec<PathBuf>,
    /// Take what PATTERN matches although something else leaves it out, but not from within a directory that is left out
    #[arg(long, value_name = "PATTERN", requires = "rules")]
    include: Vec<String>,
}

impl PatternArgs {
    /// Lines of files first, then `--exclude`, then `--include`: the last match counts.
    pub(crate) fn filter(&self) -> Result<Filter, Failure> {
        if self.exclude.is_empty() && self.exclude_from.is_empty() {
            return Ok(Filter::default());
        }
        let mut rules = GitignoreBuilder::new("/");
        let wrong = |pattern: &str, error: &ignore::Error| {
            let reason = error.to_string();
            let reason = reason.rsplit(": ").next().unwrap_or_default();
            Failure::usage(format!("'{pattern}' is no pattern: {reason}"))
        };
        for file in &self.exclude_from {
            let text =
                fs::read_to_string(file).map_err(|e| Failure::host(format!("cannot read {}", shown(file)), &e))?;
            for line in text.lines() {
                rules.add_line(None, line).map_err(|error| wrong(line, &error))?;
            }
        }
        for pattern in &self.exclude {
            rules.add_line(None, pattern).map_err(|error| wrong(pattern, &error))?;
        }
        for pattern in &self.include {
            rules.add_line(None, &format!("!{pattern}")).map_err(|error| wrong(pattern, &error))?;
        }
        let rules = rules.build().map_err(|error| wrong("the whole of them", &error))?;
        Ok(Filter::new(move |path, is_directory| leaves_out(&rules, path, is_directory)))
    }
}

fn leaves_out(rules: &Gitignore, path: &[u8], is_directory: bool) -> bool {
    // The top of a tree has no path below itself, and the user named it.
    !path.is_empty() && rules.matched(Path::new(OsStr::from_bytes(path)), is_directory).is_ignore()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn left_out(exclude: &[&str], include: &[&str], path: &str, is_directory: bool) -> bool {
        let mut rules = GitignoreBuilder::new("/");
        for line in exclude.iter().map(|p| p.to_string()).chain(include.iter().map(|p| format!("!{p}"))) {
            rules.add_line(None, &line).unwrap();
        }
        leaves_out(&rules.build().unwrap(), path.as_bytes(), is_directory)
    }

    #[test]
    fn patterns_mean_what_they_mean_in_a_gitignore_file() {
        assert!(left_out(&["*.o"], &[], "a/b.o", false));
        assert!(!left_out(&["*.o"], &["keep.o"], "a/keep.o", false));
        assert!(left_out(&["/target"], &[], "target", true));
        assert!(!left_out(&["/target"], &[], "a/target", true));
        assert!(left_out(&["cache/"], &[], "a/cache", true));
        assert!(!left_out(&["cache/"], &[], "a/cache", false));
        assert!(left_out(&["a/**/z"], &[], "a/b/c/z", false));
        assert!(!left_out(&["*"], &["*/", "*.txt"], "a", true));
        assert!(!left_out(&["*"], &["*/", "*.txt"], "a/b.txt", false));
        assert!(left_out(&["*"], &["*/", "*.txt"], "a/b.c", false));
    }
}
