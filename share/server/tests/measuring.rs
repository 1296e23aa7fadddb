//! The measurements run to their end and count what they asked; what they measure is not judged
//! here.

#![allow(clippy::unwrap_used)] // a failed step fails the test

use std::collections::BTreeMap;
use std::process::Command;

fn measure(arguments: &[&str]) -> BTreeMap<String, String> {
    let output = Command::new(env!("CARGO_BIN_EXE_lockbox-share")).arg("bench").args(arguments).output().unwrap();
    assert!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
    let text = String::from_utf8(output.stdout).unwrap();
    text.lines().map(|line| line.split_once('=').unwrap()).map(|(name, value)| (name.into(), value.into())).collect()
}

#[test]
fn each_measurement_counts_what_it_asked_for() {
    for (what, more) in [
        ("http", &["--payload-bytes", "100"][..]),
        ("http-fetch", &["--preload-shares", "200"]),
        ("http-flow", &["--keep-alive"]),
        ("http-get", &["--keep-alive", "--rate", "1000"]),
        ("http-batch", &["--no-floor"]),
    ] {
        let all = [&[what, "--requests", "60", "--concurrency", "8", "--durability", "none"], more].concat();
        let told = measure(&all);
        assert_eq!((told["done"].as_str(), told["failed"].as_str()), ("60", "0"), "{what}: {told:?}");
        assert!(told["per_second"].parse::<f64>().unwrap() > 0.0, "{what}");
        let beside_floor = matches!(what, "http" | "http-fetch");
        assert_eq!(told.contains_key("part_of_floor"), beside_floor, "{what}");
        assert_eq!(told.contains_key("times_singly"), what == "http-batch", "{what}");
    }
    let told = measure(&["http-range", "--requests", "30", "--file-mib", "2", "--range-bytes", "70000"]);
    assert_eq!(told["done"], "30");
    let told = measure(&["store", "--requests", "500", "--durability", "none"]);
    assert!(told.len() > 5, "{told:?}");
}
