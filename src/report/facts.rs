//! What a run is, beside what its recipe says: `run.json`; and what it came to: `outcome.json`.

use serde::{Deserialize, Serialize};

use crate::any_device::AnyDevice;
use crate::engine::run::Run;
use crate::num;
use crate::plan::ProgramKind;
use crate::shape::Role;

/// Products of a training step beside those of its forward pass: the backward pass has two for each.
const FORWARDS_OF_A_STEP: u64 = 3;

/// What a run is. Nothing here decides a bit.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RunFacts {
    pub name: String,
    /// `cpu` or `cuda:N`.
    pub device: String,
    /// The model of the device and how it is used.
    pub description: String,
    /// The numeric domain.
    pub domain: String,
    /// The version of the numeric contract.
    pub contract: u32,
    /// The hash of the step's manifest.
    pub manifest: String,
    /// Steps of the whole run.
    pub steps: u64,
    pub parameters: usize,
    pub tokens_per_step: usize,
    /// Floating-point operations that the model needs a step, a multiply-add counted as two: three times
    /// those of its forward pass, whatever is computed again.
    pub model_flop_per_step: u64,
    /// Operations a second that the device can do at most in this domain.
    pub peak_flop_per_s: f64,
    /// Where that number comes from.
    pub peak_source: String,
    /// Bytes of the arena by role, before step-local tensors share memory.
    pub memory: Vec<RoleBytes>,
    pub arena_bytes: usize,
    /// Bytes behind the arena that kernels and libraries work in.
    pub workspace_bytes: usize,
}

/// Bytes of all tensors of a role.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RoleBytes {
    pub role: String,
    pub bytes: usize,
}

impl RunFacts {
    /// The facts of a run on its device.
    pub fn of(run: &Run<AnyDevice>, device: &AnyDevice) -> Self {
        let session = run.trainer.session();
        let plan = session.plan();
        let (peak_flop_per_s, source) = device.peak(plan.config.math);
        let info = session.device();
        let of_role = |role: Role| RoleBytes {
            role: role.name().to_owned(),
            bytes: plan.layout.role_bytes(role),
        };
        let kinds = [ProgramKind::Step, ProgramKind::Evaluate];
        let calls = kinds.map(|kind| plan.layout.place(plan.calls(kind)));
        RunFacts {
            name: run.recipe.name.clone(),
            device: info.device,
            description: info.description,
            domain: plan.config.math.domain().to_owned(),
            contract: num::VERSION,
            manifest: session.manifest().hash().to_string(),
            steps: run.recipe.steps,
            parameters: plan.parameter_count(),
            tokens_per_step: plan.tokens(),
            model_flop_per_step: FORWARDS_OF_A_STEP * plan.flops(ProgramKind::Evaluate),
            peak_flop_per_s,
            peak_source: source.to_owned(),
            memory: Role::ALL.map(of_role).into(),
            arena_bytes: plan.layout.arena_bytes(),
            workspace_bytes: device.workspace_bytes(&plan.layout, &calls.concat()),
        }
    }

    /// Model flops utilisation: the share of the device's peak that the model's own operations are at
    /// `tokens_per_s`.
    pub fn utilisation(&self, tokens_per_s: f64) -> f64 {
        let flop_per_token = self.model_flop_per_step as f64 / self.tokens_per_step.max(1) as f64;
        flop_per_token * tokens_per_s / self.peak_flop_per_s.max(1.0)
    }
}

/// How the process that took a run's last steps ended.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RunOutcome {
    /// `finished`, `until`, `interrupted` or `stopped`.
    pub ended: String,
    /// Steps taken.
    pub steps: u64,
    /// The root over all parameters after them.
    pub root: String,
}
