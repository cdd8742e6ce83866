//! The backend trait on a CUDA device.

use std::sync::Arc;

use super::arena::CudaArena;
use super::call::{Arg, CallLaunches, DeviceShape, KernelLaunch};
use super::device::Device;
use super::gemm::{Lt, LtOperands, WORKSPACE_BYTES};
use super::graph::{self, CudaGraph, Expected};
use super::launch::launch;
use super::module::Modules;
use super::products::{GemmChoice, LibraryProduct, Products, Provider, library_product};
use super::{
    adamw, attention, bias, clip, cross_entropy, digest, embed, matmul, rms_norm, rope, swiglu,
    tree_add,
};
use crate::backend::{ArenaId, Backend, DeviceInfo, Execution, same_length};
use crate::error::{CaptureError, DeviceError, GuardError};
use crate::layout::{Layout, PlacedCall, Region};
use crate::op::Op;
use crate::shape::Math;

/// Timed runs of a candidate; the fastest counts.
const TIMED_RUNS: usize = 3;

/// A CUDA device as a backend.
pub struct CudaBackend {
    device: Arc<Device>,
    modules: Arc<Modules>,
    products: Products,
}

impl CudaBackend {
    /// Opens device `ordinal`; products are served as `choice` says.
    ///
    /// # Errors
    /// No driver, no such device, a device that is too old, a library that cannot be opened.
    pub fn open(ordinal: usize, choice: GemmChoice) -> Result<Self, DeviceError> {
        let device = Device::open(ordinal)?;
        let lt = match choice {
            GemmChoice::Own => None,
            GemmChoice::Auto => Lt::open(&device)?,
        };
        Ok(CudaBackend {
            modules: Arc::new(Modules::new(device.clone())),
            products: Products::new(choice, lt),
            device,
        })
    }

    /// The device underneath.
    pub fn device(&self) -> &Arc<Device> {
        &self.device
    }

    /// Issues a call with the provider pinned for it; says what was issued.
    fn issue(&self, arena: &CudaArena, call: &PlacedCall) -> Result<Expected, DeviceError> {
        if let (Some(Provider::Library(algorithm)), Some(lt), Some(product)) = (
            self.products.pinned(call),
            &self.products.lt,
            library_product(call),
        ) {
            let operands = self.operands(arena, &product)?;
            lt.launch(&product.shape, &algorithm, &operands)?;
            let mut expected: Expected = vec![None];
            if product.d.is_none() {
                expected.extend(self.run(arena, fold(call, &self.device.shape()))?);
            }
            return Ok(expected);
        }
        self.run(arena, launches(&call.call.op, call, &self.device.shape()))
    }

    fn run(&self, arena: &CudaArena, planned: CallLaunches) -> Result<Expected, DeviceError> {
        let mut expected = Expected::new();
        for kernel in resolve(planned, arena) {
            launch(&self.device, &self.modules, arena, &kernel)?;
            expected.push(Some(kernel));
        }
        Ok(expected)
    }

    fn operands(
        &self,
        arena: &CudaArena,
        product: &LibraryProduct,
    ) -> Result<LtOperands, DeviceError> {
        let pieces = arena.partials();
        Ok(LtOperands {
            a: arena.address(product.a)?,
            b: arena.address(product.b)?,
            bias: product.bias.map_or(Ok(0), |r| arena.address(r))?,
            d: arena.address(product.d.unwrap_or(pieces))?,
            workspace: arena.address(arena.library_workspace())?,
        })
    }

    /// Runs the own kernel, then every candidate on the same operands; pins the fastest whose output
    /// has the same bits. The output holds the contract's bits when this returns.
    fn admit(&self, arena: &CudaArena, call: &PlacedCall) -> Result<(), DeviceError> {
        let own = launches(&call.call.op, call, &self.device.shape());
        self.run(arena, own.clone())?;
        let (Some(lt), Some(product)) = (&self.products.lt, library_product(call)) else {
            self.products.pin(call, Provider::Own);
            return Ok(());
        };
        let output = [call.writes[0]];
        let expected = self.digests(arena, &output)?;
        let mut best = (
            self.time(|| self.run(arena, own.clone()).map(drop))?,
            Provider::Own,
        );
        for algorithm in lt.candidates(&product.shape)? {
            self.products.pin(call, Provider::Library(algorithm));
            // A candidate that fails to launch is no candidate.
            if self.issue(arena, call).is_err() || self.digests(arena, &output)? != expected {
                continue;
            }
            let ms = self.time(|| self.issue(arena, call).map(drop))?;
            if ms < best.0 {
                best = (ms, Provider::Library(algorithm));
            }
        }
        self.products.pin(call, best.1);
        // Candidates that were refused have left their own bits behind.
        self.run(arena, own).map(drop)
    }

