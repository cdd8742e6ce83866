//! Low-rank adapters on the GPU: which kernels of `ptx/lora_*.cu` and `ptx/matmul_*.cu` serve them, and on what
//! grid.
//!
//! A kernel computes whole chains, so the choice of a tile changes no bit. A launch serves up to four parts of
//! a fused product; further ones have launches of their own.

use super::call::{Arg, CallLaunches, DeviceShape, KernelLaunch};
use super::lora_wide::{self, Walk};
use super::matmul;
use super::pieces::{WeightTiles, cut_of, pieces};
use super::rows::{by_vectors, number, numbers, regions};
use super::thin::Thin;
use crate::layout::{PlacedCall, Region};
use crate::op::Store;
use crate::op::lora::{
    Adapters, LoraDown, LoraDownGradInput, LoraUp, LoraUpGradInput, LoraUpGradWeight, Part,
};
use crate::shape::Math;

/// Parts that one launch serves at most; the kernels say so too.
const MOST_PARTS: usize = 4;

/// How a kernel divides its output: rows and columns of a tile, threads, and bytes of dynamic shared memory.
#[derive(Clone, Copy, Debug)]
struct Tile {
    rows: usize,
    columns: usize,
    threads: u32,
    shared_bytes: usize,
}

impl Tile {
    /// A tile of the tensor-core kernels, `stages` of 128 bytes of each row and column under way.
    const fn tensor(rows: usize, columns: usize, threads: u32, stages: usize) -> Tile {
        Tile {
            rows,
            columns,
            threads,
            shared_bytes: stages * (rows + columns) * 128,
        }
    }

    /// A tile of the f32 kernels, whose shared memory is static.
    const fn small(rows: usize, columns: usize) -> Tile {
        Tile {
            rows,
            columns,
            threads: 128,
            shared_bytes: 0,
        }
    }

    /// Of the sum and the gradient of the lower product's input.
    fn of_sum(math: Math) -> Tile {
        match math {
            Math::F32 => Tile::small(64, 32),
            _ => Tile::tensor(64, 64, 128, 2),
        }
    }

    /// Of the gradient of `s`: few columns, and long chains.
    fn of_grad_input(math: Math) -> Tile {
        match math {
            Math::F32 => Tile::small(32, 32),
            _ => Tile::tensor(32, 32, 64, 6),
        }
    }

    /// Of the gradient of `b`.
    fn of_grad_weight(math: Math) -> Tile {
        match math {
            Math::F32 => Tile::small(64, 32),
            _ => Tile::tensor(64, 32, 128, 3),
        }
    }

    fn launch(&self, entry: &'static str, blocks: usize, args: Vec<Arg>) -> KernelLaunch {
        KernelLaunch {
            entry,
            grid: [number(blocks), 1, 1],
            block: [self.threads, 1, 1],
            shared_bytes: number(self.shared_bytes),
            args,
        }
    }
}

/// The kernel of a stem in a precision, for operands aligned to 16 bytes or for any.
macro_rules! entry {
    ($math:expr, $vectors:expr, $stem:literal) => {
        match ($math, $vectors) {
            (Math::F32, true) => concat!($stem, "_f32"),
            (Math::F32, false) => concat!($stem, "_f32_any"),
            (Math::Tf32, true) => concat!($stem, "_tf32"),
            (Math::Tf32, false) => concat!($stem, "_tf32_any"),
            (Math::Bf16, true) => concat!($stem, "_bf16"),
            (Math::Bf16, false) => concat!($stem, "_bf16_any"),
            (Math::F16, true) => concat!($stem, "_f16"),
            (Math::F16, false) => concat!($stem, "_f16_any"),
        }
    };
}

/// Parts that one launch serves, and the operands from their first rank or row on.
struct Served<'a> {
    parts: &'a [Part],
    adapters: &'a Adapters,
    math: Math,
    /// Ranks of the parts before, and their rows of `b`.
    ranks_before: usize,
    rows_before: usize,
}

