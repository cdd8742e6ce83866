//! Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011).
//!
//! Every random number of the engine is a function of a seed, a purpose and an index, so it is the
//! same on every machine and any position can be reached without those before it.

/// What a random number is for; two purposes never share a number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Purpose {
    /// Initial weights; the stream is the parameter's place in parameter order.
    Init = 1,
    /// The order of training windows; the stream is the epoch.
    DataOrder = 2,
    /// Generated training text; the stream is the split.
    DataText = 3,
    /// Sampling while generating; the stream is the request.
    Sampling = 4,
    /// Adapter weights; the stream is the parameter's place in parameter order.
    Adapter = 5,
}

const MULTIPLIER: [u32; 2] = [0xD251_1F53, 0xCD9E_8D57];
const WEYL: [u32; 2] = [0x9E37_79B9, 0xBB67_AE85];

/// One block: four 32-bit numbers from a counter and a key.
pub fn philox4x32_10(counter: [u32; 4], key: [u32; 2]) -> [u32; 4] {
    let (mut c, mut k) = (counter, key);
    for round in 0..10 {
        if round > 0 {
            k = [k[0].wrapping_add(WEYL[0]), k[1].wrapping_add(WEYL[1])];
        }
        let p0 = u64::from(MULTIPLIER[0]) * u64::from(c[0]);
        let p1 = u64::from(MULTIPLIER[1]) * u64::from(c[2]);
        c = [
            (p1 >> 32) as u32 ^ c[1] ^ k[0],
            p1 as u32,
            (p0 >> 32) as u32 ^ c[3] ^ k[1],
            p0 as u32,
        ];
    }
    c
}

/// A stream of blocks for one seed, purpose and stream number, addressed by index.
#[derive(Clone, Copy, Debug)]
pub struct Philox {
    seed: u64,
    purpose: Purpose,
    stream: u32,
}

impl Philox {
    /// The stream of `seed` for `purpose`.
    pub fn new(seed: u64, purpose: Purpose, stream: u32) -> Self {
        Philox {
            seed,
            purpose,
            stream,
        }
    }

    /// Block `index`: the counter holds the index, the stream and the purpose, the key is the seed.
    pub fn block(&self, index: u64) -> [u32; 4] {
        philox4x32_10(
            [
                index as u32,
                (index >> 32) as u32,
                self.stream,
                self.purpose as u32,
            ],
            [self.seed as u32, (self.seed >> 32) as u32],
        )
    }

    /// A number in `0..bound` from block `index` by the high half of a 64-bit product; its bias is
    /// below `bound / 2^64`. Returns 0 for `bound` 0.
    pub fn below(&self, index: u64, bound: u64) -> u64 {
        let b = self.block(index);
        let r = u64::from(b[0]) | u64::from(b[1]) << 32;
        ((u128::from(r) * u128::from(bound)) >> 64) as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn known_answers_of_the_reference_implementation() {
        assert_eq!(
            philox4x32_10([0; 4], [0; 2]),
            [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]
        );
        assert_eq!(
            philox4x32_10([u32::MAX; 4], [u32::MAX; 2]),
            [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]
        );
        assert_eq!(
            philox4x32_10(
                [0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344],
                [0xa409_3822, 0x299f_31d0]
            ),
            [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1]
        );
    }

    #[test]
    fn streams_purposes_and_seeds_differ() {
        let a = Philox::new(1, Purpose::Init, 0).block(5);
        assert_ne!(a, Philox::new(2, Purpose::Init, 0).block(5));
        assert_ne!(a, Philox::new(1, Purpose::Adapter, 0).block(5));
        assert_ne!(a, Philox::new(1, Purpose::Init, 1).block(5));
        assert_ne!(a, Philox::new(1, Purpose::Init, 0).block(6));
    }
}
