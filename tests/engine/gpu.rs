//! The engine on a GPU: the same bits as on the CPU, replayed, proven and digested there.

use bitstep::any_device::AnyDevice;
use bitstep::backend::Backend;
use bitstep::cuda::CudaBackend;
use bitstep::cuda::products::GemmChoice;
use bitstep::engine::halves::BackwardOptions;
use bitstep::engine::init::FreshInit;
use bitstep::engine::{Hyper, Session, Trainer};
use bitstep::error::{CaptureError, DeviceError, GuardError};
use bitstep::layout::Region;
use bitstep::model::Family;
use bitstep::plan::memory::{MemoryNeed, Room};
use bitstep::plan::{Passes, Plan, PlanConfig, ProgramKind, StepForm};
use bitstep::shape::Math;
use std::rc::Rc;
use std::sync::Arc;

use super::common::*;
use crate::gpu;

fn gpu_trainer(plan: &Arc<Plan>, cuda: CudaBackend) -> Trainer<CudaBackend> {
    let mut trainer = Trainer::new(cuda, plan.clone(), Hyper::default(), 2).expect("an arena");
    trainer.load(&FreshInit { seed: 3 }).expect("loads");
    trainer
}

#[test]
fn steps_and_replays_have_the_bits_of_the_cpu() {
    for choice in [GemmChoice::Own, GemmChoice::Auto] {
        for family in [Family::Llama, Family::Qwen2, Family::Qwen3] {
            for tied in [false, true] {
                let Some(cuda) = gpu::open(choice) else {
                    return;
                };
                let config = PlanConfig::of(3, 70);
                let plan = Arc::new(Plan::build(&model(family, tied), config).unwrap());
                let mut on_gpu = gpu_trainer(&plan, cuda);
                let mut on_cpu = trainer(&plan, Hyper::default(), 100);
                for step in 0..8 {
                    let batch = batch(&plan, step);
                    let [a, b] = [on_cpu.step(&batch), on_gpu.step(&batch)].map(|r| r.unwrap());
                    assert_eq!(a, b, "{family:?}, tied {tied}, {choice:?}, step {step}");
                    let roots = (
                        on_cpu.session_mut().root().unwrap(),
                        on_gpu.session_mut().root().unwrap(),
                    );
                    assert_eq!(
                        roots.0, roots.1,
                        "{family:?}, tied {tied}, {choice:?}, step {step}"
                    );
                }
                assert_eq!(on_gpu.session().state_name(), "replaying");
            }
        }
    }
}

#[test]
fn a_thousand_replays_and_a_fresh_engine_give_one_root() {
    let plan = plan(PlanConfig::of(4, 16));
    let Some(first) = gpu::open(GemmChoice::Auto) else {
        return;
    };
    let second = gpu::backend().unwrap();
    let mut trainers = [gpu_trainer(&plan, first), gpu_trainer(&plan, second)];
    let roots = trainers.each_mut().map(|trainer| {
        for step in 0..1000 {
            trainer.step(&batch(&plan, step % 7)).unwrap();
        }
        trainer.session_mut().root().unwrap()
    });
    assert_eq!(roots[0], roots[1]);
}

#[test]
fn a_graph_with_two_lanes_has_the_bits_of_eager_steps() {
    for choice in [GemmChoice::Own, GemmChoice::Auto] {
        let Some(cuda) = gpu::open(choice) else {
            return;
        };
        // Enough tokens that gradients of weights are worth a lane of their own.
        let config = PlanConfig {
            math: Math::Bf16,
            ..PlanConfig::of(64, 1024)
        };
        let plan = plan(config);
        let mut replayed = gpu_trainer(&plan, cuda);
        let second = gpu::open(choice).expect("opened before");
        let mut eager =
            Trainer::new(second, plan.clone(), Hyper::default(), 100).expect("an arena");
        eager.load(&FreshInit { seed: 3 }).expect("loads");
        for step in 0..12 {
            let batch = batch(&plan, step);
            assert_eq!(replayed.step(&batch).unwrap(), eager.step(&batch).unwrap());
            let root = |trainer: &mut Trainer<CudaBackend>| trainer.session_mut().root().unwrap();
            assert_eq!(
                root(&mut replayed),
                root(&mut eager),
                "{choice:?}, step {step}"
            );
        }
        assert_eq!(replayed.session().state_name(), "replaying");
        let executions = replayed.session().executions();
        let beside = executions
            .iter()
            .filter(|e| e.kernel.ends_with("beside others"));
        assert!(beside.count() > 4, "{executions:?}");
    }
}

