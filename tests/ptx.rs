//! The committed PTX: what it may not contain, and that the Rust side launches what is there.

use std::collections::BTreeSet;
use std::path::Path;

use bitstep::cuda::call::{Arg, DeviceShape, KernelLaunch};
use bitstep::cuda::issue::launches;
use bitstep::cuda::module::stem_of;
use bitstep::cuda::precision::has_kernels;
use bitstep::cuda::probe::{Instruction, plan};
use bitstep::cuda::probe_cases::{Category, Tiles};
use bitstep::cuda::ptx::{PTX, kernels};
use bitstep::cuda::together::groups;
use bitstep::layout::PlacedCall;
use bitstep::model::decoder::Decoder;
use bitstep::model::lora::{Base, LoraConfig, Norms, Projection};
use bitstep::model::mamba::{Mamba, Windows};
use bitstep::model::mamba_config::{Decay, MambaFamily};
use bitstep::model::{Family, MambaConfig, ModelConfig};
use bitstep::num::nf4::Quantisation;
use bitstep::num::tensor_step::Kind;
use bitstep::op::Op;
use bitstep::plan::{Passes, Plan, PlanConfig, StepForm};
use bitstep::shape::Math;
use serde_json::Value;

pub(crate) const DEVICE: DeviceShape = DeviceShape {
    multiprocessors: 132,
    shared_bytes_per_block: 232_448,
    warpgroups: true,
};

fn folder() -> &'static Path {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/ptx"))
}

fn index() -> Value {
    let text = std::fs::read_to_string(folder().join("index.json")).expect("an index");
    serde_json::from_str(&text).expect("JSON")
}

/// The matrix instructions that make the contract's step, in the widths that kernels use.
const CONTRACT_STEPS: [&str; 12] = [
    "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32",
    "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32",
    "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32",
    "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16",
    "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16",
    "wgmma.mma_async.sync.aligned.m64n64k8.f32.tf32.tf32",
    "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16",
    "wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16",
    "wgmma.mma_async.sync.aligned.m64n192k16.f32.bf16.bf16",
    "wgmma.mma_async.sync.aligned.m64n192k16.f32.f16.f16",
    "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16",
    "wgmma.mma_async.sync.aligned.m64n256k16.f32.f16.f16",
];

/// What orders wgmma and computes nothing.
const WGMMA_ORDER: [&str; 3] = [
    "wgmma.fence.sync.aligned;",
    "wgmma.commit_group.sync.aligned;",
    "wgmma.wait_group.sync.aligned",
];

/// Whether the lines from a guess of a reciprocal on are its step of Newton's, by which it is the reciprocal to nearest for divisors of
/// 1 to 2: what the device's own division does for them.
fn is_newtons(lines: &[&str]) -> bool {
    let [guess, less, rest, last, ..] = lines else {
        return false;
    };
    let divisor = guess.strip_prefix("rcp.approx.ftz.f32 guess, ");
    divisor.is_some_and(|divisor| {
        *less == format!("neg.f32 less, {divisor}")
            && *rest == "fma.rn.f32 rest, less, guess, 0f3F800000;"
            && last.starts_with("fma.rn.f32 %f")
            && last.ends_with(", guess, rest, guess;}")
    })
}

/// The first instruction of a text that computes with floats and does not say how it rounds, or that
/// adds floats in memory, or is a matrix instruction other than those of the contract's step.
fn inexact(ptx: &str) -> Option<&str> {
    let rounded = ["add", "sub", "mul", "div", "fma", "sqrt", "rcp"];
    let never = ["ex2", "lg2", "sin", "cos", "rsqrt", "tanh", "mad"];
    let lines: Vec<&str> = ptx.lines().map(str::trim).collect();
    let found = (0..lines.len()).find(|&at| {
        if is_newtons(&lines[at..]) {
            return false;
        }
        // A predicate may stand before the instruction.
        let line = lines[at];
        let line = line
            .strip_prefix('@')
            .map_or(line, |l| l.split_once(' ').map_or("", |p| p.1));
        let word = line.split_whitespace().next().unwrap_or("");
        let parts: Vec<&str> = word.trim_end_matches(';').split('.').collect();
        let float = parts
            .iter()
            .any(|p| ["f16", "bf16", "tf32", "f32", "f64"].contains(p));
        let memory = ["atom", "red"].contains(&parts[0]);
        let approximate = parts.iter().any(|p| ["approx", "ftz", "full"].contains(p));
        let unrounded = rounded.contains(&parts[0]) && !parts.contains(&"rn");
        // The only conversion to tf32 besides the one to nearest even rounds ties away from zero.
        let away = parts.iter().any(|p| ["rna", "satfinite"].contains(p));
        let matrix = ["mma", "wgmma", "wmma", "tcgen05"].contains(&parts[0]);
        float && (memory || approximate || unrounded || away || never.contains(&parts[0]))
            || matrix && !CONTRACT_STEPS.contains(&word) && !WGMMA_ORDER.contains(&word)
    });
    found.map(|at| lines[at])
}

