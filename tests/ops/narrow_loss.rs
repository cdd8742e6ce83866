//! Cross-entropy of narrow logits: its formula, element by element, and beside f64.

use bitstep::num::element::{Bf16, Element, F16};
use bitstep::num::{log, weight};
use bitstep::op::cross_entropy::{CrossEntropy, IGNORE, LogitsAfter};
use bitstep::shape::Math;

use super::reference::lanes;
use super::runner::{Case, Numbers, Values, run};

const TILE: usize = 8192;
const K: f32 = f32::from_bits(0x3c38_aa3b);
const NATS: f32 = f32::from_bits(0x42b1_7218);

/// What stands beside a row of logits.
#[derive(Clone, Copy)]
pub struct Scored {
    pub math: Math,
    pub target: usize,
    pub weight: f32,
    pub inv_normaliser: f32,
    pub scale: f32,
}

/// The reference of each tile, and by how much sums move when it begins.
fn references(x: &[f32]) -> Vec<(f32, f32, f32)> {
    let mut r = f32::MIN;
    let step = |tile: &[f32]| {
        let top = match tile.iter().any(|x| x.is_nan()) {
            true => f32::NAN,
            false => tile.iter().copied().fold(f32::NEG_INFINITY, f32::max),
        };
        let y = top * K;
        if y <= r {
            return (r, 1.0, 0.0);
        }
        let before = r;
        r = ((y + 1.0 / 64.0) + 393_216.0) - 393_216.0;
        let addend = if y.is_finite() { 0.0 } else { f32::NAN };
        (r, 0.5 * weight(r - before), addend)
    };
    x.chunks(TILE).map(step).collect()
}

/// Loss and gradient of a row, before the gradient is rounded.
pub fn row(x: &[f32], of: Scored) -> (f32, Vec<f32>) {
    let tiles = references(x);
    let w = |x: f32, r: f32| weight((-x).mul_add(K, r));
    let mut l = [0.0_f32; 256];
    for (tile, &(r, factor, addend)) in x.chunks(TILE).zip(&tiles) {
        l = l.map(|l| l.mul_add(factor, addend));
        for (i, &x) in tile.iter().enumerate() {
            l[i % 256] += w(x, r);
        }
    }
    let sum = lanes(256, |i, _| l[i]);
    let last = tiles[tiles.len() - 1].0;
    let f = of.weight * of.inv_normaliser;
    if sum.is_nan() || sum <= 0.0 {
        return (f32::NAN, vec![f32::NAN; x.len()]);
    }
    let distance = (-x[of.target]).mul_add(K, last);
    let loss = distance.mul_add(NATS, log(0.5 * sum)).max(0.0) * of.weight;
    let lift = if of.math == Math::F16 { 16_384.0 } else { 1.0 };
    let c = (f * (1.0 / sum)) * (of.scale / lift);
    let rounded = |w: f32| match of.math {
        Math::F16 => F16::from_f32(w).to_f32(),
        _ => Bf16::from_f32(w).to_f32(),
    };
    let gradient = x.iter().enumerate().map(|(i, &x)| {
        let r = tiles[i / TILE].0;
        if i == of.target {
            return ((w(x, last) * (1.0 / sum) - 1.0) * f) * of.scale;
        }
        rounded(w(x, r) * lift) * (c * (0.5 * weight(last - r)))
    });
    (loss, gradient.collect())
}

fn case(math: Math, rows: usize, vocab_size: usize, logits: Vec<f32>) -> Case {
    let op = CrossEntropy {
        math: Math::F32,
        rows,
        vocab_size,
        after: LogitsAfter::Gradient,
    };
    let targets = Numbers::new(9).ids(rows, vocab_size);
    Case::random(op, 5)
        .with("targets", targets)
        .with("weights", Values::F32(vec![1.0; rows]))
        .with("scalars", Values::F32(vec![1.0; 8]))
        .with("logits", Values::F32(logits))
        .in_math(math)
}

