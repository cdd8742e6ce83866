//! From a model and a configuration to the programs of a plan.

use std::ops::Range;

use super::head::{HeadPlan, LogitsKept, LossPlace, Reached, Seconds};
use super::window::{self, WindowSlots};
use super::{
    BackboneOutputs, HalfOutput, Passes, Plan, PlanConfig, ProgramKind, Programs, StepInputs,
    StepOutputs, backbone, check_reached, optimizer, place,
};
use crate::error::PlanError;
use crate::grad::recompute::{Again, Repeated, Stretch};
use crate::layout::Layout;
use crate::model::{Head, Model};
use crate::op::{OpCall, Slot};
use crate::program::ProgramBuilder;

/// What backward computes again.
#[derive(Clone, Copy, Debug)]
pub(super) enum Chosen<'a> {
    /// All of so many layers at a time; nothing for `None`.
    Layers(Option<usize>),
    /// What is said of each unit of each layer.
    Units(&'a [Vec<Again>]),
}

/// A plan, and where the model's layers stand in its programs.
pub(super) struct Built {
    pub plan: Plan,
    /// The calls of each layer.
    pub layers: Vec<Range<usize>>,
    /// The model's forward calls, with which its programs begin.
    pub body: usize,
    /// The head of a model of tokens, where its weight is not trained.
    pub frozen_head: Option<Head>,
}

/// A plan while its programs are made.
struct Build {
    program: ProgramBuilder,
    placed: place::Placed,
    inputs: StepInputs,
    outputs: StepOutputs,
    config: PlanConfig,
    /// The model's forward calls and what they end in.
    body: Vec<OpCall>,
    end: Head,
    stretches: Vec<Stretch>,
    made: Made,
}

/// What has been made.
#[derive(Default)]
struct Made {
    programs: Programs,
    derived: Vec<(Slot, Vec<f32>)>,
    logits: Vec<(Slot, usize)>,
    backbone: Option<BackboneOutputs>,
    window: Option<WindowSlots>,
    output: Option<HalfOutput>,
    reached: Vec<Slot>,
    repeated: Vec<Repeated>,
    /// What lives through several programs: lifetimes are those of these calls.
    spans: Vec<Vec<OpCall>>,
}

/// Plans the step of `model` in the form of `config`, with what is `chosen` computed again; `definition` is the hash of
/// the manifest of the defining form, `None` where this is it.
pub(super) fn plan(
    model: &dyn Model,
    config: PlanConfig,
    definition: Option<blake3::Hash>,
    chosen: Chosen,
) -> Result<Built, PlanError> {
    let mut program = ProgramBuilder::of(config.math);
    program.restored_elements = config.restored_elements;
    let placed = place::parameters(&mut program, &model.parameters())?;
    let (inputs, derived) = place::inputs(&mut program, model, &config)?;
    let outputs = place::outputs(&mut program, inputs.rows());
    let end = model.forward(&mut program, &placed.groups, &inputs)?;
    let body = std::mem::take(&mut program.calls);
    let layers = program.stretches(Some(1));
    let count = body.len();
    let stretches = stretches(&program, (&body, &layers), chosen);
    let mut build = Build {
        program,
        placed,
        inputs,
        outputs,
        config,
        body,
        end,
        stretches,
        made: Made {
            derived,
            ..Made::default()
        },
    };
    match (build.inputs.features, build.config.is_split()) {
        (_, true) => build.check_passes().and_then(|()| build.passes())?,
        (Some(_), false) => build.backbone()?,
        (None, false) => build.whole()?,
    }
    if let Passes::Halves { .. } = build.config.form.passes {
        build.halves()?;
    }
    let weight = build.program.slots.root(build.program.master(end.weight)).0;
    let frozen = weight != build.placed.arenas.param && build.inputs.features.is_none();
    Ok(Built {
        plan: build.finish(definition)?,
        layers,
        body: count,
        frozen_head: frozen.then_some(end),
    })
}

/// The stretches of the body of which backward computes something again.
fn stretches(
    program: &ProgramBuilder,
    (body, layers): (&[OpCall], &[Range<usize>]),
    chosen: Chosen,
) -> Vec<Stretch> {
    match chosen {
        Chosen::Layers(at_a_time) => {
            let stretches = program.stretches(at_a_time).into_iter();
            let whole = |calls| Stretch::whole(&program.slots, body, calls);
            stretches.map(whole).collect()
        }
        Chosen::Units(units) => {
            let chosen = layers.iter().zip(units).map(|(calls, again)| Stretch {
                calls: calls.clone(),
                again: again.clone(),
            });
            chosen.collect()
        }
    }
}

