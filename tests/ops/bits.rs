//! Every op has the bits of its formula, over awkward sizes, on every backend, path and thread count.

use bitstep::num::tree::TokenSum;
use bitstep::op::adamw::AdamW;
use bitstep::op::bias::BiasGrad;
use bitstep::op::clip::{Clip, GradSquares};
use bitstep::op::copy::{Copy, FillNeutral};
use bitstep::op::cross_entropy::{CrossEntropy, IGNORE, LogitsAfter, LossSum};
use bitstep::op::embed::{Embed, EmbedGrad};
use bitstep::op::rms_norm::{RmsNorm, RmsNormGrad};
use bitstep::op::rope::{Heads, QkNormRope, QkNormRopeGrad, Rope, RopeGrad};
use bitstep::op::swiglu::{Output, SwiGlu, SwiGluGrad};
use bitstep::op::tree_add::TreeAdd;
use bitstep::op::{Op, Store};
use bitstep::shape::Math;

use super::reference::expected;
use super::runner::{Case, Numbers, Values, assert_bits, first_difference, run, with_math};

/// One case a seed, so that no two cases have the same contents.
fn check_all(ops: impl IntoIterator<Item = Op>) {
    for (seed, op) in ops.into_iter().enumerate() {
        check(&Case::random(op, seed as u64));
    }
}

/// In f32, and in both narrow storages where the op has operands of them.
fn check(case: &Case) {
    assert_bits(case, &expected(case));
    for math in [Math::Bf16, Math::F16] {
        if with_math(&case.op, math) != case.op {
            let narrow = case.in_math(math);
            assert_bits(&narrow, &expected(&narrow));
        }
    }
}

/// One token, one piece, ragged pieces, ragged grains, more pieces than threads.
pub fn cuts() -> [TokenSum; 6] {
    let cut = |tokens, grain, piece| TokenSum {
        tokens,
        grain,
        piece,
    };
    [
        cut(1, 1, 32),
        cut(31, 31, 32),
        cut(100, 100, 32),
        cut(70, 24, 7),
        cut(64, 8, 32),
        cut(300, 100, 100),
    ]
}

/// Head sizes from 2 to 256, grouped and ungrouped.
pub fn head_shapes() -> [Heads; 7] {
    let heads = |n_heads, n_kv_heads, head_dim| Heads {
        n_heads,
        n_kv_heads,
        head_dim,
    };
    [
        heads(1, 1, 2),
        heads(4, 2, 6),
        heads(3, 1, 32),
        heads(2, 2, 50),
        heads(6, 5, 64),
        heads(4, 1, 128),
        heads(2, 1, 256),
    ]
}

const WIDTHS: [usize; 7] = [1, 3, 16, 67, 128, 257, 600];

#[test]
fn embed_copies_rows() {
    for (rows, vocab_size, d_model) in [(1, 1, 1), (37, 11, 5), (200, 300, 67), (90, 2, 257)] {
        let op = Embed {
            rows,
            vocab_size,
            d_model,
        };
        let ids = Numbers::new(rows as u64).ids(rows, vocab_size);
        check(&Case::random(op, d_model as u64).with("ids", ids));
    }
}

#[test]
fn embed_grad_sums_positions_of_an_id() {
    for sum in cuts() {
        for (vocab_size, d_model) in [(1, 3), (5, 67), (300, 17)] {
            for store in [Store::Assign, Store::Add] {
                let op = EmbedGrad {
                    vocab_size,
                    d_model,
                    sum,
                    store,
                };
                let ids = Numbers::new(vocab_size as u64).ids(sum.tokens, vocab_size);
                check(&Case::random(op, sum.tokens as u64).with("ids", ids));
            }
        }
    }
}

#[test]
fn rms_norm_has_its_bits() {
    for (rows, d_model) in [1, 5, 70].into_iter().flat_map(|r| WIDTHS.map(|d| (r, d))) {
        check_all([true, false].map(|residual| {
            Op::from(RmsNorm {
                math: Math::F32,
                rows,
                d_model,
                eps: 1e-6,
                residual,
            })
        }));
    }
}

