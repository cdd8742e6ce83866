//! The backend trait on the CPU. Its graph is the manifest itself: the placed calls, replayed in order.

use super::arena::{CpuArena, Operands};
use super::context::CpuContext;
use super::narrow::run_widened;
use super::{
    adamw, attention, bias, carry_state, clip, conv1d, copy, cross_entropy, embed, lora, matmul,
    nf4, rms_norm, rope, scan, scan_grad, split_columns, swiglu, tree_add,
};
use crate::backend::{
    ArenaBytes, ArenaId, Backend, DeviceInfo, Execution, same_length, same_regions,
};
use crate::error::{CaptureError, DeviceError, GuardError};
use crate::layout::{Layout, PlacedCall, Region};
use crate::op::Op;

/// The CPU as a device.
#[derive(Clone, Debug)]
pub struct CpuBackend {
    context: CpuContext,
}

/// A captured program: its calls and the arena they are placed in.
pub struct CpuGraph {
    arena: ArenaId,
    calls: Vec<PlacedCall>,
}

/// A captured digest: its regions and the arena they lie in.
pub struct CpuDigest {
    arena: ArenaId,
    regions: Vec<Region>,
}

fn same_arena(expected: ArenaId, found: ArenaId) -> Result<(), GuardError> {
    match expected == found {
        true => Ok(()),
        false => Err(GuardError::Arena {
            expected: expected.0,
            found: found.0,
        }),
    }
}

impl CpuBackend {
    /// The backend that computes with `context`.
    pub fn new(context: CpuContext) -> Self {
        CpuBackend { context }
    }

    /// The SIMD path and threads in use.
    pub fn context(&self) -> &CpuContext {
        &self.context
    }

    fn run(&self, arena: &mut CpuArena, call: &PlacedCall) -> Result<(), DeviceError> {
        let mut operands = arena.borrow(call)?;
        let (context, op) = (&self.context, &call.call.op);
        // A table is too large to be widened for the few rows that are read.
        if let Op::EmbedFrozen(op) = op {
            return embed::frozen(context, op, &mut operands);
        }
        run_widened(context, op, &mut operands, |operands| {
            execute(context, op, operands)
        })
    }
}

fn execute(context: &CpuContext, op: &Op, operands: &mut Operands) -> Result<(), DeviceError> {
    match op {
        Op::Embed(op) => embed::forward(context, op, operands),
        Op::EmbedGrad(op) => embed::grad(context, op, operands),
        Op::EmbedFrozen(op) => embed::frozen(context, op, operands),
        Op::RmsNorm(op) => rms_norm::forward(context, op, operands),
        Op::RmsNormGrad(op) => rms_norm::grad(context, op, operands),
        Op::Matmul(op) => matmul::forward(context, op, operands),
        Op::MatmulGradInput(op) => matmul::grad_input(context, op, operands),
        Op::MatmulGradWeight(op) => matmul::grad_weight(context, op, operands),
        Op::BiasGrad(op) => bias::grad(context, op, operands),
        Op::Rope(op) => rope::forward(context, op, operands),
        Op::RopeGrad(op) => rope::grad(context, op, operands),
        Op::QkNormRope(op) => rope::norm_forward(context, op, operands),
        Op::QkNormRopeGrad(op) => rope::norm_grad(context, op, operands),
        Op::Attention(op) => attention::forward(context, op, operands),
        Op::AttentionDelta(op) => attention::delta(context, op, operands),
        Op::AttentionGradQuery(op) => attention::grad_query(context, op, operands),
        Op::AttentionGradKeyValue(op) => attention::grad_key_value(context, op, operands),
        Op::SwiGlu(op) => swiglu::forward(context, op, operands),
        Op::SwiGluGrad(op) => swiglu::grad(context, op, operands),
        Op::Conv1d(op) => conv1d::forward(context, op, operands),
        Op::Conv1dGrad(op) => conv1d::grad(context, op, operands),
        Op::SplitColumns(op) => split_columns::forward(context, op, operands),
        Op::SplitColumnsGrad(op) => split_columns::grad(context, op, operands),
        Op::Scan(op) => scan::forward(context, op, operands),
        Op::ScanGrad(op) => scan_grad::grad(context, op, operands),
        Op::CarryState(op) => carry_state::carry(context, op, operands),
        Op::CrossEntropy(op) => cross_entropy::forward(context, op, operands),
        Op::LossSum(op) => cross_entropy::loss_sum(context, op, operands),
        Op::TreeAdd(op) => tree_add::merge(context, op, operands),
        Op::Copy(op) => copy::copy(context, op, operands),
        Op::FillNeutral(op) => copy::fill_neutral(context, op, operands),
        Op::GradSquares(op) => clip::squares(context, op, operands),
        Op::Clip(op) => clip::clip(context, op, operands),
        Op::AdamW(op) => adamw::update(context, op, operands),
        Op::Dequantise(op) => nf4::dequantise(context, op, operands),
        Op::LoraDown(op) => lora::down(context, op, operands),
        Op::LoraDownGradInput(op) => lora::down_grad_input(context, op, operands),
        Op::LoraUp(op) => lora::up(context, op, operands),
        Op::LoraUpGradInput(op) => lora::up_grad_input(context, op, operands),
        Op::LoraUpGradWeight(op) => lora::up_grad_weight(context, op, operands),
    }
}

