//! Graphs on a GPU: what was not recorded is refused, and lanes compute what the chain computes. Skipped, loudly, without one.
#![allow(unsafe_code)]

use std::ptr::null_mut;
use std::sync::Arc;

use cudarc::driver::sys;

use super::arena::CudaArena;
use super::call::{Arg, KernelLaunch, Matrix};
use super::device::Device;
use super::graph::{CudaGraph, GraphProducts, capture};
use super::graph_edges::{Issued, nodes_so_far};
use super::lanes::Lane;
use super::module::Modules;
use crate::cuda::launch::launch;
use crate::error::{CaptureError, DeviceError};
use crate::layout::Region;

/// A device with an arena of regions of 1,024 numbers and the kernel that adds one to another.
struct Bench {
    device: Arc<Device>,
    modules: Arc<Modules>,
    arena: CudaArena,
}

/// `None`, said loudly, where there is no device; a failure under `REQUIRE_CUDA=1`.
fn bench() -> Option<Bench> {
    let device = match Device::open(0) {
        Ok(device) => device,
        Err(reason) => {
            let required = std::env::var_os("REQUIRE_CUDA").is_some_and(|v| v == "1");
            assert!(!required, "REQUIRE_CUDA=1, but {reason}");
            eprintln!("skipped on a GPU: {reason}");
            return None;
        }
    };
    let modules = Arc::new(Modules::new(device.clone()));
    modules.prepare(vec![ADD]).expect("the kernel loads");
    let arena = CudaArena::zeroed(&device, 12288, Default::default()).expect("12 KiB");
    Some(Bench {
        device,
        modules,
        arena,
    })
}

const ADD: &str = "tree_add_f32";

/// Adds the region at `from` to the one at `to`.
fn add(from: usize, to: usize) -> KernelLaunch {
    let region = |offset| {
        Arg::Region(Region {
            offset,
            bytes: 4096,
        })
    };
    KernelLaunch {
        entry: ADD,
        grid: [1, 1, 1],
        block: [256, 1, 1],
        shared_bytes: 0,
        args: vec![region(from), region(to), Arg::U32(1024), Arg::U32(0)],
    }
}

impl Bench {
    /// The graph of the launches that `issue` makes, said to be those of `expected`.
    fn capture(
        &self,
        expected: Vec<KernelLaunch>,
        issue: impl FnOnce() -> Result<(), DeviceError>,
    ) -> Result<CudaGraph, CaptureError> {
        self.capture_with(|| {
            issue()?;
            let expected = expected.into_iter().map(Some).collect();
            Ok(Issued::in_order_of_capture(expected))
        })
    }

    fn capture_with(
        &self,
        issue: impl FnOnce() -> Result<Issued, DeviceError>,
    ) -> Result<CudaGraph, CaptureError> {
        let known = (&self.modules, GraphProducts::default());
        capture(&self.device, known, &self.arena, issue)
    }

    fn issue(&self, kernel: &KernelLaunch) -> Result<(), DeviceError> {
        launch(&self.device, &self.modules, &self.arena, kernel)
    }

    /// Nothing that was refused has left the stream capturing.
    fn is_usable(&self) {
        let graph = self.capture(vec![add(0, 4096)], || self.issue(&add(0, 4096)));
        let graph = graph.expect("what was issued was recorded");
        assert_eq!(graph.nodes(), 1);
        graph.launch().expect("the graph runs");
        self.device.synchronize().expect("the stream works");
    }
}

#[test]
fn a_kernel_that_was_not_recorded_is_found() {
    let Some(bench) = bench() else { return };
    let refused = bench.capture(vec![add(0, 4096)], || {
        bench.issue(&add(0, 4096))?;
        bench.issue(&add(0, 4096))
    });
    let (expected, found) = (1, 2);
    assert_eq!(refused.err(), Some(CaptureError::Nodes { expected, found }));
    bench.is_usable();
}

#[test]
fn a_kernel_with_another_address_or_size_is_found() {
    let Some(bench) = bench() else { return };
    let wider = KernelLaunch {
        grid: [2, 1, 1],
        ..add(0, 4096)
    };
    for other in [add(0, 2048), wider] {
        let refused = bench.capture(vec![add(0, 4096)], || bench.issue(&other));
        let Some(CaptureError::Node { node, kernel, .. }) = refused.err() else {
            panic!("another launch than the recorded one passed");
        };
        assert_eq!((node, kernel.as_str()), (0, ADD));
    }
    bench.is_usable();
}

