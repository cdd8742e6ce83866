//! A backend that fails where a test wants it to; everything else is the CPU's.

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use bitstep::backend::{ArenaBytes, ArenaId, Backend, DeviceInfo, Execution};
use bitstep::cpu::CpuBackend;
use bitstep::cpu::arena::CpuArena;
use bitstep::cpu::backend::{CpuDigest, CpuGraph};
use bitstep::error::{CaptureError, DeviceError, GuardError};
use bitstep::layout::{Layout, PlacedCall, Region};

/// What goes wrong, and when. Shared with the test, which changes it between steps.
#[derive(Clone, Default)]
pub struct Plans {
    /// The next eager launches that succeed; `None` for all.
    pub launches_left: Rc<Cell<Option<u32>>>,
    /// The bit that eager launches flip.
    pub flip: Rc<Cell<Option<Flip>>>,
    /// Eager launches so far.
    pub launches: Rc<Cell<u32>>,
    /// Every digest is the digest of nothing.
    pub digest_fails: Rc<Cell<bool>>,
    /// Graph launches fail.
    pub graph_fails: Rc<Cell<bool>>,
    /// After a graph launch, the byte at this offset is flipped.
    pub graph_flips: Rc<Cell<Option<usize>>>,
    /// Capture fails.
    pub capture_fails: Rc<Cell<bool>>,
    /// The captures that succeed before one fails; `None` for all.
    pub captures_left: Rc<Cell<Option<u32>>>,
    /// Graph launches do nothing.
    pub graph_idles: Rc<Cell<bool>>,
    /// This launch of a graph, counted from 0, does nothing.
    pub idle_launch: Rc<Cell<Option<u32>>>,
    /// Graph launches so far.
    pub graph_launches: Rc<Cell<u32>>,
    /// Bytes written by the host.
    pub written: Rc<Cell<usize>>,
    /// A captured digest gives that of other bytes.
    pub digest_errs: Rc<Cell<bool>>,
    /// A captured digest is not one of this arena any more.
    pub digest_refused: Rc<Cell<bool>>,
    /// Kernels have changed since capture.
    pub kernels_changed: Rc<Cell<bool>>,
    /// What was called, in order.
    pub log: Rc<RefCell<Vec<&'static str>>>,
}

/// After an eager launch, the lowest bit of one byte of the arena is flipped.
#[derive(Clone, Copy)]
pub struct Flip {
    /// Which launch, from 0.
    pub launch: u32,
    /// The byte's offset in the arena.
    pub offset: usize,
}

pub struct Faulty {
    pub cpu: CpuBackend,
    pub plans: Plans,
}

fn fault() -> DeviceError {
    DeviceError::Driver {
        device: "test".into(),
        call: "launch",
        text: "planned fault".into(),
    }
}

impl Backend for Faulty {
    type Arena = CpuArena;
    type Graph = CpuGraph;
    type DigestGraph = CpuDigest;

    fn info(&self) -> DeviceInfo {
        self.cpu.info()
    }

    fn allocate(&self, layout: &Layout, calls: &[PlacedCall]) -> Result<CpuArena, DeviceError> {
        self.cpu.allocate(layout, calls)
    }

    fn arena_id(&self, arena: &CpuArena) -> ArenaId {
        self.cpu.arena_id(arena)
    }

    fn launch(&self, arena: &mut CpuArena, call: &PlacedCall) -> Result<(), DeviceError> {
        match self.plans.launches_left.get() {
            Some(0) => return Err(fault()),
            Some(n) => self.plans.launches_left.set(Some(n - 1)),
            None => {}
        }
        self.cpu.launch(arena, call)?;
        let launch = self.plans.launches.replace(self.plans.launches.get() + 1);
        if let Some(flip) = self.plans.flip.get().filter(|f| f.launch == launch) {
            let (offset, bytes) = (flip.offset, 1);
            arena.bytes_mut(Region { offset, bytes })?[0] ^= 1;
        }
        Ok(())
    }

