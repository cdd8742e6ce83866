//! A step on an arena of its own, where a device with a clock can time its graph and each of its ops.
//!
//! Ops are timed in groups: all calls of one op with the same sizes, in the order of the step. So
//! each call finds its operands as far from the device's caches as in the step, nearly, and the cost
//! of starting a kernel is that of a graph's node. A group runs on the bytes of a whole step.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::any_device::{AnyArena, AnyDevice, AnyGraph};
use crate::backend::{ArenaBytes, Backend};
use crate::engine::snapshot::Snapshot;
use crate::error::Error;
use crate::layout::PlacedCall;
use crate::op::Access;
use crate::plan::{Plan, ProgramKind};

/// Milliseconds that one timed graph of a group should take, so that starting it does not count.
const GROUP_MS: f64 = 1.0;
/// How often a group stands in its graph at most.
const MOST_REPEATS: usize = 20;
/// Runs of a graph in one timing, and timings, of which the best counts.
const LAUNCHES: u32 = 4;
const TIMINGS: usize = 3;

/// The step's calls over an arena that holds the state of a run.
pub struct Stage<'d> {
    backend: &'d AnyDevice,
    plan: Arc<Plan>,
    calls: Vec<PlacedCall>,
    arena: AnyArena,
    step: AnyGraph,
    state: Snapshot,
}

impl<'d> Stage<'d> {
    /// Allocates a plan's arena, puts `state` there, runs the step once and captures it.
    ///
    /// # Errors
    /// An arena that does not fit, a fault of the device, a capture that fails.
    pub fn new(backend: &'d AnyDevice, plan: Arc<Plan>, state: Snapshot) -> Result<Self, Error> {
        let calls = plan.layout.place(plan.calls(ProgramKind::Step));
        let evaluate = plan.layout.place(plan.calls(ProgramKind::Evaluate));
        let all = [calls.as_slice(), evaluate.as_slice()].concat();
        let mut arena = backend.allocate(&plan.layout, &all)?;
        state.restore(backend, &mut arena, &plan.layout)?;
        for call in &calls {
            backend.launch(&mut arena, call)?;
        }
        let step = captured(backend, &mut arena, &calls)?;
        Ok(Stage {
            backend,
            plan,
            calls,
            arena,
            step,
            state,
        })
    }

    /// Nodes of the step's graph.
    pub fn nodes(&self) -> usize {
        self.backend.graph_nodes(&self.step)
    }

    /// Memory of the arena.
    pub fn memory(&self) -> ArenaBytes {
        self.backend.arena_bytes(&self.arena)
    }

    /// Milliseconds of each of `steps` launches of the step's graph, by the device's own clock; none
    /// where it has none.
    ///
    /// # Errors
    /// A fault of the device.
    pub fn step_ms(&mut self, steps: u32) -> Result<Vec<f64>, Error> {
        let mut times = Vec::new();
        for _ in 0..steps {
            let (arena, step) = (&mut self.arena, &mut self.step);
            let ms = self.backend.time_graph(arena, step, 1)?;
            times.extend(ms.map(f64::from));
        }
        Ok(times)
    }

    /// Milliseconds of each call of the step, by the device's own clock; none where it has none.
    ///
    /// # Errors
    /// A fault of the device, a capture that fails.
    pub fn call_ms(&mut self) -> Result<Option<Vec<f64>>, Error> {
        let mut groups: BTreeMap<String, Vec<usize>> = BTreeMap::new();
        for (index, call) in self.calls.iter().enumerate() {
            let group = groups.entry(call.call.op.to_string());
            group.or_default().push(index);
        }
        let mut times = vec![0.0; self.calls.len()];
        for indices in groups.values() {
            let calls: Vec<_> = indices.iter().map(|&i| self.calls[i].clone()).collect();
            let Some(ms) = self.group_ms(&calls)? else {
                return Ok(None);
            };
            for &index in indices {
                times[index] = ms / indices.len() as f64;
            }
        }
        Ok(Some(times))
    }

