//! The FMA peak of one core, against which kernels are judged.

use std::time::{Duration, Instant};

use crate::cpu::simd::{FMA_ROUND_FLOPS, SimdPath, fma_rounds};

/// Rounds a timing covers; some 40 µs on a core with two 512-bit units.
const ROUNDS: usize = 8192;

/// Timings taken; the best counts, since other processes only ever slow one down.
const TIMINGS: usize = 40;

/// The f32 FMA rate of one core in GFLOP/s (a fused multiply-add is two), measured by a kernel that
/// touches registers only.
pub fn fma_peak_gflops(path: SimdPath) -> f64 {
    let mut best = Duration::MAX;
    for _ in 0..TIMINGS {
        let start = Instant::now();
        std::hint::black_box(fma_rounds(path, std::hint::black_box(ROUNDS)));
        best = best.min(start.elapsed());
    }
    let flops = (ROUNDS * FMA_ROUND_FLOPS) as f64;
    flops / best.as_secs_f64().max(1e-9) / 1e9
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_path_has_a_finite_peak() {
        for path in SimdPath::available() {
            let peak = fma_peak_gflops(path);
            assert!(peak > 0.01 && peak < 10_000.0, "{path}: {peak} GFLOP/s");
        }
    }
}
