//! From a call to its launches: the engine's own kernels, the workspace they use, and its addresses.

use super::arena::CudaArena;
use super::call::{Arg, CallLaunches, DeviceShape, KernelLaunch};
use super::lanes::Lane;
use super::{
    adamw, attention, bias, carry_state, clip, conv1d, copy, cross_entropy, embed, lora, matmul,
    nf4, rms_norm, rope, scan, split_columns, swiglu, tree_add,
};
use crate::layout::PlacedCall;
use crate::op::Op;

/// The engine's own launches of a call.
pub fn launches(op: &Op, call: &PlacedCall, shape: &DeviceShape) -> CallLaunches {
    match op {
        Op::Embed(op) => embed::forward(op, call, shape),
        Op::EmbedGrad(op) => embed::grad(op, call, shape),
        Op::EmbedFrozen(op) => embed::frozen(op, call, shape),
        Op::RmsNorm(op) => rms_norm::forward(op, call, shape),
        Op::RmsNormGrad(op) => rms_norm::grad(op, call, shape),
        Op::Matmul(op) => matmul::forward(op, call, shape),
        Op::MatmulGradInput(op) => matmul::grad_input(op, call, shape),
        Op::MatmulGradWeight(op) => matmul::grad_weight(op, call, shape),
        Op::BiasGrad(op) => bias::grad(op, call, shape),
        Op::Rope(op) => rope::forward(op, call, shape),
        Op::RopeGrad(op) => rope::grad(op, call, shape),
        Op::QkNormRope(op) => rope::norm_forward(op, call, shape),
        Op::QkNormRopeGrad(op) => rope::norm_grad(op, call, shape),
        Op::Attention(op) => attention::forward(op, call, shape),
        Op::AttentionDelta(op) => attention::delta(op, call, shape),
        Op::AttentionGradQuery(op) => attention::grad_query(op, call, shape),
        Op::AttentionGradKeyValue(op) => attention::grad_key_value(op, call, shape),
        Op::SwiGlu(op) => swiglu::forward(op, call, shape),
        Op::SwiGluGrad(op) => swiglu::grad(op, call, shape),
        Op::Conv1d(op) => conv1d::forward(op, call, shape),
        Op::Conv1dGrad(op) => conv1d::grad(op, call, shape),
        Op::SplitColumns(op) => split_columns::forward(op, call, shape),
        Op::SplitColumnsGrad(op) => split_columns::grad(op, call, shape),
        Op::Scan(op) => scan::forward(op, call, shape),
        Op::ScanGrad(op) => scan::grad(op, call, shape),
        Op::CarryState(op) => carry_state::carry(op, call, shape),
        Op::CrossEntropy(op) => cross_entropy::forward(op, call, shape),
        Op::LossSum(op) => cross_entropy::loss_sum(op, call, shape),
        Op::TreeAdd(op) => tree_add::merge(op, call, shape),
        Op::Copy(op) => copy::copy(op, call, shape),
        Op::FillNeutral(op) => copy::fill_neutral(op, call, shape),
        Op::GradSquares(op) => clip::squares(op, call, shape),
        Op::Clip(op) => clip::clip(op, call, shape),
        Op::AdamW(op) => adamw::update(op, call, shape),
        Op::Dequantise(op) => nf4::dequantise(op, call, shape),
        Op::LoraDown(op) => lora::down(op, call, shape),
        Op::LoraDownGradInput(op) => lora::down_grad_input(op, call, shape),
        Op::LoraUp(op) => lora::up(op, call, shape),
        Op::LoraUpGradInput(op) => lora::up_grad_input(op, call, shape),
        Op::LoraUpGradWeight(op) => lora::up_grad_weight(op, call, shape),
    }
}

/// The launch that folds the pieces a library product has left in the workspace.
pub(super) fn fold(call: &PlacedCall, shape: &DeviceShape) -> CallLaunches {
    match &call.call.op {
        Op::MatmulGradWeight(op) => matmul::fold(op, call, shape),
        _ => CallLaunches::default(),
    }
}

/// Puts the workspace arguments of a call at their addresses in a lane's workspace: counters in the zeroed part, the rest
/// behind it, so that no call's partials lie over another's counters.
pub(super) fn resolve(planned: CallLaunches, arena: &CudaArena, lane: Lane) -> Vec<KernelLaunch> {
    let zeroed = planned.zeroed_bytes;
    let place = |arg: Arg| match arg {
        Arg::Workspace { offset } if offset < zeroed => {
            Arg::Region(arena.counter_region(lane, offset))
        }
        Arg::Workspace { offset } => Arg::Region(arena.workspace_region(lane, offset - zeroed, 0)),
        other => other,
    };
    let launches = planned.launches.into_iter();
    launches
        .map(|mut launch| {
            launch.args = launch.args.into_iter().map(place).collect();
            launch
        })
        .collect()
}