/// A product of no tiles, whose matrices begin at this byte and have so many columns.
fn product(offset: usize, columns: u32) -> KernelLaunch {
    let region = Region { offset, bytes: 0 };
    let matrix = Arg::Matrix(Matrix {
        region,
        rows: 16,
        columns,
        box_rows: 16,
    });
    KernelLaunch {
        entry: "matmul_bf16_sm90a_128",
        grid: [2, 1, 1],
        block: [384, 1, 1],
        shared_bytes: 230_496,
        args: [[matrix; 3], [Arg::U32(0); 3]].concat(),
    }
}

#[test]
fn a_kernel_over_another_matrix_is_found() {
    let Some(bench) = bench() else { return };
    if !bench.device.shape().warpgroups {
        return;
    }
    let entry = product(0, 64).entry;
    bench
        .modules
        .prepare(vec![entry])
        .expect("the kernel loads");
    let same = bench.capture(vec![product(0, 64)], || bench.issue(&product(0, 64)));
    assert_eq!(same.map(|graph| graph.nodes()).ok(), Some(1));
    for other in [product(256, 64), product(0, 128)] {
        let refused = bench.capture(vec![product(0, 64)], || bench.issue(&other));
        let Some(CaptureError::Node { node, kernel, .. }) = refused.err() else {
            panic!("another launch than the recorded one passed");
        };
        assert_eq!((node, kernel.as_str()), (0, entry));
    }
    bench.is_usable();
}

#[test]
fn a_graph_that_allocates_is_refused() {
    let Some(bench) = bench() else { return };
    let refused = bench.capture(Vec::new(), || {
        let mut memory = 0;
        let stream = bench.device.stream();
        // SAFETY: during capture both calls only add nodes; the graph is refused and never runs.
        let status = unsafe {
            let status = sys::cuMemAllocAsync(&mut memory, 256, stream);
            bench.device.check("cuMemAllocAsync", status)?;
            sys::cuMemFreeAsync(memory, stream)
        };
        bench.device.check("cuMemFreeAsync", status)
    });
    assert_eq!(refused.err(), Some(CaptureError::MemoryNodes { found: 2 }));
    bench.is_usable();
}

#[test]
fn a_side_lane_computes_what_the_chain_computes() {
    let Some(bench) = bench() else { return };
    // Two lanes add a one each; the last kernel adds what the one has to what the other has.
    let kernels = [add(0, 4096), add(0, 8192), add(4096, 8192)];
    let ones: Vec<u8> = [1.0f32; 3072]
        .iter()
        .flat_map(|x| x.to_le_bytes())
        .collect();
    let all = Region {
        offset: 0,
        bytes: ones.len(),
    };
    bench.arena.write(all, &ones).expect("12 KiB");
    let graph = bench.capture_with(|| {
        kernels.iter().try_for_each(|kernel| bench.issue(kernel))?;
        let mut issued = Issued::default();
        let [first, second, last] = kernels.clone().map(|kernel| vec![Some(kernel)]);
        let side = issued.extend((first, 1), Lane::Side, vec![]);
        let main = issued.extend((second, 2), Lane::Main, vec![]);
        issued.extend(
            (last, nodes_so_far(&bench.device)?),
            Lane::Main,
            [side, main].concat(),
        );
        Ok(issued)
    });
    graph.expect("planned edges").launch().expect("runs");
    let mut found = vec![0; ones.len()];
    bench.arena.read(all, &mut found).expect("12 KiB");
    let found: Vec<f32> = found
        .as_chunks()
        .0
        .iter()
        .map(|b| f32::from_le_bytes(*b))
        .collect();
    assert_eq!([found[0], found[1024], found[2048]], [1.0, 2.0, 4.0]);
}

#[test]
fn a_capture_that_is_no_chain_is_refused() {
    let Some(bench) = bench() else { return };
    let refused = bench.capture_with(|| {
        let kernel = add(0, 4096);
        bench.issue(&kernel)?;
        let forget =
            sys::CUstreamUpdateCaptureDependencies_flags::CU_STREAM_SET_CAPTURE_DEPENDENCIES;
        // SAFETY: the stream is capturing; it forgets what the next kernel would wait for.
        let status = unsafe {
            sys::cuStreamUpdateCaptureDependencies_v2(
                bench.device.stream(),
                null_mut(),
                std::ptr::null(),
                0,
                forget as u32,
            )
        };
        bench
            .device
            .check("cuStreamUpdateCaptureDependencies", status)?;
        bench.issue(&kernel)?;
        let mut issued = Issued::default();
        let first = issued.extend((vec![Some(kernel.clone())], 1), Lane::Main, vec![]);
        issued.extend((vec![Some(kernel)], 2), Lane::Side, first);
        Ok(issued)
    });
    let (from, to, planned) = (0, 1, true);
    assert_eq!(
        refused.err(),
        Some(CaptureError::Edge { from, to, planned })
    );
    bench.is_usable();
}