#[test]
fn a_digest_on_the_device_is_that_of_its_bytes() {
    let Some(cuda) = gpu::backend() else { return };
    let plan = plan(PlanConfig::of(4, 16));
    let mut arena = cuda.allocate(&plan.layout, &[]).unwrap();
    let lengths = [1, 4, 63, 64, 65, 1023, 1024, 1025, 2048, 3072, 5000, 20_000];
    let bytes: Vec<u8> = (0..20_000u32).map(|i| (i * 7 + i / 251) as u8).collect();
    for (index, bytes_long) in lengths.into_iter().enumerate() {
        let region = Region {
            offset: 256 * index,
            bytes: bytes_long,
        };
        cuda.write(&mut arena, region, &bytes[..bytes_long])
            .unwrap();
        let digest = cuda.digest(&arena, &[region]).unwrap();
        assert_eq!(
            digest,
            [blake3::hash(&bytes[..bytes_long])],
            "{bytes_long} bytes"
        );
    }
}

#[test]
fn a_captured_digest_is_that_of_the_bytes_and_guarded() {
    let Some(cuda) = gpu::backend() else { return };
    let plan = plan(PlanConfig::of(4, 16));
    let mut arena = cuda.allocate(&plan.layout, &[]).unwrap();
    let regions: Vec<Region> = plan
        .params
        .iter()
        .map(|p| plan.layout.region(p.slot))
        .collect();
    let mut graph = cuda.capture_digest(&mut arena, &regions).unwrap();
    for round in 0..3u8 {
        let mut expected = Vec::new();
        for (index, &region) in regions.iter().enumerate() {
            let bytes: Vec<u8> = (0..region.bytes)
                .map(|i| (i * 7 + index) as u8 ^ round)
                .collect();
            cuda.write(&mut arena, region, &bytes).unwrap();
            expected.push(blake3::hash(&bytes));
        }
        assert_eq!(cuda.check_digest(&arena, &graph, &regions), Ok(()));
        assert_eq!(cuda.digest(&arena, &regions).unwrap(), expected);
        // Another digest has overwritten the workspace; the graph brings its own table.
        cuda.digest(&arena, &regions[1..3]).unwrap();
        assert_eq!(
            cuda.launch_digest(&mut arena, &mut graph).unwrap(),
            expected
        );
    }
    let refused = cuda.check_digest(&arena, &graph, &regions[1..]);
    assert!(matches!(refused, Err(GuardError::DigestRegions { .. })));
    let other = cuda.allocate(&plan.layout, &[]).unwrap();
    let refused = cuda.check_digest(&other, &graph, &regions);
    assert!(matches!(refused, Err(GuardError::Arena { .. })));
    let mut none = cuda.capture_digest(&mut arena, &[]).unwrap();
    assert!(
        cuda.launch_digest(&mut arena, &mut none)
            .unwrap()
            .is_empty()
    );
}

#[test]
fn a_graph_of_another_backend_is_refused_and_other_products_are_not() {
    let Some(cuda) = gpu::open(GemmChoice::Auto) else {
        return;
    };
    let other = gpu::backend().unwrap();
    let plan = plan(PlanConfig::of(2, 6));
    let calls = plan.layout.place(plan.calls(ProgramKind::Evaluate));
    let mut arena = cuda.allocate(&plan.layout, &calls).unwrap();
    let graph = cuda.capture(&mut arena, &calls).unwrap();
    assert_eq!(cuda.check_graph(&arena, &graph), Ok(()));
    let refused = other.check_graph(&arena, &graph);
    assert!(matches!(refused, Err(GuardError::Modules { .. })));
    // Products of another size that are admitted meanwhile do not concern the graph.
    let larger = Arc::new(Plan::build(&model(Family::Llama, false), PlanConfig::of(3, 7)).unwrap());
    let foreign = larger.layout.place(larger.calls(ProgramKind::Evaluate));
    let mut second = cuda.allocate(&larger.layout, &foreign).unwrap();
    for call in &foreign {
        cuda.launch(&mut second, call).unwrap();
    }
    assert_eq!(cuda.check_graph(&arena, &graph), Ok(()));
    // The graph's own products were not admitted at its capture: admitting them is a change.
    for call in &calls {
        cuda.launch(&mut arena, call).unwrap();
    }
    let checked = cuda.check_graph(&arena, &graph);
    // Without the library nothing is admitted, and nothing has changed.
    match cuda.info().description.contains("not found") {
        true => assert_eq!(checked, Ok(())),
        false => assert!(matches!(checked, Err(GuardError::Kernels { .. }))),
    }
}

