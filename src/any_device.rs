//! A backend chosen at run time: the CPU or a CUDA device, for callers that cannot be generic.

use std::rc::Rc;

use crate::backend::{ArenaBytes, ArenaId, Backend, DeviceInfo, Execution};
use crate::cpu::CpuBackend;
use crate::cpu::arena::CpuArena;
use crate::cpu::backend::{CpuDigest, CpuGraph};
use crate::cpu::peak::{self, fma_peak_gflops};
use crate::cuda::arena::CudaArena;
use crate::cuda::backend::CudaDigest;
use crate::cuda::graph::CudaGraph;
use crate::cuda::{self, CudaBackend};
use crate::error::{CaptureError, DeviceError, GuardError};
use crate::layout::{Layout, PlacedCall, Region};
use crate::plan::memory::Room;
use crate::shape::Math;

/// A backend of either kind. Clones of a CUDA backend share its modules and pinned providers.
#[derive(Clone)]
pub enum AnyDevice {
    Cpu(CpuBackend),
    Cuda(Rc<CudaBackend>),
}

impl AnyDevice {
    /// The CPU backend, where it is one.
    pub fn cpu(&self) -> Option<&CpuBackend> {
        match self {
            AnyDevice::Cpu(cpu) => Some(cpu),
            AnyDevice::Cuda(_) => None,
        }
    }

    /// Whether the device has a clock of its own; the CPU's is the caller's.
    pub fn has_clock(&self) -> bool {
        matches!(self, AnyDevice::Cuda(_))
    }

    /// Bytes that the device's kernels need for `calls` behind the arena of a layout.
    pub fn workspace_bytes(&self, layout: &Layout, calls: &[PlacedCall]) -> usize {
        match self {
            AnyDevice::Cpu(_) => 0,
            AnyDevice::Cuda(cuda) => cuda.workspace_bytes(layout, calls),
        }
    }

    /// What a GPU's memory has free; `None` on the CPU, whose memory the operating system knows.
    ///
    /// # Errors
    /// What the driver says.
    pub fn room(&self) -> Result<Option<Room>, DeviceError> {
        let AnyDevice::Cuda(cuda) = self else {
            return Ok(None);
        };
        let (free_bytes, total_bytes) = cuda.device().memory()?;
        Ok(Some(Room {
            free_bytes,
            total_bytes,
        }))
    }

    /// The operations a second that the device can do at most in products of a precision, a multiply-add
    /// counted as two, and where the number comes from: f32 as measured for the CPU's threads, which
    /// emulate everything narrower; clock, lanes and tensor cores for a GPU.
    pub fn peak(&self, math: Math) -> (f64, &'static str) {
        match self {
            AnyDevice::Cpu(cpu) => {
                let context = cpu.context();
                let peak = fma_peak_gflops(context.path()) * 1e9 * context.threads() as f64;
                (peak, "f32, measured, registers only, times the threads")
            }
            AnyDevice::Cuda(cuda) => {
                let source = match math {
                    Math::F32 => "128 f32 lanes a multiprocessor at the highest clock",
                    _ => "dense tensor cores at the highest clock",
                };
                (cuda.device().info.peak(math), source)
            }
        }
    }

    /// The bytes a second that a copy within the device's memory reads and writes together, measured.
    ///
    /// # Errors
    /// A GPU with too little free memory for the copy; what the driver says.
    pub fn copy_bandwidth(&self) -> Result<f64, DeviceError> {
        match self {
            AnyDevice::Cpu(cpu) => Ok(peak::copy_bandwidth(cpu.context())),
            AnyDevice::Cuda(cuda) => cuda::copy_bandwidth(cuda.device()),
        }
    }
}

/// An arena of either kind.
pub enum AnyArena {
    Cpu(CpuArena),
    Cuda(Box<CudaArena>),
}

/// A graph of either kind.
pub enum AnyGraph {
    Cpu(CpuGraph),
    Cuda(Box<CudaGraph>),
}

/// A captured digest of either kind.
pub enum AnyDigest {
    Cpu(CpuDigest),
    Cuda(Box<CudaDigest>),
}

