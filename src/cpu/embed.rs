//! Token embedding on the CPU.

use rayon::prelude::*;

use super::arena::Operands;
use super::context::CpuContext;
use super::rows::{add_to, expect_len, rows_per_task};
use super::simd::{Task, dispatch};
use crate::error::DeviceError;
use crate::num::element::{Bf16, Element, F16};
use crate::num::tree::TreeFold;
use crate::op::Store;
use crate::op::embed::{Embed, EmbedFrozen, EmbedGrad};
use crate::shape::DType;

/// Tasks a thread, so that frequent ids in one part of the table do not leave the others idle.
const TASKS_A_THREAD: usize = 4;

/// Checks that every id is a row of the table.
fn check_ids(ids: &[i32], vocab_size: usize) -> Result<(), DeviceError> {
    let outside = |&id: &i32| usize::try_from(id).map_or(true, |id| id >= vocab_size);
    match ids.iter().position(outside) {
        None => Ok(()),
        Some(position) => Err(DeviceError::TokenOutOfRange {
            position,
            found: ids[position],
            vocab_size,
        }),
    }
}

/// `x[t] = table[ids[t]]`.
///
/// # Errors
/// Operands that are missing or of the wrong size, or an id outside the table.
pub fn forward(
    context: &CpuContext,
    op: &Embed,
    operands: &mut Operands,
) -> Result<(), DeviceError> {
    let table: &[f32] = operands.read(1)?;
    rows_of(
        context,
        table,
        [op.rows, op.vocab_size, op.d_model],
        operands,
    )
}

/// The same from a table that is stored as products read it; only the rows that are asked for are widened.
///
/// # Errors
/// As [`forward`].
pub fn frozen(
    context: &CpuContext,
    op: &EmbedFrozen,
    operands: &mut Operands,
) -> Result<(), DeviceError> {
    let sizes = [op.rows, op.vocab_size, op.d_model];
    match op.math.storage() {
        DType::Bf16 => rows_of::<Bf16>(context, operands.read(1)?, sizes, operands),
        DType::F16 => rows_of::<F16>(context, operands.read(1)?, sizes, operands),
        _ => rows_of::<f32>(context, operands.read(1)?, sizes, operands),
    }
}

fn rows_of<E: Element>(
    context: &CpuContext,
    table: &[E],
    [rows, vocab_size, d]: [usize; 3],
    operands: &mut Operands,
) -> Result<(), DeviceError> {
    let ids: &[i32] = operands.read(0)?;
    let x: &mut [f32] = operands.write(0)?;
    expect_len("ids", rows, ids.len())?;
    expect_len("table", vocab_size * d, table.len())?;
    expect_len("x", rows * d, x.len())?;
    check_ids(ids, vocab_size)?;
    if d == 0 {
        return Ok(());
    }
    let rows = rows_per_task(d);
    context.run(|| {
        let tasks = x.par_chunks_mut(rows * d).zip(ids.par_chunks(rows));
        tasks.for_each(|(x, ids)| {
            for (x, &id) in x.chunks_exact_mut(d).zip(ids) {
                let row = &table[id as usize * d..][..d];
                x.iter_mut().zip(row).for_each(|(x, e)| *x = e.to_f32());
            }
        });
    });
    Ok(())
}

/// One position, ordered by its id first.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Occurrence {
    id: usize,
    position: usize,
}

/// The gradient of neighbouring rows of the table.
struct TableRows<'a> {
    dx: &'a [f32],
    /// All occurrences of the ids of these rows, in order.
    occurrences: &'a [Occurrence],
    first_id: usize,
    rows: &'a mut [f32],
    d_model: usize,
    grain: usize,
    store: Store,
}