#[test]
fn transfers_of_every_length_bring_the_bytes_and_a_fill_stays_inside() {
    let Some(cuda) = gpu::backend() else { return };
    // More than two halves of the pinned buffer, so that each is used again.
    let plan = plan(PlanConfig::of(512, 64));
    let mut arena = cuda.allocate(&plan.layout, &[]).unwrap();
    for length in [
        0,
        1,
        32,
        (1 << 22) - 1,
        1 << 22,
        (1 << 22) + 1,
        (5 << 22) + 3,
    ] {
        assert!(length + 7 <= plan.layout.arena_bytes(), "{length}");
        let region = Region {
            offset: 7,
            bytes: length,
        };
        let bytes: Vec<u8> = (0..length).map(|i| (i * 13 + i / 255) as u8).collect();
        cuda.write(&mut arena, region, &bytes).unwrap();
        let mut found = vec![0; length];
        cuda.read(&arena, region, &mut found).unwrap();
        assert!(found == bytes, "{length}");
    }
    let region = |offset, bytes| Region { offset, bytes };
    cuda.fill(&mut arena, region(0, 32), 0).unwrap();
    cuda.fill(&mut arena, region(5, 0), 9).unwrap();
    cuda.fill(&mut arena, region(7, 5), 0xff).unwrap();
    let mut found = [1u8; 32];
    cuda.read(&arena, region(0, 32), &mut found).unwrap();
    for (i, byte) in found.into_iter().enumerate() {
        assert_eq!(byte, if (7..12).contains(&i) { 0xff } else { 0 });
    }
    let refused = cuda.fill(&mut arena, region(1 << 50, 4), 0);
    assert!(matches!(refused, Err(DeviceError::OutOfArena { .. })));
}

#[test]
fn a_failed_capture_leaves_the_stream_usable() {
    let Some(cuda) = gpu::backend() else { return };
    let plan = plan(PlanConfig::of(2, 6));
    let calls = plan.layout.place(plan.calls(ProgramKind::Evaluate));
    let mut arena = cuda.allocate(&plan.layout, &calls).unwrap();
    let mut broken = calls.clone();
    broken[3].writes[0].offset = 1 << 50;
    let refused = cuda.capture(&mut arena, &broken).err();
    assert!(
        matches!(
            refused,
            Some(CaptureError::Device(DeviceError::OutOfArena { .. }))
        ),
        "{refused:?}"
    );
    let mut graph = cuda.capture(&mut arena, &calls).unwrap();
    cuda.launch_graph(&mut arena, &mut graph).unwrap();
    let mut byte = [0u8];
    cuda.read(
        &arena,
        Region {
            offset: 0,
            bytes: 1,
        },
        &mut byte,
    )
    .unwrap();
}

#[test]
fn graph_arena_and_engine_can_be_dropped_in_every_order() {
    let plan = plan(PlanConfig::of(2, 6));
    for order in 0..3 {
        let Some(cuda) = gpu::backend() else { return };
        let calls = plan.layout.place(plan.calls(ProgramKind::Evaluate));
        let mut arena = cuda.allocate(&plan.layout, &calls).unwrap();
        let graph = cuda.capture(&mut arena, &calls).unwrap();
        match order {
            0 => drop((graph, arena, cuda)),
            1 => drop((cuda, graph, arena)),
            _ => drop((arena, cuda, graph)),
        }
    }
}

