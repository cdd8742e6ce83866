//! The FMA peak of one core and the memory bandwidth of all, against which kernels are judged.

use std::time::{Duration, Instant};

use rayon::prelude::*;

use crate::cpu::context::CpuContext;
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

/// Bytes of the copy that measures bandwidth, beyond what most caches hold.
const COPY_BYTES: usize = 64 << 20;
/// Bytes a thread copies at once.
const COPY_PART: usize = 1 << 20;
/// Copies timed; the best counts.
const COPIES: usize = 5;

/// Bytes a second that a copy in memory by all threads reads and writes together.
pub fn copy_bandwidth(context: &CpuContext) -> f64 {
    let (from, mut to) = (vec![1u8; COPY_BYTES], vec![0u8; COPY_BYTES]);
    let mut best = Duration::MAX;
    for _ in 0..COPIES {
        let start = Instant::now();
        context.run(|| {
            let parts = to.par_chunks_mut(COPY_PART).zip(from.par_chunks(COPY_PART));
            parts.for_each(|(to, from)| to.copy_from_slice(std::hint::black_box(from)));
        });
        std::hint::black_box(&to);
        best = best.min(start.elapsed());
    }
    2.0 * COPY_BYTES as f64 / best.as_secs_f64().max(1e-9)
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

    #[test]
    fn memory_moves_at_a_rate_that_a_machine_can_have() {
        for threads in [1, 2] {
            let context = CpuContext::new(SimdPath::Scalar, threads).unwrap();
            let rate = copy_bandwidth(&context);
            assert!(
                rate > 1e7 && rate < 1e13,
                "{threads}: {rate} bytes a second"
            );
        }
    }
}