#[test]
fn every_float_operation_says_how_it_rounds_and_none_is_atomic() {
    for (stem, text) in PTX {
        assert_eq!(inexact(text), None, "{stem}");
    }
}

#[test]
fn an_operation_without_a_rounding_is_found() {
    let bad = [
        "add.f32 %f1, %f2, %f3;",
        "@%p1 mul.ftz.rn.f32 %f1, %f2, %f3;",
        "fma.f64 %fd1, %fd2, %fd3, %fd4;",
        "div.approx.f32 %f1, %f2, %f3;",
        "ex2.approx.ftz.f32 %f1, %f2;",
        "red.global.add.f32 [%rd1], %f1;",
        "atom.global.add.f64 %fd1, [%rd1], %fd2;",
        "rsqrt.approx.f32 %f1, %f2;",
        "cvt.rna.tf32.f32 %r1, %f1;",
        "mma.sync.aligned.m16n8k16.row.col.f16.f16.f16.f16 {%r1, %r2}, {%r3},",
        "mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 {%f1, %f2}, {%r3},",
        "mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 {%f1, %f2}, {%r3},",
        "wgmma.mma_async.sync.aligned.m64n64k16.f16.f16.f16 {%r1}, %rd1, %rd2, p, 1, 1, 0, 0;",
    ];
    for line in bad {
        assert_eq!(inexact(line), Some(line));
    }
    let good = "fma.rn.f32 %f1, %f2, %f3, %f4;\nmax.f32 %f1, %f2, %f3;\nadd.s32 %r1, %r2, %r3;\n\
        atom.global.add.u32 %r1, [%rd1], 1;\ncvt.rn.f32.f64 %f1, %fd1;\n\
        mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%f1}, {%r1};\n\
        wgmma.wait_group.sync.aligned 0;";
    assert_eq!(inexact(good), None);
}

#[test]
fn a_guess_of_a_reciprocal_stands_only_before_its_step() {
    let guess = "rcp.approx.ftz.f32 guess, %f2;";
    let step = "neg.f32 less, %f2;\nfma.rn.f32 rest, less, guess, 0f3F800000;\nfma.rn.f32 %f1, guess, rest, guess;}";
    assert_eq!(inexact(&format!("{guess}\n{step}")), None);
    assert_eq!(inexact(guess), Some(guess));
    for (of, other) in [
        ("%f2", "%f3"),
        ("3F8", "3F9"),
        ("rest, guess;", "guess, guess;"),
    ] {
        let text = format!("{guess}\n{}", step.replacen(of, other, 1));
        assert_eq!(inexact(&text), Some(guess), "{other}");
    }
}

#[test]
fn the_embedded_files_are_those_of_the_folder_and_the_index() {
    let listed: BTreeSet<String> = PTX.iter().map(|(stem, _)| (*stem).to_owned()).collect();
    let files = |ending: &str| -> BTreeSet<String> {
        let entries = std::fs::read_dir(folder()).expect("a folder").flatten();
        let names = entries.filter_map(|e| e.file_name().into_string().ok());
        names
            .filter_map(|n| n.strip_suffix(ending).map(str::to_owned))
            .collect()
    };
    let indexed: BTreeSet<String> = index()
        .as_object()
        .expect("a table")
        .keys()
        .cloned()
        .collect();
    assert_eq!(files(".cu"), listed);
    assert_eq!(files(".ptx"), listed);
    assert_eq!(indexed, listed);
}

#[test]
fn no_kernel_spills() {
    for (stem, file) in index().as_object().expect("a table") {
        for (kernel, facts) in file["kernels"].as_object().expect("kernels") {
            assert_eq!(facts["spill_bytes"], 0, "{stem}: {kernel}");
        }
    }
}