impl Backend for CpuBackend {
    type Arena = CpuArena;
    type Graph = CpuGraph;
    type DigestGraph = CpuDigest;

    fn info(&self) -> DeviceInfo {
        let (path, threads) = (self.context.path(), self.context.threads());
        DeviceInfo {
            device: "cpu".into(),
            description: format!("CPU, {path}, {threads} threads"),
        }
    }

    fn allocate(&self, layout: &Layout, _calls: &[PlacedCall]) -> Result<CpuArena, DeviceError> {
        CpuArena::zeroed(layout.arena_bytes())
    }

    fn arena_id(&self, arena: &CpuArena) -> ArenaId {
        arena.id()
    }

    fn launch(&self, arena: &mut CpuArena, call: &PlacedCall) -> Result<(), DeviceError> {
        self.run(arena, call)
    }

    fn capture(
        &self,
        arena: &mut CpuArena,
        calls: &[PlacedCall],
    ) -> Result<CpuGraph, CaptureError> {
        for (index, call) in calls.iter().enumerate() {
            arena.borrow(call).map_err(|source| CaptureError::Call {
                call: index,
                source,
            })?;
        }
        Ok(CpuGraph {
            arena: arena.id(),
            calls: calls.to_vec(),
        })
    }

    fn check_graph(&self, arena: &CpuArena, graph: &CpuGraph) -> Result<(), GuardError> {
        same_arena(graph.arena, arena.id())
    }

    fn launch_graph(&self, arena: &mut CpuArena, graph: &mut CpuGraph) -> Result<(), DeviceError> {
        // Entering the pool once a graph, not once a call, saves a hand-over between threads a call.
        self.context.run(|| {
            let mut calls = graph.calls.iter();
            calls.try_for_each(|call| self.run(arena, call))
        })
    }

    fn graph_nodes(&self, graph: &CpuGraph) -> usize {
        graph.calls.len()
    }

    fn arena_bytes(&self, arena: &CpuArena) -> ArenaBytes {
        ArenaBytes {
            planned: arena.total_bytes(),
            workspace: 0,
        }
    }

    fn executions(&self, calls: &[PlacedCall]) -> Vec<Execution> {
        let path = self.context.path();
        calls
            .iter()
            .enumerate()
            .map(|(call, placed)| Execution {
                call,
                kernel: format!("cpu::{}.{path}", placed.call.op.rule().stem()),
            })
            .collect()
    }

    fn write(&self, arena: &mut CpuArena, region: Region, bytes: &[u8]) -> Result<(), DeviceError> {
        same_length(region, bytes.len())?;
        arena.bytes_mut(region)?.copy_from_slice(bytes);
        Ok(())
    }

    fn fill(&self, arena: &mut CpuArena, region: Region, byte: u8) -> Result<(), DeviceError> {
        arena.bytes_mut(region)?.fill(byte);
        Ok(())
    }

    fn read(&self, arena: &CpuArena, region: Region, bytes: &mut [u8]) -> Result<(), DeviceError> {
        same_length(region, bytes.len())?;
        bytes.copy_from_slice(arena.bytes(region)?);
        Ok(())
    }

    fn digest(
        &self,
        arena: &CpuArena,
        regions: &[Region],
    ) -> Result<Vec<blake3::Hash>, DeviceError> {
        use rayon::prelude::*;
        self.context.run(|| {
            let regions = regions.par_iter();
            regions
                .map(|&r| Ok(blake3::hash(arena.bytes(r)?)))
                .collect()
        })
    }

    fn capture_digest(
        &self,
        arena: &mut CpuArena,
        regions: &[Region],
    ) -> Result<CpuDigest, CaptureError> {
        regions.iter().try_for_each(|&region| arena.check(region))?;
        Ok(CpuDigest {
            arena: arena.id(),
            regions: regions.to_vec(),
        })
    }

    fn check_digest(
        &self,
        arena: &CpuArena,
        graph: &CpuDigest,
        regions: &[Region],
    ) -> Result<(), GuardError> {
        same_arena(graph.arena, arena.id())?;
        same_regions(&graph.regions, regions)
    }

    fn launch_digest(
        &self,
        arena: &mut CpuArena,
        graph: &mut CpuDigest,
    ) -> Result<Vec<blake3::Hash>, DeviceError> {
        self.digest(arena, &graph.regions)
    }
}
