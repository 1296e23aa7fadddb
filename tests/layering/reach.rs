//! Finds calls that go through one layer to another one that the caller's row of the import table does not have: a value of a layer's type that
//! comes out of another layer is that layer all the same.
//!
//! A method or field of the library is a way to a layer when its type names one of that layer's own types; whoever is not allowed to import the
//! layer may not take the way. Layers that only hold values (`VOCABULARY`) can be reached by everybody.
//!
//! What cannot be seen: which type a method is called on. So a name counts only when every method and field of that name in the library leads to
//! the same layer, and one does not count that the caller's own module declares, or for a program any crate but the library. Neither are types behind generics, closures and type aliases of
//! a layer that the signature does not name, nor what macros write.

use std::collections::{BTreeMap, BTreeSet};

use crate::Table;
use crate::paths::{Modules, Names};
use crate::text::is_name;

/// Layers whose types are facts without behaviour: errors, numbers and times.
const VOCABULARY: [&str; 3] = ["error", "env", "format"];

/// Every way through to a layer that the modules of `callers` take and may not: the library, or all crates of one row.
pub(crate) fn ways_taken(
    table: &Table,
    library: &Modules,
    callers: &Modules,
    row: &str,
    elsewhere: &BTreeSet<String>,
) -> BTreeSet<String> {
    let ways = ways(library);
    let mut taken_ways = BTreeSet::new();
    let own: BTreeSet<(&str, String)> =
        callers.all().flat_map(|(at, code)| names_of(code).map(move |name| (module(row, at), name))).collect();
    for (at, code) in callers.all() {
        let module = module(row, at);
        let Some(allowed) = table.get(module) else { continue };
        for name in taken(code) {
            if elsewhere.contains(name) || own.contains(&(module, name.to_owned())) {
                continue;
            }
            let Some(layers) = ways.get(name).filter(|layers| layers.is_disjoint(allowed)) else { continue };
            if !layers.contains(module) {
                let layers: Vec<&str> = layers.iter().map(String::as_str).collect();
                taken_ways.insert(format!("{module}: '.{name}' leads to {}", layers.join(" or ")));
            }
        }
    }
    taken_ways
}

/// Names of the methods and fields of all modules.
pub(crate) fn names(modules: &Modules) -> BTreeSet<String> {
    modules.all().flat_map(|(_, code)| names_of(code)).collect()
}

fn names_of(code: &str) -> impl Iterator<Item = String> {
    declared(code).into_iter().map(|(name, _)| name)
}

/// The row of a module.
fn module<'a>(row: &'a str, at: &'a [String]) -> &'a str {
    if row.is_empty() { at.first().map_or("", String::as_str) } else { row }
}

/// Names of methods and fields, and the layers to which they lead; a name that leads to the caller's own or to none is left out.
fn ways(library: &Modules) -> BTreeMap<String, BTreeSet<String>> {
    let mut ways: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    let mut plain = BTreeSet::new();
    for (at, code) in library.all() {
        let Some(own) = at.first() else { continue };
        for (name, types) in declared(code) {
            let layers: BTreeSet<String> = identifiers(types)
                .filter_map(|word| library.origin(at, word))
                .filter_map(|path: Names| path.first().cloned())
                .filter(|layer| !VOCABULARY.contains(&layer.as_str()))
                .collect();
            match layers.iter().any(|layer| layer != own) {
                true => ways.entry(name).or_default().extend(layers),
                false => drop(plain.insert(name)),
            }
        }
    }
    ways.retain(|name, _| !plain.contains(name));
    ways
}

/// Methods with their results, and fields with their types.
fn declared(code: &str) -> Vec<(String, &str)> {
    let mut declared = Vec::new();
    for (start, _) in code.match_indices("fn ") {
        let rest = &code[start + 3..];
        let name: String = rest.chars().take_while(|&c| is_name(c)).collect();
        let signature = &rest[..rest.find(['{', ';']).unwrap_or(rest.len())];
        let Some((parameters, result)) = signature.split_once("->") else {
            declared.push((name, ""));
            continue;
        };
        let receiver =
            parameters.split_once('(').map_or("", |(_, inner)| inner).split([',', ')']).next().unwrap_or_default();
        if receiver.trim_start_matches(['&', ' ', '\n']).split_whitespace().last() == Some("self") {
            declared.push((name, result.split("where").next().unwrap_or_default()));
        }
    }
    for (start, _) in code.match_indices("struct ") {
        let rest = &code[start..];
        let Some(open) = rest.find(['{', ';', '(']).filter(|&open| rest[open..].starts_with('{')) else { continue };
        let body = &rest[open + 1..open + rest[open..].find('}').unwrap_or(1)];
        for field in body.split(",\n") {
            if let Some((name, types)) = field.split_once(": ") {
                let name = name.trim_end().rsplit(|c| !is_name(c)).next().unwrap_or_default();
                declared.push((name.to_owned(), types));
            }
        }
    }
    declared
}

/// Names behind a dot.
fn taken(code: &str) -> BTreeSet<&str> {
    let behind = code.match_indices('.').map(|(at, _)| &code[at + 1..]);
    let names = behind.map(|rest| &rest[..rest.find(|c| !is_name(c)).unwrap_or(rest.len())]);
    names.filter(|name| name.starts_with(|c: char| c.is_lowercase())).collect()
}

fn identifiers(text: &str) -> impl Iterator<Item = &str> {
    text.split(|c| !is_name(c)).filter(|word| word.starts_with(char::is_uppercase))
}

#[test]
fn ways_through_a_layer_are_found() {
    let table =
        "| module | may import |\n|---|---|\n| `low` | nothing |\n| `middle` | `low` |\n| `high` | `middle` |\n";
    let table = crate::parse_table(table);
    let taken = |middle: &str, high: &str| {
        let low = ("src/low.rs".into(), "pub struct Deep; impl Deep { fn dig(&self) {} }".to_owned());
        let middle = ("src/middle.rs".into(), middle.to_owned());
        let library = Modules::of("src", &[low, middle, ("src/high.rs".into(), high.to_owned())].into());
        ways_taken(&table, &library, &library, "", &BTreeSet::new()).into_iter().collect::<Vec<_>>()
    };
    let method = "use crate::low::Deep; pub struct M; impl M { pub fn deep(&self) -> &Deep { todo } }";
    let field = "use crate::low; use low::Deep; pub struct M { pub deep: Arc<crate::low::Deep>,\n }";
    assert_eq!(taken(method, "fn f(m: &M) { m.deep().dig() }"), ["high: '.deep' leads to low"]);
    assert_eq!(taken(method, "fn f(m: &M) { m.other().dig() }"), [""; 0]);
    assert_eq!(taken(method, "struct H; impl H { fn deep(&self) {} } fn f(h: &H) { h.deep() }"), [""; 0]);
    assert_eq!(taken("use crate::low::Deep; struct M { deep: Deep }", "fn f(m: &M) { m.deep.dig() }").len(), 1);
    assert_eq!(taken(field, "fn f(m: &M) { m.deep.dig() }"), [""; 0], "a whole path in a signature is not followed");
}
