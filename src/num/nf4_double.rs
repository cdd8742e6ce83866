//! Double quantisation: the block maxima of NF4 as eight-bit codes themselves (Dettmers et al., QLoRA, 2023, section 3).
//!
//! What a tensor's maxima exceed their mean by is quantised in blocks of 256, each with an f32 maximum. The code is the
//! dynamic one of Dettmers, 8-Bit Approximations for Parallelism in Deep Learning, 2016: seven decades, each with twice
//! as many fractions as the one below. Codes, maxima, mean and values are those of bitsandbytes' reference, to the last
//! bit.

use std::sync::LazyLock;

use super::nf4::{LEAST_MAXIMUM, largest_magnitude};

/// Maxima that share a maximum of their own.
pub const MAXIMA_BLOCK: usize = 256;

/// Block maxima as codes.
#[derive(Clone, Debug, PartialEq)]
pub struct Nested {
    /// One a maximum.
    pub codes: Vec<u8>,
    /// The largest magnitude of each block of [`MAXIMA_BLOCK`]; the last block may be shorter.
    pub maxima: Vec<f32>,
    /// The mean, which was subtracted.
    pub offset: f32,
}

impl Nested {
    /// Quantises block maxima: what each exceeds the mean by, over its block's largest magnitude, becomes the nearest
    /// code, and where it is the middle between two, rounded to f32, the lower one. A whole block is multiplied by the
    /// reciprocal, a shorter last one is divided, each operation rounded to f32.
    pub fn of(maxima: &[f32]) -> Nested {
        let offset = mean(maxima);
        let mut nested = Nested {
            codes: Vec::with_capacity(maxima.len()),
            maxima: Vec::with_capacity(maxima.len().div_ceil(MAXIMA_BLOCK)),
            offset,
        };
        for block in maxima.chunks(MAXIMA_BLOCK) {
            let centred = block.iter().map(|x| x - offset);
            let largest = largest_magnitude(centred.clone());
            if block.len() == MAXIMA_BLOCK {
                let scale = 1.0 / largest.max(LEAST_MAXIMUM);
                nested.codes.extend(centred.map(|x| nearest(x * scale)));
                nested.maxima.push(largest);
            } else {
                let largest = largest_magnitude([LEAST_MAXIMUM, largest]);
                nested.codes.extend(centred.map(|x| nearest(x / largest)));
                nested.maxima.push(largest);
            }
        }
        nested
    }

    /// The maxima that the codes stand for.
    pub fn restored(&self) -> Vec<f32> {
        restored(
            (&self.codes, &DYNAMIC),
            (&self.maxima, MAXIMA_BLOCK),
            self.offset,
        )
    }
}

/// `code's value · maximum of its block + offset`, each operation rounded to f32.
pub fn restored(
    (codes, map): (&[u8], &[f32; 256]),
    (maxima, block): (&[f32], usize),
    offset: f32,
) -> Vec<f32> {
    let blocks = codes.chunks(block.max(1)).zip(maxima);
    let values = blocks.flat_map(|(codes, maximum)| {
        let value = move |&code: &u8| map[usize::from(code)] * maximum + offset;
        codes.iter().map(value)
    });
    values.collect()
}

/// What the eight-bit codes stand for, ascending.
pub static DYNAMIC: LazyLock<[f32; 256]> = LazyLock::new(dynamic);

/// The powers of ten of the decades.
const DECADES: [f32; 7] = [1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0];

/// Decade `e` has `2^e` values of either sign: the middles of as many equal parts of 0.1 to 1, times its power of ten.
/// Bounds are counted from the nearer end, by fused operations. 0 and 1 make them 256.
fn dynamic() -> [f32; 256] {
    let mut values = [0.0; 256];
    values[1] = 1.0;
    let mut filled = 2;
    let (low, high) = (0.1_f32, 1.0_f32);
    for (e, decade) in DECADES.iter().enumerate() {
        let parts = 1_u16 << e;
        let step = (high - low) / f32::from(parts);
        let bound = |k: u16| match k < parts.div_ceil(2) {
            true => step.mul_add(f32::from(k), low),
            false => (-step).mul_add(f32::from(parts - k), high),
        };
        for k in 0..parts {
            let value = decade * ((bound(k) + bound(k + 1)) / 2.0);
            values[filled] = value;
            values[filled + 1] = -value;
            filled += 2;
        }
    }
    values.sort_by(f32::total_cmp);
    values
}

