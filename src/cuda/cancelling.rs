//! Operands on which another order of a sum shows in every bit of the output.
//!
//! A product that is stored in 16 bits hides most of what it was summed in: two chains that differ in the last bits of f32 round to the
//! same bf16 in all but one of some thousands of outputs, and a small product has no more outputs than that. So a provider is held
//! against the engine's own kernel on operands of this kind too: the second half of every sum takes back what the first half gave,
//! exactly, and what is left is what the chain has lost to rounding, which no other order loses alike.

use super::gemm::LtShape;
use crate::num::element::encode;
use crate::shape::DType;

/// Most columns of an operand that are replaced where they lie one after another.
const COLUMNS: usize = 256;
/// The most elements of an operand that are replaced. Products with larger ones have so many outputs, or such long sums, that some
/// output shows the order on any operands.
const MOST_ELEMENTS: usize = 1 << 23;

/// The bytes that replace the first ones of A and of B, in the library's terms.
pub(super) struct Cancelling {
    pub a: Vec<u8>,
    pub b: Vec<u8>,
}

impl Cancelling {
    /// Operands for a shape; `None` where the output hides nothing, or where the operands are too large.
    pub(super) fn of(shape: &LtShape) -> Option<Self> {
        let factors = shape.math.storage();
        if shape.output == DType::F32 || shape.batch > 1 {
            return None;
        }
        let half = shape.k / 2;
        let a = operand((shape.m, shape.k, shape.lda), shape.transpose_a, |i, k| {
            let sign = if k < half { 1.0 } else { -1.0 };
            sign * term(half, 1, i, k)
        });
        // B is the other way round: its rows go along the sum where it is not transposed.
        let b = operand((shape.n, shape.k, shape.ldb), !shape.transpose_b, |j, k| {
            term(half, 2, j, k)
        });
        Some(Cancelling {
            a: encode(factors, &a?)?,
            b: encode(factors, &b?)?,
        })
    }
}

/// The elements of an operand of `count` sums of `k` terms, which lie `ld` apart if `along` the sum its elements follow each other, and
/// side by side otherwise.
fn operand(
    (count, k, ld): (usize, usize, usize),
    along: bool,
    value: impl Fn(usize, usize) -> f32,
) -> Option<Vec<f32>> {
    let (outer, within) = if along {
        (count.min(COLUMNS), k)
    } else {
        (k, count)
    };
    // Nothing between the rows is touched.
    if ld != within || outer * within > MOST_ELEMENTS {
        return None;
    }
    let at = |o: usize, i: usize| if along { value(o, i) } else { value(i, o) };
    let elements = (0..outer).flat_map(|o| (0..within).map(move |i| (o, i)));
    Some(elements.map(|(o, i)| at(o, i)).collect())
}

/// Term `k` of sum `index`, the same for `k` and `k + half`; zero behind both halves. Eight bits of mantissa, which every storage has, and
/// exponents from -6 to 6, so that the terms of one sum reach further than an accumulator holds.
fn term(half: usize, seed: u64, index: usize, k: usize) -> f32 {
    if k >= 2 * half {
        return 0.0;
    }
    // The finaliser of MurmurHash3, over sum and term.
    let mut x = (seed << 60) ^ ((index as u64) << 28) ^ (k % half) as u64;
    for factor in [0xff51_afd7_ed55_8ccd, 0xc4ce_b9fe_1a85_ec53] {
        x = (x ^ (x >> 33)).wrapping_mul(factor);
    }
    let bits = (x >> 32) as u32;
    let mantissa = 1.0 + (bits % 128) as f32 / 128.0;
    let exponent = (bits / 128 % 13) as i32 - 6;
    let sign = if bits >> 31 == 0 { 1.0 } else { -1.0 };
    sign * mantissa * 2.0_f32.powi(exponent)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::num::element::decode;
    use crate::num::round::f32_to_bf16;
    use crate::num::tensor_step::{Kind, chain};
    use crate::shape::Math;

    fn shape([m, n, k]: [usize; 3], transpose_a: bool) -> LtShape {
        LtShape {
            m,
            n,
            k,
            transpose_a,
            transpose_b: false,
            lda: if transpose_a { k } else { m },
            ldb: k,
            ldd: m,
            bias: false,
            math: Math::Bf16,
            output: DType::Bf16,
            add: false,
            alignment: 16,
            batch: 1,
            strides: [0; 3],
        }
    }

    /// The share of outputs whose stored bits differ between the contract's chain and one that takes the second half of a sum first.
    fn share(a: &[Vec<f32>], b: &[Vec<f32>]) -> f64 {
        let mut differing = 0;
        for row in a {
            for column in b {
                let of = |a: &[f32], b: &[f32]| f32_to_bf16(chain(Kind::Bf16, 0.0, a, b));
                let middle = row.len() / 32 * 16;
                let turned = |x: &[f32]| [&x[middle..], &x[..middle]].concat();
                let other = of(&turned(row), &turned(column));
                differing += u32::from(of(row, column) != other);
            }
        }
        f64::from(differing) / (a.len() * b.len()) as f64
    }

    #[test]
    fn another_order_shows_here_and_hardly_anywhere_else() {
        for (transpose_a, k) in [(true, 268), (false, 268), (false, 64)] {
            let made = Cancelling::of(&shape([40, 300, k], transpose_a)).expect("narrow and small");
            let [a, b] = [&made.a, &made.b].map(|bytes| decode(DType::Bf16, bytes).expect("bf16"));
            assert_eq!((a.len(), b.len()), (40 * k, COLUMNS * k));
            let of_a = |i: usize, k: usize, all: usize| {
                if transpose_a {
                    a[i * all + k]
                } else {
                    a[k * 40 + i]
                }
            };
            let rows: Vec<Vec<f32>> = (0..20)
                .map(|i| (0..k).map(|t| of_a(i, t, k)).collect())
                .collect();
            let columns: Vec<Vec<f32>> = b.chunks(k).take(20).map(<[f32]>::to_vec).collect();
            let shown = share(&rows, &columns);
            assert!(shown > 0.5, "{k} terms: {shown}");
            // Without the halves that cancel, as any operands are.
            let positive = |x: &[Vec<f32>]| -> Vec<Vec<f32>> {
                x.iter()
                    .map(|row| row.iter().map(|x| x.abs()).collect())
                    .collect()
            };
            let hidden = share(&positive(&rows), &positive(&columns));
            assert!(hidden < 0.02, "{k} terms: {hidden}");
        }
    }

    #[test]
    fn outputs_that_hide_nothing_and_large_operands_need_none() {
        let small = shape([40, 300, 64], true);
        let whole = LtShape {
            output: DType::F32,
            ..small
        };
        assert!(Cancelling::of(&whole).is_none());
        assert!(Cancelling::of(&shape([1024, 300, 1 << 14], false)).is_none());
        let apart = LtShape { ldb: 72, ..small };
        assert!(Cancelling::of(&apart).is_none());
    }
}