/// Losses and gradients beside f64, over the logits as they are stored: a gradient has two roundings to H, but at
/// the target, where one is taken after the subtraction.
#[test]
fn narrow_losses_and_gradients_are_those_of_f64() {
    // Two roundings of what is subnormal in f16, each to a multiple of 2^-24.
    let formats = [(Math::Bf16, 8, 0.0), (Math::F16, 11, 0.5_f64.powi(24))];
    for (math, bits, subnormal) in formats {
        let (rows, vocab_size) = (3, 20_000);
        let mut numbers = Numbers::new(4);
        let logits: Vec<f32> = (0..rows * vocab_size)
            .map(|i| numbers.uniform(-6.0, 6.0) as f32 + if i % 9001 == 0 { 9.0 } else { 0.0 })
            .collect();
        let case = case(math, rows, vocab_size, logits);
        let stored = case.widened().writes[2].f32s().to_vec();
        let found = run(&case);
        let (losses, gradients) = (found[0].f32s(), found[2].widened());
        let scale = if math == Math::F16 { 2048.0 } else { 1.0 };
        let Values::I32(targets) = &case.reads[0] else {
            panic!("targets are i32")
        };
        for (row, x) in stored.chunks(vocab_size).enumerate() {
            let lse = x.iter().map(|&x| f64::from(x).exp()).sum::<f64>().ln();
            let target = targets[row] as usize;
            let loss = lse - f64::from(x[target]);
            let error = (f64::from(losses[row]) - loss).abs();
            assert!(error < 3e-6 + 3e-7 * loss, "{error:e} of {loss}");
            let gradient = &gradients.f32s()[row * vocab_size..][..vocab_size];
            for (i, (&g, &x)) in gradient.iter().zip(x).enumerate() {
                let p = (f64::from(x) - lse).exp();
                let expected = scale * if i == target { p - 1.0 } else { p };
                let error = (f64::from(g) - expected).abs();
                let most = 2.1 * 0.5_f64.powi(bits) * expected.abs() + subnormal;
                assert!(error < most, "{math:?} {i}: {error:e} of {expected:e}");
            }
        }
    }
}

/// A NaN, an infinity or a row of minus infinities alone makes loss and every gradient of its row a NaN, in whichever tile it
/// stands; minus infinity elsewhere is a probability of zero.
#[test]
fn narrow_rows_that_are_not_finite_say_so() {
    for math in [Math::Bf16, Math::F16] {
        for (at, bad) in [(3, f32::NAN), (8200, f32::INFINITY), (9000, f32::NAN)] {
            let (rows, vocab_size) = (2, 9001);
            let mut logits = vec![0.25; rows * vocab_size];
            logits[at] = bad;
            logits[vocab_size..vocab_size + 8500].fill(f32::NEG_INFINITY);
            let mut case = case(math, rows, vocab_size, logits);
            case = case.with("targets", Values::I32(vec![5, 8600]));
            let found = run(&case);
            let gradients = found[2].widened();
            let (broken, whole) = gradients.f32s().split_at(vocab_size);
            assert!(found[0].f32s()[0].is_nan());
            assert!(broken.iter().all(|g| g.is_nan()), "{bad} at {at}");
            assert!((found[0].f32s()[1] - 501_f32.ln()).abs() < 1e-5);
            assert!(whole[..8500].iter().all(|&g| g == 0.0));
            assert!(whole[8500..].iter().all(|g| g.is_finite() && *g != 0.0));
        }
        let all = vec![f32::NEG_INFINITY; 300];
        let found = run(&case(math, 1, 300, all));
        assert!(found[0].f32s()[0].is_nan());
        // An ignored row is zeros whatever it holds.
        let ignored = case(math, 1, 300, vec![f32::NAN; 300]);
        let found = run(&ignored.with("targets", Values::I32(vec![IGNORE])));
        assert_eq!(found[0].f32s()[0].to_bits(), 0);
        assert!(found[2].widened().f32s().iter().all(|g| g.to_bits() == 0));
    }
}
