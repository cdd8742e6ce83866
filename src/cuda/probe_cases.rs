//! The cases with which a device's tensor-core step is compared with the rule: always the same numbers.

use crate::num::round::{f16_to_f32, f32_to_bf16, f32_to_f16};
use crate::num::tensor_step::{Kind, step};

/// Rows and columns of a tile of outputs.
pub const SIDE: usize = 64;

/// Steps of the category that chains them.
const CHAINED: usize = 4;

/// What a set of cases is made to show.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Category {
    /// Exponents within ±2, ±12 and ±60 (or the format's normal ones): bits kept, order, rounding.
    Narrow,
    Middle,
    Wide,
    /// Four steps, one after the other.
    Chained,
    /// The accumulator's exponent from far below the products' to far above.
    Accumulators,
    /// Only the first products are not zero, as in a padded tail.
    Tails,
    /// Half of the products have a zero factor beside a large one; the others are small.
    Zeros,
    /// Nothing but zeros of both signs and a few ones: the sign of a zero result.
    SignedZeros,
    /// The accumulator is near the negated sum: cancellation to few bits and to none.
    Cancellation,
    /// Subnormal factors of the format beside normal ones.
    SubnormalFactors,
    /// Subnormal accumulators beside products of their size.
    SubnormalAccumulators,
    /// Sums that are subnormal, from products below the least normal number.
    SubnormalResults,
    /// Sums on both sides of the largest finite number.
    Overflow,
    /// Products beyond 2^128 that cancel in pairs.
    HugeProducts,
    /// Infinite factors and accumulators without zeros.
    Infinities,
    /// NaNs, and infinities beside zeros.
    Nans,
}

impl Category {
    /// Every category.
    pub const ALL: [Category; 16] = [
        Category::Narrow,
        Category::Middle,
        Category::Wide,
        Category::Chained,
        Category::Accumulators,
        Category::Tails,
        Category::Zeros,
        Category::SignedZeros,
        Category::Cancellation,
        Category::SubnormalFactors,
        Category::SubnormalAccumulators,
        Category::SubnormalResults,
        Category::Overflow,
        Category::HugeProducts,
        Category::Infinities,
        Category::Nans,
    ];
}

/// Operands of one category for one kind.
#[derive(Clone, Debug, PartialEq)]
pub struct Tiles {
    pub kind: Kind,
    pub category: Category,
    /// How many tiles.
    pub count: usize,
    /// Steps of each chain.
    pub steps: usize,
    /// `[count, SIDE, steps * k]`: rows of A.
    pub a: Vec<f32>,
    /// `[count, SIDE, steps * k]`: columns of B.
    pub b: Vec<f32>,
    /// `[count, SIDE, SIDE]`: accumulators.
    pub c: Vec<f32>,
}

impl Tiles {
    /// The first `count` tiles of a category.
    pub fn generate(kind: Kind, category: Category, count: usize) -> Tiles {
        let seed = category as u64 * 3 + kind as u64;
        let mut numbers = Numbers { state: seed, kind };
        let steps = if category == Category::Chained {
            CHAINED
        } else {
            1
        };
        let width = steps * kind.k();
        let mut fill = |left: bool| -> Vec<f32> {
            let lines =
                (0..count * SIDE).map(|line| numbers.factors(category, width, (line, left)));
            lines.flatten().collect()
        };
        let (a, b) = (fill(true), fill(false));
        let mut tiles = Tiles {
            kind,
            category,
            count,
            steps,
            a,
            b,
            c: vec![0.0; count * SIDE * SIDE],
        };
        for i in 0..tiles.c.len() {
            let (_, a, b) = tiles.case(i);
            tiles.c[i] = numbers.accumulator(category, (a, b));
        }
        tiles
    }

