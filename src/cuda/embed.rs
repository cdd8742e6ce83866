//! Launches of the token embedding and its gradient.

use super::call::{CallLaunches, DeviceShape};
use super::rows::{aligned, by_vectors, number, numbers, one, regions};
use crate::layout::PlacedCall;
use crate::op::Store;
use crate::op::embed::{Embed, EmbedFrozen, EmbedGrad};
use crate::shape::DType;

/// `x[t] = table[ids[t]]`; a row whose id lies outside the table becomes NaN.
pub fn forward(op: &Embed, call: &PlacedCall, _device: &DeviceShape) -> CallLaunches {
    let (table, x) = (call.reads[1], call.writes[0]);
    let entry = match aligned(op.d_model, &[table, x]) {
        true => "embed_f32_quads",
        false => "embed_f32",
    };
    rows_of(entry, call, [op.rows, op.vocab_size, op.d_model])
}

/// The same from a table that is stored as products read it.
pub fn frozen(op: &EmbedFrozen, call: &PlacedCall, _: &DeviceShape) -> CallLaunches {
    let (table, x) = (call.reads[1], call.writes[0]);
    let wide = by_vectors(op.d_model, op.math, &[table, x]);
    let entry = match (op.math.storage(), wide) {
        (DType::Bf16, true) => "embed_frozen_bf16_octets",
        (DType::Bf16, false) => "embed_frozen_bf16",
        (DType::F16, true) => "embed_frozen_f16_octets",
        (DType::F16, false) => "embed_frozen_f16",
        (_, true) => "embed_f32_quads",
        (_, false) => "embed_f32",
    };
    rows_of(entry, call, [op.rows, op.vocab_size, op.d_model])
}

/// A warp a row.
fn rows_of(
    entry: &'static str,
    call: &PlacedCall,
    [rows, vocab_size, d]: [usize; 3],
) -> CallLaunches {
    if d == 0 {
        return CallLaunches::default();
    }
    let mut args = regions([call.reads[0], call.reads[1], call.writes[0]]).to_vec();
    args.extend(numbers([rows, vocab_size, d]));
    one(entry, [rows.div_ceil(4), 1], [128, 1], args)
}

/// Warps of a block of the gradient; each scans an equal segment of the positions.
const WARPS: usize = 8;
/// The most ids of a block.
const MOST_ROWS: usize = 256;
/// The most positions that a warp lists; a longer segment is scanned again for each id.
const MOST_LISTED: usize = 512;
/// Positions that a list's entry can hold, beside 8 bits for the id.
const MOST_TOKENS: usize = 1 << 24;
/// Blocks that keep a large GPU busy.
const BLOCKS: usize = 1024;
/// Pairs of an id and 128 columns above which columns are served by fours.
const MANY_ROWS: usize = 4096;

/// Columns of a block that serves one id.
const ROW_COLUMNS: usize = 128;
/// The most positions that such a block lists, and the most blocks of which each scans all positions.
const ROW_TOKENS: usize = 4096;
const ROW_BLOCKS: usize = 1024;

/// The gradient with a block for each id and 128 columns, where these are few.
fn grad_by_rows(op: &EmbedGrad, call: &PlacedCall) -> Option<CallLaunches> {
    let (tokens, d) = (op.sum.tokens, op.d_model);
    let grid = [op.vocab_size, d.div_ceil(ROW_COLUMNS)];
    let one_grain = op.sum.grain >= tokens;
    if !one_grain || tokens > ROW_TOKENS || grid[0] * grid[1] > ROW_BLOCKS {
        return None;
    }
    let mut args = regions([call.reads[0], call.reads[1], call.writes[0]]).to_vec();
    args.extend(numbers([tokens, d, usize::from(op.store == Store::Add)]));
    Some(one(
        "embed_grad_f32_row",
        grid,
        [number(ROW_COLUMNS), 1],
        args,
    ))
}

/// `dtable[v] (+)= Σ dx[t]` over the positions of `v`.
pub fn grad(op: &EmbedGrad, call: &PlacedCall, _device: &DeviceShape) -> CallLaunches {
    if let Some(launches) = grad_by_rows(op, call) {
        return launches;
    }
    let (ids, dx, dtable) = (call.reads[0], call.reads[1], call.writes[0]);
    let (tokens, d) = (op.sum.tokens, op.d_model);
    let grain = op.sum.grain.clamp(1, tokens.max(1));
    let grains = tokens.div_ceil(grain);
    let quads = aligned(d, &[dx, dtable]) && op.vocab_size * d.div_ceil(128) >= MANY_ROWS;
    let columns = if quads { 4 } else { 1 };
    let entry = match (quads, grains > 1) {
        (true, true) => "embed_grad_f32_grains_quads",
        (true, false) => "embed_grad_f32_quads",
        (false, true) => "embed_grad_f32_grains",
        (false, false) => "embed_grad_f32",
    };
    let chunks = d.div_ceil(32 * columns);
    // A block has every 2^shift-th id.
    let rows = (op.vocab_size * chunks / BLOCKS).clamp(WARPS, MOST_ROWS);
    let blocks = op.vocab_size.div_ceil(rows).next_power_of_two();
    let shift = blocks.trailing_zeros() as usize;
    let segment = tokens.div_ceil(WARPS).next_multiple_of(32);
    // A multiple of 4 keeps what follows the lists aligned.
    let listed = match tokens < MOST_TOKENS {
        true => segment.min(MOST_LISTED),
        false => 0,
    };
    let mut args = regions([ids, dx, dtable]).to_vec();
    args.extend(numbers([
        tokens,
        grain,
        op.vocab_size,
        d,
        shift,
        listed,
        usize::from(op.store == Store::Add),
    ]));
    let levels = match grains {
        0 | 1 => 0,
        n => (n - 1).ilog2() as usize + 1,
    };
    let shared_bytes = 4 * (WARPS * listed + levels * 32 * WARPS * columns);
    let grid = [chunks, blocks.min(op.vocab_size)];
    let mut launches = one(entry, grid, [number(32 * WARPS), 1], args);
    for launch in &mut launches.launches {
        launch.shared_bytes = number(shared_bytes);
    }
    launches
}