    /// Milliseconds of a group's calls, one after another.
    fn group_ms(&mut self, group: &[PlacedCall]) -> Result<Option<f64>, Error> {
        // The step leaves each operand with numbers of its kind, whatever ran before.
        self.backend.launch_graph(&mut self.arena, &mut self.step)?;
        let mut once = captured(self.backend, &mut self.arena, group)?;
        let backend = self.backend;
        let Some(first) = backend.time_graph(&mut self.arena, &mut once, 1)? else {
            return Ok(None);
        };
        let repeats = repeats(f64::from(first));
        let mut graph = captured(backend, &mut self.arena, &vec![group; repeats].concat())?;
        let mut best = f64::INFINITY;
        for _ in 0..TIMINGS {
            let ms = backend.time_graph(&mut self.arena, &mut graph, LAUNCHES)?;
            best = best.min(ms.map_or(f64::INFINITY, f64::from));
        }
        if group.iter().any(|call| self.changes_state(call)) {
            let layout = &self.plan.layout;
            self.state.restore(backend, &mut self.arena, layout)?;
        }
        Ok(Some(best / (f64::from(LAUNCHES) * repeats as f64)))
    }

    /// Whether running a call again leaves other bytes in what survives a step.
    fn changes_state(&self, call: &PlacedCall) -> bool {
        let persistent = self.plan.layout.persistent_bytes();
        let operands = call.call.op.rule().signature().writes;
        let mut written = operands.iter().zip(&call.writes);
        written
            .any(|(operand, region)| operand.access == Access::Update && region.offset < persistent)
    }
}

/// How often a group that takes `ms` stands in its graph.
fn repeats(ms: f64) -> usize {
    let wanted = (GROUP_MS / ms.max(1e-6)).ceil() as usize;
    wanted.clamp(1, MOST_REPEATS)
}

fn captured(
    backend: &AnyDevice,
    arena: &mut AnyArena,
    calls: &[PlacedCall],
) -> Result<AnyGraph, Error> {
    Ok(backend.capture(arena, calls)?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::CpuBackend;
    use crate::cpu::context::CpuContext;
    use crate::cpu::simd::SimdPath;
    use crate::data::Batch;
    use crate::engine::init::FreshInit;
    use crate::engine::{Hyper, Session};
    use crate::model::decoder::Decoder;
    use crate::model::{Family, ModelConfig};
    use crate::plan::PlanConfig;

    /// A stage on the CPU over a model that has taken one step.
    fn on_cpu(backend: &AnyDevice) -> Stage<'_> {
        let model = Decoder::new(ModelConfig {
            family: Family::Llama,
            vocab_size: 16,
            d_model: 16,
            n_layers: 1,
            n_heads: 2,
            n_kv_heads: 1,
            head_dim: 8,
            d_ff: 32,
            rope_theta: 1e4,
            rms_norm_eps: 1e-5,
            tie_embeddings: false,
            max_seq_len: 4,
            init_std: 0.02,
        });
        let plan = Arc::new(Plan::build(&model, PlanConfig::of(1, 4)).unwrap());
        let mut session = Session::new(backend.clone(), plan.clone()).unwrap();
        session.load(&FreshInit { seed: 1 }).unwrap();
        let batch = Batch {
            batch: 1,
            seq_len: 4,
            input_ids: vec![1, 2, 3, 4],
            targets: vec![2, 3, 4, 5],
            weights: vec![1.0; 4],
            normaliser: None,
        };
        session.step(&batch, &Hyper::default()).unwrap();
        Stage::new(backend, plan, session.snapshot().unwrap()).unwrap()
    }

    #[test]
    fn a_device_without_a_clock_gives_no_times() {
        let cpu = CpuBackend::new(CpuContext::new(SimdPath::Scalar, 1).unwrap());
        let backend = AnyDevice::Cpu(cpu);
        let mut stage = on_cpu(&backend);
        assert_eq!(stage.nodes(), stage.calls.len());
        assert_eq!(stage.memory().planned, stage.plan.layout.arena_bytes());
        assert!(stage.step_ms(3).unwrap().is_empty());
        assert_eq!(stage.call_ms().unwrap(), None);
    }

    #[test]
    fn only_updates_of_what_survives_a_step_change_state() {
        let cpu = CpuBackend::new(CpuContext::new(SimdPath::Scalar, 1).unwrap());
        let backend = AnyDevice::Cpu(cpu);
        let stage = on_cpu(&backend);
        let changing = stage.calls.iter().filter(|call| stage.changes_state(call));
        let ops: Vec<_> = changing.map(|call| call.call.op.rule().stem()).collect();
        assert_eq!(ops, ["adamw"]);
    }

    #[test]
    fn short_groups_are_repeated_and_long_ones_run_once() {
        assert_eq!(repeats(5.0), 1);
        assert_eq!(repeats(0.3), 4);
        assert_eq!(repeats(0.001), MOST_REPEATS);
        assert_eq!(repeats(0.0), MOST_REPEATS);
    }
}