fn foreign() -> GuardError {
    GuardError::Kernels {
        expected: "a graph of this backend".into(),
        found: "a graph of another kind of backend".into(),
    }
}

fn mixed() -> DeviceError {
    DeviceError::Unavailable {
        device: "this backend".into(),
        reason: "the arena or graph belongs to a backend of another kind".into(),
    }
}

/// Runs `$body` with backend and arena of one kind.
macro_rules! on {
    ($self:expr, $arena:expr, ($backend:ident, $memory:ident) => $body:expr) => {
        match ($self, $arena) {
            (AnyDevice::Cpu($backend), AnyArena::Cpu($memory)) => $body,
            (AnyDevice::Cuda($backend), AnyArena::Cuda($memory)) => $body,
            _ => Err(mixed().into()),
        }
    };
}

impl Backend for AnyDevice {
    type Arena = AnyArena;
    type Graph = AnyGraph;
    type DigestGraph = AnyDigest;

    fn info(&self) -> DeviceInfo {
        match self {
            AnyDevice::Cpu(cpu) => cpu.info(),
            AnyDevice::Cuda(cuda) => cuda.info(),
        }
    }

    fn allocate(&self, layout: &Layout, calls: &[PlacedCall]) -> Result<AnyArena, DeviceError> {
        Ok(match self {
            AnyDevice::Cpu(cpu) => AnyArena::Cpu(cpu.allocate(layout, calls)?),
            AnyDevice::Cuda(cuda) => AnyArena::Cuda(Box::new(cuda.allocate(layout, calls)?)),
        })
    }

    fn arena_id(&self, arena: &AnyArena) -> ArenaId {
        match arena {
            AnyArena::Cpu(arena) => arena.id(),
            AnyArena::Cuda(arena) => arena.id(),
        }
    }

    fn launch(&self, arena: &mut AnyArena, call: &PlacedCall) -> Result<(), DeviceError> {
        on!(self, arena, (backend, memory) => backend.launch(memory, call))
    }

    fn capture(
        &self,
        arena: &mut AnyArena,
        calls: &[PlacedCall],
    ) -> Result<AnyGraph, CaptureError> {
        match (self, arena) {
            (AnyDevice::Cpu(cpu), AnyArena::Cpu(arena)) => {
                cpu.capture(arena, calls).map(AnyGraph::Cpu)
            }
            (AnyDevice::Cuda(cuda), AnyArena::Cuda(arena)) => {
                let graph = cuda.capture(arena, calls)?;
                Ok(AnyGraph::Cuda(Box::new(graph)))
            }
            _ => Err(mixed().into()),
        }
    }

    fn check_graph(&self, arena: &AnyArena, graph: &AnyGraph) -> Result<(), GuardError> {
        match (self, arena, graph) {
            (AnyDevice::Cpu(cpu), AnyArena::Cpu(arena), AnyGraph::Cpu(graph)) => {
                cpu.check_graph(arena, graph)
            }
            (AnyDevice::Cuda(cuda), AnyArena::Cuda(arena), AnyGraph::Cuda(graph)) => {
                cuda.check_graph(arena, graph)
            }
            _ => Err(foreign()),
        }
    }

    fn launch_graph(&self, arena: &mut AnyArena, graph: &mut AnyGraph) -> Result<(), DeviceError> {
        match (self, arena, graph) {
            (AnyDevice::Cpu(cpu), AnyArena::Cpu(arena), AnyGraph::Cpu(graph)) => {
                cpu.launch_graph(arena, graph)
            }
            (AnyDevice::Cuda(cuda), AnyArena::Cuda(arena), AnyGraph::Cuda(graph)) => {
                cuda.launch_graph(arena, graph)
            }
            _ => Err(mixed()),
        }
    }

    fn time_graph(
        &self,
        arena: &mut AnyArena,
        graph: &mut AnyGraph,
        launches: u32,
    ) -> Result<Option<f32>, DeviceError> {
        match (self, arena, graph) {
            (AnyDevice::Cpu(cpu), AnyArena::Cpu(arena), AnyGraph::Cpu(graph)) => {
                cpu.time_graph(arena, graph, launches)
            }
            (AnyDevice::Cuda(cuda), AnyArena::Cuda(arena), AnyGraph::Cuda(graph)) => {
                cuda.time_graph(arena, graph, launches)
            }
            _ => Err(mixed()),
        }
    }

