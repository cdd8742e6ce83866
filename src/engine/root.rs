//! The digest of the parameters as a graph of its own, captured once a proof has passed.

use super::step::Core;
use crate::backend::Backend;
use crate::error::{CaptureError, StepError};
use crate::layout::Region;

/// The captured digest of every parameter.
pub(super) struct RootGraph<B: Backend> {
    graph: B::DigestGraph,
}

impl<B: Backend> RootGraph<B> {
    /// Captures the digest of the parameters and holds it against the digest that is not captured.
    ///
    /// # Errors
    /// What the backend cannot capture; [`CaptureError::Digest`] with the first parameter whose
    /// captured digest is another one.
    pub(super) fn capture(core: &mut Core<B>) -> Result<Self, CaptureError> {
        let regions = regions(core);
        let mut graph = core.backend.capture_digest(&mut core.arena, &regions)?;
        let expected = core.digest_regions(&regions)?;
        let launched = core.backend.launch_digest(&mut core.arena, &mut graph);
        let found = core.guarded(launched)?;
        let differs = (0..regions.len()).find(|&i| found.get(i) != Some(&expected[i]));
        match differs {
            None => Ok(RootGraph { graph }),
            Some(i) => Err(CaptureError::Digest {
                tensor: core.plan.params[i].name.clone(),
                expected: expected[i].to_hex().to_string(),
                found: found
                    .get(i)
                    .map_or("none".into(), |d| d.to_hex().to_string()),
            }),
        }
    }

    /// The digest of every parameter, in parameter order, if the graph is still one of them.
    ///
    /// # Errors
    /// What has changed since capture; a device fault.
    pub(super) fn digests(&mut self, core: &mut Core<B>) -> Result<Vec<blake3::Hash>, StepError> {
        core.healthy()?;
        let regions = regions(core);
        core.backend
            .check_digest(&core.arena, &self.graph, &regions)?;
        let launched = core.backend.launch_digest(&mut core.arena, &mut self.graph);
        Ok(core.guarded(launched)?)
    }
}

/// Where the parameters lie, in parameter order.
fn regions<B: Backend>(core: &Core<B>) -> Vec<Region> {
    let params = core.plan.params.iter();
    params.map(|p| core.plan.layout.region(p.slot)).collect()
}
