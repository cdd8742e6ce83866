//! Timed graphs: how often they run, what they leave, and what a device says of its memory.

use bitstep::any_device::AnyDevice;
use bitstep::backend::{ArenaBytes, Backend};
use bitstep::cuda::copy_bandwidth;
use bitstep::cuda::together::groups;
use bitstep::layout::{PlacedCall, Region};
use bitstep::plan::{Plan, PlanConfig, ProgramKind};
use std::sync::Arc;

use super::common::*;
use crate::gpu;

/// An arena of `plan` that holds what a session has after one step, and the calls of the step.
fn stage<B: Backend>(backend: &B, plan: &Arc<Plan>) -> (B::Arena, Vec<PlacedCall>) {
    let mut session = session(plan, 1);
    session.step(&batch(plan, 0), &Default::default()).unwrap();
    let calls = plan.layout.place(plan.calls(ProgramKind::Step));
    let mut arena = backend.allocate(&plan.layout, &calls).unwrap();
    let state = session.snapshot().unwrap();
    state.restore(backend, &mut arena, &plan.layout).unwrap();
    for call in &calls {
        backend.launch(&mut arena, call).unwrap();
    }
    (arena, calls)
}

fn state<B: Backend>(backend: &B, arena: &B::Arena, plan: &Plan) -> Vec<u8> {
    let region = Region {
        offset: 0,
        bytes: plan.layout.persistent_bytes(),
    };
    let mut bytes = vec![0; region.bytes];
    backend.read(arena, region, &mut bytes).unwrap();
    bytes
}

/// Times three launches on one arena and launches `plain` times on another; whether both end equal.
fn same_state<B: Backend>(backend: &B, plain: u32) -> (bool, Option<f32>) {
    let plan = plan(PlanConfig::of(2, 6));
    let (mut timed, calls) = stage(backend, &plan);
    let mut graph = backend.capture(&mut timed, &calls).unwrap();
    let ms = backend.time_graph(&mut timed, &mut graph, 3).unwrap();
    let (mut launched, calls) = stage(backend, &plan);
    let mut graph = backend.capture(&mut launched, &calls).unwrap();
    for _ in 0..plain {
        backend.launch_graph(&mut launched, &mut graph).unwrap();
    }
    let states = [&timed, &launched].map(|arena| state(backend, arena, &plan));
    (states[0] == states[1], ms)
}

#[test]
fn a_timed_graph_runs_once_more_than_is_timed() {
    let cpu = cpu(1);
    assert_eq!(same_state(&cpu, 4), (true, None), "the CPU has no clock");
    assert_eq!(same_state(&cpu, 3), (false, None));
    let Some(cuda) = gpu::backend() else { return };
    let (same, ms) = same_state(&cuda, 4);
    assert!(same && ms.is_some_and(|ms| ms > 0.0), "{ms:?}");
    assert!(!same_state(&cuda, 3).0);
}

#[test]
fn a_graph_has_a_node_for_every_call_or_group_of_calls_at_least() {
    let plan = plan(PlanConfig::of(2, 6));
    let cpu = cpu(1);
    let (mut arena, calls) = stage(&cpu, &plan);
    for count in [0, 3, calls.len()] {
        let graph = cpu.capture(&mut arena, &calls[..count]).unwrap();
        assert_eq!(cpu.graph_nodes(&graph), count);
    }
    let planned = plan.layout.arena_bytes();
    let expected = ArenaBytes {
        planned,
        workspace: 0,
    };
    assert_eq!(cpu.arena_bytes(&arena), expected);
    let Some(cuda) = gpu::backend() else { return };
    let (mut arena, calls) = stage(&cuda, &plan);
    let graph = cuda.capture(&mut arena, &calls).unwrap();
    // A group of calls is one launch.
    let groups = groups(&calls, &cuda.device().shape()).into_iter().flatten();
    let together: usize = groups.map(|group| group.calls - 1).sum();
    let nodes = cuda.graph_nodes(&graph);
    assert!(together > 0 && nodes >= calls.len() - together, "{nodes}");
    let held = cuda.arena_bytes(&arena);
    assert!(held.planned >= planned && held.workspace > 0, "{held:?}");
}

#[test]
fn arena_and_graph_of_another_kind_hold_nothing_here() {
    let Some(cuda) = gpu::backend() else { return };
    let plan = plan(PlanConfig::of(2, 6));
    let (gpu, cpu) = (AnyDevice::Cuda(cuda.into()), AnyDevice::Cpu(cpu(1)));
    let (mut arena, calls) = stage(&gpu, &plan);
    let mut graph = gpu.capture(&mut arena, &calls).unwrap();
    assert_eq!(cpu.arena_bytes(&arena), ArenaBytes::default());
    assert_eq!(cpu.graph_nodes(&graph), 0);
    assert!(cpu.time_graph(&mut arena, &mut graph, 1).is_err());
}

#[test]
fn a_gpu_copies_at_a_rate_that_a_gpu_can_have() {
    let Some(cuda) = gpu::backend() else { return };
    let rate = copy_bandwidth(cuda.device()).unwrap();
    assert!(rate > 5e10 && rate < 5e13, "{rate} bytes a second");
}