impl Task for TableRows<'_> {
    type Out = ();

    #[inline(always)]
    fn run(mut self) {
        let mut spare = Vec::new();
        let mut rest = self.occurrences;
        let rows = std::mem::take(&mut self.rows);
        for (row, id) in rows.chunks_exact_mut(self.d_model).zip(self.first_id..) {
            let (here, after) = rest.split_at(rest.partition_point(|o| o.id == id));
            rest = after;
            match (self.sum(here, &mut spare), self.store) {
                (Some(sum), Store::Assign) => {
                    row.copy_from_slice(&sum);
                    spare.push(sum);
                }
                (Some(sum), Store::Add) => {
                    add_to(row, &sum);
                    spare.push(sum);
                }
                (None, Store::Assign) => row.fill(0.0),
                (None, Store::Add) => {}
            }
        }
    }
}

impl TableRows<'_> {
    /// The sum over one id's occurrences, or `None` when there is none.
    ///
    /// A grain without the id is left out of the tree: its partial is `+0.0`, and no partial is
    /// `-0.0`, so the addition would change no bit. `spare` keeps vectors to be used again.
    #[inline(always)]
    fn sum(&self, here: &[Occurrence], spare: &mut Vec<Vec<f32>>) -> Option<Vec<f32>> {
        let mut fold = TreeFold::new();
        let mut rest = here;
        let mut grain = 0;
        while !rest.is_empty() {
            let end = (grain + 1) * self.grain;
            let (inside, after) = rest.split_at(rest.partition_point(|o| o.position < end));
            rest = after;
            grain += 1;
            let partial = (!inside.is_empty()).then(|| {
                let mut partial = spare.pop().unwrap_or_default();
                partial.clear();
                partial.resize(self.d_model, 0.0);
                for o in inside {
                    add_to(
                        &mut partial,
                        &self.dx[o.position * self.d_model..][..self.d_model],
                    );
                }
                partial
            });
            fold.push(partial, |a, b| merge(a, b, spare));
        }
        fold.finish(|a, b| merge(a, b, spare)).flatten()
    }
}

#[inline(always)]
fn merge(
    left: Option<Vec<f32>>,
    right: Option<Vec<f32>>,
    spare: &mut Vec<Vec<f32>>,
) -> Option<Vec<f32>> {
    match (left, right) {
        (Some(mut left), Some(right)) => {
            add_to(&mut left, &right);
            spare.push(right);
            Some(left)
        }
        (left, right) => left.or(right),
    }
}

/// `dtable[v] (+)= Σ dx[t]` over the positions of `v`.
///
/// # Errors
/// Operands that are missing or of the wrong size, or an id outside the table.
pub fn grad(
    context: &CpuContext,
    op: &EmbedGrad,
    operands: &mut Operands,
) -> Result<(), DeviceError> {
    let ids: &[i32] = operands.read(0)?;
    let dx: &[f32] = operands.read(1)?;
    let dtable: &mut [f32] = operands.write(0)?;
    let d = op.d_model;
    expect_len("ids", op.sum.tokens, ids.len())?;
    expect_len("dx", op.sum.tokens * d, dx.len())?;
    expect_len("dtable", op.vocab_size * d, dtable.len())?;
    check_ids(ids, op.vocab_size)?;
    if d == 0 {
        return Ok(());
    }
    let occurrence = |(position, &id): (usize, &i32)| Occurrence {
        id: id as usize,
        position,
    };
    let mut occurrences: Vec<Occurrence> = ids.iter().enumerate().map(occurrence).collect();
    let path = context.path();
    let rows = op
        .vocab_size
        .div_ceil(TASKS_A_THREAD * context.threads())
        .max(1);
    context.run(|| {
        occurrences.par_sort_unstable();
        let tasks = dtable.par_chunks_mut(rows * d).enumerate();
        tasks.for_each(|(index, table_rows)| {
            let first_id = index * rows;
            let start = occurrences.partition_point(|o| o.id < first_id);
            let end = occurrences.partition_point(|o| o.id < first_id + rows);
            let task = TableRows {
                dx,
                occurrences: &occurrences[start..end],
                first_id,
                rows: table_rows,
                d_model: d,
                grain: op.sum.grain.max(1),
                store: op.store,
            };
            dispatch(path, task);
        });
    });
    Ok(())
}