    fn capture(
        &self,
        arena: &mut CpuArena,
        calls: &[PlacedCall],
    ) -> Result<CpuGraph, CaptureError> {
        self.plans.log.borrow_mut().push("capture");
        let left = self.plans.captures_left.get();
        self.plans
            .captures_left
            .set(left.map(|n| n.saturating_sub(1)));
        match self.plans.capture_fails.get() || left == Some(0) {
            true => Err(CaptureError::MemoryNodes { found: 2 }),
            false => self.cpu.capture(arena, calls),
        }
    }

    fn check_graph(&self, arena: &CpuArena, graph: &CpuGraph) -> Result<(), GuardError> {
        if self.plans.kernels_changed.get() {
            return Err(GuardError::Kernels {
                expected: "module a".into(),
                found: "module b".into(),
            });
        }
        self.cpu.check_graph(arena, graph)
    }

    fn launch_graph(&self, arena: &mut CpuArena, graph: &mut CpuGraph) -> Result<(), DeviceError> {
        self.plans.log.borrow_mut().push("launch_graph");
        if self.plans.graph_fails.get() {
            return Err(fault());
        }
        let launch = self.plans.graph_launches.get();
        self.plans.graph_launches.set(launch + 1);
        if self.plans.graph_idles.get() || self.plans.idle_launch.get() == Some(launch) {
            return Ok(());
        }
        self.cpu.launch_graph(arena, graph)?;
        if let Some(offset) = self.plans.graph_flips.get() {
            let byte = arena.bytes_mut(Region { offset, bytes: 1 })?;
            byte[0] ^= 1;
        }
        Ok(())
    }

    fn graph_nodes(&self, graph: &CpuGraph) -> usize {
        self.cpu.graph_nodes(graph)
    }

    fn arena_bytes(&self, arena: &CpuArena) -> ArenaBytes {
        self.cpu.arena_bytes(arena)
    }

    fn executions(&self, calls: &[PlacedCall]) -> Vec<Execution> {
        self.cpu.executions(calls)
    }

    fn write(&self, arena: &mut CpuArena, region: Region, bytes: &[u8]) -> Result<(), DeviceError> {
        self.plans
            .written
            .set(self.plans.written.get() + bytes.len());
        self.cpu.write(arena, region, bytes)
    }

    fn read(&self, arena: &CpuArena, region: Region, bytes: &mut [u8]) -> Result<(), DeviceError> {
        self.cpu.read(arena, region, bytes)
    }

    fn digest(
        &self,
        arena: &CpuArena,
        regions: &[Region],
    ) -> Result<Vec<blake3::Hash>, DeviceError> {
        match self.plans.digest_fails.get() {
            true => Ok(vec![blake3::hash(&[]); regions.len()]),
            false => self.cpu.digest(arena, regions),
        }
    }

    fn fill(&self, arena: &mut CpuArena, region: Region, byte: u8) -> Result<(), DeviceError> {
        self.cpu.fill(arena, region, byte)
    }

    fn capture_digest(
        &self,
        arena: &mut CpuArena,
        regions: &[Region],
    ) -> Result<CpuDigest, CaptureError> {
        self.plans.log.borrow_mut().push("capture_digest");
        self.cpu.capture_digest(arena, regions)
    }

    fn check_digest(
        &self,
        arena: &CpuArena,
        graph: &CpuDigest,
        regions: &[Region],
    ) -> Result<(), GuardError> {
        match self.plans.digest_refused.get() {
            true => self.cpu.check_digest(arena, graph, &regions[1..]),
            false => self.cpu.check_digest(arena, graph, regions),
        }
    }

    fn launch_digest(
        &self,
        arena: &mut CpuArena,
        graph: &mut CpuDigest,
    ) -> Result<Vec<blake3::Hash>, DeviceError> {
        self.plans.log.borrow_mut().push("launch_digest");
        let mut digests = self.cpu.launch_digest(arena, graph)?;
        if self.plans.digest_errs.get() {
            digests.rotate_left(1);
        }
        Ok(digests)
    }
}
