//! Power cuts and process deaths under a file-system workload: what comes back is the tree as it was at a commit no older than the last fsync
//! that returned, checks as sound in structure, counts and space, and its unlinked files are reclaimed.

use std::collections::BTreeMap;
use std::ops::ControlFlow;
use std::sync::Arc;

use parking_lot::Mutex;

use super::support::{create_on, open_on};
use crate::env::SeededEnvironment;
use crate::format::{Generation, Ino, ROOT_INO};
use crate::fs::{Creator, FileSystem, RenameMode, SetAttributes, XattrMode, mode};
use crate::storage::simulated::{OpKind, SimulatedStorage};

const OWNER: Creator = Creator { uid: 1000, gid: 1000, umask: None };

/// Everything that a user can see of an object.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Seen {
    mode: u32,
    links: u32,
    size: u64,
    content: Vec<u8>,
    xattrs: Vec<u8>,
}

type Listing = BTreeMap<Vec<u8>, Seen>;

fn list(fs: &FileSystem, directory: Ino, path: &[u8], into: &mut Listing) {
    let mut children = Vec::new();
    fs.list_directory(directory, 2, u64::MAX, false, &mut |entry, _| {
        children.push((entry.ino, entry.name.to_vec()));
        ControlFlow::Continue(())
    })
    .unwrap();
    for (ino, name) in children {
        let attributes = fs.attributes(ino).unwrap();
        let path = [path, b"/", &name].concat();
        let content = match attributes.mode & mode::TYPE {
            mode::REGULAR => fs.read(ino, 0, attributes.size as usize).unwrap(),
            mode::SYMLINK => fs.read_link(ino).unwrap(),
            _ => Vec::new(),
        };
        let is_directory = attributes.mode & mode::TYPE == mode::DIRECTORY;
        let seen = Seen {
            mode: attributes.mode,
            links: attributes.links,
            size: if is_directory { 0 } else { attributes.size },
            content,
            xattrs: fs.list_xattrs(ino).unwrap(),
        };
        into.insert(path.clone(), seen);
        if is_directory {
            list(fs, ino, &path, into);
        }
    }
}

fn listing(fs: &FileSystem) -> Listing {
    let mut all = Listing::new();
    list(fs, ROOT_INO, b"", &mut all);
    all
}

struct Image {
    storage: Arc<SimulatedStorage>,
    acknowledged: Generation,
}

struct Run {
    environment: Arc<SeededEnvironment>,
    states: BTreeMap<Generation, Listing>,
    images: Vec<Image>,
}

fn some_name(environment: &SeededEnvironment) -> Vec<u8> {
    format!("n{}", environment.next_u64() % 7).into_bytes()
}

/// One random operation; refusals are fine, they are part of the workload.
fn step(fs: &FileSystem, environment: &SeededEnvironment, directories: &mut Vec<Ino>, open: &mut Vec<Ino>) {
    let dice = |bound: u64| environment.next_u64() % bound;
    let directory = directories[dice(directories.len() as u64) as usize];
    let name = some_name(environment);
    let file = fs.lookup(directory, &name).ok().filter(|a| a.mode & mode::TYPE == mode::REGULAR).map(|a| a.ino);
    match dice(16) {
        0..3 => {
            if let Ok(made) = fs.make_node(directory, &name, mode::REGULAR | 0o640, 0, OWNER) {
                let length = [10, 300, 5000, 200_000][dice(4) as usize];
                fs.write(made.ino, 0, &vec![dice(256) as u8; length]).unwrap();
            }
        }
        3..6 => {
            if let Some(ino) = file {
                let length = 1 + dice(60_000) as usize;
                fs.write(ino, dice(300_000), &vec![dice(256) as u8; length]).unwrap();
            }
        }
        6 => {
            if let Some(ino) = file {
                let set = SetAttributes { size: Some(dice(300_000)), ..SetAttributes::default() };
                fs.set_attributes(ino, &set).unwrap();
            }
        }
        7..9 => {
            if let Ok(made) = fs.make_directory(directory, &name, 0o755, OWNER) {
                directories.push(made.ino);
            }
        }
        9 => {
            let _ = fs.make_symlink(directory, &name, b"../somewhere", OWNER);
        }
        10 => {
            // Unlinked while open: the content must go after the crash.
            if let Some(ino) = file {
                if open.len() < 4 {
                    fs.open(ino).unwrap();
                    open.push(ino);
                }
                fs.unlink(directory, &name).unwrap();
            }
        }
        11 => {
            if let Some(ino) = open.pop() {
                fs.release(ino).unwrap();
            }
        }
        12 => {
            if let Ok(target) = fs.lookup(directory, &name)
                && fs.remove_directory(directory, &name).is_ok()
            {
                directories.retain(|ino| *ino != target.ino);
            }
        }
        13 => {
            let to = directories[dice(directories.len() as u64) as usize];
            let victim = fs.lookup(to, &some_name(environment)).ok();
            let new_name = some_name(environment);
            let replaced = fs.lookup(to, &new_name).ok().or(victim);
            if fs.rename(directory, &name, to, &new_name, RenameMode::Replace).is_ok()
                && let Some(gone) = replaced
                && fs.attributes(gone.ino).is_err()
            {
                directories.retain(|ino| *ino != gone.ino);
            }
        }
        14 => {
            if let Some(ino) = file {
                let to = directories[dice(directories.len() as u64) as usize];
                let _ = fs.link(ino, to, &some_name(environment));
            }
        }
        _ => {
            if let Some(ino) = file {
                let value = vec![7; [5, 900, 9000][dice(3) as usize]];
                fs.set_xattr(ino, b"user.note", &value, XattrMode::Set).unwrap();
            }
        }
    }
}

