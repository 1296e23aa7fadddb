//! Replays the inputs of a target, then runs it on mutated ones. Without libFuzzer's coverage
//! counters and the sanitizer it is some fifty times as fast: for the tests of each change, and for
//! campaigns of hundreds of millions on the corpus that libFuzzer has found.

use std::cell::RefCell;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use fastrand::Rng;

/// As libFuzzer is told by tests/fuzz.sh.
const LONGEST_INPUT: usize = 4096;
const LONGEST_RUN: Duration = Duration::from_secs(1);
const LARGEST_RUN_KIB: u64 = 256 << 10;
/// Values at which lengths, counts and signs turn over.
const EDGES: [u64; 12] = [0, 1, 0x7f, 0x80, 0xff, 0x7fff, 0x8000, 0xffff, 0x7fff_ffff, 0xffff_ffff, 1 << 63, u64::MAX];

thread_local! {
    static INPUT: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
}

/// Every file of the directories.
fn corpus(directories: &[PathBuf]) -> Vec<Vec<u8>> {
    let mut inputs = Vec::new();
    for directory in directories {
        for entry in fs::read_dir(directory).expect("a directory of inputs") {
            let input = fs::read(entry.expect("an input").path()).expect("an input is read");
            if input.len() <= LONGEST_INPUT {
                inputs.push(input);
            }
        }
    }
    assert!(!inputs.is_empty(), "there are no inputs of at most {LONGEST_INPUT} bytes");
    inputs
}

/// A place within `length` bytes, or their end.
fn part(random: &mut Rng, length: usize) -> std::ops::Range<usize> {
    let start = random.usize(..=length);
    start..start + random.usize(..=(length - start).min(64))
}

fn change(input: &mut Vec<u8>, others: &[Vec<u8>], random: &mut Rng) {
    if input.is_empty() {
        input.push(random.u8(..));
        return;
    }
    let place = random.usize(..input.len());
    match random.u8(..10) {
        0 | 1 => input[place] ^= 1 << random.u8(..8),
        2 => input[place] = random.u8(..),
        3 | 4 => {
            // A number of 1, 2, 4 or 8 bytes: an edge, or a neighbour of what stands there.
            let width = (1 << random.usize(..4)).min(input.len() - place);
            let mut bytes = [0; 8];
            bytes[..width].copy_from_slice(&input[place..place + width]);
            let near = u64::from_le_bytes(bytes).wrapping_add(random.u64(..33)).wrapping_sub(16);
            let value = if random.bool() { EDGES[random.usize(..EDGES.len())] } else { near };
            input[place..place + width].copy_from_slice(&value.to_le_bytes()[..width]);
        }
        5 => input.truncate(place),
        6 => {
            let gone = part(random, input.len());
            input.drain(gone);
        }
        7 => {
            let more: Vec<u8> = (0..random.usize(1..=16)).map(|_| random.u8(..)).collect();
            input.splice(place..place, more);
        }
        8 => {
            let from = part(random, input.len());
            let copied = input[from].to_vec();
            let end = (place + copied.len()).min(input.len());
            input.splice(place..end, copied);
        }
        _ => {
            let other = &others[random.usize(..others.len())];
            let from = part(random, other.len());
            let end = (place + from.len()).min(input.len());
            input.splice(place..end, other[from].iter().copied());
        }
    }
    input.truncate(LONGEST_INPUT);
}

/// When a run ends.
#[derive(Clone, Copy)]
pub(crate) enum Limit {
    Executions(u64),
    Time(Duration),
}

/// Largest resident memory of this process so far, in KiB.
fn peak_memory() -> u64 {
    let status = fs::read_to_string("/proc/self/status").expect("/proc is mounted");
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).expect("the kernel reports VmHWM");
    line.trim().trim_end_matches(" kB").parse().expect("VmHWM is a number")
}

/// Runs `entry` on the input that the thread has. An input that takes over a second is a finding.
fn execute(entry: fn(&[u8]), finding: &Path) {
    let timed = || {
        let began = Instant::now();
        INPUT.with_borrow(|input| entry(input));
        began.elapsed()
    };
    // Twice: the process may have been stopped meanwhile.
    if timed() > LONGEST_RUN && timed() > LONGEST_RUN {
        let _ = INPUT.with_borrow(|input| fs::write(finding, input));
        panic!("an input took over {LONGEST_RUN:?}");
    }
}

/// Replays every input of the directories, then mutates them in one to four places until the limit.
/// A panic leaves its input in `findings`.
#[allow(clippy::print_stdout)] // the result
pub(crate) fn run(name: &str, entry: fn(&[u8]), limit: Limit, seed: u64, directories: &[PathBuf], findings: &Path) {
    let inputs = corpus(directories);
    let mut random = Rng::with_seed(seed);
    let finding = findings.join(format!("{name}-mutated-{seed}"));
    let kept = finding.clone();
    let hook = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        let _ = INPUT.with_borrow(|input| fs::write(&kept, input));
        hook(panic);
    }));
    let began = Instant::now();
    for replayed in &inputs {
        INPUT.set(replayed.clone());
        execute(entry, &finding);
    }
    let mut executions = 0;
    while match limit {
        Limit::Executions(most) => executions < most,
        Limit::Time(most) => began.elapsed() < most,
    } {
        INPUT.with_borrow_mut(|input| {
            input.clear();
            input.extend_from_slice(&inputs[random.usize(..inputs.len())]);
            for _ in 0..random.u8(1..=4) {
                change(input, &inputs, &mut random);
            }
        });
        execute(entry, &finding);
        executions += 1;
    }
    let (inputs, seconds, memory) = (inputs.len(), began.elapsed().as_secs_f64(), peak_memory());
    assert!(memory <= LARGEST_RUN_KIB, "the inputs of seed {seed} took {memory} KiB");
    println!("{executions} executions of {inputs} inputs changed, seed {seed}, in {seconds:.0} s");
}
