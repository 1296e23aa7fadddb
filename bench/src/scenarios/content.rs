//! Seeded content: incompressible noise, compressible text, and the repeated byte of published
//! figures.

/// xorshift64*, so that every run measures the same bytes.
pub(crate) struct Seeded(u64);

impl Seeded {
    pub(crate) fn new(seed: u64) -> Seeded {
        Seeded(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    pub(crate) fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    pub(crate) fn below(&mut self, bound: u64) -> u64 {
        self.next() % bound
    }
}

pub(crate) fn noise(seed: u64, length: usize) -> Vec<u8> {
    let mut random = Seeded::new(seed);
    let mut out = Vec::with_capacity(length + 8);
    while out.len() < length {
        out.extend_from_slice(&random.next().to_le_bytes());
    }
    out.truncate(length);
    out
}

/// Words of two to nine letters out of 4,096, the first ones most often, in lines: zstd -1 makes
/// about a third of it.
pub(crate) fn text(seed: u64, length: usize) -> Vec<u8> {
    let mut random = Seeded::new(seed);
    let mut out = Vec::with_capacity(length + 16);
    let mut column = 0;
    while out.len() < length {
        let bits = 1 + random.below(12);
        let number = random.below(1 << bits);
        let mut letters = Seeded::new(number + 1);
        let count = 2 + letters.below(8);
        out.extend((0..count).map(|_| b"etaoinshrdlucmfw"[letters.below(16) as usize]));
        column += count + 1;
        out.push(if column > 72 { b'\n' } else { b' ' });
        column = if column > 72 { 0 } else { column };
    }
    out.truncate(length);
    out
}
