//! Capture, check, instantiation and launch of a graph.
//!
//! Capture is thread-local and ends on every path. Before a graph is instantiated its own nodes are
//! read back: each kernel must be the one that was recorded, with its grid, block, shared memory and
//! arguments; a node that allocates or frees memory is refused.
#![allow(unsafe_code)]

use std::cell::Cell;
use std::sync::Arc;

use cudarc::driver::sys;

use super::arena::{CudaArena, Memory};
use super::call::{Arg, KernelLaunch};
use super::device::Device;
use super::exclusive;
use super::graph_edges::{Issued, arrange};
use super::identity::Identity;
use super::launch::{Value, pack};
use super::module::Modules;
use super::products::Products;
use crate::error::{CaptureError, DeviceError, GuardError};
use crate::layout::PlacedCall;

/// A captured, instantiated graph. It keeps arena and modules alive.
pub struct CudaGraph {
    device: Arc<Device>,
    graph: sys::CUgraph,
    exec: sys::CUgraphExec,
    pub(super) identity: Identity,
    pub(super) products: GraphProducts,
    pub(super) nodes: usize,
    _memory: Arc<Memory>,
    _modules: Arc<Modules>,
}

/// The products of a graph and what they were pinned to at capture.
#[derive(Default)]
pub(super) struct GraphProducts {
    /// Sorted keys of the graph's own products.
    pub keys: Vec<String>,
    /// The hash over what those were pinned to.
    pub own: Option<blake3::Hash>,
    /// The hash over everything pinned when it was last known that the own ones have not changed.
    pub seen: Cell<Option<blake3::Hash>>,
}

impl GraphProducts {
    /// What is pinned now for the calls of a graph.
    pub(super) fn of(products: &Products, calls: &[PlacedCall]) -> Self {
        let mut keys: Vec<String> = calls.iter().map(Products::key).collect();
        keys.sort_unstable();
        keys.dedup();
        GraphProducts {
            own: Some(products.fingerprint_of(&keys)),
            seen: Cell::new(Some(products.fingerprint())),
            keys,
        }
    }

    /// Checks that the graph's products are pinned to what they were at capture. What another graph
    /// has pinned meanwhile does not count.
    ///
    /// # Errors
    /// [`GuardError::Kernels`] with both hashes.
    pub(super) fn check(&self, products: &Products) -> Result<(), GuardError> {
        let (Some(own), now) = (self.own, products.fingerprint()) else {
            return Ok(());
        };
        if self.seen.get() == Some(now) {
            return Ok(());
        }
        let found = products.fingerprint_of(&self.keys);
        if found != own {
            return Err(GuardError::Kernels {
                expected: own.to_hex().to_string(),
                found: found.to_hex().to_string(),
            });
        }
        self.seen.set(Some(now));
        Ok(())
    }
}

/// What a captured kernel node must be; `None` for a library's kernel, which has no recorded form.
pub(super) type Expected = Vec<Option<KernelLaunch>>;

/// Captures what `issue` sends to the device's stream.
///
/// # Errors
/// What `issue` fails with, memory nodes, a node or an edge that is not what was recorded, what the driver says.
pub(super) fn capture(
    device: &Arc<Device>,
    (modules, products): (&Arc<Modules>, GraphProducts),
    arena: &CudaArena,
    issue: impl FnOnce() -> Result<Issued, DeviceError>,
) -> Result<CudaGraph, CaptureError> {
    device.bind()?;
    let _alone = exclusive::capturing();
    let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
    // SAFETY: the stream lives as long as the device and is not capturing: capture ends below.
    let status = unsafe { sys::cuStreamBeginCapture_v2(device.stream(), mode) };
    device.check("cuStreamBeginCapture", status)?;
    // A panic in between would leave the stream capturing; the guard ends it then too.
    let open = OpenCapture { device };
    let issued = issue();
    let graph = open.end();
    let graph = OwnedGraph {
        graph: graph?,
        device: device.clone(),
    };
    let issued = issued?;
    let nodes = check_nodes(device, modules, arena, (&graph, &issued.kernels))?;
    arrange(device, graph.graph, &nodes, &issued)?;
    let mut exec = std::ptr::null_mut();
    // SAFETY: the graph was captured above, and `exec` outlives the call.
    let status = unsafe { sys::cuGraphInstantiateWithFlags(&mut exec, graph.graph, 0) };
    device.check("cuGraphInstantiate", status)?;
    let captured = CudaGraph {
        device: device.clone(),
        graph: graph.release(),
        exec,
        identity: Identity {
            arena: arena.id(),
            modules: modules.id(),
            stream: device.stream_id(),
        },
        products,
        nodes: nodes.len(),
        _memory: arena.memory.clone(),
        _modules: modules.clone(),
    };
    // SAFETY: exec and stream live as long as `captured` and its device.
    let status = unsafe { sys::cuGraphUpload(captured.exec, device.stream()) };
    device.check("cuGraphUpload", status)?;
    Ok(captured)
}

