//! The vector code against plain code, and its bounds checks against broken callers.

use super::*;

struct Dot<'a>(&'a [f32]);

impl Task for Dot<'_> {
    type Out = Vec<u32>;

    #[inline(always)]
    fn run(self) -> Vec<u32> {
        let fma = |&x: &f32| x.mul_add(x, -1.0).to_bits();
        self.0.iter().map(fma).collect()
    }
}

#[test]
fn a_task_gives_the_same_bits_on_every_path() {
    let values: Vec<f32> = (0..1000).map(|i| 1.0 + i as f32 * 1.1e-7).collect();
    let fused = dispatch(SimdPath::Scalar, Dot(&values));
    for path in SimdPath::ALL {
        assert_eq!(dispatch(path, Dot(&values)), fused, "{path}");
    }
    let rounded_twice: Vec<u32> = values.iter().map(|x| (x * x - 1.0).to_bits()).collect();
    assert_ne!(fused, rounded_twice);
}

#[test]
fn transposing_moves_every_element_and_no_other() {
    for (rows, cols) in [(1, 1), (8, 8), (9, 17), (48, 31), (7, 40), (16, 0)] {
        let src: Vec<f32> = (0..rows * (cols + 3)).map(|i| i as f32).collect();
        for path in SimdPath::ALL {
            let mut dst = vec![-1.0; cols * (rows + 2)];
            Transpose {
                src: &src,
                src_stride: cols + 3,
                dst: &mut dst,
                dst_stride: rows + 2,
                rows,
                cols,
            }
            .run(path);
            for (i, &found) in dst.iter().enumerate() {
                let (p, j) = (i / (rows + 2), i % (rows + 2));
                let expected = if j < rows {
                    src[j * (cols + 3) + p]
                } else {
                    -1.0
                };
                assert_eq!(found, expected, "{path} {rows} x {cols} at {p}, {j}");
            }
        }
    }
}

/// A tile of 2 × 16 outputs and 3 steps over slices of the given lengths.
fn tile_over([a, b, c]: [usize; 3], path: SimdPath) -> Vec<f32> {
    let (a, b, mut c) = (vec![1.0; a], vec![1.0; b], vec![0.5; c]);
    Tile {
        rows: 2,
        width: 16,
        k: 3,
        a: &a,
        a_row: 3,
        a_step: 1,
        b: &b,
        c: &mut c,
        c_row: 16,
        start: Start::Resume,
    }
    .run(path);
    c
}

#[test]
fn a_tile_beyond_its_slices_is_caught() {
    for path in SimdPath::ALL {
        assert_eq!(tile_over([6, 48, 32], path), [3.5; 32]);
        for short in [[5, 48, 32], [6, 47, 32], [6, 48, 31]] {
            let caught = std::panic::catch_unwind(|| tile_over(short, path));
            assert!(caught.is_err(), "{path} {short:?}");
        }
    }
}

#[test]
fn a_transpose_beyond_its_slices_is_caught() {
    for [from, to] in [[63, 64], [64, 63]] {
        let caught = std::panic::catch_unwind(|| {
            let (src, mut dst) = (vec![0.0; from], vec![0.0; to]);
            Transpose {
                src: &src,
                src_stride: 8,
                dst: &mut dst,
                dst_stride: 8,
                rows: 8,
                cols: 8,
            }
            .run(SimdPath::Avx2);
        });
        assert!(caught.is_err(), "{from} to {to}");
    }
}
