//! The modules of one crate, the paths that they name, and the files in which what is named stands.

use std::collections::BTreeMap;
use std::path::Path;

use crate::text::{blank, is_name, without_tests};
use crate::{CRATES, FUZZ_MARK, Sources, TEST_MARK, is_below, test_modules};

/// A path from the crate's root.
pub(crate) type Names = Vec<String>;

/// The modules of a crate by their paths.
pub(crate) struct Modules(BTreeMap<Names, Module>);

struct Module {
    code: String,
    /// What `use` brings in: the name here, and where it comes from.
    brought: BTreeMap<String, Names>,
}

impl Modules {
    /// Those below the root of a crate, without tests and without other crates that lie below it.
    pub(crate) fn of(root: &str, sources: &Sources) -> Modules {
        let left_out = [test_modules(sources, TEST_MARK), test_modules(sources, FUZZ_MARK)].concat();
        let is_other = |path: &Path| {
            let mut others = CRATES.iter().filter(|of| of.root.len() > root.len());
            others.any(|of| path.starts_with(of.root))
        };
        let mut modules = BTreeMap::new();
        for (path, text) in sources {
            let Ok(below) = path.strip_prefix(root) else { continue };
            if is_other(path) || is_below(path, &left_out) {
                continue;
            }
            let below = below.with_extension("");
            let mut names: Names = below.iter().map(|name| name.to_string_lossy().into_owned()).collect();
            if names.last().is_some_and(|last| matches!(last.as_str(), "mod" | "lib" | "main")) {
                names.pop();
            }
            let code = without_tests(&blank(text));
            modules.insert(names, Module { code, brought: BTreeMap::new() });
        }
        let mut modules = Modules(modules);
        let brought: Vec<(Names, _)> =
            modules.0.iter().map(|(at, module)| (at.clone(), modules.uses(at, &module.code))).collect();
        for (at, brought) in brought {
            modules.0.entry(at).and_modify(|module| module.brought = brought);
        }
        modules
    }

    pub(crate) fn all(&self) -> impl Iterator<Item = (&Names, &str)> {
        self.0.iter().map(|(at, module)| (at, module.code.as_str()))
    }

    /// Where a name comes from that a module has, declared there or brought in; none for one of another crate.
    pub(crate) fn origin(&self, at: &[String], name: &str) -> Option<Names> {
        let module = self.0.get(at)?;
        match module.brought.get(name) {
            Some(path) => self.home(path),
            None => ["struct ", "enum ", "trait "]
                .iter()
                .any(|kind| declares(&module.code, kind, name))
                .then(|| at.to_vec()),
        }
    }

    /// What the `use` declarations of a module bring in from its own crate.
    fn uses(&self, at: &[String], code: &str) -> BTreeMap<String, Names> {
        let mut brought = BTreeMap::new();
        for (start, _) in code.match_indices("use ") {
            if code[..start].ends_with(is_name) {
                continue;
            }
            let tree = code[start + 4..].split(';').next().unwrap_or_default();
            for (path, name) in leaves(tree) {
                brought.extend(self.absolute(at, &path).map(|path| (name, path)));
            }
        }
        brought
    }

    /// Every path of the crate that a module names, in `use` declarations and elsewhere.
    pub(crate) fn named(&self, at: &[String]) -> Vec<Names> {
        let Some(module) = self.0.get(at) else { return Vec::new() };
        let mut named: Vec<Names> = module.brought.values().cloned().collect();
        for word in ["crate::", "super::", "self::"] {
            for (start, _) in module.code.match_indices(word) {
                if !module.code[..start].ends_with(|c| is_name(c) || c == ':') {
                    let rest = &module.code[start..];
                    let end = rest.find(|c| !is_name(c) && c != ':').unwrap_or(rest.len());
                    let path: Names = rest[..end].split("::").filter(|name| !name.is_empty()).map(Into::into).collect();
                    named.extend(self.absolute(at, &path).filter(|path| !path.is_empty()));
                }
            }
        }
        named
    }

    /// The path from the root for one that a module writes; none for one of another crate.
    fn absolute(&self, at: &[String], path: &[String]) -> Option<Names> {
        let mut from: Names = at.to_vec();
        let mut rest = path;
        match rest.first()?.as_str() {
            "crate" => from.clear(),
            "self" | "super" => {}
            child => {
                from.push(child.to_owned());
                let is_child = self.0.contains_key(&from);
                from.pop();
                if !is_child {
                    return None;
                }
            }
        }
        while let Some(("crate" | "self" | "super", after)) =
            rest.split_first().map(|(name, after)| (name.as_str(), after))
        {
            if rest[0] == "super" {
                from.pop();
            }
            rest = after;
        }
        from.extend(rest.iter().cloned());
        Some(from)
    }

    /// The module that has what a path names: what a module passes on is that of the one where it comes from.
    pub(crate) fn home(&self, path: &[String]) -> Option<Names> {
        let mut path = path.to_vec();
        // Nothing is passed on more often.
        for _ in 0..8 {
            let length = (0..=path.len()).rev().find(|&length| self.0.contains_key(&path[..length]))?;
            let (module, rest) = path.split_at(length);
            let origin = rest.first().and_then(|name| self.0[module].brought.get(name));
            match origin {
                Some(origin) if origin[..] != path[..=length] => path = [origin, &rest[1..]].concat(),
                _ => return Some(module.to_vec()),
            }
        }
        None
    }
}

fn declares(code: &str, kind: &str, name: &str) -> bool {
    let mut found = code.match_indices(kind).map(|(at, _)| &code[at + kind.len()..]);
    found.any(|rest| rest.strip_prefix(name).is_some_and(|rest| !rest.starts_with(is_name)))
}

/// The paths of a `use` tree, each with the name that it gets.
fn leaves(tree: &str) -> Vec<(Names, String)> {
    let tree = tree.trim();
    let Some(open) = tree.find('{') else {
        let (path, name) = tree.split_once(" as ").unwrap_or((tree, ""));
        let path: Names = path.split("::").map(|name| name.trim().to_owned()).filter(|name| !name.is_empty()).collect();
        let path = if path.len() > 1 && path.last().is_some_and(|last| last == "self") {
            path[..path.len() - 1].to_vec()
        } else {
            path
        };
        let name = if name.is_empty() { path.last().cloned().unwrap_or_default() } else { name.trim().to_owned() };
        return vec![(path, name)];
    };
    let inner = tree[open + 1..].trim_end().strip_suffix('}').unwrap_or_default();
    let mut parts = vec![String::new()];
    let mut depth = 0;
    for c in inner.chars() {
        depth += i32::from(c == '{') - i32::from(c == '}');
        if c == ',' && depth == 0 {
            parts.push(String::new());
        } else {
            parts.last_mut().unwrap().push(c);
        }
    }
    let prefix = &tree[..open];
    parts
        .iter()
        .filter(|part| !part.trim().is_empty())
        .flat_map(|part| leaves(&format!("{prefix}{}", part.trim())))
        .collect()
}
