//! Backups that cannot be updated in place: a new file replaces them, unless they have several hard
//! links.

use std::sync::Arc;

use super::super::{Archive, BackupDestination};
use super::backups::{OnHost, on};
use super::sample::{expected, put};
use crate::error::{Error, Refusal};
use crate::format::{RING_SLOTS, ROOT_INO};
use crate::storage::Storage;

/// Before the recorded history of the archive it is unknown what has changed since, and whether the
/// backup has diverged.
#[test]
fn a_backup_from_before_the_history_is_made_anew() {
    let host = OnHost::new();
    let write = |name: &str, forget: bool| {
        let archive = host.open("a.lbx", false);
        let fs = archive.file_system();
        put(fs, ROOT_INO, name.as_bytes(), name.as_bytes());
        fs.make_durable().unwrap();
        if forget {
            fs.volume.forget_history().unwrap();
            // The ring records the previous sessions for this number of commits.
            for n in 0..=RING_SLOTS {
                put(fs, ROOT_INO, format!("{name}{n}").as_bytes(), b"1");
                fs.make_durable().unwrap();
            }
        }
        let now = expected(fs);
        archive.close().unwrap();
        now
    };
    let first = write("first", false);
    assert!(host.back_up() == first);
    let later = write("later", true);
    let (path, link) = (host.path("backup.lbx"), host.path("link.lbx"));
    let before = std::fs::read(&path).unwrap();
    let unchanged = || assert!(std::fs::read(&path).unwrap() == before);
    {
        let backed = Archive::open_for_backup(&host.path("a.lbx"), &host.key, &host.seen).unwrap();
        let moment = backed.backups().pin().unwrap();
        let destination = BackupDestination::open(&path, true).unwrap();
        let there: Arc<dyn Storage> = destination.existing().unwrap().clone();
        assert_eq!(moment.bring_up_to_date(&there, &mut on).unwrap(), None);
    }
    unchanged();
    // The new file would have one of the names, and the old version the others.
    std::fs::hard_link(&path, &link).unwrap();
    let count = || std::fs::read_dir(path.parent().unwrap()).unwrap().count();
    let names = count();
    let refused = BackupDestination::open(&path, true).unwrap().create_new().map(drop);
    let why = |refused| match refused {
        Err(Error::Refused(Refusal::Destination { why })) => why,
        other => panic!("{other:?}"),
    };
    assert!(why(refused).contains("several hard links"));
    // Another hard link is created meanwhile.
    std::fs::remove_file(&link).unwrap();
    let destination = BackupDestination::open(&path, true).unwrap();
    let beside = destination.create_new().unwrap();
    std::fs::hard_link(&path, &link).unwrap();
    assert!(why(destination.take(beside)).contains("several hard links"));
    assert_eq!(count(), names);
    unchanged();
    std::fs::remove_file(&link).unwrap();
    assert!(host.back_up() == later);
    // From here on it is a regular backup.
    let last = write("last", false);
    assert!(host.back_up() == last);
}
