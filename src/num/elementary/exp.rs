//! `exp` and `sigmoid`, branch-free.

use super::{LN2_HI, LN2_LO, canonical_nan};

/// 1.5 · 2^23: adding it rounds to an integer, which then stands in the low bits.
const ROUND: f32 = 12_582_912.0;
/// log2(e), rounded once.
pub const LOG2_E: f32 = f32::from_bits(0x3fb8_aa3b);
/// `e^x` is `+0.0` below this and infinite above [`HIGHEST`], so clamping keeps every exponent small.
const LOWEST: f32 = -104.0;
const HIGHEST: f32 = 89.0;
/// Half of the longest step by which an exponent moves, as a change of the bits.
const HALF_WAY: u32 = 64 << 23;
/// The bits of 1.0.
const ONE: u32 = 0x3f80_0000;

/// Minimax coefficients of `(e^r - 1 - r) / r²` for |r| ≤ ln(2) / 2, the constant first.
const Q: [f32; 5] = [
    f32::from_bits(0x3eff_fffe),
    f32::from_bits(0x3e2a_aa46),
    f32::from_bits(0x3d2a_ac2d),
    f32::from_bits(0x3c09_1eb9),
    f32::from_bits(0x3ab5_5c69),
];

/// `e^x = (1 + r + tail) · 2^n` with |r + tail| ≤ sqrt(2) - 1; the low nine bits of `n_bits` are n.
struct Reduced {
    r: f32,
    tail: f32,
    n_bits: u32,
}

/// Splits `x` in `LOWEST..=HIGHEST` (Cody and Waite's reduction). `r` is exact; what is missing from it,
/// `n · LN2_LO`, goes to the tail, where its rounding weighs little.
#[inline(always)]
fn reduce(x: f32) -> Reduced {
    let t = x.mul_add(LOG2_E, ROUND);
    let n = t - ROUND;
    let r = n.mul_add(-LN2_HI, x);
    let full = n.mul_add(-LN2_LO, r);
    let q = Q[4].mul_add(full, Q[3]);
    let q = q.mul_add(full, Q[2]);
    let q = q.mul_add(full, Q[1]);
    let q = q.mul_add(full, Q[0]);
    Reduced {
        r,
        tail: n.mul_add(-LN2_LO, (full * full) * q),
        n_bits: t.to_bits(),
    }
}

/// `p · 2^n` rounded once, for p near 1 and n from -150 to 0 if `down`, else from 0 to 128.
#[inline(always)]
fn scale(p: f32, n_bits: u32, down: bool) -> f32 {
    let way = if down {
        HALF_WAY
    } else {
        HALF_WAY.wrapping_neg()
    };
    let near = p.to_bits().wrapping_add(n_bits << 23).wrapping_add(way);
    f32::from_bits(near) * f32::from_bits(ONE.wrapping_sub(way))
}

/// `e^x`.
#[inline(always)]
pub fn exp(x: f32) -> f32 {
    let z = if x < LOWEST { LOWEST } else { x };
    let z = if z > HIGHEST { HIGHEST } else { z };
    let e = reduce(z);
    let p = 1.0 + (e.r + e.tail);
    canonical_nan(x, scale(p, e.n_bits, x < 0.0))
}

/// Minimax coefficients of `(2^r - 1) / r` for |r| ≤ 1/2, the constant first.
const POWER: [f32; 6] = [
    f32::from_bits(0x3f31_7218),
    f32::from_bits(0x3e75_fdee),
    f32::from_bits(0x3d63_57bd),
    f32::from_bits(0x3c1d_96ea),
    f32::from_bits(0x3aaf_84a8),
    f32::from_bits(0x3920_bc08),
];
/// Below this [`decay`] does not fall, so that its results stay normal numbers.
const DECAY_LOWEST: f32 = -125.0;

/// `2^x` for `x` up to zero, and `2^-125` below -125: by how much a state decays. A NaN is passed over: it
/// gives `2^-125` too. Positive arguments are outside its domain.
#[inline(always)]
pub fn decay(x: f32) -> f32 {
    let z = if x > DECAY_LOWEST { x } else { DECAY_LOWEST };
    let t = z + ROUND;
    let r = z - (t - ROUND);
    let q = POWER[5].mul_add(r, POWER[4]);
    let q = q.mul_add(r, POWER[3]);
    let q = q.mul_add(r, POWER[2]);
    let q = q.mul_add(r, POWER[1]);
    let q = q.mul_add(r, POWER[0]);
    let p = q.mul_add(r, 1.0);
    f32::from_bits(p.to_bits().wrapping_add(t.to_bits() << 23))
}

/// `e^z` for `z = -|x|`, as an unevaluated sum and in other forms.
pub(super) struct NegativeExp {
    /// `hi + lo = e^z / 2^n`.
    hi: f32,
    lo: f32,
    n_bits: u32,
    /// `2^n`, or `+0.0` where `e^z` is below `e^-60`.
    power: f32,
}

impl NegativeExp {
    #[inline(always)]
    pub(super) fn new(x: f32) -> Self {
        let z = -x.abs();
        let z = if z < LOWEST { LOWEST } else { z };
        let e = reduce(z);
        let s = e.r + e.tail;
        let s_low = e.tail - (s - e.r);
        let hi = 1.0 + s;
        let power = f32::from_bits((e.n_bits << 23).wrapping_add(ONE));
        NegativeExp {
            hi,
            lo: (s - (hi - 1.0)) + s_low,
            n_bits: e.n_bits,
            power: if z < -60.0 { 0.0 } else { power },
        }
    }

    /// `e^z` as an unevaluated sum, both `+0.0` below `e^-60`.
    #[inline(always)]
    pub(super) fn sum(&self) -> (f32, f32) {
        (self.hi * self.power, self.lo * self.power)
    }

    /// `e^z` rounded once, subnormal results included.
    #[inline(always)]
    pub(super) fn value(&self) -> f32 {
        scale(self.hi + self.lo, self.n_bits, true)
    }
}

/// `1 / (1 + e^-x)`: with `z = -|x|`, `1 / (1 + e^z)` from zero up and `e^z / (1 + e^z)` below.
///
/// The quotient's remainder is taken against the denominator's own low part, so that the denominator's
/// rounding, which alone would cost a whole ulp, does not count.
#[inline(always)]
pub fn sigmoid(x: f32) -> f32 {
    let down = x < 0.0;
    let e = NegativeExp::new(x);
    let (u, u_low) = e.sum();
    let d = 1.0 + u;
    let d_low = (u - (d - 1.0)) + u_low;
    let inverse = 1.0 / d;
    let top = if down { e.hi } else { 1.0 };
    let top_low = if down { e.lo } else { 0.0 };
    let q = top * inverse;
    let rest = (-q).mul_add(d, top) + top_low;
    let rest = (-q).mul_add(d_low, rest);
    let q = rest.mul_add(inverse, q);
    let scaled = scale(q, e.n_bits, true);
    canonical_nan(x, if down { scaled } else { q })
}
