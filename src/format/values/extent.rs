//! Extent value (section 7.2).

use crate::error::{Error, Result};
use crate::format::codec::{array_at, check_zero, exact_array, put, u32_at, u64_at};
use crate::format::ids::{Generation, MAX_DATA, Pointer};

const BYTES: usize = 56;

/// Extent value (section 7.2): part of a page that holds a range of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    pub page: Pointer,
    pub start: u32,
    pub length: u32,
    pub born: Generation,
}

impl Extent {
    pub fn encode(&self) -> [u8; 56] {
        let mut out = [0; BYTES];
        put(&mut out, 0, self.page.encode());
        put(&mut out, 32, self.start.to_le_bytes());
        put(&mut out, 36, self.length.to_le_bytes());
        put(&mut out, 40, self.born.0.to_le_bytes());
        out
    }

    /// # Errors
    /// `Damaged` for another length, no page, or a part that is empty or exceeds the longest page.
    pub fn decode(value: &[u8]) -> Result<Extent> {
        let value: &[u8; BYTES] = exact_array(value, "extent")?;
        check_zero(&value[48..], "extent")?;
        let extent = Extent {
            page: Pointer::decode(&array_at(value, 0))?,
            start: u32_at(value, 32),
            length: u32_at(value, 36),
            born: Generation(u64_at(value, 40)),
        };
        if extent.page.is_null() {
            return Err(Error::damaged("extent has a null pointer"));
        }
        // The sum of two u32 fits into u64.
        if extent.length == 0 || u64::from(extent.start) + u64::from(extent.length) > MAX_DATA as u64 {
            return Err(Error::damaged(format!(
                "extent is out of bounds: start={} length={}",
                extent.start, extent.length
            )));
        }
        Ok(extent)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::format::ids::Run;
    use crate::format::strategies::{mutated, noise, pointer};

    fn extent() -> Extent {
        let page = Pointer { run: Run::new(500, 33), generation: Generation(3), tag: [4; 16] };
        Extent { page, start: 0, length: 131_072, born: Generation(5) }
    }

    fn refused(extent: Extent) -> bool {
        matches!(Extent::decode(&extent.encode()), Err(Error::Damaged(_)))
    }

    #[test]
    fn an_extent_names_bytes_of_a_page() {
        assert_eq!(Extent::decode(&extent().encode()).unwrap(), extent());
        assert!(refused(Extent { page: Pointer::NULL, ..extent() }));
        assert!(refused(Extent { length: 0, ..extent() }));
        assert!(refused(Extent { start: 1, ..extent() }));
        assert!(refused(Extent { start: u32::MAX, length: u32::MAX, ..extent() }));
    }

    #[test]
    fn reserved_bytes_of_an_extent_are_zero() {
        for at in [48, 55] {
            let mut value = extent().encode();
            value[at] = 1;
            assert!(Extent::decode(&value).is_err(), "at={at}");
        }
        assert!(Extent::decode(&extent().encode()[..55]).is_err());
    }

    proptest! {
        #[test]
        fn extents_round_trip(page in pointer(), start in 0..131_072u32, length in 1..=131_072u32, born in any::<u64>()) {
            let extent = Extent { page, start, length: length.min(131_072 - start), born: Generation(born) };
            prop_assert_eq!(Extent::decode(&extent.encode()).unwrap(), extent);
        }

        #[test]
        fn no_input_panics(bytes in noise(60), damaged in mutated(extent().encode().to_vec())) {
            let _ = Extent::decode(&bytes);
            let _ = Extent::decode(&damaged);
        }
    }
}
