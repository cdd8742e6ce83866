//! Admission of products: a candidate of the library serves only after its output had the same bits as the engine's own
//! kernel on the step's own operands, and the fastest of those that agree is pinned.

use super::arena::CudaArena;
use super::backend::CudaBackend;
use super::issue::launches;
use super::lanes::Lane;
use super::products::{Products, Provider, library_product};
use crate::error::DeviceError;
use crate::layout::{PlacedCall, Region};

/// Timed runs of a candidate; the fastest counts.
const TIMED_RUNS: usize = 3;
/// A candidate whose run takes this many times the best time so far is not timed again.
const HOPELESS: f32 = 1.25;

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
        let timed = self.time(f32::INFINITY, || {
            self.run(arena, own.clone(), Lane::Main).map(drop)
        })?;
        let mut best = (timed, Provider::Own);
        for algorithm in lt.candidates(&product.shape)? {
            self.products.pin(call, Provider::Library(algorithm));
            restore()?;
            // A candidate that fails to launch is no candidate.
            if self.issue(arena, call, Lane::Main).is_err()
                || self.digests(arena, &output)? != expected
            {
                continue;
            }
            let ms = self.time(best.0, || self.issue(arena, call, Lane::Main).map(drop))?;
            if ms < best.0 {
                best = (ms, Provider::Library(algorithm));
            }
        }
        self.products.pin(call, best.1);
        // Candidates that were refused, or that added more than once, have left their own bits behind.
        restore()?;
        self.run(arena, own, Lane::Main).map(drop)
    }

    /// The least time of a few runs; no further one after a run that is far above `best`.
    fn time(
        &self,
        best: f32,
        run: impl Fn() -> Result<(), DeviceError>,
    ) -> Result<f32, DeviceError> {
        let mut least = f32::INFINITY;
        for _ in 0..TIMED_RUNS {
            least = least.min(self.device.time(&run)?);
            if least > HOPELESS * best {
                break;
            }
        }
        Ok(least)
    }
}
