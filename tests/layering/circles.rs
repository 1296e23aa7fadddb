//! Finds circles between the files of one module: files that need each other cannot be read, tested or changed one after the other.
//!
//! A file needs another one when it names something of it, by whatever path: what a `mod.rs` passes on is followed to where it stands. The
//! `mod.rs` of a directory and what lies in it are one room, so neither counts as needing the other.
//!
//! What cannot be seen: methods that one file gives to a type of another one (`impl` blocks of one type in many files call each other
//! without naming a file), and what macros write.

use std::collections::{BTreeMap, BTreeSet};

use crate::paths::Modules;

/// The circles of a crate: the directory in which each lies, and the names of those that are in it.
pub(crate) fn circles(root: &str, modules: &Modules) -> Vec<String> {
    // By directory: which of its members need which others.
    let mut rooms: BTreeMap<Vec<String>, BTreeMap<String, BTreeSet<String>>> = BTreeMap::new();
    for (at, _) in modules.all() {
        for path in modules.named(at) {
            let Some(other) = modules.home(&path) else { continue };
            let same = at.iter().zip(&other).take_while(|(one, other)| one == other).count();
            if let (Some(one), Some(other)) = (at.get(same), other.get(same)) {
                rooms.entry(at[..same].to_vec()).or_default().entry(one.clone()).or_default().insert(other.clone());
            }
        }
    }
    let directory = |room: &[String]| [&[root.to_owned()], room].concat().join("/");
    let named = |(room, needs): (&Vec<String>, &_)| {
        let directory = directory(room);
        in_circles(needs).into_iter().map(move |circle| format!("{directory}: {circle}")).collect::<Vec<_>>()
    };
    rooms.iter().flat_map(named).collect()
}

/// Sets of members of which each needs each other one, directly or by way of others.
fn in_circles(needs: &BTreeMap<String, BTreeSet<String>>) -> Vec<String> {
    let reached: BTreeMap<&str, BTreeSet<&str>> =
        needs.keys().map(|from| (from.as_str(), reached(needs, from))).collect();
    let mut circles = BTreeSet::new();
    for (from, reaches) in &reached {
        let back = |to: &&str| reached.get(to).is_some_and(|back| back.contains(from));
        let circle: Vec<&str> = reaches.iter().copied().filter(back).collect();
        if circle.len() > 1 {
            circles.insert(circle.join(" "));
        }
    }
    circles.into_iter().collect()
}

fn reached<'a>(needs: &'a BTreeMap<String, BTreeSet<String>>, from: &str) -> BTreeSet<&'a str> {
    let mut reached = BTreeSet::new();
    let mut waiting: Vec<&str> = needs.get(from).into_iter().flatten().map(String::as_str).collect();
    while let Some(next) = waiting.pop() {
        if reached.insert(next) {
            waiting.extend(needs.get(next).into_iter().flatten().map(String::as_str));
        }
    }
    reached
}

#[test]
fn circles_are_found_by_whatever_path_and_others_are_none() {
    let found = |files: &[(&str, &str)]| {
        let sources = files.iter().map(|(path, code)| (path.into(), (*code).to_owned())).collect();
        circles("src", &Modules::of("src", &sources))
    };
    let room =
        ("src/room/mod.rs", "mod a; mod b; pub(crate) use b::{Thing as Other, f}; struct Own; fn g() { a::h() }");
    let a = "use super::Own; use super::Other;";
    assert_eq!(found(&[room, ("src/room/a.rs", a), ("src/room/b.rs", "use super::Own;")]), [""; 0]);
    for b in ["use super::a::X;", "use super::{Own, a::{X, Y}};", "fn f() { crate::room::a::h() }", "use super::a;"] {
        assert_eq!(found(&[room, ("src/room/a.rs", a), ("src/room/b.rs", b)]), ["src/room: a b"], "{b}");
    }
    for b in ["// use super::a::X;", "#[cfg(test)]\nmod tests { use super::super::a::X; }", "use other::a;"] {
        assert_eq!(found(&[room, ("src/room/a.rs", a), ("src/room/b.rs", b)]), [""; 0], "{b}");
    }
    let longer = ("src/room/c/deep.rs", "use super::super::a::X;");
    let (b, c) = (("src/room/b.rs", "use super::c::Y;"), ("src/room/c/mod.rs", "mod deep; struct Y;"));
    assert_eq!(found(&[room, ("src/room/a.rs", a), b, c, longer]), ["src/room: a b c"]);
}