/// How many of the middles between neighbouring values are less than `x`; none for a NaN.
fn nearest(x: f32) -> u8 {
    let x = x.clamp(-1.0, 1.0);
    let (mut first, mut last) = (0_u8, u8::MAX);
    while first < last {
        let middle = first + (last - first) / 2;
        let at = usize::from(middle);
        match (DYNAMIC[at] + DYNAMIC[at + 1]) / 2.0 < x {
            true => first = middle + 1,
            false => last = middle,
        }
    }
    first
}

/// Columns of a sum, eight lanes of four vectors.
const LANES: usize = 8;
const COLUMNS: usize = 4 * LANES;
/// Levels of partial sums in a column.
const LEVELS: usize = 4;

/// The mean in f32, in the order in which PyTorch sums on one thread of a CPU, by vectors of eight: columns of every
/// 32nd value; to the first of four vectors the vectors that are left; the four vectors; what fills no vector, and the
/// eight lanes behind it.
fn mean(values: &[f32]) -> f32 {
    let whole = values.len() / LANES * LANES;
    let rows = values.chunks_exact(COLUMNS);
    let left = rows.remainder();
    let mut vectors = columns(rows);
    for vector in left.chunks_exact(LANES) {
        add(&mut vectors[..LANES], vector);
    }
    let (first, others) = vectors.split_at_mut(LANES);
    for other in others.chunks_exact(LANES) {
        add(first, other);
    }
    let sum = values[whole..].iter().chain(first.iter());
    match values.len() {
        0 => 0.0,
        n => sum.fold(0.0, |sum, x| sum + x) / n as f32,
    }
}

fn add(sums: &mut [f32], values: &[f32]) {
    for (sum, value) in sums.iter_mut().zip(values) {
        *sum += value;
    }
}

/// The sums of columns. A level's partial sum joins the next level whenever it holds as many values as a power of two
/// that grows with the number of rows.
fn columns<'a>(rows: impl ExactSizeIterator<Item = &'a [f32]>) -> [f32; COLUMNS] {
    let count = rows.len();
    let power = (count.max(1).next_power_of_two().ilog2() / LEVELS as u32).max(4);
    let step = 1_usize << power;
    let mut sums = [[0.0; COLUMNS]; LEVELS];
    for (i, row) in rows.enumerate() {
        add(&mut sums[0], row);
        let done = i + 1;
        for level in 1..LEVELS {
            if !done.is_multiple_of(step << (power * (level as u32 - 1))) {
                break;
            }
            let (below, above) = sums.split_at_mut(level);
            add(&mut above[0], &below[level - 1]);
            below[level - 1] = [0.0; COLUMNS];
        }
    }
    let [mut all, others @ ..] = sums;
    for level in &others {
        add(&mut all, level);
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_value_between_two_codes_has_the_nearest_and_the_lower_of_two() {
        for i in 0..255_u8 {
            let [low, high] = [i, i + 1].map(|i| DYNAMIC[usize::from(i)]);
            let middle = (low + high) / 2.0;
            assert_eq!(nearest(low), i);
            assert_eq!(nearest(middle), i);
            assert_eq!(nearest(middle.next_up()), i + 1);
        }
        assert_eq!(
            [nearest(7.0), nearest(-7.0), nearest(f32::NAN)],
            [255, 0, 0]
        );
    }

    #[test]
    fn equal_none_and_missing_maxima_keep_to_the_formula() {
        let equal = Nested::of(&[0.25; 300]);
        assert_eq!(equal.offset, 0.25);
        assert_eq!(equal.maxima, [0.0, LEAST_MAXIMUM]);
        assert_eq!(equal.restored(), [0.25; 300]);
        let none = Nested::of(&[]);
        assert_eq!((none.offset, none.restored()), (0.0, Vec::new()));
        assert!(Nested::of(&[1.0, f32::NAN]).restored()[0].is_nan());
    }
}
