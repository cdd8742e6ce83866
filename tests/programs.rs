//! Programs that cannot be planned: each fault has its own error, which names the tensor.

use bitstep::error::PlanError;
use bitstep::grad::GradBuilder;
use bitstep::model::decoder::Decoder;
use bitstep::model::params::{Init, ParamGroup};
use bitstep::model::{Derived, Family, Head, Model, ModelConfig};
use bitstep::op::matmul::Matmul;
use bitstep::op::tree_add::TreeAdd;
use bitstep::op::{OpCall, Slot};
use bitstep::plan::{ParamSlots, Plan, PlanConfig, StepInputs, TokenCut};
use bitstep::program::{ProgramBuilder, SlotTable};
use bitstep::shape::{DType, Math, Role, TensorSpec};

fn tensor(slots: &mut SlotTable, name: &str, elements: usize, role: Role) -> Slot {
    slots.add(TensorSpec::new(name, [elements], DType::F32, role))
}

fn add(reads: Vec<Slot>, writes: Vec<Slot>) -> OpCall {
    let op = TreeAdd { elements: 4 }.into();
    OpCall { op, reads, writes }
}

#[test]
fn calls_that_do_not_fit_are_refused_by_name() {
    let mut slots = SlotTable::default();
    let four = tensor(&mut slots, "four", 4, Role::Grad);
    let other = tensor(&mut slots, "other", 4, Role::Grad);
    let three = tensor(&mut slots, "three", 3, Role::Grad);
    let local = tensor(&mut slots, "local", 4, Role::Activation);
    let check = |reads, writes| slots.check(&[add(reads, writes)]);
    assert_eq!(check(vec![four], vec![other]), Ok(()));
    let error = check(vec![], vec![four]).unwrap_err();
    assert!(matches!(
        error,
        PlanError::OperandCount {
            expected: 1,
            found: 0,
            ..
        }
    ));
    let error = check(vec![three], vec![four]).unwrap_err();
    assert!(matches!(error, PlanError::Operand { tensor, .. } if tensor == "three"));
    let error = check(vec![four], vec![four]).unwrap_err();
    assert!(matches!(error, PlanError::Overlap { written, .. } if written == "four"));
    let error = check(vec![local], vec![four]).unwrap_err();
    assert!(matches!(error, PlanError::ReadBeforeWrite { tensor, .. } if tensor == "local"));
    let error = slots.view(four, 2, "part", [3]).unwrap_err();
    assert!(matches!(
        error,
        PlanError::ViewOutOfBounds {
            end: 5,
            elements: 4,
            ..
        }
    ));
}

/// A builder over one parameter of four elements and a program of its own.
fn with_grads<T>(act: impl FnOnce(&mut GradBuilder, [Slot; 2]) -> T, calls: &[OpCall]) -> T {
    let mut program = ProgramBuilder::default();
    let param = tensor(&mut program.slots, "param", 4, Role::Param);
    let grad = tensor(&mut program.slots, "grad", 4, Role::Grad);
    let x = tensor(&mut program.slots, "x", 2, Role::Activation);
    let y = tensor(&mut program.slots, "y", 2, Role::Activation);
    program.calls = calls.to_vec();
    let cut = TokenCut {
        grain: 1,
        piece: None,
    };
    let mut grads = GradBuilder::new(&mut program, cut, (param, grad));
    act(&mut grads, [x, y])
}

#[test]
fn backward_refuses_what_has_no_derivative_no_source_or_two() {
    let (param, y) = (Slot(0), Slot(3));
    let calls = [add(vec![param], vec![y])];
    let error = with_grads(|grads, _| grads.backward(&calls), &calls).unwrap_err();
    assert!(
        matches!(error, PlanError::NoBackward { op: "tree_add", .. }),
        "{error}"
    );
    let product = Matmul {
        math: Math::F32,
        rows: 1,
        n_in: 2,
        n_out: 2,
        bias: false,
    };
    let calls = [OpCall {
        op: product.into(),
        reads: vec![Slot(2), param],
        writes: vec![y],
    }];
    let error = with_grads(|grads, _| grads.backward(&calls), &calls).unwrap_err();
    assert!(matches!(error, PlanError::MissingGradient { tensor, .. } if tensor == "y"));
    let twice = |grads: &mut GradBuilder, [x, y]: [Slot; 2]| {
        grads.share(x, y, "test")?;
        grads.share(x, y, "test")
    };
    let error = with_grads(twice, &[]).unwrap_err();
    assert!(matches!(error, PlanError::SecondGradient { tensor, .. } if tensor == "x"));
}

/// A decoder that also registers a parameter of this name, which nothing reads.
struct WithExtra(Decoder, &'static str);

impl Model for WithExtra {
    fn parameters(&self) -> Vec<ParamGroup> {
        let mut groups = self.0.parameters();
        groups.push(ParamGroup::single(self.1, [8], Init::Ones));
        groups
    }

    fn derived(&self, seq_len: usize) -> Result<Vec<Derived>, PlanError> {
        self.0.derived(seq_len)
    }

    fn forward(
        &self,
        program: &mut ProgramBuilder,
        params: &ParamSlots,
        inputs: &StepInputs,
    ) -> Result<Head, PlanError> {
        self.0.forward(program, params, inputs)
    }
}

fn decoder(head_dim: usize) -> Decoder {
    Decoder::new(ModelConfig {
        family: Family::Llama,
        vocab_size: 11,
        d_model: 8,
        n_layers: 1,
        n_heads: 2,
        n_kv_heads: 1,
        head_dim,
        d_ff: 12,
        rope_theta: 1e4,
        rms_norm_eps: 1e-6,
        tie_embeddings: false,
        max_seq_len: 5,
        init_std: 0.02,
    })
}

#[test]
fn a_parameter_without_a_gradient_or_with_a_taken_name_is_refused() {
    let plan = |name| Plan::build(&WithExtra(decoder(4), name), PlanConfig::of(1, 5));
    let error = plan("unused").unwrap_err();
    assert!(matches!(error, PlanError::NoGradient { parameter } if parameter == "unused"));
    let error = plan("model.norm.weight").unwrap_err();
    assert!(
        matches!(error, PlanError::DuplicateParameter { parameter } if parameter == "model.norm.weight")
    );
}

#[test]
fn a_head_of_more_chunks_than_can_be_planned_is_refused() {
    let config = |chunk_logits| PlanConfig {
        chunk_logits,
        ..PlanConfig::of(1 << 17, 1)
    };
    let error = Plan::build(&decoder(4), config(1)).unwrap_err();
    let text = "chunks of the head: expected at most 65536, by fewer tokens in a step or a smaller vocabulary, found 131072";
    assert_eq!(error.to_string(), text);
    assert!(Plan::build(&decoder(4), config(1 << 24)).is_ok());
}

#[test]
fn a_head_wider_than_its_lanes_is_refused() {
    // The second one's rotary table would not fit any memory.
    for head_dim in [258, (1 << 31) - 2] {
        let error = Plan::build(&decoder(head_dim), PlanConfig::of(1, 5)).unwrap_err();
        assert!(
            matches!(error, PlanError::Size { what: "head_dim", found, .. } if found == head_dim),
            "{error}"
        );
    }
    assert!(Plan::build(&decoder(256), PlanConfig::of(1, 5)).is_ok());
}