    /// Accumulator and factors of output `i` of all tiles.
    pub fn case(&self, i: usize) -> (f32, &[f32], &[f32]) {
        let width = self.steps * self.kind.k();
        let (tile, row, column) = (i / (SIDE * SIDE), i / SIDE % SIDE, i % SIDE);
        let line = |at: usize| (tile * SIDE + at) * width..(tile * SIDE + at + 1) * width;
        (self.c[i], &self.a[line(row)], &self.b[line(column)])
    }

    /// Factors as a device reads them: two numbers of 16 bits a word, or one of tf32.
    pub fn words(&self, values: &[f32]) -> Vec<u32> {
        let pairs = |narrow: fn(f32) -> u16| {
            let word = |p: &[f32]| u32::from(narrow(p[0])) | u32::from(narrow(p[1])) << 16;
            values.chunks_exact(2).map(word).collect()
        };
        match self.kind {
            Kind::Bf16 => pairs(f32_to_bf16),
            Kind::F16 => pairs(f32_to_f16),
            Kind::Tf32 => values.iter().map(|x| x.to_bits()).collect(),
        }
    }
}

/// A counter-free sequence of numbers (SplitMix64).
struct Numbers {
    state: u64,
    kind: Kind,
}

impl Numbers {
    fn next(&mut self) -> u64 {
        self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.state;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn below(&mut self, n: u64) -> u64 {
        (self.next() >> 16) % n
    }

    /// A binary32 number of random sign and fraction with an exponent from `low` to `high`; below the
    /// normal ones it is subnormal.
    fn number(&mut self, low: i32, high: i32) -> f32 {
        let exponent = low + self.below((high - low + 1) as u64) as i32;
        let bits = self.next() as u32;
        let sign = bits & 0x8000_0000;
        if exponent < -126 {
            let fraction = (bits & 0x007f_ffff | 0x0080_0000) >> (-126 - exponent).min(24);
            return f32::from_bits(sign | fraction);
        }
        f32::from_bits(sign | bits & 0x007f_ffff | ((exponent + 127) as u32) << 23)
    }

    /// A finite number of the format with an exponent from `low` to `high`, within the format's normal ones.
    fn factor(&mut self, low: i32, high: i32) -> f32 {
        let (least, most) = match self.kind {
            Kind::F16 => (-14, 15),
            _ => (-126, 127),
        };
        let x = self.number(low.clamp(least, most), high.clamp(least, most));
        let rounded = self.kind.round(x);
        match rounded.is_finite() {
            true => rounded,
            false => self.kind.round(x * 0.5),
        }
    }

    fn signed_zero(&mut self) -> f32 {
        if self.below(2) == 0 { 0.0 } else { -0.0 }
    }

    fn subnormal(&mut self) -> f32 {
        let bits = self.next();
        let sign = (bits as u32) & 0x8000_0000;
        match self.kind {
            Kind::Bf16 => f32::from_bits(sign | (bits >> 32) as u32 & 0x007f_0000),
            Kind::Tf32 => f32::from_bits(sign | (bits >> 32) as u32 & 0x007f_e000),
            Kind::F16 => f16_to_f32((sign >> 16) as u16 | (bits >> 32) as u16 & 0x03ff),
        }
    }

    /// The factors of one row or column of a tile.
    fn factors(&mut self, category: Category, width: usize, line: (usize, bool)) -> Vec<f32> {
        let mut factors: Vec<f32> = (0..width).map(|i| self.one(category, i, line)).collect();
        if category == Category::HugeProducts {
            // Pairs of products cancel, so that a sum is finite unless a product is infinite by itself.
            let sign = if line.1 { -1.0 } else { 1.0 };
            for pair in factors.chunks_exact_mut(2) {
                pair[1] = sign * pair[0];
            }
        }
        factors
    }

    fn one(&mut self, category: Category, i: usize, (line, left): (usize, bool)) -> f32 {
        let (roll, even) = (self.below(16), i.is_multiple_of(2));
        match category {
            Category::Narrow | Category::Chained | Category::Accumulators => self.factor(-2, 2),
            Category::Middle => self.factor(-12, 12),
            Category::Wide => self.factor(-60, 60),
            Category::Tails if i > line % self.kind.k() => self.signed_zero(),
            Category::Tails => self.factor(-6, 6),
            // Of every other pair one factor is zero and the other as large as the format has it.
            Category::Zeros if i % 4 == 2 * usize::from(left) => self.signed_zero(),
            Category::Zeros if even && self.kind == Kind::F16 => self.factor(12, 15),
            Category::Zeros if even => self.factor(116, 127),
            Category::Zeros => self.factor(-14, -4),
            Category::SignedZeros if roll == 0 && i == 0 => 1.0,
            Category::SignedZeros => match (left, line % 4) {
                // Lines of one sign make products of one sign.
                (_, 0) => 0.0,
                (true, 1) => -0.0,
                (false, 1) => 1.0,
                (_, _) => self.signed_zero(),
            },
            Category::Cancellation => self.factor(-3, 3),
            Category::SubnormalFactors if left == even => self.subnormal(),
            Category::SubnormalFactors if self.kind == Kind::F16 => self.factor(-14, 15),
            Category::SubnormalFactors => self.factor(90, 127),
            Category::SubnormalAccumulators | Category::SubnormalResults => match self.kind {
                // The products of f16 never come near the least numbers of binary32.
                Kind::F16 if roll < 8 => self.signed_zero(),
                Kind::F16 => self.subnormal(),
                _ if left => self.factor(-75, -60),
                _ => self.factor(-78, -64),
            },
            Category::Overflow if roll < 10 => self.signed_zero(),
            Category::Overflow => self.factor(61, 64),
            Category::HugeProducts => self.factor(48, 72),
            Category::Infinities if roll == 0 && line % 4 == 0 => f32::INFINITY,
            Category::Infinities if roll == 1 && line % 4 == 1 => f32::NEG_INFINITY,
            Category::Infinities => self.factor(-4, 4),
            Category::Nans if roll == 0 && line % 8 == 0 => f32::INFINITY,
            Category::Nans if roll == 1 && line % 8 == 1 => f32::NAN,
            Category::Nans if roll < 4 => self.signed_zero(),
            Category::Nans => self.factor(-4, 4),
        }
    }

    /// An accumulator for the given factors.
    fn accumulator(&mut self, category: Category, (a, b): (&[f32], &[f32])) -> f32 {
        let roll = self.below(16);
        match category {
            Category::Narrow | Category::Chained | Category::Tails => self.number(-3, 4),
            Category::Middle => self.number(-24, 24),
            Category::Wide => self.number(-100, 100),
            Category::Accumulators => self.number(-34, 34),
            Category::Zeros if roll < 4 => self.signed_zero(),
            Category::Zeros => self.number(-40, 0),
            Category::SignedZeros => self.signed_zero(),
            Category::Cancellation => {
                let sum = step(self.kind, 0.0, a, b);
                let nudge = [0, 0, 1, u32::MAX][roll as usize % 4];
                -f32::from_bits(sum.to_bits().wrapping_add(nudge))
            }
            Category::SubnormalFactors if self.kind == Kind::F16 => self.number(-40, -8),
            Category::SubnormalFactors => self.number(-60, -20),
            Category::SubnormalAccumulators => self.number(-148, -124),
            Category::SubnormalResults if roll < 12 => self.signed_zero(),
            Category::SubnormalResults => self.number(-140, -126),
            Category::Overflow => self.number(125, 127),
            Category::HugeProducts => self.number(110, 127),
            Category::Infinities if roll == 0 => f32::INFINITY,
            Category::Infinities if roll == 1 => f32::NEG_INFINITY,
            Category::Infinities => self.number(-4, 4),
            Category::Nans if roll == 0 => f32::from_bits(0xffc1_2345),
            Category::Nans if roll == 1 => f32::INFINITY,
            Category::Nans => self.number(-4, 4),
        }
    }
}
