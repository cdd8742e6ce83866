//! Rates of the CPU's tensor-core products, in steps of 16 (bf16, f16) or 8 (tf32) products.
//!
//! `cargo bench --bench tensor_gemm [-- SIMD_PATH]`: for each shape and kind on one thread, the millions of
//! steps a second of the best run, packing and rounding of f32 operands included.

use std::time::Instant;

use bitstep::cpu::context::CpuContext;
use bitstep::cpu::gemm::{Form, MatMut};
use bitstep::cpu::simd::SimdPath;
use bitstep::cpu::tensor_gemm::{Elements, TensorGemm, TensorMat, TensorSum, tensor_gemm};
use bitstep::num::tensor_step::Kind;
use bitstep::op::Store;

/// Form, m, n and k: a square, a layer of a small model and its gradients, an attention tile.
const SHAPES: [(Form, usize, usize, usize); 5] = [
    (Form::Nt, 512, 512, 512),
    (Form::Nt, 1024, 384, 128),
    (Form::Nn, 1024, 128, 384),
    (Form::Tn, 384, 128, 1024),
    (Form::Nt, 64, 64, 64),
];

fn main() {
    let named = std::env::args().skip(1).find_map(|a| a.parse().ok());
    let path = named.unwrap_or_else(SimdPath::detect);
    let context = CpuContext::new(path, 1).expect("a thread pool");
    println!("path {path}");
    for shape in SHAPES {
        Kind::ALL.iter().for_each(|&k| measure(&context, shape, k));
    }
}

fn values(len: usize) -> Vec<f32> {
    let step = |i: usize| (i.wrapping_mul(2_654_435_761) >> 8) as u16 as f32;
    (0..len).map(|i| step(i) / 32768.0 - 1.0).collect()
}

fn measure(context: &CpuContext, (form, m, n, k): (Form, usize, usize, usize), kind: Kind) {
    let (a, b, mut c) = (values(m * k), values(n * k), vec![0.0; m * n]);
    let (a, b) = (Elements::F32(&a), Elements::F32(&b));
    let (a, b) = match form {
        Form::Nt => (TensorMat::tight(a, m, k), TensorMat::tight(b, n, k)),
        Form::Nn => (TensorMat::tight(a, m, k), TensorMat::tight(b, k, n)),
        Form::Tn => (TensorMat::tight(a, k, m), TensorMat::tight(b, k, n)),
    };
    let product = TensorGemm {
        kind,
        form,
        a,
        b,
        bias: None,
        sum: TensorSum::Chain,
        store: Store::Assign,
    };
    let runs = (1 << 28) / (m * n * k);
    let seconds = (0..runs.clamp(3, 200)).map(|_| {
        let start = Instant::now();
        tensor_gemm(context, &product, MatMut::tight(&mut c, m, n)).expect("shapes fit");
        start.elapsed().as_secs_f64()
    });
    let best = seconds.fold(f64::INFINITY, f64::min);
    let steps = (m * n * k.div_ceil(kind.k())) as f64;
    let name = kind.name();
    let rate = steps / best / 1e6;
    println!("{form:?} m {m:5} n {n:5} k {k:5} {name:>4}: {rate:6.1} M steps/s");
}