#[test]
fn rms_norm_grad_has_its_bits() {
    for (sum, d_model) in cuts().into_iter().flat_map(|s| WIDTHS.map(|d| (s, d))) {
        let stores = [
            (Store::Assign, true),
            (Store::Add, true),
            (Store::Add, false),
        ];
        check_all(stores.map(|(store, weight_grad)| {
            Op::from(RmsNormGrad {
                delta_grad: false,
                math: Math::F32,
                d_model,
                sum,
                store,
                weight_grad,
            })
        }));
    }
}

/// Rows that a GPU streams, of the sizes that its threads hold in registers and of another one: too many tokens for
/// blocks that read them twice, in one tree of more than two levels of 32 pieces, and grains with trees of their own.
#[test]
fn rms_norm_grad_of_many_rows_has_its_bits() {
    let cut = |tokens, grain| TokenSum {
        tokens,
        grain,
        piece: 32,
    };
    let sizes = [
        (768, cut(2100, 2100)),
        (1024, cut(130, 65)),
        (2048, cut(90, 45)),
        (1028, cut(2049, 2049)),
    ];
    for (d_model, sum) in sizes {
        for (store, weight_grad) in [
            (Store::Assign, true),
            (Store::Add, true),
            (Store::Add, false),
        ] {
            check(&Case::random(
                RmsNormGrad {
                    delta_grad: false,
                    math: Math::F32,
                    d_model,
                    sum,
                    store,
                    weight_grad,
                },
                d_model as u64,
            ));
        }
    }
}

#[test]
fn bias_grad_has_its_bits() {
    for sum in cuts() {
        check_all(WIDTHS.map(|n_out| {
            Op::from(BiasGrad {
                math: Math::F32,
                n_out,
                sum,
            })
        }));
    }
}

#[test]
fn rope_and_its_inverse_have_their_bits() {
    for heads in head_shapes() {
        for (rows, seq_len) in [(1, 1), (21, 7), (64, 64)] {
            let forward = Rope {
                math: Math::F32,
                rows,
                seq_len,
                heads,
            };
            let back = RopeGrad {
                math: Math::F32,
                rows,
                seq_len,
                heads,
            };
            check_all([Op::from(forward), Op::from(back)]);
        }
    }
}

#[test]
fn qk_norm_rope_has_its_bits() {
    for heads in head_shapes() {
        check_all([(1, 1), (21, 7), (64, 64)].map(|(rows, seq_len)| {
            Op::from(QkNormRope {
                math: Math::F32,
                rows,
                seq_len,
                heads,
                eps: 1e-6,
            })
        }));
    }
}

#[test]
fn qk_norm_rope_grad_has_its_bits() {
    for (heads, sum) in head_shapes()
        .into_iter()
        .flat_map(|h| cuts().map(|s| (h, s)))
    {
        check_all([true, false].map(|weight_grad| {
            Op::from(QkNormRopeGrad {
                math: Math::F32,
                seq_len: sum.grain.min(10),
                heads,
                sum,
                weight_grad,
            })
        }));
    }
}

#[test]
fn swiglu_and_its_gradient_have_their_bits() {
    for (rows, d_ff) in [1, 5, 70].into_iter().flat_map(|r| WIDTHS.map(|d| (r, d))) {
        let math = Math::F32;
        let grad = |output| SwiGluGrad {
            math,
            rows,
            d_ff,
            output,
        };
        check_all([
            Op::from(SwiGlu { math, rows, d_ff }),
            Op::from(grad(Output::Left)),
            Op::from(grad(Output::Restored)),
        ]);
    }
}