impl Build {
    /// The programs of a model of tokens over its whole batch.
    fn whole(&mut self) -> Result<(), PlanError> {
        let head = self.head(LogitsKept::Chunk)?;
        let loss = head.whole_loss();
        let evaluate = self.evaluate(&head, loss);
        self.program.calls = self.body.clone();
        self.made.logits = head.logits();
        let form = (self.placed.arenas, Seconds::Added, loss);
        let reached = head.step(&mut self.program, &self.body, form)?;
        self.made.reached = reached.parameters;
        self.made.repeated = reached.repeated;
        self.step_and(evaluate)
    }

    /// The programs of a backbone alone.
    fn backbone(&mut self) -> Result<(), PlanError> {
        self.program.calls = self.body.clone();
        let (reached, left) = self.backbone_backward()?;
        self.made.backbone = Some(left);
        self.made.reached = reached.parameters;
        self.made.repeated = reached.repeated;
        self.step_and(self.body.clone())
    }

    /// Ends the step and adds it before the evaluation.
    fn step_and(&mut self, evaluate: Vec<OpCall>) -> Result<(), PlanError> {
        let ends = (&self.inputs, self.outputs);
        optimizer::append(&mut self.program, &self.placed, &self.config, ends);
        let step = std::mem::take(&mut self.program.calls);
        for (kind, calls) in [(ProgramKind::Step, step), (ProgramKind::Evaluate, evaluate)] {
            self.made.spans.push(calls.clone());
            self.made.programs.add(kind, calls);
        }
        Ok(())
    }

    /// Refuses passes where what a batch brings cannot be cut.
    fn check_passes(&self) -> Result<(), PlanError> {
        let found = match (self.inputs.features, &self.inputs.carried) {
            (Some(_), _) => "features, which come from the caller",
            (_, Some(_)) => "states that sequences hand from step to step",
            _ => return Ok(()),
        };
        Err(PlanError::Form {
            form: "micro-batches",
            expected: "a model whose batches are tokens alone",
            found: found.to_owned(),
        })
    }

    /// The programs of a batch in passes: evaluation and accumulation of one pass, and the window.
    fn passes(&mut self) -> Result<(), PlanError> {
        let slots = window::declare(&mut self.program, &mut self.made.derived);
        let head = self.head(LogitsKept::Chunk)?;
        self.made.logits = head.logits();
        let undivided = |loss| LossPlace {
            scalars: slots.ones,
            loss,
        };
        let evaluate = self.evaluate(&head, undivided(self.outputs.loss));
        self.program.calls = self.body.clone();
        let form = (self.placed.arenas, Seconds::Apart, undivided(slots.loss));
        let reached = head.step(&mut self.program, &self.body, form)?;
        self.made.repeated = reached.repeated.clone();
        let accumulate = std::mem::take(&mut self.program.calls);
        for calls in [&accumulate, &evaluate] {
            self.made.spans.push(calls.clone());
        }
        self.made.programs.add(ProgramKind::Evaluate, evaluate);
        self.made.programs.add(ProgramKind::Accumulate, accumulate);
        self.window(slots, reached)?;
        let apply = self.made.programs.calls(ProgramKind::Apply).to_vec();
        self.made.spans.push(apply);
        Ok(())
    }

    /// Forward and backward as programs of their own, beside the whole step.
    fn halves(&mut self) -> Result<(), PlanError> {
        let slots = window::declare(&mut self.program, &mut self.made.derived);
        let undivided = LossPlace {
            scalars: slots.ones,
            loss: slots.loss,
        };
        let (mut span, reached) = match self.made.backbone {
            Some(left) => {
                let forward = self.body.clone();
                self.made
                    .programs
                    .add(ProgramKind::Forward, forward.clone());
                (forward, self.backbone_halves(left)?)
            }
            None => {
                let head = self.head(LogitsKept::All)?;
                self.token_halves(&head, undivided)?
            }
        };
        let backward = std::mem::take(&mut self.program.calls);
        span.extend(backward.iter().cloned());
        self.made.programs.add(ProgramKind::Backward, backward);
        self.window(slots, reached)?;
        // What forward hands to the update, such as the states that go on, lives until then.
        span.extend(self.made.programs.calls(ProgramKind::Apply).iter().cloned());
        self.made.spans.push(span);
        Ok(())
    }

