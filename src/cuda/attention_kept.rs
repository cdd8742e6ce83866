//! The gradients of attention by warpgroups, where the key and value pass leaves the rounded gradients of the scores in
//! the workspace and the query pass multiplies them by the keys: scores, their weights and the products with the values
//! are computed once instead of twice.
//!
//! Both passes alone compute the same gradients of the scores and round them alike, and the chains over the keys go on
//! in the same order, so no bit depends on it.

use super::attention_warpgroup::{ALIGNMENT, GROUP_THREADS, TILE};
use super::call::{Arg, KernelLaunch};
use super::rows::number;
use crate::layout::Region;
use crate::op::attention::AttentionShape;

/// The most bytes of workspace that gradients of scores take: those of 8 sequences of 1,024 tokens with 12 heads fit.
const MOST_BYTES: usize = 128 << 20;
/// Bytes of a tile of 64 queries and 64 keys in 16 bits.
const TILE_BYTES: usize = TILE * TILE * 2;
/// Operands of the key and value pass, before its sizes.
const OPERANDS: usize = 5;

/// The key and value pass alone and the same that keeps; the query pass from there by its name, its columns of a head,
/// groups and stages, which the entries in `ptx/attention_grad_query_kept_*_sm90a.cu` say as well.
struct Kernel {
    alone: &'static str,
    keeping: &'static str,
    query: &'static str,
    size: [usize; 3],
}

macro_rules! kernel {
    ($form:literal, $size:expr) => {
        Kernel {
            alone: concat!("attention_grad_key_value_", $form),
            keeping: concat!("attention_grad_key_value_", $form, "_keeping"),
            query: concat!("attention_grad_query_kept_", $form),
            size: $size,
        }
    };
}

const KERNELS: [Kernel; 4] = [
    kernel!("bf16_sm90a_d64", [64, 2, 4]),
    kernel!("bf16_sm90a_d128", [128, 1, 3]),
    kernel!("f16_sm90a_d64", [64, 2, 4]),
    kernel!("f16_sm90a_d128", [128, 1, 3]),
];

impl Kernel {
    /// Dynamic shared memory of a block of the query pass: its stages of keys and of each group's tile.
    fn shared_bytes(&self) -> usize {
        let [columns, groups, stages] = self.size;
        stages * (TILE * columns * 2 + groups * TILE_BYTES) + ALIGNMENT
    }
}

/// Bytes of the gradients of all scores on and below the diagonal, by whole tiles; none where they are more than a
/// number has.
fn kept_bytes(shape: &AttentionShape) -> Option<usize> {
    let tiles = shape.seq_len.div_ceil(TILE);
    let per_head = tiles.checked_mul(tiles + 1)? / 2;
    let heads = shape.batch.checked_mul(shape.heads.n_heads)?;
    heads.checked_mul(per_head)?.checked_mul(TILE_BYTES)
}

/// The key and value pass and the query pass behind it, from the former alone, and the bytes of workspace between
/// them; `table` where a rotation follows. None where the pass is of another kind or the workspace would be too large.
pub(super) fn launches(
    shape: &AttentionShape,
    alone: &KernelLaunch,
    table: Option<Region>,
) -> Option<([KernelLaunch; 2], usize)> {
    let kernel = KERNELS.iter().find(|kernel| kernel.alone == alone.entry)?;
    let bytes = kept_bytes(shape).filter(|&bytes| bytes <= MOST_BYTES)?;
    let (operands, sizes) = alone.args.split_first_chunk::<OPERANDS>()?;
    let [qkv, _, _, delta, dqkv] = *operands;
    let kept = Arg::Workspace { offset: 0 };
    // Where nothing is turned the kernels read no table.
    let turning = [
        table.map_or(delta, Arg::Region),
        Arg::U32(u32::from(table.is_some())),
    ];
    let mut args = operands.to_vec();
    args.extend(turning);
    args.push(kept);
    args.extend(sizes);
    let key_value = KernelLaunch {
        entry: kernel.keeping,
        args,
        ..alone.clone()
    };
    let [seq_len, n_heads, n_kv_heads, head_dim, _, scale] = *sizes else {
        return None;
    };
    let [_, groups, _] = kernel.size;
    let blocks = shape.seq_len.div_ceil(TILE).div_ceil(groups);
    let mut args = vec![kept, qkv, dqkv];
    args.extend(turning);
    args.extend([seq_len, n_heads, n_kv_heads, head_dim, scale]);
    let query = KernelLaunch {
        entry: kernel.query,
        grid: [number(shape.batch * shape.heads.n_heads), number(blocks), 1],
        block: [number(GROUP_THREADS * groups), 1, 1],
        shared_bytes: number(kernel.shared_bytes()),
        args,
    };
    Some(([key_value, query], bytes))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cuda::call::H200;
    use crate::cuda::placed_calls::shape;

    #[test]
    fn tiles_on_and_below_the_diagonal_are_kept() {
        assert_eq!(kept_bytes(&shape(1, 64, 64)), Some(4 * 8192));
        assert_eq!(kept_bytes(&shape(2, 65, 64)), Some(8 * 3 * 8192));
        assert_eq!(kept_bytes(&shape(24, 1024, 64)), Some(96 * 136 * 8192));
        assert_eq!(kept_bytes(&shape(1, usize::MAX, 64)), None);
    }

    #[test]
    fn four_warpgroups_or_three_fit_a_multiprocessor() {
        for kernel in &KERNELS {
            let [_, groups, _] = kernel.size;
            let bytes = (4 - groups % 2) / groups * (kernel.shared_bytes() + 1024);
            assert!(bytes <= H200.shared_bytes_per_block as usize + 1024);
        }
    }
}