/// Plans that reach every op in every precision, in small and in large sizes, aligned and not.
pub(crate) fn plans() -> Vec<Plan> {
    let mut plans = Vec::new();
    for family in [Family::Llama, Family::Qwen2, Family::Qwen3] {
        for (batch, seq_len, d_model, head_dim, vocab_size) in [
            (32, 32, 128, 32, 256),
            (8, 1024, 768, 64, 50304),
            (1, 3, 5, 2, 7),
            (2, 70, 96, 128, 40),
        ] {
            let model = Decoder::new(ModelConfig {
                family,
                max_seq_len: seq_len,
                ..model([vocab_size, d_model, head_dim])
            });
            for grain in [1, batch] {
                for math in Math::ALL {
                    let config = PlanConfig {
                        grain,
                        math,
                        ..PlanConfig::of(batch, seq_len)
                    };
                    if grain < batch {
                        let sequences = grain;
                        let passes = Passes::Micro { sequences };
                        let form = StepForm {
                            passes,
                            ..StepForm::default()
                        };
                        let split = PlanConfig {
                            form,
                            ..config.clone()
                        };
                        plans.push(Plan::build(&model, split).expect("plans"));
                    }
                    plans.push(Plan::build(&model, config).expect("plans"));
                }
            }
        }
    }
    for base in [Base::Plain, Base::Nf4(Quantisation::Once)] {
        for (rank, d_model, head_dim, grain) in [
            (16, 128, 32, 2),
            (24, 128, 32, 2),
            (40, 136, 32, 2),
            (104, 128, 64, 2),
            (3, 36, 6, 1),
        ] {
            let lora = LoraConfig {
                rank,
                alpha: 8.0,
                targets: Projection::ALL.into(),
                norms: Norms::Frozen,
                base,
            };
            let model = Decoder::with_adapters(model([40, d_model, head_dim]), lora);
            for math in Math::ALL {
                let config = PlanConfig {
                    grain,
                    math,
                    ..PlanConfig::of(2, 512)
                };
                plans.push(Plan::build(&model, config).expect("plans"));
            }
        }
    }
    attention_plans(&mut plans);
    product_plans(&mut plans);
    mamba_plans(&mut plans);
    plans
}

/// Models of some layers, in whose graphs attention serves its neighbours: in the backward of the last layer the
/// gradient may lie over the output.
fn attention_plans(plans: &mut Vec<Plan>) {
    for head_dim in [32, 64, 128] {
        for (batch, seq_len) in [(2, 24), (2, 96), (20, 1024), (40, 1024)] {
            for math in [Math::Tf32, Math::Bf16, Math::F16] {
                let model = Decoder::new(ModelConfig {
                    family: Family::Llama,
                    n_layers: 3,
                    max_seq_len: seq_len,
                    ..model([40, 4 * head_dim, head_dim])
                });
                let config = PlanConfig {
                    math,
                    ..PlanConfig::of(batch, seq_len)
                };
                plans.push(Plan::build(&model, config).expect("plans"));
            }
        }
    }
}

/// Models whose products fill a large device with tiles of 256, 192 and 128 columns, whole and with adapters.
fn product_plans(plans: &mut Vec<Plan>) {
    for d_model in [1024, 768, 640] {
        let lora = LoraConfig {
            rank: 16,
            alpha: 8.0,
            targets: Projection::ALL.into(),
            norms: Norms::Frozen,
            base: Base::Plain,
        };
        let whole = Decoder::new(model([40, d_model, 64]));
        for model in [
            whole,
            Decoder::with_adapters(model([40, d_model, 64]), lora),
        ] {
            for math in [Math::Bf16, Math::F16] {
                let config = PlanConfig {
                    math,
                    ..PlanConfig::of(9, 256)
                };
                plans.push(Plan::build(&model, config).expect("plans"));
            }
        }
    }
}

/// A layer of a model with these sizes.
fn model([vocab_size, d_model, head_dim]: [usize; 3]) -> ModelConfig {
    ModelConfig {
        family: Family::Qwen3,
        vocab_size,
        d_model,
        n_layers: 1,
        n_heads: 4,
        n_kv_heads: 2,
        head_dim,
        d_ff: 3 * d_model,
        rope_theta: 1e4,
        rms_norm_eps: 1e-6,
        tie_embeddings: true,
        max_seq_len: 512,
        init_std: 0.02,
    }
}

/// The same for Mamba, with every number of states that has a kernel of its own.
fn mamba_plans(plans: &mut Vec<Plan>) {
    for (batch, seq_len, d_model, d_state, d_conv) in [
        (32, 32, 128, 16, 4),
        (8, 512, 768, 16, 4),
        (1, 3, 5, 7, 2),
        (2, 70, 40, 8, 4),
        (2, 9, 16, 32, 3),
        (1, 40, 16, 64, 16),
    ] {
        let config = MambaConfig {
            family: MambaFamily::Mamba,
            vocab_size: 40,
            d_model,
            n_layers: 1,
            expand: 2,
            d_state,
            d_conv,
            dt_rank: 3,
            rms_norm_eps: 1e-5,
            tie_embeddings: true,
            init_std: 0.02,
            decay: Decay::Reference,
        };
        for windows in [Windows::Separate, Windows::Carried] {
            let model = Mamba::new(config.clone()).with_windows(windows);
            for math in Math::ALL {
                let config = PlanConfig {
                    math,
                    ..PlanConfig::of(batch, seq_len)
                };
                plans.push(Plan::build(&model, config).expect("plans"));
            }
        }
    }
}