    /// Nodes of a graph of this backend; 0 for one of another kind, which holds nothing here.
    fn graph_nodes(&self, graph: &AnyGraph) -> usize {
        match (self, graph) {
            (AnyDevice::Cpu(cpu), AnyGraph::Cpu(graph)) => cpu.graph_nodes(graph),
            (AnyDevice::Cuda(cuda), AnyGraph::Cuda(graph)) => cuda.graph_nodes(graph),
            _ => 0,
        }
    }

    /// Memory of an arena of this backend; none for one of another kind.
    fn arena_bytes(&self, arena: &AnyArena) -> ArenaBytes {
        match (self, arena) {
            (AnyDevice::Cpu(cpu), AnyArena::Cpu(arena)) => cpu.arena_bytes(arena),
            (AnyDevice::Cuda(cuda), AnyArena::Cuda(arena)) => cuda.arena_bytes(arena),
            _ => ArenaBytes::default(),
        }
    }

    fn executions(&self, calls: &[PlacedCall]) -> Vec<Execution> {
        match self {
            AnyDevice::Cpu(cpu) => cpu.executions(calls),
            AnyDevice::Cuda(cuda) => cuda.executions(calls),
        }
    }

    fn write(&self, arena: &mut AnyArena, region: Region, bytes: &[u8]) -> Result<(), DeviceError> {
        on!(self, arena, (backend, memory) => backend.write(memory, region, bytes))
    }

    fn fill(&self, arena: &mut AnyArena, region: Region, byte: u8) -> Result<(), DeviceError> {
        on!(self, arena, (backend, memory) => backend.fill(memory, region, byte))
    }

    fn read(&self, arena: &AnyArena, region: Region, bytes: &mut [u8]) -> Result<(), DeviceError> {
        on!(self, arena, (backend, memory) => backend.read(memory, region, bytes))
    }

    fn digest(
        &self,
        arena: &AnyArena,
        regions: &[Region],
    ) -> Result<Vec<blake3::Hash>, DeviceError> {
        on!(self, arena, (backend, memory) => backend.digest(memory, regions))
    }

    fn capture_digest(
        &self,
        arena: &mut AnyArena,
        regions: &[Region],
    ) -> Result<AnyDigest, CaptureError> {
        match (self, arena) {
            (AnyDevice::Cpu(cpu), AnyArena::Cpu(arena)) => {
                cpu.capture_digest(arena, regions).map(AnyDigest::Cpu)
            }
            (AnyDevice::Cuda(cuda), AnyArena::Cuda(arena)) => {
                let digest = cuda.capture_digest(arena, regions)?;
                Ok(AnyDigest::Cuda(Box::new(digest)))
            }
            _ => Err(mixed().into()),
        }
    }

    fn check_digest(
        &self,
        arena: &AnyArena,
        graph: &AnyDigest,
        regions: &[Region],
    ) -> Result<(), GuardError> {
        match (self, arena, graph) {
            (AnyDevice::Cpu(cpu), AnyArena::Cpu(arena), AnyDigest::Cpu(graph)) => {
                cpu.check_digest(arena, graph, regions)
            }
            (AnyDevice::Cuda(cuda), AnyArena::Cuda(arena), AnyDigest::Cuda(graph)) => {
                cuda.check_digest(arena, graph, regions)
            }
            _ => Err(foreign()),
        }
    }

    fn launch_digest(
        &self,
        arena: &mut AnyArena,
        graph: &mut AnyDigest,
    ) -> Result<Vec<blake3::Hash>, DeviceError> {
        match (self, arena, graph) {
            (AnyDevice::Cpu(cpu), AnyArena::Cpu(arena), AnyDigest::Cpu(graph)) => {
                cpu.launch_digest(arena, graph)
            }
            (AnyDevice::Cuda(cuda), AnyArena::Cuda(arena), AnyDigest::Cuda(graph)) => {
                cuda.launch_digest(arena, graph)
            }
            _ => Err(mixed()),
        }
    }
}
