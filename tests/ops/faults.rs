//! Faults that ops of this kind have had: sums that depend on timing, gradients that add up when they
//! should be assigned, rows of a table that were not meant, operands and ids that do not fit.

use bitstep::error::DeviceError;
use bitstep::num::tree::TokenSum;
use bitstep::op::bias::BiasGrad;
use bitstep::op::embed::{Embed, EmbedGrad};
use bitstep::op::rms_norm::{RmsNorm, RmsNormGrad};
use bitstep::op::rope::{Heads, QkNormRope, QkNormRopeGrad, Rope, RopeGrad};
use bitstep::op::swiglu::{Output, SwiGlu, SwiGluGrad};
use bitstep::op::{Op, Store};
use bitstep::shape::Math;

use super::runner::{
    Case, Numbers, Values, assert_bits, devices, first_difference, run, with_math,
};

const SUM: TokenSum = TokenSum {
    tokens: 12,
    grain: 6,
    piece: 4,
};
const HEADS: Heads = Heads {
    n_heads: 2,
    n_kv_heads: 1,
    head_dim: 8,
};

#[test]
fn a_thousand_backwards_of_a_few_ids_are_equal() {
    let sum = TokenSum {
        tokens: 700,
        grain: 350,
        piece: 350,
    };
    let op = EmbedGrad {
        vocab_size: 9,
        d_model: 33,
        sum,
        store: Store::Assign,
    };
    let ids = Numbers::new(1).ids(sum.tokens, 3);
    let case = Case::random(op, 1).with("ids", ids);
    let first = run(&case);
    let many_threads = devices().last().expect("a device");
    for pass in 0..1000 {
        let found = many_threads.run(&case).expect("the case runs");
        assert_eq!(first_difference(&found[0], &first[0]), None, "pass {pass}");
    }
}

#[test]
fn gradients_of_norm_weights_and_biases_do_not_add_up() {
    let norm = RmsNormGrad {
        delta_grad: false,
        math: Math::F32,
        d_model: 20,
        sum: SUM,
        store: Store::Assign,
        weight_grad: true,
    };
    let qk_norm = QkNormRopeGrad {
        math: Math::F32,
        seq_len: 6,
        heads: HEADS,
        sum: SUM,
        weight_grad: true,
    };
    let bias = BiasGrad {
        math: Math::F32,
        n_out: 20,
        sum: SUM,
    };
    for op in [Op::from(norm), Op::from(qk_norm), Op::from(bias)] {
        let case = Case::random(op, 2);
        let first = run(&case);
        let mut again = case.clone();
        let signature = case.op.rule().signature();
        for (i, operand) in signature.writes.iter().enumerate() {
            if operand.access == bitstep::op::Access::Write {
                again.writes[i] = first[i].clone();
            }
        }
        assert_bits(&again, &first);
    }
}

#[test]
fn rows_of_absent_ids_are_zeroed_or_keep_their_bits() {
    let op = |store| EmbedGrad {
        vocab_size: 4,
        d_model: 3,
        sum: SUM,
        store,
    };
    let ids = Values::I32(vec![2; SUM.tokens]);
    let before = Values::F32(vec![-0.0; 12]);
    for store in [Store::Assign, Store::Add] {
        let case = Case::random(op(store), 3)
            .with("ids", ids.clone())
            .with("dtable", before.clone());
        let absent = if store == Store::Add { -0.0_f32 } else { 0.0 };
        for device in devices() {
            let found = device.run(&case).expect("the case runs");
            for (i, x) in found[0].f32s().iter().enumerate() {
                let kept = x.to_bits() == absent.to_bits();
                assert!(kept || i / 3 == 2, "{store:?}, element {i}: {x:e}");
            }
        }
    }
}

#[test]
fn an_id_outside_the_table_is_an_error() {
    let embed = Embed {
        rows: SUM.tokens,
        vocab_size: 4,
        d_model: 3,
    };
    let grad = EmbedGrad {
        vocab_size: 4,
        d_model: 3,
        sum: SUM,
        store: Store::Add,
    };
    for (op, id) in [(Op::from(embed), 4), (Op::from(grad), -1)] {
        let mut ids = vec![3; SUM.tokens];
        ids[5] = id;
        let case = Case::random(op, 4).with("ids", Values::I32(ids));
        let refused = DeviceError::TokenOutOfRange {
            position: 5,
            found: id,
            vocab_size: 4,
        };
        // A GPU cannot stop in the middle of a launch: there the kernel stores NaN, so that the step is
        // dropped; the engine refuses such a batch before either.
        for device in devices().iter().filter(|d| d.name().starts_with("CPU")) {
            assert_eq!(device.run(&case).err(), Some(refused.clone()));
        }
    }
}

