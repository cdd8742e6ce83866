//! What a run needs of its device's memory: told before the first step, refused where it does not fit.

use std::sync::Arc;

use super::{machine, output};
use crate::any_device::AnyDevice;
use crate::backend::Backend;
use crate::engine::run::{Run, plan_of};
use crate::error::{DeviceError, Error};
use crate::io::Recipe;
use crate::plan::Plan;
use crate::plan::memory::{MemoryNeed, Room};

/// Opens the run of a recipe after its plan was held against the memory that is free; gives the table
/// of its memory beside it.
///
/// # Errors
/// A plan that does not fit, before anything is allocated; else as [`Run::open`].
pub fn open(recipe: Recipe, backend: &AnyDevice) -> Result<(Run<AnyDevice>, String), Error> {
    let plan = plan_of(&recipe)?;
    open_planned(recipe, plan, backend)
}

fn open_planned(
    recipe: Recipe,
    plan: Plan,
    backend: &AnyDevice,
) -> Result<(Run<AnyDevice>, String), Error> {
    let plan = Arc::new(plan);
    let table = check(&plan, backend)?;
    let run = Run::open_planned(recipe, plan, backend.clone())?;
    Ok((run, table))
}

/// As [`open`], with a plan of the recipe and the table written to standard error.
///
/// # Errors
/// As [`open`].
pub fn open_reported(
    recipe: Recipe,
    plan: Plan,
    backend: &AnyDevice,
) -> Result<Run<AnyDevice>, Error> {
    let (run, table) = open_planned(recipe, plan, backend)?;
    output::note(table);
    Ok(run)
}

/// The table of a plan's memory on a device that it fits into.
fn check(plan: &Plan, backend: &AnyDevice) -> Result<String, DeviceError> {
    let programs = plan.programs().iter();
    let calls: Vec<_> = programs.map(|(_, c)| plan.layout.place(c)).collect();
    let need = MemoryNeed {
        layout: &plan.layout,
        workspace_bytes: backend.workspace_bytes(&plan.layout, &calls.concat()),
    };
    let device = backend.info().device;
    let room = match backend.room()? {
        Some(room) => Some(room),
        None => machine::memory_bytes().map(|(total, available)| Room {
            free_bytes: available as usize,
            total_bytes: total as usize,
        }),
    };
    if let Some(room) = room {
        need.check(&device, room)?;
    }
    let form = super::form::text_of(plan);
    let mut table = need.table(&device, room).trim_end().to_owned();
    table.extend(form.map(|form| format!("\nform         {form}")));
    for line in super::form::again_lines(plan) {
        table += &format!("\nagain        {line}");
    }
    Ok(heading(&table))
}

/// The lines of a table under their heading.
pub fn heading(table: &str) -> String {
    let lines = table.lines().map(|line| format!("\n  {line}"));
    format!("memory by role{}", lines.collect::<String>())
}