    fn time(&self, run: impl Fn() -> Result<(), DeviceError>) -> Result<f32, DeviceError> {
        let mut best = f32::INFINITY;
        for _ in 0..TIMED_RUNS {
            best = best.min(self.device.time(&run)?);
        }
        Ok(best)
    }

    fn digests(
        &self,
        arena: &CudaArena,
        regions: &[Region],
    ) -> Result<Vec<blake3::Hash>, DeviceError> {
        let planned = digest::plan(regions);
        for &region in regions {
            arena.address(region)?;
        }
        arena.write(
            arena.workspace_region(0, planned.table.len()),
            &planned.table,
        )?;
        self.run(arena, planned.launches)?;
        // The digests stand side by side, so one copy brings all of them.
        let first = planned.results.first().copied().unwrap_or(0);
        let mut bytes = vec![0; planned.results.len() * blake3::OUT_LEN];
        arena.read(arena.workspace_region(first, bytes.len()), &mut bytes)?;
        let digests = bytes.as_chunks::<{ blake3::OUT_LEN }>().0;
        Ok(digests
            .iter()
            .copied()
            .map(blake3::Hash::from_bytes)
            .collect())
    }
}

/// Whether there are kernels for an op's precision.
///
/// # Errors
/// [`DeviceError::NoPrecision`] names both.
pub fn has_kernels(op: &Op) -> Result<(), DeviceError> {
    match op.rule().math() {
        Math::F32 => Ok(()),
        math => Err(DeviceError::NoPrecision {
            op: op.rule().stem(),
            precision: math.name(),
        }),
    }
}

/// The engine's own launches of a call.
pub fn launches(op: &Op, call: &PlacedCall, shape: &DeviceShape) -> CallLaunches {
    match op {
        Op::Embed(op) => embed::forward(op, call, shape),
        Op::EmbedGrad(op) => embed::grad(op, call, shape),
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
        Op::CrossEntropy(op) => cross_entropy::forward(op, call, shape),
        Op::LossSum(op) => cross_entropy::loss_sum(op, call, shape),
        Op::TreeAdd(op) => tree_add::merge(op, call, shape),
        Op::GradSquares(op) => clip::squares(op, call, shape),
        Op::Clip(op) => clip::clip(op, call, shape),
        Op::AdamW(op) => adamw::update(op, call, shape),
    }
}

/// The launch that folds the pieces a library product has left in the workspace.
fn fold(call: &PlacedCall, shape: &DeviceShape) -> CallLaunches {
    match &call.call.op {
        Op::MatmulGradWeight(op) => matmul::fold(op, call, shape),
        _ => CallLaunches::default(),
    }
}