/// What backward writes over the output's gradient is what forward has written, and the gradients are the same.
#[test]
fn a_restored_output_has_the_bits_of_forward() {
    for (math, d_ff) in [Math::F32, Math::Bf16, Math::F16]
        .into_iter()
        .flat_map(|math| [128, 67].map(|d_ff| (math, d_ff)))
    {
        let rows = 9;
        // Gates far out, subnormal and of both signs too.
        let mut numbers = Numbers::new(41);
        let mut gate_up = numbers.ordinary(rows * 2 * d_ff).f32s().to_vec();
        let far = [-100.0, -87.5, 88.0, 1e-41, -0.0, 0.0, -30.0, 6e-8];
        gate_up[..far.len()].copy_from_slice(&far);
        let gate_up = Values::stored(math.storage(), &gate_up);
        let forward = Case::random(SwiGlu { math, rows, d_ff }, 1);
        let forward = run(&forward.with("gate_up", gate_up.clone()));
        let grad = |output| {
            let op = SwiGluGrad {
                math,
                rows,
                d_ff,
                output,
            };
            run(&Case::random(op, 2).with("gate_up", gate_up.clone()))
        };
        let (left, restored) = (grad(Output::Left), grad(Output::Restored));
        let difference = first_difference(&restored[0], &forward[0]);
        assert_eq!(difference, None, "{math} {d_ff}");
        assert_eq!(left.len() + 1, restored.len());
    }
}

#[test]
fn cross_entropy_has_its_bits() {
    for (rows, vocab_size) in [(1, 1), (9, 3), (70, 257), (5, 1000), (3, 16_500)] {
        for after in [LogitsAfter::Gradient, LogitsAfter::Kept] {
            let mut numbers = Numbers::new(vocab_size as u64);
            let mut targets = numbers.ids(rows, vocab_size).i32s().to_vec();
            targets
                .iter_mut()
                .skip(1)
                .step_by(4)
                .for_each(|t| *t = IGNORE);
            let op = CrossEntropy {
                math: Math::F32,
                rows,
                vocab_size,
                after,
            };
            check(&Case::random(op, 5).with("targets", Values::I32(targets)));
        }
    }
}

#[test]
fn sums_of_losses_and_partial_gradients_have_their_bits() {
    check_all(cuts().map(|sum| Op::from(LossSum { sum })));
    check_all([1, 7, 40_000].map(|elements| Op::from(TreeAdd { elements })));
    check_all([1, 7, 40_000].map(|elements| Op::from(Copy { elements })));
    check_all([1, 7, 40_000].map(|elements| Op::from(FillNeutral { elements })));
    check_all([1, 300, 16_384, 40_001].map(|elements| Op::from(GradSquares { elements })));
}

#[test]
fn clip_decides_as_its_formula() {
    let limits = [
        (1.0, 1e9, 2.5),
        (1e9, 1e9, 2.5),
        (1.0, 0.5, 2.5),
        (1.0, 1e9, f32::NAN),
    ];
    for (max_norm, spike_norm, loss) in limits {
        for partials in [1, 5, 64] {
            let mut scalars = vec![0.5; 8];
            (scalars[4], scalars[5]) = (max_norm, spike_norm);
            let case = Case::random(
                Clip {
                    loss_scaling: None,
                    partials,
                },
                3,
            )
            .with("scalars", Values::F32(scalars))
            .with("loss", Values::F32(vec![loss]));
            check(&case);
        }
    }
}

#[test]
fn adamw_updates_as_its_formula_or_not_at_all() {
    let sizes = [
        (1, 0, [0, 0]),
        (5, 5, [1, 2]),
        (40_000, 20_001, [0, 0]),
        (40_000, 20_001, [3_072, 192]),
        (40_000, 20_001, [39_999, 0]),
        (16_385, 16_384, [2_050, 1]),
    ];
    for (elements, decayed, [before_shadow, after_shadow]) in sizes {
        for applied in [1, 0] {
            let op = AdamW {
                math: Math::F32,
                elements,
                decayed,
                beta1: 0.9,
                one_minus_beta1: 0.1,
                beta2: 0.95,
                one_minus_beta2: 0.05,
                eps: 1e-8,
                before_shadow,
                after_shadow,
            };
            let mut numbers = Numbers::new(decayed as u64);
            let squares = (0..elements).map(|_| numbers.uniform(0.0, 1.0) as f32);
            let scalars = vec![1e-3, 1.7, 2.9, 0.99, 1.0, 9.0, 0.1, 1.0];
            let report = vec![0, 0, 0.7_f32.to_bits(), applied, 0, 0, 0, 0];
            let case = Case::random(op, 4)
                .with("moment2", Values::F32(squares.collect()))
                .with("scalars", Values::F32(scalars))
                .with("report", Values::U32(report));
            check(&case);
        }
    }
}
