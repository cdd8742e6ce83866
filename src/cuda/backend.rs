//! The backend trait on a CUDA device.

use std::sync::Arc;

use super::arena::{CudaArena, Pinned};
use super::call::CallLaunches;
use super::device::Device;
use super::digest::{self, DigestPlan};
use super::gemm::{Lt, LtOperands};
use super::graph::{self, CudaGraph, Expected, GraphProducts};
use super::graph_edges::{Issued, nodes_so_far};
use super::identity::Identity;
use super::issue::{fold, launches, resolve};
use super::lanes::{LANES, Lane, Unit, lane_of, units};
use super::late::{self, Late};
use super::launch::launch;
use super::module::Modules;
use super::precision::has_kernels;
use super::products::{GemmChoice, LibraryProduct, Products, Provider, library_product};
use super::together::{self, Group};
use crate::backend::{
    ArenaBytes, ArenaId, Backend, DeviceInfo, Execution, same_length, same_regions,
};
use crate::error::{CaptureError, DeviceError, GuardError};
use crate::layout::{ALIGNMENT, Layout, PlacedCall, Region};
use crate::op::Op;

/// A CUDA device as a backend.
pub struct CudaBackend {
    pub(super) device: Arc<Device>,
    pub(super) modules: Arc<Modules>,
    pub(super) products: Products,
}

/// A captured digest: one graph that brings the table of the regions to the device, hashes and brings
/// the digests back, through pinned memory of its own.
pub struct CudaDigest {
    graph: CudaGraph,
    regions: Vec<Region>,
    /// Read by the graph, so it lives as long.
    _table: Pinned,
    found: Pinned,
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

    /// The version of cuBLASLt, where it may serve products and was found.
    pub fn library_version(&self) -> Option<usize> {
        self.products.lt.as_ref().map(|lt| lt.version)
    }

    /// Bytes that [`Backend::allocate`] takes behind the arena of a layout.
    pub fn workspace_bytes(&self, layout: &Layout, calls: &[PlacedCall]) -> usize {
        let parts = self.workspaces(layout, calls).into_iter().flatten();
        parts.map(|bytes| bytes.next_multiple_of(ALIGNMENT)).sum()
    }

    /// Bytes of arrival counters, of partials, and for the matrix library: the main lane's, for every call, which
    /// runs there before capture, and for digests; the side lane's, for the calls that a graph launches there.
    fn workspaces(&self, layout: &Layout, calls: &[PlacedCall]) -> [[usize; 3]; LANES] {
        let groups = self.groups(calls).into_iter().flatten();
        let main = self.workspace(Lane::Main, calls.iter(), groups);
        let beside = calls.iter().filter(|c| lane_of(&c.call.op) == Lane::Side);
        let [counters, partials, library] = main;
        let digests = digest::workspace_bytes(layout.regions());
        let waiting = late::room_bytes(calls);
        let partials = late::shared_bytes(partials) + waiting;
        let main = [counters, partials.max(digests), library];
        [main, self.workspace(Lane::Side, beside, std::iter::empty())]
    }