/// Puts the workspace arguments of a call at their addresses: counters in the zeroed part, the rest
/// behind it, so that no call's partials lie over another's counters.
fn resolve(planned: CallLaunches, arena: &CudaArena) -> Vec<KernelLaunch> {
    let zeroed = planned.zeroed_bytes;
    let place = |arg: Arg| match arg {
        Arg::Workspace { offset } if offset < zeroed => Arg::Region(arena.counter_region(offset)),
        Arg::Workspace { offset } => Arg::Region(arena.workspace_region(offset - zeroed, 0)),
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

impl Backend for CudaBackend {
    type Arena = CudaArena;
    type Graph = CudaGraph;

    fn info(&self) -> DeviceInfo {
        let info = &self.device.info;
        let gemm = match (&self.products.lt, self.products.choice) {
            (Some(lt), _) => format!("cuBLASLt {}", lt.version),
            (None, GemmChoice::Auto) => "own products, cuBLASLt not found".into(),
            (None, GemmChoice::Own) => "own products".into(),
        };
        let (major, minor) = info.driver_cuda;
        DeviceInfo {
            device: self.device.label(),
            description: format!("{}, CUDA {major}.{minor}, {gemm}", info.name),
        }
    }

    fn allocate(&self, layout: &Layout, calls: &[PlacedCall]) -> Result<CudaArena, DeviceError> {
        calls
            .iter()
            .try_for_each(|call| has_kernels(&call.call.op))?;
        let shape = self.device.shape();
        let planned = calls
            .iter()
            .map(|call| launches(&call.call.op, call, &shape));
        let (mut counters, mut partials) = (0, 0);
        for call in planned {
            counters = counters.max(call.zeroed_bytes);
            partials =
                partials.max(call.workspace_bytes - call.zeroed_bytes.min(call.workspace_bytes));
        }
        let products = calls
            .iter()
            .filter_map(library_product)
            .filter(|p| p.d.is_none());
        let pieces = products
            .map(|p| p.shape.batch * p.shape.strides[2] * 4)
            .max();
        let digests = digest::workspace_bytes(layout.regions());
        let partials = partials.max(pieces.unwrap_or(0)).max(digests);
        let library = if self.products.lt.is_some() {
            WORKSPACE_BYTES
        } else {
            0
        };
        CudaArena::zeroed(
            &self.device,
            layout.arena_bytes(),
            [counters, partials, library],
        )
    }

    fn arena_id(&self, arena: &CudaArena) -> ArenaId {
        arena.id()
    }

    fn launch(&self, arena: &mut CudaArena, call: &PlacedCall) -> Result<(), DeviceError> {
        has_kernels(&call.call.op)?;
        self.device.bind()?;
        let product = matches!(
            call.call.op,
            Op::Matmul(_) | Op::MatmulGradInput(_) | Op::MatmulGradWeight(_)
        );
        if product && self.products.lt.is_some() && self.products.pinned(call).is_none() {
            return self.admit(arena, call);
        }
        self.issue(arena, call).map(drop)
    }

    fn capture(
        &self,
        arena: &mut CudaArena,
        calls: &[PlacedCall],
    ) -> Result<CudaGraph, CaptureError> {
        // Modules load and functions resolve before capture, which forbids both.
        for call in calls {
            for kernel in launches(&call.call.op, call, &self.device.shape()).launches {
                self.modules.function(kernel.entry)?;
            }
            for kernel in fold(call, &self.device.shape()).launches {
                self.modules.function(kernel.entry)?;
            }
        }
        let providers = self.products.fingerprint();
        let issue = || {
            let mut expected = Expected::new();
            for call in calls {
                expected.extend(self.issue(arena, call)?);
            }
            Ok(expected)
        };
        graph::capture(&self.device, (&self.modules, providers), arena, issue)
    }

    fn check_graph(&self, arena: &CudaArena, graph: &CudaGraph) -> Result<(), GuardError> {
        if arena.id() != graph.arena {
            return Err(GuardError::Arena {
                expected: graph.arena.0,
                found: arena.id().0,
            });
        }
        let found = self.products.fingerprint();
        match found == graph.providers {
            true => Ok(()),
            false => Err(GuardError::Kernels {
                expected: graph.providers.to_hex().to_string(),
                found: found.to_hex().to_string(),
            }),
        }
    }

    fn launch_graph(
        &self,
        _arena: &mut CudaArena,
        graph: &mut CudaGraph,
    ) -> Result<(), DeviceError> {
        graph.launch()
    }

    fn executions(&self, calls: &[PlacedCall]) -> Vec<Execution> {
        let shape = self.device.shape();
        let describe = |call: &PlacedCall| {
            if let Some(Provider::Library(algorithm)) = self.products.pinned(call) {
                return algorithm.describe();
            }
            let launches = launches(&call.call.op, call, &shape).launches;
            let texts: Vec<String> = launches
                .iter()
                .map(|l| {
                    let ([x, y, z], [bx, by, bz]) = (l.grid, l.block);
                    format!(
                        "{} <<<{x},{y},{z} x {bx},{by},{bz}, {}>>>",
                        l.entry, l.shared_bytes
                    )
                })
                .collect();
            texts.join(" + ")
        };
        let calls = calls.iter().enumerate();
        calls
            .map(|(call, placed)| Execution {
                call,
                kernel: describe(placed),
            })
            .collect()
    }

    fn write(
        &self,
        arena: &mut CudaArena,
        region: Region,
        bytes: &[u8],
    ) -> Result<(), DeviceError> {
        same_length(region, bytes.len())?;
        arena.write(region, bytes)
    }

    fn read(&self, arena: &CudaArena, region: Region, bytes: &mut [u8]) -> Result<(), DeviceError> {
        same_length(region, bytes.len())?;
        arena.read(region, bytes)
    }

    fn digest(
        &self,
        arena: &CudaArena,
        regions: &[Region],
    ) -> Result<Vec<blake3::Hash>, DeviceError> {
        self.device.bind()?;
        self.digests(arena, regions)
    }
}
