//! What a call costs, by a rule that is the same on every machine: it chooses what backward computes again and decides
//! no bit. The constants are round figures of a large device of Hopper's kind, as `bench --profile` gives them.

use crate::op::Op;
use crate::shape::Math;

/// Seconds from the start of a call to that of the next one, however small.
const CALL_SECONDS: f64 = 2e-6;
/// Bytes a second of calls that only move them.
const BYTES_PER_SECOND: f64 = 3.6e12;
/// Operations a second of products in f32.
const F32_PRODUCTS: f64 = 47e12;
/// Of products on tensor cores in tf32, and in bf16 and f16.
const TF32_PRODUCTS: f64 = 330e12;
const NARROW_PRODUCTS: f64 = 650e12;
/// Outputs from which on a product fills a large device: a tile of 128 x 128 for each of 132 multiprocessors. One with
/// fewer has that share of the rate: the input gradient of a head of 151,936 logits ran at 841 TFLOP/s over 2,048 rows of
/// 1,024 columns, and at 456 over 1,024 rows.
const FILLING_OUTPUTS: f64 = (132 * 128 * 128) as f64;
/// Attention runs at this share of the rate of products.
const ATTENTION_SHARE: f64 = 0.4;
/// Operations a second of scans and convolutions, which take elementary functions.
const ELEMENTARY: f64 = 5e12;
/// The shares of the bandwidth that adapters' lower products and their sums reach.
const LOWER_SHARE: f64 = 0.45;
const UPPER_SHARE: f64 = 0.78;

/// Estimated seconds of a call of an op: the longer of its bytes over a bandwidth and its operations over a rate.
pub fn seconds(op: &Op) -> f64 {
    let rule = op.rule();
    let products = match rule.math() {
        Math::F32 => F32_PRODUCTS,
        Math::Tf32 => TF32_PRODUCTS,
        Math::Bf16 | Math::F16 => NARROW_PRODUCTS,
    };
    let filled = |outputs: usize| products * (outputs as f64 / FILLING_OUTPUTS).min(1.0);
    let (rate, bandwidth) = match op {
        Op::Matmul(op) => (filled(op.rows * op.n_out), BYTES_PER_SECOND),
        Op::MatmulGradInput(op) => (filled(op.rows * op.n_in), BYTES_PER_SECOND),
        Op::Attention(_) => (products * ATTENTION_SHARE, BYTES_PER_SECOND),
        Op::Scan(_) | Op::Conv1d(_) => (ELEMENTARY, BYTES_PER_SECOND),
        Op::LoraDown(_) => (products, BYTES_PER_SECOND * LOWER_SHARE),
        Op::LoraUp(_) => (products, BYTES_PER_SECOND * UPPER_SHARE),
        _ => (products, BYTES_PER_SECOND),
    };
    let (bytes, flops) = (rule.bytes() as f64, rule.flops() as f64);
    let computed = if flops > 0.0 { flops / rate } else { 0.0 };
    CALL_SECONDS + (bytes / bandwidth).max(computed)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::op::attention::{Attention, AttentionShape};
    use crate::op::matmul::{Matmul, MatmulGradInput};
    use crate::op::rms_norm::RmsNorm;
    use crate::op::rope::Heads;

    #[test]
    fn a_product_of_few_outputs_has_its_share_of_the_device() {
        let head = |rows| {
            let (n_in, n_out, math) = (1024, 151_936, Math::Bf16);
            seconds(&Op::from(MatmulGradInput {
                rows,
                n_in,
                n_out,
                math,
            })) - CALL_SECONDS
        };
        // Half as many rows take about as long, where they already did not fill the device.
        assert!((0.99..1.01).contains(&(head(512) / head(1024))));
        assert!((1.9..2.0).contains(&(head(4096) / head(2048))));
        let none = MatmulGradInput {
            rows: 0,
            n_in: 8,
            n_out: 8,
            math: Math::F32,
        };
        assert!(seconds(&Op::from(none)).is_finite());
    }

    #[test]
    fn bytes_or_operations_decide_whichever_take_longer() {
        let (rows, d_model, math) = (4096, 1024, Math::Bf16);
        let norm = seconds(&Op::from(RmsNorm {
            rows,
            d_model,
            eps: 1e-6,
            residual: false,
            math,
        }));
        let moved = (rows * d_model * 6) as f64 / BYTES_PER_SECOND;
        assert!(norm > moved && norm < 1.1 * moved + CALL_SECONDS);
        let product = |math| {
            let op = Matmul {
                rows,
                n_in: d_model,
                n_out: 4096,
                bias: false,
                math,
            };
            seconds(&Op::from(op))
        };
        let flops = 2.0 * (rows * d_model * 4096) as f64;
        assert_eq!(product(math), CALL_SECONDS + flops / NARROW_PRODUCTS);
        assert_eq!(product(Math::F32), CALL_SECONDS + flops / F32_PRODUCTS);
    }

    /// Attention of 1,024 tokens costs more than the product that its input comes from, though it has fewer operations.
    #[test]
    fn attention_is_dearer_than_its_operations() {
        let heads = Heads {
            n_heads: 16,
            n_kv_heads: 8,
            head_dim: 128,
        };
        let shape = AttentionShape {
            batch: 4,
            seq_len: 1024,
            heads,
        };
        let math = Math::Bf16;
        let attention = Op::from(Attention { shape, math });
        let product = Op::from(Matmul {
            rows: 4096,
            n_in: 1024,
            n_out: 4096,
            bias: false,
            math,
        });
        let flops = |op: &Op| op.rule().flops();
        assert!(flops(&attention) < flops(&product));
        assert!(seconds(&attention) > seconds(&product));
    }
}
