//! What rewrites an archive that lives at an address as a whole, or puts a part of it back; and what is saved of a damaged one there.

use std::fs;
use std::path::PathBuf;

use crate::living_elsewhere::{CREATE, Home, homes};
use crate::support::{names, noise};

/// An archive with a file that is gone, a snapshot that shows another one, and files that are there.
fn filled(home: &Home) {
    home.create();
    let place = &home.place;
    fs::create_dir(place.path("tree")).unwrap();
    fs::write(place.path("gone"), noise(9 << 20)).unwrap();
    fs::write(place.path("kept"), noise(1 << 20)).unwrap();
    for number in 0..40 {
        fs::write(place.path(format!("tree/{number}")), format!("{number}")).unwrap();
    }
    // Each in objects of its own.
    home.good(&["add", &home.address, "tree"]);
    home.good(&["add", &home.address, "gone", "kept"]);
    home.good(&["snapshot", "create", &home.address, "before"]);
    home.good(&["rm", &home.within("/kept")]);
    home.good(&["snapshot", "create", &home.address, "later"]);
    home.good(&["snapshot", "rm", &home.address, "before"]);
    home.good(&["mkdir", &home.within("/empty")]);
}

#[test]
fn a_header_is_saved_and_put_back_where_the_archive_lives() {
    for home in homes() {
        let (place, address) = (&home.place, home.address.as_str());
        home.create();
        home.good(&["header", "backup", address, "saved"]);
        assert_eq!(fs::metadata(place.path("saved")).unwrap().len(), 132 << 10);
        place.secret("new", "another one");
        home.good(&["passwd", address, "--new-passfile=new", CREATE[0], CREATE[1], CREATE[2]]);
        let older = home.run(&["header", "restore", address, "saved"]);
        assert_eq!(older.code, 16, "{}", older.complaint);
        let told = home.good(&["header", "restore", address, "saved", "--accept-older"]);
        assert!(told.contains("open the archive again"), "{told}");
        home.good(&["ls", address]);
        assert_eq!(home.run(&["ls", address, "--passfile=new"]).code, 10);
        assert!(home.good(&["check", "--repair-header", address]).contains("sound"));
        home.good(&["mkdir", &home.within("/more")]);
    }
}

fn segments(home: &Home) -> Vec<PathBuf> {
    let incarnations = fs::read_dir(home.place.path("objects")).unwrap().map(|entry| entry.unwrap().path());
    let found = incarnations.filter_map(|path| fs::read_dir(path.join("seg")).ok()).flatten();
    found.map(|entry| entry.unwrap().path()).collect()
}

#[test]
fn what_is_whole_of_an_archive_is_rescued_from_a_store_that_lacks_objects() {
    let home = Home::directory();
    filled(&home);
    home.good(&["rescue", &home.address, "--to=all"]);
    assert_eq!(names(&home.place.path("all")), ["empty", "gone", "tree"]);
    assert!(fs::read(home.place.path("all/gone")).unwrap() == noise(9 << 20));
    // The largest one has the large file.
    let largest = segments(&home).into_iter().max_by_key(|path| fs::metadata(path).unwrap().len()).unwrap();
    let object = fs::read(&largest).unwrap();
    for kept in [None, Some(object.len() / 2)] {
        match kept {
            None => fs::remove_file(&largest).unwrap(),
            Some(length) => fs::write(&largest, &object[..length]).unwrap(),
        }
        let to = format!("out{kept:?}");
        let rescued = home.run(&["rescue", &home.address, "--to", &to, "--partial"]);
        assert_eq!(rescued.code, 12, "{}", rescued.complaint);
        assert!(rescued.complaint.contains("is missing") || kept.is_some(), "{}", rescued.complaint);
        let there: Vec<String> =
            names(&home.place.path(&to)).into_iter().map(|name| name.into_string().unwrap()).collect();
        assert!(there.contains(&"tree".to_owned()) && !there.contains(&"gone".to_owned()), "{there:?}");
        assert_eq!(fs::read(home.place.path(format!("{to}/tree/7"))).unwrap(), b"7");
    }
    fs::write(&largest, &object).unwrap();
    home.good(&["rescue", &home.address, "--to=again"]);
}

#[test]
fn a_store_that_does_not_answer_lost_nothing_that_is_rescued() {
    let home = Home::bucket();
    filled(&home);
    // It is past the opening, which reads no more than the start.
    *home.store.answers.lock().unwrap() = Some(9);
    let ended = home.run(&["rescue", &home.address, "--to=lost", "--partial"]);
    *home.store.answers.lock().unwrap() = None;
    assert!(ended.code == 2 && ended.complaint.contains("does not answer"), "{ended:?}");
    assert!(ended.out.is_empty() && !home.place.path("lost/partial").exists());
    home.good(&["rescue", &home.address, "--to=all"]);
}