impl Served<'_> {
    /// Calls `launch` with every group of parts.
    fn each(adapters: &Adapters, math: Math, mut launch: impl FnMut(&Served)) {
        let (mut ranks_before, mut rows_before) = (0, 0);
        for parts in adapters.parts.chunks(MOST_PARTS) {
            launch(&Served {
                parts,
                adapters,
                math,
                ranks_before,
                rows_before,
            });
            ranks_before += adapters.rank * parts.len();
            rows_before += parts.iter().map(|p| p.columns).sum::<usize>();
        }
    }

    /// `s` or its gradient from the first rank of these parts on.
    fn ranks_of(&self, region: Region) -> Region {
        from(region, self.ranks_before * self.math.storage().size())
    }

    /// `b`, or its gradient in f32, from the first row of these parts on.
    fn rows_of(&self, region: Region, element_bytes: usize) -> Region {
        let bytes = self.rows_before * self.adapters.rank * element_bytes;
        from(region, bytes)
    }

    /// Whether every row of every operand is whole chunks of 16 bytes that start at multiples of 16.
    fn by_vectors(&self, operands: &[Region]) -> bool {
        let (a, math) = (self.adapters, self.math);
        let whole = |elements: usize| by_vectors(elements, math, &[]);
        let parts = self.parts.iter();
        let mut parts = parts.map(|p| whole(p.first) && whole(p.columns));
        by_vectors(a.rank, math, operands) && whole(a.n_out) && parts.all(|p| p)
    }

    /// Rank, ranks, columns of the product, scale, and the parts: what ends the arguments of every kernel.
    fn numbers(&self) -> Vec<Arg> {
        let a = self.adapters;
        let mut args = numbers([a.rank, a.ranks(), a.n_out]).to_vec();
        args.push(Arg::F32(a.scale));
        for i in 0..MOST_PARTS {
            let none = Part {
                first: 0,
                columns: 0,
            };
            let part = self.parts.get(i).copied().unwrap_or(none);
            args.extend(numbers([part.first, part.columns]));
        }
        args
    }

    /// The sum by strips, where the parts are made up of them; reads s, b, writes y.
    fn up_wide(
        &self,
        rows: usize,
        operands: [Region; 3],
        device: &DeviceShape,
    ) -> Option<KernelLaunch> {
        let rank = self.adapters.rank;
        let columns: Vec<usize> = self.parts.iter().map(|p| p.columns).collect();
        let walk = Walk::of((rows, rank, self.math), &columns, &operands, device)?;
        let entry = lora_wide::up_entry(self.math, rank)?;
        if !self.by_vectors(&operands) {
            return None;
        }
        walk.launch(entry, &operands, self.numbers())
    }

    /// Tiles of `width` of each part's columns.
    fn tiles(&self, width: usize) -> usize {
        self.parts.iter().map(|p| p.columns.div_ceil(width)).sum()
    }
}

/// A region without its first `bytes`.
fn from(region: Region, bytes: usize) -> Region {
    Region {
        offset: region.offset + bytes,
        bytes: region.bytes.saturating_sub(bytes),
    }
}

/// `s = x · aᵀ`: the kernels of a linear layer; reads x, a, writes s.
pub fn down(op: &LoraDown, call: &PlacedCall, device: &DeviceShape) -> CallLaunches {
    matmul::forward(&op.layer(), call, device)
}

/// `dx (+)= ds · a` by strips, where such a matrix is made up of them.
fn down_grad_input_wide(
    op: &LoraDownGradInput,
    operands: [Region; 3],
    device: &DeviceShape,
) -> Option<KernelLaunch> {
    let size = (op.rows, op.ranks, op.math);
    let walk = Walk::of(size, &[op.n_in], &operands, device)?;
    let add = usize::from(op.store == Store::Add);
    let entry = lora_wide::down_grad_input_entry(op.math, op.ranks)?;
    walk.launch(entry, &operands, numbers([op.n_in, op.ranks, add]))
}

/// `dx (+)= ds · a`; reads ds, a, writes dx.
pub fn down_grad_input(
    op: &LoraDownGradInput,
    call: &PlacedCall,
    device: &DeviceShape,
) -> CallLaunches {
    let (ds, a, dx) = (call.reads[0], call.reads[1], call.writes[0]);
    if let Some(launch) = down_grad_input_wide(op, [ds, a, dx], device) {
        return launch.into();
    }
    let tile = Tile::of_sum(op.math);
    let blocks = op.rows.div_ceil(tile.rows) * op.n_in.div_ceil(tile.columns);
    if blocks == 0 {
        return CallLaunches::default();
    }
    let vectors = by_vectors(op.ranks, op.math, &[ds]) && by_vectors(op.n_in, op.math, &[a, dx]);
    let entry = entry!(op.math, vectors, "lora_down_grad_input");
    let mut args = regions([ds, a, dx]).to_vec();
    let add = usize::from(op.store == Store::Add);
    args.extend(numbers([op.rows, op.n_in, op.ranks, add]));
    tile.launch(entry, blocks, args).into()
}