#[test]
fn an_arena_larger_than_the_device_is_refused_with_the_numbers() {
    let Some(cuda) = gpu::backend() else { return };
    let plan = plan(PlanConfig::of(1 << 14, 4096));
    let refused = Session::new(cuda, plan).err();
    let Some(DeviceError::DeviceMemory {
        needed_bytes,
        free_bytes,
        ..
    }) = refused
    else {
        panic!("expected a refusal, found {refused:?}");
    };
    assert!(needed_bytes > free_bytes);
}

#[test]
fn an_arena_of_another_kind_of_device_is_refused() {
    let Some(cuda) = gpu::backend() else { return };
    let plan = plan(PlanConfig::of(2, 6));
    let on_cpu = AnyDevice::Cpu(cpu(1));
    let on_gpu = AnyDevice::Cuda(Rc::new(cuda));
    let arena = on_gpu.allocate(&plan.layout, &[]).unwrap();
    let (offset, bytes) = (0, 1);
    let refused = on_cpu.read(&arena, Region { offset, bytes }, &mut [0]);
    assert!(
        matches!(refused, Err(DeviceError::Unavailable { .. })),
        "{refused:?}"
    );
}

#[test]
fn the_memory_told_before_a_run_is_what_it_allocates() {
    for choice in [GemmChoice::Own, GemmChoice::Auto] {
        let Some(cuda) = gpu::open(choice) else {
            return;
        };
        let device = AnyDevice::Cuda(Rc::new(cuda));
        let plan = plan(PlanConfig::of(64, 256));
        let calls = plan.layout.place(plan.calls(ProgramKind::Step));
        let need = MemoryNeed {
            layout: &plan.layout,
            workspace_bytes: device.workspace_bytes(&plan.layout, &calls),
        };
        let arena = device.allocate(&plan.layout, &calls).unwrap();
        let taken = device.arena_bytes(&arena);
        assert_eq!(taken.planned + taken.workspace, need.bytes());
        drop(arena);
        let room = Room {
            free_bytes: need.bytes() - 1,
            total_bytes: need.bytes(),
        };
        assert!(matches!(
            need.check("cuda:0", room),
            Err(DeviceError::PlanTooLarge { .. })
        ));
    }
}

#[test]
fn every_form_of_a_step_has_the_bits_of_the_cpu() {
    let forms = [
        (Passes::Micro { sequences: 1 }, None),
        (Passes::Micro { sequences: 2 }, Some(1)),
        (Passes::Whole, Some(1)),
        (Passes::Halves { most_passes: 4 }, Some(2)),
    ];
    for (math, tied) in [(Math::F32, true), (Math::Bf16, true), (Math::F16, false)] {
        let config = |passes, layers: Option<usize>| PlanConfig {
            grain: 1,
            math,
            form: StepForm {
                passes,
                recompute: layers.into(),
            },
            ..PlanConfig::of(4, 70)
        };
        let planned = |config| Arc::new(Plan::build(&model(Family::Qwen3, tied), config).unwrap());
        let whole = planned(config(Passes::Whole, None));
        for (passes, recompute) in forms {
            let Some(cuda) = gpu::open(GemmChoice::Auto) else {
                return;
            };
            let plan = planned(config(passes, recompute));
            let mut on_gpu = gpu_trainer(&plan, cuda);
            let mut on_cpu = trainer(&whole, Hyper::default(), 100);
            for step in 0..5 {
                let batch = batch(&whole, step);
                let expected = on_cpu.step(&batch).unwrap();
                let found = match passes {
                    Passes::Halves { .. } => {
                        on_gpu.forward(&batch).unwrap();
                        let clip = Hyper::default().clip_norm;
                        let options = BackwardOptions::update(clip, None);
                        let report = on_gpu.backward_targets(&batch, &options).unwrap();
                        report.expect("an update")
                    }
                    _ => on_gpu.step(&batch).unwrap(),
                };
                assert_eq!(found, expected, "{math}, {passes:?}, step {step}");
                let roots = [
                    on_cpu.session_mut().root().unwrap(),
                    on_gpu.session_mut().root().unwrap(),
                ];
                assert_eq!(roots[0], roots[1], "{math}, {passes:?}, step {step}");
            }
            assert_eq!(on_gpu.session().state_name(), "replaying");
        }
    }
}