struct OpenCapture<'d> {
    device: &'d Arc<Device>,
}

impl OpenCapture<'_> {
    fn end(self) -> Result<sys::CUgraph, DeviceError> {
        let mut graph = std::ptr::null_mut();
        // SAFETY: the stream is capturing since the value was made, and `graph` outlives the call.
        let status = unsafe { sys::cuStreamEndCapture(self.device.stream(), &mut graph) };
        let device = self.device.clone();
        std::mem::forget(self);
        device.check("cuStreamEndCapture", status).map(|()| graph)
    }
}

impl Drop for OpenCapture<'_> {
    fn drop(&mut self) {
        let mut graph = std::ptr::null_mut();
        // SAFETY: reached only when `end` was not: the stream is still capturing, and whatever graph
        // comes back is destroyed at once.
        unsafe {
            let _ = sys::cuStreamEndCapture(self.device.stream(), &mut graph);
            if !graph.is_null() {
                let _ = sys::cuGraphDestroy(graph);
            }
        }
    }
}

struct OwnedGraph {
    graph: sys::CUgraph,
    device: Arc<Device>,
}

impl OwnedGraph {
    fn release(self) -> sys::CUgraph {
        let graph = self.graph;
        std::mem::forget(self);
        graph
    }
}

impl Drop for OwnedGraph {
    fn drop(&mut self) {
        let _ = self.device.bind();
        // SAFETY: the graph was captured and never instantiated.
        let _ = unsafe { sys::cuGraphDestroy(self.graph) };
    }
}

fn nodes_of(device: &Device, graph: sys::CUgraph) -> Result<Vec<sys::CUgraphNode>, DeviceError> {
    let mut count = 0;
    // SAFETY: a null list asks for the count, and `count` outlives the call.
    let status = unsafe { sys::cuGraphGetNodes(graph, std::ptr::null_mut(), &mut count) };
    device.check("cuGraphGetNodes", status)?;
    // The driver takes no list for a graph without nodes.
    if count == 0 {
        return Ok(Vec::new());
    }
    let mut nodes = vec![std::ptr::null_mut(); count];
    // SAFETY: the list has room for `count` nodes.
    let status = unsafe { sys::cuGraphGetNodes(graph, nodes.as_mut_ptr(), &mut count) };
    device.check("cuGraphGetNodes", status).map(|()| nodes)
}

fn node_type(device: &Device, node: sys::CUgraphNode) -> Result<sys::CUgraphNodeType, DeviceError> {
    let mut kind = sys::CUgraphNodeType::CU_GRAPH_NODE_TYPE_EMPTY;
    // SAFETY: the node belongs to a graph that is alive, and `kind` outlives the call.
    let status = unsafe { sys::cuGraphNodeGetType(node, &mut kind) };
    device.check("cuGraphNodeGetType", status).map(|()| kind)
}

/// Holds every node against what was recorded; gives the nodes in the order of capture.
fn check_nodes(
    device: &Device,
    modules: &Modules,
    arena: &CudaArena,
    (graph, expected): (&OwnedGraph, &Expected),
) -> Result<Vec<sys::CUgraphNode>, CaptureError> {
    use sys::CUgraphNodeType as Type;
    let nodes = nodes_of(device, graph.graph)?;
    let mut kernels = Vec::new();
    let mut memory_nodes = 0;
    for &node in &nodes {
        match node_type(device, node)? {
            Type::CU_GRAPH_NODE_TYPE_KERNEL => kernels.push(node),
            Type::CU_GRAPH_NODE_TYPE_MEM_ALLOC | Type::CU_GRAPH_NODE_TYPE_MEM_FREE => {
                memory_nodes += 1;
            }
            _ => {}
        }
    }
    if memory_nodes > 0 {
        return Err(CaptureError::MemoryNodes {
            found: memory_nodes,
        });
    }
    if kernels.len() != expected.len() {
        return Err(CaptureError::Nodes {
            expected: expected.len(),
            found: kernels.len(),
        });
    }
    for (index, (&node, expected)) in kernels.iter().zip(expected).enumerate() {
        if let Some(launch) = expected {
            let found = node_text(device, node, &launch.args)?;
            let expected = launch_text(device, modules, arena, launch)?;
            if found != expected {
                return Err(CaptureError::Node {
                    node: index,
                    kernel: launch.entry.to_owned(),
                    expected,
                    found,
                });
            }
        }
    }
    Ok(nodes)
}

