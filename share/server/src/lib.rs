//! The share daemon: keeps sealed files and gives each of them away once. It has no key and depends
//! on nothing that opens.

#![forbid(unsafe_code)]

pub mod http;
pub mod limiter;
pub mod metrics;
pub mod store;

/// Random numbers of tests, the same again for the same seed.
#[cfg(test)]
pub(crate) mod seeded {
    /// Numbers from a seed (splitmix64).
    pub(crate) fn numbers(seed: u64) -> impl FnMut() -> u64 {
        let mut state = seed;
        move || {
            state = state.wrapping_add(0x9E37_79B9_7F4A_7C15);
            let mut z = (state ^ (state >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
            z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
            z ^ (z >> 31)
        }
    }

    /// The seed that `SEED` names, or another one in each run. It is printed.
    pub(crate) fn fresh_seed() -> u64 {
        let seed = std::env::var("SEED")
            .ok()
            .map_or_else(|| u64::from(std::process::id()), |seed| seed.parse().expect("a number"));
        eprintln!("SEED={seed}");
        seed
    }

    /// Numbers from that seed.
    pub(crate) fn fresh_numbers() -> impl FnMut() -> usize {
        let mut next = numbers(fresh_seed());
        move || next() as usize
    }
}