fn workload(seed: u64, steps: u64, wanted: usize) -> Run {
    println!("seed {seed}");
    let environment = Arc::new(SeededEnvironment::new(seed));
    let storage = SimulatedStorage::new();
    let fs = create_on(storage.clone(), environment.clone());
    let mut states = BTreeMap::from([(fs.volume.durable().generation, listing(&fs))]);
    let acknowledged = Arc::new(Mutex::new(fs.volume.durable().generation));
    let images: Arc<Mutex<Vec<Image>>> = Arc::default();
    let hook = {
        let (weak, images, acknowledged) = (Arc::downgrade(&storage), images.clone(), acknowledged.clone());
        let chance = SeededEnvironment::new(seed ^ 0xFEED);
        move |_: &OpKind| {
            let Some(storage) = weak.upgrade() else { return };
            if !chance.next_u64().is_multiple_of(5) || images.lock().len() >= wanted {
                return;
            }
            let crashed = match chance.next_u64() % 4 {
                0 => storage.process_death(),
                _ => storage.crash_random(&mut || chance.next_u64()),
            };
            images.lock().push(Image { storage: crashed, acknowledged: *acknowledged.lock() });
        }
    };
    storage.on_op(Box::new(hook));
    let mut directories = vec![ROOT_INO];
    let mut open = Vec::new();
    for n in 0..steps {
        step(&fs, &environment, &mut directories, &mut open);
        if n % 6 == 5 {
            let seen = listing(&fs);
            // It may be found although its acknowledgement was not lived to see.
            for ahead in 1..=3 {
                states.insert(Generation(fs.volume.durable().generation.0 + ahead), seen.clone());
            }
            fs.sync().unwrap();
            let durable = fs.volume.durable().generation;
            states.insert(durable, seen);
            *acknowledged.lock() = durable;
        }
    }
    storage.on_op(Box::new(|_| {}));
    let images = std::mem::take(&mut *images.lock());
    Run { environment, states, images }
}

#[test]
fn every_crash_gives_the_tree_of_a_commit_no_older_than_the_last_fsync() {
    for seed in 1..=5 {
        let run = workload(seed, 160, 40);
        assert!(run.images.len() >= 20, "only {} images", run.images.len());
        for image in &run.images {
            let fs = open_on(image.storage.clone(), run.environment.clone());
            let generation = fs.volume.durable().generation;
            assert!(generation >= image.acknowledged, "{} acknowledged, {} found", image.acknowledged.0, generation.0);
            let (_, expected) = run.states.range(..=generation).next_back().expect("a commit that was made");
            assert_eq!(&listing(&fs), expected, "tree of commit {}", generation.0);
            while fs.maintain().unwrap() {}
            assert_eq!(&listing(&fs), expected, "after reclaim");
            let (_, findings) = fs.check_structure(true, &mut |_, _| {}).unwrap();
            assert!(findings.is_empty(), "{findings:?}");
            let findings = fs.volume.check_space(true, &mut |_, _| {}).unwrap();
            assert!(findings.is_empty(), "{findings:?}");
            // Every inode in use is reachable: what was unlinked while open is gone.
            let reachable: std::collections::BTreeSet<Ino> = inodes(&fs, ROOT_INO);
            assert_eq!(fs.volume.state().inodes(), reachable.len() as u64);
        }
    }
}

fn inodes(fs: &FileSystem, directory: Ino) -> std::collections::BTreeSet<Ino> {
    let mut all = std::collections::BTreeSet::from([directory]);
    let mut below = Vec::new();
    fs.list_directory(directory, 2, u64::MAX, false, &mut |entry, _| {
        below.push((entry.ino, entry.file_type));
        ControlFlow::Continue(())
    })
    .unwrap();
    for (ino, file_type) in below {
        all.insert(ino);
        if u32::from(file_type) == mode::DIRECTORY >> 12 {
            all.extend(inodes(fs, ino));
        }
    }
    all
}
