//! The tensor-core step in the processor's own vector instructions; the same operations as the portable
//! form in `tensor_tile`, which says why each is exact.

use std::arch::x86_64::*;

use crate::cpu::tensor_tile::{
    FIELD_OF_ONE, FRACTION_BITS, Factor, FactorLine, LANES, LEAST_SCALE, Panel,
};
use crate::num::tensor_model::ZERO_ACCUMULATOR;
use crate::num::tensor_step::Kind;

/// Defines the functions that name one instruction each, so that one text serves both widths.
macro_rules! operations {
    ($name:ident, $features:literal, $float:ty, $int:ty, {
        $($op:ident($($arg:ident: $kind:ty),*) -> $out:ty = $body:expr;)*
    }) => {
        mod $name {
            use super::*;
            pub type F = $float;
            pub type I = $int;
            $(
                #[inline]
                #[target_feature(enable = $features)]
                pub fn $op($($arg: $kind),*) -> $out {
                    $body
                }
            )*
        }
    };
}

operations!(wide, "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma", __m512, __m512i, {
    splat(x: i32) -> I = _mm512_set1_epi32(x);
    splat_f(x: f32) -> F = _mm512_set1_ps(x);
    add(a: I, b: I) -> I = _mm512_add_epi32(a, b);
    sub(a: I, b: I) -> I = _mm512_sub_epi32(a, b);
    max(a: I, b: I) -> I = _mm512_max_epi32(a, b);
    and(a: I, b: I) -> I = _mm512_and_si512(a, b);
    or(a: I, b: I) -> I = _mm512_or_si512(a, b);
    xor(a: I, b: I) -> I = _mm512_xor_si512(a, b);
    to_field(a: I) -> I = _mm512_slli_epi32::<23>(a);
    from_field(a: I) -> I = _mm512_srli_epi32::<23>(a);
    high(a: I) -> I = _mm512_srli_epi32::<8>(a);
    sign(a: I) -> I = _mm512_srai_epi32::<31>(a);
    up(a: I, n: I) -> I = _mm512_sllv_epi32(a, n);
    down(a: I, n: I) -> I = _mm512_srlv_epi32(a, n);
    add_f(a: F, b: F) -> F = _mm512_add_ps(a, b);
    sub_f(a: F, b: F) -> F = _mm512_sub_ps(a, b);
    mul_f(a: F, b: F) -> F = _mm512_mul_ps(a, b);
    cut(a: F) -> I = _mm512_cvttps_epi32(a);
    to_f(a: I) -> F = _mm512_cvtepi32_ps(a);
    bits(a: F) -> I = _mm512_castps_si512(a);
    from_bits(a: I) -> F = _mm512_castsi512_ps(a);
    if_greater(a: I, b: I, x: I, y: I) -> I =
        _mm512_mask_blend_epi32(_mm512_cmpgt_epi32_mask(a, b), y, x);
    if_greater_f(a: F, b: F, x: I, y: I) -> I =
        _mm512_mask_blend_epi32(_mm512_cmp_ps_mask::<_CMP_GT_OQ>(a, b), y, x);
});

operations!(narrow, "avx2,fma", __m256, __m256i, {
    splat(x: i32) -> I = _mm256_set1_epi32(x);
    splat_f(x: f32) -> F = _mm256_set1_ps(x);
    add(a: I, b: I) -> I = _mm256_add_epi32(a, b);
    sub(a: I, b: I) -> I = _mm256_sub_epi32(a, b);
    max(a: I, b: I) -> I = _mm256_max_epi32(a, b);
    and(a: I, b: I) -> I = _mm256_and_si256(a, b);
    or(a: I, b: I) -> I = _mm256_or_si256(a, b);
    xor(a: I, b: I) -> I = _mm256_xor_si256(a, b);
    to_field(a: I) -> I = _mm256_slli_epi32::<23>(a);
    from_field(a: I) -> I = _mm256_srli_epi32::<23>(a);
    high(a: I) -> I = _mm256_srli_epi32::<8>(a);
    sign(a: I) -> I = _mm256_srai_epi32::<31>(a);
    up(a: I, n: I) -> I = _mm256_sllv_epi32(a, n);
    down(a: I, n: I) -> I = _mm256_srlv_epi32(a, n);
    add_f(a: F, b: F) -> F = _mm256_add_ps(a, b);
    sub_f(a: F, b: F) -> F = _mm256_sub_ps(a, b);
    mul_f(a: F, b: F) -> F = _mm256_mul_ps(a, b);
    cut(a: F) -> I = _mm256_cvttps_epi32(a);
    to_f(a: I) -> F = _mm256_cvtepi32_ps(a);
    bits(a: F) -> I = _mm256_castps_si256(a);
    from_bits(a: I) -> F = _mm256_castsi256_ps(a);
    if_greater(a: I, b: I, x: I, y: I) -> I = _mm256_blendv_epi8(y, x, _mm256_cmpgt_epi32(a, b));
    if_greater_f(a: F, b: F, x: I, y: I) -> I =
        _mm256_blendv_epi8(y, x, bits(_mm256_cmp_ps::<_CMP_GT_OQ>(a, b)));
});