    /// The same of a lane for these calls and groups of calls one after another.
    fn workspace<'c>(
        &self,
        lane: Lane,
        calls: impl Iterator<Item = &'c PlacedCall> + Clone,
        groups: impl Iterator<Item = Group>,
    ) -> [usize; 3] {
        let shape = self.device.shape();
        let planned = calls
            .clone()
            .map(|call| launches(&call.call.op, call, &shape));
        let planned = planned.chain(groups.map(|group| group.launches));
        let (mut counters, mut partials) = (0, 0);
        for call in planned {
            counters = counters.max(call.zeroed_bytes);
            partials =
                partials.max(call.workspace_bytes - call.zeroed_bytes.min(call.workspace_bytes));
        }
        let products = calls.clone().filter_map(library_product);
        let pieces = products.filter(|p| p.d.is_none());
        let pieces = pieces.map(|p| p.shape.batch * p.shape.strides[2] * 4).max();
        let library = match self.products.lt.is_some() && calls.count() > 0 {
            true => lane.library_bytes(),
            false => 0,
        };
        [counters, partials.max(pieces.unwrap_or(0)), library]
    }

    /// Issues a call with the provider pinned for it; says what was issued.
    pub(super) fn issue(
        &self,
        arena: &CudaArena,
        call: &PlacedCall,
        lane: Lane,
    ) -> Result<Expected, DeviceError> {
        if let (Some(Provider::Library(algorithm)), Some(lt), Some(product)) = (
            self.products.pinned(call),
            &self.products.lt,
            library_product(call),
        ) {
            let operands = self.operands(arena, &product, lane)?;
            lt.launch(&product.shape, &algorithm, &operands)?;
            let mut expected: Expected = vec![None];
            if product.d.is_none() {
                expected.extend(self.run(arena, fold(call, &self.device.shape()), lane)?);
            }
            return Ok(expected);
        }
        self.run(
            arena,
            launches(&call.call.op, call, &self.device.shape()),
            lane,
        )
    }

    pub(super) fn run(
        &self,
        arena: &CudaArena,
        planned: CallLaunches,
        lane: Lane,
    ) -> Result<Expected, DeviceError> {
        let mut expected = Expected::new();
        for kernel in resolve(planned, arena, lane) {
            launch(&self.device, &self.modules, arena, &kernel)?;
            expected.push(Some(kernel));
        }
        Ok(expected)
    }

    fn operands(
        &self,
        arena: &CudaArena,
        product: &LibraryProduct,
        lane: Lane,
    ) -> Result<LtOperands, DeviceError> {
        let pieces = arena.partials(lane);
        Ok(LtOperands {
            a: arena.address(product.a)?,
            b: arena.address(product.b)?,
            bias: product.bias.map_or(Ok(0), |r| arena.address(r))?,
            d: arena.address(product.d.unwrap_or(pieces))?,
            workspace: arena.address(arena.library_workspace(lane))?,
        })
    }

    /// For each call the group that begins with it, where there is one.
    fn groups(&self, calls: &[PlacedCall]) -> Vec<Option<Group>> {
        together::groups(calls, &self.device.shape())
    }

    /// Issues calls in the units of their lanes, and the folds that a graph puts off; says what was issued, and what of it waits
    /// for what.
    fn issue_all(&self, arena: &CudaArena, calls: &[PlacedCall]) -> Result<Issued, DeviceError> {
        let groups = self.groups(calls);
        let planned = groups.iter().flatten().cloned();
        let [_, shared, _] = self.workspace(Lane::Main, calls.iter(), planned);
        let room = late::room_behind(arena.partials(Lane::Main), shared);
        let mut late = Late::of(calls, &self.device.shape(), room);
        let mut issued = Issued::default();
        let mut add = |kernels, lane, after| {
            let nodes = nodes_so_far(&self.device)?;
            Ok::<_, DeviceError>(issued.extend((kernels, nodes), lane, after))
        };
        let mut ends: Vec<Vec<usize>> = Vec::new();
        // What of the main lane was issued last, and the unit that it belongs to.
        let (mut main, mut main_unit) = (Vec::new(), None);
        for unit in units(calls, &groups) {
            let Unit { first, lane, .. } = unit;
            let folds = late.due(first + unit.calls);
            let folded = !folds.launches.is_empty();
            if folded {
                main = add(self.run(arena, folds, Lane::Main)?, Lane::Main, main)?;
                // Whatever waits for the unit before the folds waits for them too, and so does this one.
                if let Some(before) = main_unit {
                    ends[before] = main.clone();
                }
            }
            let kernels = match (&groups[first], late.instead(first)) {
                (Some(group), _) => self.run(arena, group.launches.clone(), lane)?,
                (None, Some(pieces)) => self.run(arena, pieces.clone().into(), lane)?,
                (None, None) => self.issue(arena, &calls[first], lane)?,
            };
            let after = unit.after.iter().flat_map(|&unit| ends[unit].clone());
            let after = after.chain(main.iter().copied().filter(|_| folded));
            let end = add(kernels, lane, after.collect())?;
            if lane == Lane::Main {
                (main, main_unit) = (end.clone(), Some(ends.len()));
            }
            ends.push(end);
        }
        let folds = late.due(calls.len() + 1);
        add(self.run(arena, folds, Lane::Main)?, Lane::Main, main)?;
        Ok(issued)
    }

    /// Every kernel that calls, or their digests, may launch.
    fn entries(&self, calls: &[PlacedCall]) -> Vec<&'static str> {
        let shape = self.device.shape();
        let planned = calls.iter().flat_map(|call| {
            let own = launches(&call.call.op, call, &shape).launches;
            own.into_iter().chain(fold(call, &shape).launches)
        });
        let groups = self.groups(calls).into_iter().flatten();
        planned
            .chain(groups.flat_map(|group| group.launches.launches))
            .map(|kernel| kernel.entry)
            .chain(digest::ENTRIES)
            .collect()
    }

    /// What a graph over `arena` would run with now.
    fn identity(&self, arena: &CudaArena) -> Identity {
        Identity {
            arena: arena.id(),
            modules: self.modules.id(),
            stream: self.device.stream_id(),
        }
    }

    pub(super) fn digests(
        &self,
        arena: &CudaArena,
        regions: &[Region],
    ) -> Result<Vec<blake3::Hash>, DeviceError> {
        let planned = digest::plan(regions);
        for &region in regions {
            arena.address(region)?;
        }
        arena.write(
            arena.workspace_region(Lane::Main, 0, planned.table.len()),
            &planned.table,
        )?;
        let results = digest_results(arena, &planned);
        self.run(arena, planned.launches, Lane::Main)?;
        let mut bytes = vec![0; results.bytes];
        arena.read(results, &mut bytes)?;
        Ok(hashes(&bytes))
    }
}

