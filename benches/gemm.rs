//! Rates of the CPU's matrix products beside one core's FMA peak.
//!
//! `cargo bench --bench gemm [-- SIMD_PATH]`: for each shape and 1 and 2 threads, GFLOP/s of the best and
//! the median run by the wall clock, and the best one's share of the peak measured beside it. On a
//! busy machine a long run never has its cores to itself, so the rate per second of processor time
//! over all runs stands beside it (Linux only).

use std::time::Instant;

use bitstep::cpu::context::CpuContext;
use bitstep::cpu::gemm::{Form, Gemm, Mat, MatMut, Store, gemm};
use bitstep::cpu::peak::fma_peak_gflops;
use bitstep::cpu::simd::SimdPath;
use bitstep::num::tree::TokenSum;

/// Form, m, n, k and the piece of a sum over tokens (0 for one chain).
const SHAPES: [(Form, usize, usize, usize, usize); 20] = [
    (Form::Nt, 1024, 1024, 1024, 0),
    (Form::Nn, 1024, 1024, 1024, 0),
    (Form::Tn, 1024, 1024, 1024, 0),
    (Form::Nt, 8192, 768, 768, 0),
    (Form::Nt, 8192, 2304, 768, 0),
    (Form::Nn, 8192, 768, 2304, 0),
    (Form::Tn, 2304, 768, 8192, 2048),
    (Form::Nt, 1024, 256, 128, 0),
    (Form::Nt, 1024, 128, 128, 0),
    (Form::Nt, 1024, 768, 128, 0),
    (Form::Nt, 1024, 128, 384, 0),
    (Form::Nn, 1024, 128, 256, 0),
    (Form::Nn, 1024, 128, 128, 0),
    (Form::Nn, 1024, 128, 768, 0),
    (Form::Nn, 1024, 384, 128, 0),
    (Form::Tn, 256, 128, 1024, 128),
    (Form::Tn, 128, 128, 1024, 128),
    (Form::Tn, 768, 128, 1024, 128),
    (Form::Tn, 128, 384, 1024, 128),
    (Form::Nt, 1024, 50304, 768, 0),
];

fn values(len: usize) -> Vec<f32> {
    let step = |i: usize| (i.wrapping_mul(2_654_435_761) >> 8) as u16 as f32;
    (0..len).map(|i| step(i) / 32768.0 - 1.0).collect()
}

fn main() {
    let named = std::env::args().skip(1).find_map(|a| a.parse().ok());
    let path = named.unwrap_or_else(SimdPath::detect);
    println!("path {path}");
    for threads in [1, 2] {
        let context = CpuContext::new(path, threads).expect("a thread pool");
        context.run(|| SHAPES.iter().for_each(|s| measure(&context, *s)));
    }
}

/// Seconds that this process's threads have run so far, where the system tells.
fn processor_seconds() -> Option<f64> {
    let mut nanoseconds = 0.0;
    for task in std::fs::read_dir("/proc/self/task").ok()? {
        let text = std::fs::read_to_string(task.ok()?.path().join("schedstat")).ok()?;
        nanoseconds += text.split_whitespace().next()?.parse::<f64>().ok()?;
    }
    Some(nanoseconds * 1e-9)
}

fn measure(context: &CpuContext, shape: (Form, usize, usize, usize, usize)) {
    let (form, m, n, k, piece) = shape;
    let (a, b, mut c) = (values(m * k), values(n * k), vec![0.0; m * n]);
    let (a, b) = match form {
        Form::Nt => (Mat::tight(&a, m, k), Mat::tight(&b, n, k)),
        Form::Nn => (Mat::tight(&a, m, k), Mat::tight(&b, k, n)),
        Form::Tn => (Mat::tight(&a, k, m), Mat::tight(&b, k, n)),
    };
    let cut = TokenSum {
        tokens: k,
        grain: k,
        piece,
    };
    let product = Gemm {
        form,
        a,
        b,
        bias: None,
        sum: (piece > 0).then_some(cut),
        store: Store::Assign,
    };
    let flops = 2.0 * (m * n * k) as f64;
    let runs = ((4e10 / flops) as usize).clamp(3, 300);
    let path = context.path();
    // The first run touches the result's pages, which the system hands out one by one.
    gemm(context, &product, MatMut::tight(&mut c, m, n)).expect("shapes fit");
    let before = fma_peak_gflops(path);
    let processor = processor_seconds();
    let mut seconds: Vec<f64> = (0..runs)
        .map(|_| {
            let start = Instant::now();
            gemm(context, &product, MatMut::tight(&mut c, m, n)).expect("shapes fit");
            start.elapsed().as_secs_f64()
        })
        .collect();
    let processor = processor_seconds().zip(processor).map(|(a, b)| a - b);
    seconds.sort_by(f64::total_cmp);
    let peak = before.max(fma_peak_gflops(path));
    let rate = |s: f64| flops / s / 1e9;
    let of_processor = rate(processor.unwrap_or(f64::NAN) / runs as f64);
    println!(
        "{form:?} m {m:5} n {n:5} k {k:5} piece {piece:5} threads {}: {:6.1} best {:6.1} median GFLOP/s, \
         {:3.0} % of peak; {of_processor:6.1} a core-second, {:3.0} % of {peak:.1}; {:9.1} µs",
        context.threads(),
        rate(seconds[0]),
        rate(seconds[runs / 2]),
        100.0 * rate(seconds[0]) / (peak * context.threads() as f64),
        100.0 * of_processor / peak,
        seconds[0] * 1e6,
    );
}