/// `y = fma(scale, s · bᵀ, y)` in the columns of each part; reads s, b, writes y.
pub fn up(op: &LoraUp, call: &PlacedCall, device: &DeviceShape) -> CallLaunches {
    let tile = Tile::of_sum(op.math);
    let y = call.writes[0];
    let mut made = CallLaunches::default();
    Served::each(&op.adapters, op.math, |served| {
        let s = served.ranks_of(call.reads[0]);
        let b = served.rows_of(call.reads[1], op.math.storage().size());
        if let Some(launch) = served.up_wide(op.rows, [s, b, y], device) {
            made.launches.push(launch);
            return;
        }
        let entry = entry!(op.math, served.by_vectors(&[s, b, y]), "lora_up");
        let blocks = op.rows.div_ceil(tile.rows) * served.tiles(tile.columns);
        let mut args = regions([s, b, y]).to_vec();
        args.extend(numbers([op.rows]));
        args.extend(served.numbers());
        if blocks > 0 {
            made.launches.push(tile.launch(entry, blocks, args));
        }
    });
    made
}

/// `ds = (dy · b) · scale`, each part's from its columns of dy; reads dy, b, writes ds.
pub fn up_grad_input(op: &LoraUpGradInput, call: &PlacedCall, _: &DeviceShape) -> CallLaunches {
    let tile = Tile::of_grad_input(op.math);
    let dy = call.reads[0];
    let mut made = CallLaunches::default();
    Served::each(&op.adapters, op.math, |served| {
        let b = served.rows_of(call.reads[1], op.math.storage().size());
        let ds = served.ranks_of(call.writes[0]);
        let entry = entry!(
            op.math,
            served.by_vectors(&[dy, b, ds]),
            "lora_up_grad_input"
        );
        let tiles = op.rows.div_ceil(tile.rows) * op.adapters.rank.div_ceil(tile.columns);
        let mut args = regions([dy, b, ds]).to_vec();
        args.extend(numbers([op.rows]));
        args.extend(served.numbers());
        let blocks = tiles * served.parts.len();
        if blocks > 0 {
            made.launches.push(tile.launch(entry, blocks, args));
        }
    });
    made
}

/// `db = (dyᵀ · s) · scale`, cut into pieces and grains; reads dy, s, writes db.
///
/// Launches follow one another in the workspace, which is that of the one with the most tiles.
pub fn up_grad_weight(op: &LoraUpGradWeight, call: &PlacedCall, _: &DeviceShape) -> CallLaunches {
    let tile = Tile::of_grad_weight(op.math);
    let dy = call.reads[0];
    let [pieces_of_grain, pieces] = pieces(&op.sum);
    let thin = thin(op, call);
    let tiles_of = |served: &Served| match thin {
        Some(thin) => served.parts.iter().map(|p| thin.tiles(p.columns)).sum(),
        None => served.tiles(tile.rows) * op.adapters.rank.div_ceil(tile.columns),
    };
    let mut most_tiles = 0;
    Served::each(&op.adapters, op.math, |served| {
        most_tiles = most_tiles.max(tiles_of(served));
    });
    let (meeting, sum) = match thin {
        Some(thin) => (thin.meeting(most_tiles), thin.rest()),
        None => {
            let outputs = tile.rows * tile.columns;
            let tiles = most_tiles;
            (WeightTiles { tiles, outputs }, op.sum)
        }
    };
    let mut made = CallLaunches::default();
    Served::each(&op.adapters, op.math, |served| {
        let s = served.ranks_of(call.reads[1]);
        let db = served.rows_of(call.writes[0], size_of::<f32>());
        let mut args = regions([dy, s]).to_vec();
        args.extend(meeting.places(db, &sum));
        let [tokens, grain, piece] = cut_of(&op.sum);
        args.extend(numbers([tokens, grain, piece, pieces_of_grain, pieces]));
        args.extend(served.numbers());
        let tiles = tiles_of(served);
        made.launches.extend(match thin {
            _ if tiles == 0 => None,
            Some(thin) => Some(thin.launch(tiles, args)),
            None => {
                let entry = entry!(op.math, served.by_vectors(&[dy, s]), "lora_up_grad_weight");
                Some(tile.launch(entry, tiles * pieces, args))
            }
        });
    });
    meeting.with_workspace(made, &sum)
}

/// The division of `db` as a thin sum, where every launch can read its operands so.
fn thin(op: &LoraUpGradWeight, call: &PlacedCall) -> Option<Thin> {
    let mut vectors = true;
    Served::each(&op.adapters, op.math, |served| {
        vectors &= served.by_vectors(&[call.reads[0], served.ranks_of(call.reads[1])]);
    });
    Thin::of(op.math, op.adapters.rank, &op.sum).filter(|_| vectors)
}

#[cfg(test)]
#[path = "lora_tests.rs"]
mod tests;