fn is_product(op: &Op) -> bool {
    matches!(
        op,
        Op::Matmul(_) | Op::MatmulGradInput(_) | Op::MatmulGradWeight(_)
    )
}

/// Where the digests of a plan stand side by side, so that one copy brings all of them.
fn digest_results(arena: &CudaArena, planned: &DigestPlan) -> Region {
    let first = planned.results.first().copied().unwrap_or(0);
    arena.workspace_region(Lane::Main, first, planned.results.len() * blake3::OUT_LEN)
}

fn hashes(bytes: &[u8]) -> Vec<blake3::Hash> {
    let digests = bytes.as_chunks::<{ blake3::OUT_LEN }>().0.iter();
    digests.copied().map(blake3::Hash::from_bytes).collect()
}

impl Backend for CudaBackend {
    type Arena = CudaArena;
    type Graph = CudaGraph;
    type DigestGraph = CudaDigest;

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
        let workspaces = self.workspaces(layout, calls);
        let arena = CudaArena::zeroed(&self.device, layout.arena_bytes(), workspaces)?;
        self.modules.prepare(self.entries(calls))?;
        // A group is served by the engine's own kernel: its products need no other provider.
        for (first, group) in self.groups(calls).iter().enumerate() {
            let of_group = group
                .iter()
                .flat_map(|group| &calls[first..][..group.calls]);
            of_group
                .filter(|call| is_product(&call.call.op))
                .for_each(|call| self.products.pin(call, Provider::Own));
        }
        Ok(arena)
    }

    fn arena_id(&self, arena: &CudaArena) -> ArenaId {
        arena.id()
    }

    fn launch(&self, arena: &mut CudaArena, call: &PlacedCall) -> Result<(), DeviceError> {
        has_kernels(&call.call.op)?;
        self.device.bind()?;
        if is_product(&call.call.op)
            && self.products.lt.is_some()
            && self.products.pinned(call).is_none()
        {
            return self.admit(arena, call);
        }
        self.issue(arena, call, Lane::Main).map(drop)
    }

    fn capture(
        &self,
        arena: &mut CudaArena,
        calls: &[PlacedCall],
    ) -> Result<CudaGraph, CaptureError> {
        // Modules load and functions resolve before capture, which forbids both.
        self.modules.prepare(self.entries(calls))?;
        let products = GraphProducts::of(&self.products, calls);
        let issue = || self.issue_all(arena, calls);
        graph::capture(&self.device, (&self.modules, products), arena, issue)
    }

    fn check_graph(&self, arena: &CudaArena, graph: &CudaGraph) -> Result<(), GuardError> {
        graph.identity.check(&self.identity(arena))?;
        graph.products.check(&self.products)
    }

    fn launch_graph(
        &self,
        _arena: &mut CudaArena,
        graph: &mut CudaGraph,
    ) -> Result<(), DeviceError> {
        graph.launch()
    }

    fn time_graph(
        &self,
        _arena: &mut CudaArena,
        graph: &mut CudaGraph,
        launches: u32,
    ) -> Result<Option<f32>, DeviceError> {
        graph.time(launches).map(Some)
    }

    fn graph_nodes(&self, graph: &CudaGraph) -> usize {
        graph.nodes()
    }

    fn arena_bytes(&self, arena: &CudaArena) -> ArenaBytes {
        arena.bytes()
    }

    fn executions(&self, calls: &[PlacedCall]) -> Vec<Execution> {
        let shape = self.device.shape();
        let describe = |call: &PlacedCall| match self.products.pinned(call) {
            Some(Provider::Library(algorithm)) => algorithm.describe(),
            _ => launches(&call.call.op, call, &shape).describe(),
        };
        // The first call of the group that serves it, and the group.
        let mut serving: Option<(usize, Group)> = None;
        let groups = calls.iter().zip(self.groups(calls)).enumerate();
        groups
            .map(|(call, (placed, group))| {
                serving = serving
                    .take()
                    .filter(|(first, group)| call < first + group.calls)
                    .or_else(|| group.map(|group| (call, group)));
                let kernel = match &serving {
                    Some((first, group)) => group.describe(*first),
                    None => match lane_of(&placed.call.op) {
                        Lane::Main if late::is_late(placed) => {
                            format!("{}, in a graph with those of others", describe(placed))
                        }
                        Lane::Main => describe(placed),
                        Lane::Side => format!("{}, in a graph beside others", describe(placed)),
                    },
                };
                Execution { call, kernel }
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

    fn fill(&self, arena: &mut CudaArena, region: Region, byte: u8) -> Result<(), DeviceError> {
        arena.fill(region, byte)
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

    fn capture_digest(
        &self,
        arena: &mut CudaArena,
        regions: &[Region],
    ) -> Result<CudaDigest, CaptureError> {
        for &region in regions {
            arena.address(region).map_err(CaptureError::from)?;
        }
        self.modules.prepare(digest::ENTRIES.to_vec())?;
        let planned = digest::plan(regions);
        let results = digest_results(arena, &planned);
        let table = Pinned::holding(&self.device, &planned.table)?;
        let found = Pinned::holding(&self.device, &vec![0; results.bytes])?;
        let issue = || {
            if regions.is_empty() {
                return Ok(Issued::default());
            }
            table.send(
                arena,
                arena.workspace_region(Lane::Main, 0, planned.table.len()),
            )?;
            let expected = self.run(arena, planned.launches, Lane::Main)?;
            found.receive(arena, results)?;
            Ok(Issued::in_order_of_capture(expected))
        };
        let known = (&self.modules, GraphProducts::default());
        Ok(CudaDigest {
            graph: graph::capture(&self.device, known, arena, issue)?,
            regions: regions.to_vec(),
            _table: table,
            found,
        })
    }

    fn check_digest(
        &self,
        arena: &CudaArena,
        graph: &CudaDigest,
        regions: &[Region],
    ) -> Result<(), GuardError> {
        graph.graph.identity.check(&self.identity(arena))?;
        same_regions(&graph.regions, regions)
    }

    fn launch_digest(
        &self,
        _arena: &mut CudaArena,
        graph: &mut CudaDigest,
    ) -> Result<Vec<blake3::Hash>, DeviceError> {
        graph.graph.launch()?;
        Ok(hashes(&graph.found.settled()?))
    }
}
