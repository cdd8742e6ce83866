//! How a state of the engine runs a program: eagerly and written down in warm-up, as a guarded replay once the
//! program is proven.

use super::guard::{Admitted, Guard};
use super::hyper::Hyper;
use super::state::{Engine, Replaying, Warmup};
use super::step::{Core, Observe};
use crate::backend::Backend;
use crate::error::{CaptureError, GuardError, StepError};
use crate::plan::ProgramKind;

/// The captured programs of a plan.
pub(super) struct Graphs<B: Backend>(Vec<(ProgramKind, B::Graph)>);

impl<B: Backend> Graphs<B> {
    /// Captures every program, without running it.
    ///
    /// # Errors
    /// What the backend cannot capture.
    pub fn capture(core: &mut Core<B>) -> Result<Self, CaptureError> {
        core.healthy()?;
        let mut graphs = Vec::new();
        for (kind, calls) in &core.programs {
            graphs.push((*kind, core.backend.capture(&mut core.arena, calls)?));
        }
        Ok(Graphs(graphs))
    }

    /// The graph of a program.
    ///
    /// # Errors
    /// [`StepError::NoProgram`] where the plan has no such program.
    pub fn get(&mut self, kind: ProgramKind) -> Result<&mut B::Graph, StepError> {
        let found = self.0.iter_mut().find(|(k, _)| *k == kind);
        match found {
            Some((_, graph)) => Ok(graph),
            None => Err(StepError::NoProgram {
                program: kind.to_string(),
            }),
        }
    }

    /// Every graph with its program.
    pub fn iter_mut(&mut self) -> impl Iterator<Item = (ProgramKind, &mut B::Graph)> {
        self.0.iter_mut().map(|(kind, graph)| (*kind, graph))
    }
}

/// A state that can run programs.
pub(super) trait RunPrograms<B: Backend> {
    fn core(&mut self) -> &mut Core<B>;

    /// Whether every one of these programs may run now; changes nothing.
    fn admit_all(&mut self, kinds: &[ProgramKind], hyper: &Hyper) -> Result<(), StepError>;

    /// Runs a program over the inputs that stand in the arena.
    fn run_program(
        &mut self,
        kind: ProgramKind,
        hyper: &Hyper,
        observer: Option<&mut dyn Observe<B>>,
    ) -> Result<(), StepError>;

    /// Notes that an update has been made.
    fn count_step(&mut self);
}

impl<B: Backend> RunPrograms<B> for Engine<B, Warmup> {
    fn core(&mut self) -> &mut Core<B> {
        &mut self.core
    }

    fn admit_all(&mut self, _kinds: &[ProgramKind], _hyper: &Hyper) -> Result<(), StepError> {
        Ok(())
    }

    fn run_program(
        &mut self,
        kind: ProgramKind,
        _hyper: &Hyper,
        observer: Option<&mut dyn Observe<B>>,
    ) -> Result<(), StepError> {
        let issued = self.core.eager(kind, observer)?;
        self.state.note(kind, issued);
        Ok(())
    }

    fn count_step(&mut self) {
        self.state.count_step();
    }
}

impl<B: Backend> RunPrograms<B> for Engine<B, Replaying<B>> {
    fn core(&mut self) -> &mut Core<B> {
        &mut self.core
    }

    fn admit_all(&mut self, kinds: &[ProgramKind], hyper: &Hyper) -> Result<(), StepError> {
        let (core, state) = (&self.core, &mut self.state);
        for &kind in kinds {
            admit(core, (&state.guard, state.graphs.get(kind)?), hyper)?;
        }
        Ok(())
    }

    fn run_program(
        &mut self,
        kind: ProgramKind,
        hyper: &Hyper,
        _observer: Option<&mut dyn Observe<B>>,
    ) -> Result<(), StepError> {
        let (core, state) = (&mut self.core, &mut self.state);
        let graph = state.graphs.get(kind)?;
        let admitted = admit(core, (&state.guard, graph), hyper)?;
        Ok(core.replay(graph, admitted)?)
    }

    fn count_step(&mut self) {}
}

/// Asks backend and guard whether a graph may be launched now.
pub(super) fn admit<'g, B: Backend>(
    core: &Core<B>,
    (guard, graph): (&'g Guard, &B::Graph),
    hyper: &Hyper,
) -> Result<Admitted<'g>, GuardError> {
    core.backend.check_graph(&core.arena, graph)?;
    let arena = core.backend.arena_id(&core.arena);
    guard.admit(arena, &core.plan.layout, core.manifest.hash(), hyper)
}