/// Defines the chains of a panel over vectors of one width.
macro_rules! kernel {
    ($entry:ident, $chains:ident, $step:ident, $round:ident, $ops:ident, $features:literal, $parts:literal) => {
        /// Computes the panel.
        #[target_feature(enable = $features)]
        pub(super) fn $entry(panel: Panel) {
            match panel.kind {
                Kind::Bf16 | Kind::F16 => $chains::<16>(panel),
                Kind::Tf32 => $chains::<8>(panel),
            }
        }

        #[target_feature(enable = $features)]
        fn $chains<const K: usize>(panel: Panel) {
            let (b_steps, _) = panel.b.as_chunks::<K>();
            let rows = panel.a.chunks_exact(panel.b.len().max(1));
            for (a, sums) in rows.zip(panel.sums.chunks_mut(panel.stride)) {
                let Some(sums) = sums.first_chunk_mut::<LANES>() else {
                    return;
                };
                let mut acc: [$ops::F; $parts] = bytemuck::cast(*sums);
                let (a_steps, _) = a.as_chunks::<K>();
                for (a, b) in a_steps.iter().zip(b_steps) {
                    for (part, acc) in acc.iter_mut().enumerate() {
                        *acc = $step::<K>(*acc, a, b, part);
                    }
                }
                *sums = bytemuck::cast(acc);
            }
        }

        #[inline]
        #[target_feature(enable = $features)]
        fn $step<const K: usize>(
            acc: $ops::F,
            a: &[Factor; K],
            b: &[FactorLine; K],
            part: usize,
        ) -> $ops::F {
            use $ops::*;
            let bits_of = bits(acc);
            let field = and(from_field(bits_of), splat(255));
            let one = or(and(bits_of, splat(i32::MIN)), splat(FIELD_OF_ONE));
            let normal = from_bits(or(and(bits_of, splat(!0x7f80_0000)), splat(FIELD_OF_ONE)));
            let subnormal = sub_f(normal, from_bits(one));
            let own = if_greater(splat(1), field, bits(subnormal), bits(normal));
            let exponent = sub(max(field, splat(1)), splat(127));
            let size = and(bits_of, splat(i32::MAX));
            let exponent = if_greater(size, splat(0), exponent, splat(ZERO_ACCUMULATOR));
            let mut exponents = [exponent; K];
            let mut largest = exponent;
            for p in 0..K {
                let columns: [I; $parts] = bytemuck::cast(b[p].exponents);
                exponents[p] = add(splat(a[p].exponent), columns[part]);
                largest = max(largest, exponents[p]);
            }
            let base = sub(splat(127 + FRACTION_BITS), largest);
            let mut sums = splat(0);
            for p in 0..K {
                let columns: [F; $parts] = bytemuck::cast(b[p].significands);
                let product = mul_f(splat_f(a[p].significand), columns[part]);
                let scale = to_field(max(add(base, exponents[p]), splat(LEAST_SCALE)));
                sums = add(sums, cut(mul_f(product, from_bits(scale))));
            }
            let scale = to_field(max(add(base, exponent), splat(LEAST_SCALE)));
            let start = cut(mul_f(from_bits(own), from_bits(scale)));
            let rounded = $round(sums, start, sub(largest, splat(FRACTION_BITS)));
            from_bits(if_greater(field, splat(254), bits_of, rounded))
        }

        #[inline]
        #[target_feature(enable = $features)]
        fn $round(products: $ops::I, start: $ops::I, unit: $ops::I) -> $ops::I {
            use $ops::*;
            let sum = add(products, start);
            let majority = or(and(products, start), and(or(products, start), sum));
            let negative = sign(majority);
            let size = sub(xor(sum, negative), negative);
            let top = mul_f(to_f(high(size)), splat_f(256.0));
            let low = to_f(and(size, splat(255)));
            let nearest = add_f(top, low);
            let below = sub(bits(nearest), splat(1));
            let rounded = if_greater_f(sub_f(nearest, top), low, below, bits(nearest));
            // A size of zero is zero in units of the least number.
            let field = add(from_field(rounded), unit);
            let field = if_greater(rounded, splat(0), field, splat(0));
            let finite = add(rounded, to_field(unit));
            let normal = if_greater(field, splat(254), splat(0x7f80_0000), finite);
            // A shift by 32 or more, or by a negative number, gives zero.
            let places = add(unit, splat(149));
            let subnormal = or(up(size, places), down(size, sub(splat(0), places)));
            let result = if_greater(splat(1), field, subnormal, normal);
            or(result, and(negative, splat(i32::MIN)))
        }
    };
}

kernel!(
    chains_avx512,
    chains_wide,
    step_wide,
    round_wide,
    wide,
    "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma",
    1
);
kernel!(
    chains_avx2,
    chains_narrow,
    step_narrow,
    round_narrow,
    narrow,
    "avx2,fma",
    2
);