fn of_rows() -> Vec<Op> {
    let (rows, sum) = (SUM.tokens, SUM);
    let (vocab_size, d_model, store) = (4, 3, Store::Add);
    vec![
        Embed {
            rows,
            vocab_size,
            d_model,
        }
        .into(),
        EmbedGrad {
            vocab_size,
            d_model,
            sum,
            store,
        }
        .into(),
        RmsNorm {
            math: Math::F32,
            rows,
            d_model,
            eps: 1e-6,
            residual: true,
        }
        .into(),
        RmsNormGrad {
            delta_grad: false,
            math: Math::F32,
            d_model,
            sum,
            store,
            weight_grad: true,
        }
        .into(),
        BiasGrad {
            math: Math::F32,
            n_out: 3,
            sum,
        }
        .into(),
    ]
}

fn of_heads() -> Vec<Op> {
    let (rows, seq_len, heads, sum) = (SUM.tokens, 6, HEADS, SUM);
    vec![
        Rope {
            math: Math::F32,
            rows,
            seq_len,
            heads,
        }
        .into(),
        RopeGrad {
            math: Math::F32,
            rows,
            seq_len,
            heads,
        }
        .into(),
        QkNormRope {
            math: Math::F32,
            rows,
            seq_len,
            heads,
            eps: 1e-6,
        }
        .into(),
        QkNormRopeGrad {
            math: Math::F32,
            seq_len,
            heads,
            sum,
            weight_grad: true,
        }
        .into(),
        SwiGlu {
            math: Math::F32,
            rows,
            d_ff: 5,
        }
        .into(),
        SwiGluGrad {
            math: Math::F32,
            rows,
            d_ff: 5,
            output: Output::Left,
        }
        .into(),
        SwiGluGrad {
            math: Math::F32,
            rows,
            d_ff: 5,
            output: Output::Restored,
        }
        .into(),
    ]
}

/// One of each op, in f32 and in both narrow storages.
fn one_of_each() -> Vec<Op> {
    let ops = [of_rows(), of_heads()].concat();
    let narrow = [Math::Bf16, Math::F16].map(|math| ops.iter().map(move |op| with_math(op, math)));
    let narrow: Vec<Op> = narrow.into_iter().flatten().collect();
    ops.into_iter().chain(narrow).collect()
}

#[test]
fn an_operand_of_another_size_is_named() {
    for op in one_of_each() {
        let signature = op.rule().signature();
        for operand in signature.reads.iter().chain(&signature.writes) {
            let elements = operand.shape.elements();
            for found in [elements - 1, elements + 1] {
                let case = Case::random(op.clone(), 5).resized(operand.name, found);
                let refused = DeviceError::OperandSize {
                    operand: operand.name,
                    expected: elements,
                    found,
                };
                let error = devices()[0].run(&case).err();
                assert_eq!(error, Some(refused), "{op}, {}", operand.name);
            }
        }
    }
}

/// The NaNs of narrow outputs, of which there is at least one, that are not `canonical`.
fn other_nans(outputs: &[Values], canonical: u16, infinity: u16) -> Vec<String> {
    let narrow = outputs.iter().filter_map(|values| match values {
        Values::Bf16(v) | Values::F16(v) => Some(v),
        _ => None,
    });
    let nans: Vec<u16> = narrow
        .flatten()
        .copied()
        .filter(|bits| bits & 0x7fff > infinity)
        .collect();
    assert!(!nans.is_empty(), "no output is a NaN");
    let other = nans.iter().filter(|&&bits| bits != canonical);
    other.map(|bits| format!("{bits:04x}")).collect()
}

#[test]
fn a_narrow_nan_is_stored_as_the_canonical_one() {
    for (math, canonical, infinity) in [(Math::Bf16, 0x7fc0, 0x7f80), (Math::F16, 0x7e00, 0x7c00)] {
        // Rows that vectors reach, and rows that they do not.
        for d_model in [16, 5] {
            let with_nan = |n: usize| {
                let mut numbers = vec![0.5; 2 * n];
                numbers[n / 2] = f32::NAN;
                numbers[2 * n - 1] = f32::NAN;
                numbers
            };
            let (d_ff, rows, eps, residual) = (d_model, 2, 1e-6, false);
            let swiglu = Case::random(SwiGlu { rows, d_ff, math }, 1);
            let norm = RmsNorm {
                rows,
                d_model,
                eps,
                residual,
                math,
            };
            let gate_up = Values::stored(math.storage(), &with_nan(2 * d_ff));
            let x = Values::F32(with_nan(d_model));
            for case in [
                swiglu.with("gate_up", gate_up),
                Case::random(norm, 1).with("x", x),
            ] {
                for device in devices() {
                    let found = device.run(&case).expect("the case runs");
                    let other = other_nans(&found, canonical, infinity);
                    assert!(
                        other.is_empty(),
                        "{}, {}: {other:?}",
                        device.name(),
                        case.op
                    );
                }
            }
        }
    }
}

#[test]
fn another_nan_than_the_canonical_one_is_found() {
    let outputs = |bits| [Values::F32(vec![1.0]), Values::Bf16(vec![0x3f80, bits])];
    assert_eq!(other_nans(&outputs(0x7fc0), 0x7fc0, 0x7f80), [""; 0]);
    assert_eq!(other_nans(&outputs(0x7fff), 0x7fc0, 0x7f80), ["7fff"]);
}
