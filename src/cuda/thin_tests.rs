//! Tests of thin sums over tokens.

use super::*;

fn cut(tokens: usize, grain: usize, piece: usize) -> TokenSum {
    TokenSum {
        tokens,
        grain,
        piece,
    }
}

/// Thin columns of a tile, tiles of the thin factor, and blocks that meet.
fn of(columns: usize, sum: TokenSum) -> Option<(usize, usize, usize)> {
    let thin = Thin::of(Math::Bf16, columns, &sum)?;
    Some((thin.extent, thin.reads, thin.groups))
}

#[test]
fn ranks_take_the_narrowest_tile_and_pieces_meet_by_fours() {
    let sum = cut(4096, 4096, 128);
    for (columns, extent, reads) in [
        (8, 16, 1),
        (16, 16, 1),
        (24, 32, 1),
        (48, 48, 1),
        (64, 32, 2),
        (96, 48, 2),
    ] {
        assert_eq!(of(columns, sum), Some((extent, reads, 8)), "{columns}");
    }
    assert_eq!(of(16, cut(4096, 4096, 256)), Some((16, 1, 4)));
    // The last block has one piece.
    assert_eq!(of(16, cut(1000, 1000, 200)), Some((16, 1, 2)));
}

#[test]
fn other_sums_are_left_to_other_kernels() {
    let sum = cut(4096, 4096, 128);
    assert_eq!(of(0, sum), None);
    assert_eq!(of(104, sum), None);
    // Fewer pieces than a block has warps, and a tree over grains of three pieces.
    assert_eq!(of(16, cut(4096, 4096, 2048)), None);
    assert_eq!(of(16, cut(768, 96, 32)), None);
    assert!(of(16, cut(768, 64, 32)).is_some());
    for math in [Math::F32, Math::Tf32] {
        assert_eq!(Thin::of(math, 16, &sum), None);
    }
}

#[test]
fn what_is_left_is_a_tree_over_blocks() {
    let thin = Thin::of(Math::F16, 16, &cut(4096, 4096, 128)).expect("thin");
    assert_eq!(pieces(&thin.rest()), [8, 8]);
    assert!(is_one_tree(&thin.rest()));
    let launch = thin.launch(thin.tiles(100), Vec::new());
    assert_eq!(launch.entry, "lora_up_grad_weight_thin_f16_16");
    assert_eq!((launch.grid, launch.block), ([16, 1, 1], [128, 1, 1]));
    // Six stages of 16 lines of 64 and 16 columns for each of four warps.
    assert_eq!(launch.shared_bytes, 4 * 6 * 16 * (144 + 48));
}