    /// Forward and score of a model of tokens, and the calls of its backward half.
    fn token_halves(
        &mut self,
        head: &HeadPlan,
        loss: LossPlace,
    ) -> Result<(Vec<OpCall>, Reached), PlanError> {
        self.program.calls = self.body.clone();
        head.products(&mut self.program);
        let forward = std::mem::take(&mut self.program.calls);
        head.score(&mut self.program, loss);
        let score = std::mem::take(&mut self.program.calls);
        let calls = (forward.as_slice(), self.body.as_slice());
        let reached = head.backward_half(&mut self.program, calls, self.placed.arenas)?;
        self.made.output = Some(HalfOutput {
            output: head.buffer(),
            gradient: head.buffer(),
            input_grad: None,
            width: self.end.vocab_size,
        });
        let span = [forward.as_slice(), &score].concat();
        self.made.programs.add(ProgramKind::Forward, forward);
        self.made.programs.add(ProgramKind::Score, score);
        Ok((span, reached))
    }

    /// The backward half of a backbone.
    fn backbone_halves(&mut self, left: BackboneOutputs) -> Result<Reached, PlanError> {
        let features = self.inputs.features;
        self.program.calls = self.body.clone();
        let (reached, own) = self.backbone_backward()?;
        self.program.calls.drain(..self.body.len());
        self.made.output = features.map(|features| HalfOutput {
            output: left.output,
            gradient: features.output_grad,
            input_grad: Some(own.input_grad),
            width: self.program.slots.spec(left.output).shape.elements() / self.inputs.rows(),
        });
        Ok(reached)
    }

    fn backbone_backward(&mut self) -> Result<(Reached, BackboneOutputs), PlanError> {
        let Some(features) = self.inputs.features else {
            return Err(PlanError::MissingGradient {
                op: "backbone",
                tensor: "features".to_owned(),
            });
        };
        let places = (features, self.end.hidden);
        let arenas = (self.placed.arenas, &self.config);
        let body = (&self.body[..], &self.stretches[..]);
        backbone::backward(&mut self.program, body, places, arenas)
    }

    /// The programs that combine passes and update.
    fn window(&mut self, mut slots: WindowSlots, reached: Reached) -> Result<(), PlanError> {
        slots.seconds = reached.seconds;
        self.made.reached = reached.parameters;
        let levels = self.config.window_levels();
        slots.declare_levels(&mut self.program, &self.placed, levels);
        slots.programs(
            &mut self.program,
            (&self.placed, &self.config),
            (&self.inputs, self.outputs),
            &mut self.made.programs,
        )?;
        self.made.window = Some(slots);
        Ok(())
    }

    fn head(&mut self, kept: LogitsKept) -> Result<HeadPlan, PlanError> {
        let ends = (&self.inputs, self.outputs);
        let form = (&self.config, kept, self.stretches.clone());
        HeadPlan::declare(&mut self.program, self.end, ends, form)
    }

    fn evaluate(&mut self, head: &HeadPlan, loss: LossPlace) -> Vec<OpCall> {
        self.program.calls = self.body.clone();
        head.evaluate(&mut self.program, loss);
        std::mem::take(&mut self.program.calls)
    }

    fn finish(self, definition: Option<blake3::Hash>) -> Result<Plan, PlanError> {
        let (program, placed, made) = (self.program, self.placed, self.made);
        check_reached(&program.slots, &placed.params, &made.reached)?;
        for calls in &made.spans {
            program.slots.check(calls)?;
        }
        let spans: Vec<&[OpCall]> = made.spans.iter().map(Vec::as_slice).collect();
        let layout = Layout::plan(&program.slots, &spans);
        let mut plan = Plan {
            shadows: program.shadows(),
            slots: program.slots,
            params: placed.params,
            arenas: placed.arenas,
            inputs: self.inputs,
            outputs: self.outputs,
            derived: made.derived,
            logits: made.logits,
            backbone: made.backbone,
            vocab_size: self.end.vocab_size,
            config: self.config,
            layout,
            programs: made.programs,
            window: made.window,
            output: made.output,
            repeated: made.repeated,
            definition: blake3::Hash::from_bytes([0; blake3::OUT_LEN]),
        };
        plan.definition = definition.unwrap_or_else(|| plan.manifest().hash());
        Ok(plan)
    }
}