/// Function, grid, block, shared memory and arguments of a kernel node, as comparable text.
fn node_text(device: &Device, node: sys::CUgraphNode, args: &[Arg]) -> Result<String, DeviceError> {
    let mut params = std::mem::MaybeUninit::<sys::CUDA_KERNEL_NODE_PARAMS>::zeroed();
    // SAFETY: the node is a kernel node of a graph that is alive; the driver fills the struct.
    let status = unsafe { sys::cuGraphKernelNodeGetParams_v2(node, params.as_mut_ptr()) };
    device.check("cuGraphKernelNodeGetParams", status)?;
    // SAFETY: the call above succeeded, and a zeroed struct of integers and pointers is valid.
    let p = unsafe { params.assume_init() };
    // SAFETY: the driver keeps one value for each parameter of the kernel; `args` are those of its
    // signature, which a test holds to the committed PTX, so each value is as wide as its kind says.
    let words = |(i, arg): (usize, &Arg)| unsafe {
        let at = *p.kernelParams.add(i);
        match arg {
            Arg::Region(_) | Arg::Workspace { .. } => vec![at.cast::<u64>().read_unaligned()],
            Arg::U32(_) | Arg::F32(_) => vec![u64::from(at.cast::<u32>().read_unaligned())],
            Arg::Matrix(_) => {
                let map = at.cast::<sys::CUtensorMap>().read_unaligned();
                map.opaque.to_vec()
            }
        }
    };
    let values: Vec<u64> = args.iter().enumerate().flat_map(words).collect();
    Ok(text_of(
        p.func,
        [p.gridDimX, p.gridDimY, p.gridDimZ],
        [p.blockDimX, p.blockDimY, p.blockDimZ],
        (p.sharedMemBytes, &values),
    ))
}

fn launch_text(
    device: &Device,
    modules: &Modules,
    arena: &CudaArena,
    launch: &KernelLaunch,
) -> Result<String, DeviceError> {
    let function = modules.function(launch.entry)?;
    let values = pack(device, launch, arena)?;
    let values: Vec<u64> = values.iter().flat_map(Value::words).copied().collect();
    let shared = launch.shared_bytes;
    Ok(text_of(
        function.0,
        launch.grid,
        launch.block,
        (shared, &values),
    ))
}

fn text_of(
    function: sys::CUfunction,
    grid: [u32; 3],
    block: [u32; 3],
    (shared, values): (u32, &[u64]),
) -> String {
    format!("{function:p} grid {grid:?} block {block:?} shared {shared} args {values:x?}")
}

impl CudaGraph {
    /// Issues the graph once.
    ///
    /// # Errors
    /// What the driver says.
    pub(super) fn launch(&self) -> Result<(), DeviceError> {
        self.device.bind()?;
        // SAFETY: exec and stream live as long as `self`; the graph's arena is held by `_memory`.
        let status = unsafe { sys::cuGraphLaunch(self.exec, self.device.stream()) };
        self.device.check("cuGraphLaunch", status)
    }

    /// Milliseconds of `launches` runs back to back, by events. A run before them keeps the device busy
    /// while they are queued, so that the host's part of a launch does not count.
    ///
    /// # Errors
    /// What the driver says.
    pub(super) fn time(&self, launches: u32) -> Result<f32, DeviceError> {
        self.launch()?;
        let queue = || (0..launches).try_for_each(|_| self.launch());
        self.device.time(queue)
    }

    /// Nodes of the graph.
    pub fn nodes(&self) -> usize {
        self.nodes
    }
}

impl Drop for CudaGraph {
    fn drop(&mut self) {
        let _ = self.device.bind();
        let _ = self.device.synchronize();
        let _aside = exclusive::aside();
        // SAFETY: nothing of the graph runs any more; both handles were made by `capture`.
        unsafe {
            let _ = sys::cuGraphExecDestroy(self.exec);
            let _ = sys::cuGraphDestroy(self.graph);
        }
    }
}