/// Fails unless a launch passes the parameters that its kernel takes.
fn assert_signature(launch: &KernelLaunch, index: &Value) {
    let (stem, _) = stem_of(launch.entry).unwrap_or_else(|| panic!("no file for {}", launch.entry));
    let params = &index[stem]["kernels"][launch.entry]["params"];
    let given: Vec<&str> = launch.args.iter().map(width).collect();
    assert_eq!(serde_json::json!(given), *params, "{}", launch.entry);
}

#[test]
fn every_launch_has_the_signature_of_its_kernel() {
    let index = index();
    let (mut reached, mut together) = (BTreeSet::new(), BTreeSet::new());
    for plan in plans() {
        for (_, calls) in plan.programs().iter() {
            let calls = plan.layout.place(calls);
            for group in groups(&calls, &DEVICE).into_iter().flatten() {
                for launch in &group.launches.launches {
                    assert_signature(launch, &index);
                    together.insert(launch.entry);
                }
            }
            let served = |call: &PlacedCall| has_kernels(&call.call.op).is_ok();
            for call in calls.into_iter().filter(served) {
                let older = DeviceShape {
                    warpgroups: false,
                    ..DEVICE
                };
                let both = [DEVICE, older].map(|device| launches(&call.call.op, &call, &device));
                for launch in both.into_iter().flat_map(|both| both.launches) {
                    assert_signature(&launch, &index);
                    assert_storage(launch.entry, &call.call.op);
                    reached.insert(launch.entry);
                }
            }
        }
    }
    for entry in by_size() {
        assert!(reached.contains(entry.as_str()), "{entry} was not reached");
    }
    assert!(
        reached.len() > 252,
        "only {} kernels were reached",
        reached.len()
    );
    let of_neighbours = [
        "_with_delta",
        "_turned",
        "_keeping",
        "attention_grad_query_kept_",
        "attention_grads_",
        "attention_turned_",
        "lora_up_swiglu_",
        "_sm90a_lora_",
    ];
    let kernels = PTX.iter().flat_map(|(_, text)| kernels(text));
    for entry in kernels.filter(|entry| of_neighbours.iter().any(|part| entry.contains(part))) {
        assert!(together.contains(entry), "{entry} was not reached");
    }
    assert!(together.len() > 58, "only {together:?} were reached");
}

/// Kernels of which the operands' sizes choose one.
fn by_size() -> Vec<String> {
    let mut entries = Vec::new();
    for math in ["f32", "tf32", "bf16", "f16"] {
        for stem in ["up", "up_grad_input", "up_grad_weight", "down_grad_input"] {
            entries.extend(["", "_any"].map(|end| format!("lora_{stem}_{math}{end}")));
        }
    }
    for math in ["bf16", "f16"] {
        for terms in [16, 32, 48] {
            entries.push(format!("lora_up_{math}_wide_{terms}"));
            entries.push(format!("lora_down_grad_input_{math}_wide_{terms}"));
            entries.push(format!("lora_up_grad_weight_thin_{math}_{terms}"));
        }
        for tile in [128, 192, 256] {
            entries.push(format!("matmul_{math}_sm90a_{tile}"));
            entries.push(format!("matmul_grad_input_{math}_sm90a_{tile}"));
        }
    }
    entries
}

/// The kernel is one for the storage of the op's precision. Those that only clear or fold sums serve all, and products
/// of tf32 have kernels of their own.
fn assert_storage(entry: &str, op: &Op) {
    let math = op.rule().math();
    let names = [math.storage().name(), math.name()];
    let named = |name: &&str| entry.split('_').any(|part| part == *name);
    let partials = entry == "bias_grad_f32_none" || entry.starts_with("rms_norm_grad_folds_f32");
    let serves = names.iter().any(named) || partials;
    assert!(serves, "{entry} for an op in {math}");
}

#[test]
fn the_probes_launches_have_the_signatures_of_their_kernels() {
    let index = index();
    for instruction in [Instruction::Mma, Instruction::Wgmma] {
        for kind in Kind::ALL {
            let tiles = Tiles::generate(kind, Category::Chained, 2);
            let plan = plan(instruction, &tiles);
            assert_signature(&plan.launch, &index);
            assert_eq!(plan.launch.grid, [2, 1, 1]);
            for (region, values) in plan.regions.iter().zip([&tiles.a, &tiles.b]) {
                assert_eq!(region.bytes, tiles.words(values).len() * 4);
            }
            for pair in plan.regions.windows(2) {
                assert!(pair[0].end() <= pair[1].offset, "the operands lie apart");
            }
        }
    }
}

/// How PTX declares a parameter of this kind.
fn width(arg: &Arg) -> &'static str {
    match arg {
        Arg::Region(_) | Arg::Workspace { .. } => ".u64",
        Arg::U32(_) => ".u32",
        Arg::F32(_) => ".f32",
        Arg::Matrix(_) => ".b8",
    }
}
