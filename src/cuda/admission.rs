//! Admission of products: a candidate of the library serves only after its output had the same bits as the engine's own
//! kernel on the step's own operands, and the fastest of those that agree is pinned.

use super::arena::CudaArena;
use super::backend::CudaBackend;
use super::cancelling::Cancelling;
use super::gemm::Algorithm;
use super::graph::{self, Expected, GraphProducts};
use super::graph_edges::Issued;
use super::issue::launches;
use super::lanes::{Lane, lane_of};
use super::products::{LibraryProduct, Products, Provider, library_product};
use crate::error::DeviceError;
use crate::layout::{PlacedCall, Region};

/// Timed runs of a provider; the fastest counts.
const TIMED_RUNS: usize = 3;
/// Calls of a timed run.
const TIMED_CALLS: usize = 4;
/// A call that takes this many times the best time so far, host and all, is not timed again.
const HOPELESS: f32 = 2.0;
/// Milliseconds from which the host's part of a call does not count.
const LONG_MS: f32 = 1.0;

impl CudaBackend {
    /// Runs the own kernel, then every candidate on the same operands; pins the fastest whose output
    /// has the same bits. The output holds the contract's bits when this returns.
    pub(super) fn admit(&self, arena: &CudaArena, call: &PlacedCall) -> Result<(), DeviceError> {
        let own = launches(&call.call.op, call, &self.device.shape());
        let (Some(lt), Some(product)) = (&self.products.lt, library_product(call)) else {
            self.products.pin(call, Provider::Own);
            return self.run(arena, own, Lane::Main).map(drop);
        };
        let output = [call.writes[0]];
        // Every provider starts from what an output held that is added to.
        let mut before = vec![0; output[0].bytes * usize::from(Products::adds(call))];
        let region = Region {
            bytes: before.len(),
            ..output[0]
        };
        if !before.is_empty() {
            arena.read(region, &mut before)?;
        }
        let restore = || match before.is_empty() {
            true => Ok(()),
            false => arena.write(region, &before),
        };
        self.run(arena, own.clone(), Lane::Main)?;
        let expected = self.digests(arena, &output)?;
        let timed = self.time(arena, f32::INFINITY, || {
            self.run(arena, own.clone(), Lane::Main)
        })?;
        let mut best = (timed, Provider::Own);
        let candidates = lt.candidates(&product.shape, lane_of(&call.call.op).library_bytes())?;
        for algorithm in self.order_kept(arena, call, &product, candidates)? {
            restore()?;
            if !self.gives(arena, call, algorithm, &expected)? {
                continue;
            }
            let ms = self.time(arena, best.0, || self.issue(arena, call, Lane::Main))?;
            if ms < best.0 {
                best = (ms, Provider::Library(algorithm));
            }
        }
        self.products.pin(call, best.1);
        // Candidates that were refused, or that added more than once, have left their own bits behind.
        restore()?;
        self.run(arena, own, Lane::Main).map(drop)
    }

    /// The candidates that keep the contract's order of sums also where every bit of the output shows it. The operands hold afterwards
    /// what they held before.
    fn order_kept(
        &self,
        arena: &CudaArena,
        call: &PlacedCall,
        product: &LibraryProduct,
        candidates: Vec<Algorithm>,
    ) -> Result<Vec<Algorithm>, DeviceError> {
        let Some(Cancelling { a, b }) = Cancelling::of(&product.shape) else {
            return Ok(candidates);
        };
        let bias = product.bias.map(|region| (region, vec![0; region.bytes]));
        let replaced = [(product.a, a), (product.b, b)].into_iter().chain(bias);
        let mut before = Vec::new();
        for (whole, bytes) in replaced {
            let region = Region {
                bytes: bytes.len(),
                ..whole
            };
            let mut old = vec![0; bytes.len()];
            arena.read(region, &mut old)?;
            arena.write(region, &bytes)?;
            before.push((region, old));
        }
        let kept = self.same_as_own(arena, call, candidates);
        for (region, old) in before {
            arena.write(region, &old)?;
        }
        kept
    }

    /// The candidates whose output on the operands as they are has the bits of the own kernel's.
    fn same_as_own(
        &self,
        arena: &CudaArena,
        call: &PlacedCall,
        candidates: Vec<Algorithm>,
    ) -> Result<Vec<Algorithm>, DeviceError> {
        let output = [call.writes[0]];
        let own = launches(&call.call.op, call, &self.device.shape());
        arena.fill(output[0], 0)?;
        self.run(arena, own, Lane::Main)?;
        let expected = self.digests(arena, &output)?;
        let mut kept = Vec::new();
        for algorithm in candidates {
            arena.fill(output[0], 0)?;
            if self.gives(arena, call, algorithm, &expected)? {
                kept.push(algorithm);
            }
        }
        Ok(kept)
    }

    /// Pins an algorithm and runs it once; whether the output then has this digest. One that fails to launch is no candidate.
    fn gives(
        &self,
        arena: &CudaArena,
        call: &PlacedCall,
        algorithm: Algorithm,
        expected: &[blake3::Hash],
    ) -> Result<bool, DeviceError> {
        self.products.pin(call, Provider::Library(algorithm));
        let issued = self.issue(arena, call, Lane::Main);
        Ok(issued.is_ok() && self.digests(arena, &[call.writes[0]])? == expected)
    }

    /// Milliseconds of one call as a graph runs it: among its like, with whatever the library adds to its kernel, and
    /// without the host's part. A call that is no match for `best`, or so long that its start does not count, is timed alone. A
    /// call that cannot be captured takes forever.
    fn time(
        &self,
        arena: &CudaArena,
        best: f32,
        issue: impl Fn() -> Result<Expected, DeviceError>,
    ) -> Result<f32, DeviceError> {
        let alone = || self.device.time(|| issue().map(drop));
        let mut least = alone()?;
        if least > HOPELESS * best {
            return Ok(least);
        }
        if least > LONG_MS {
            for _ in 1..TIMED_RUNS {
                least = least.min(alone()?);
            }
            return Ok(least);
        }
        let known = (&self.modules, GraphProducts::default());
        let captured = graph::capture(&self.device, known, arena, || {
            let calls = (0..TIMED_CALLS).map(|_| issue());
            let kernels = calls.collect::<Result<Vec<Expected>, _>>()?;
            Ok(Issued::in_order_of_capture(kernels.concat()))
        });
        let Ok(graph) = captured else {
            return Ok(f32::INFINITY);
        };
        let runs = (0..TIMED_RUNS).map(|_| graph.time(1));
        let least = runs.collect::<Result<Vec<f32>, _>>()?.into_iter();
        Ok(least.fold(f32::INFINITY, f32::min) / TIMED_CALLS as f32)
    }
}
