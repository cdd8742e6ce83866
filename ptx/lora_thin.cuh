// The products of adapters with few columns: the lower product, the gradient of its output, and the gradient of the upper
// matrix as a sum over tokens with a thin factor.
#pragma once
#include "lora.cuh"
#include "thin_rows.cuh"
#include "thin_sum.cuh"

// One block of s[t, k] = sum_i x[t, i] * a[k, i].
template <class Rows>
__device__ __forceinline__ void thin_down_tile(const unsigned short* x, const unsigned short* a, unsigned short* s,
                                               unsigned rows, unsigned n_in, unsigned ranks) {
    const unsigned tiles_m = tiles_of(rows, Rows::ROWS);
    const size_t row0 = (size_t)(blockIdx.x % tiles_m) * Rows::ROWS, column0 = (size_t)(blockIdx.x / tiles_m) * Rows::WIDTH;
    const ThinOperands p = {x + row0 * n_in, a + column0 * n_in, n_in, n_in, (unsigned)(rows - row0), (unsigned)(ranks - column0), n_in};
    Rows::tile(p, s + row0 * ranks + column0, ranks, [](float sum) { return sum; });
}

// One block of ds[t, part * rank + k] = (sum_o dy[t, first + o] * b[row + o, k]) * scale.
template <class Rows>
__device__ __forceinline__ void thin_up_grad_input_tile(const unsigned short* dy, const unsigned short* b,
                                                        unsigned short* ds, unsigned rows, const Ranks& of, float scale,
                                                        const Parts& parts) {
    const unsigned tiles_m = tiles_of(rows, Rows::ROWS), tiles = tiles_m * tiles_of(of.rank, Rows::WIDTH);
    const unsigned index = blockIdx.x / tiles, block = blockIdx.x % tiles;
    const Part part = part_at(parts, index);
    const size_t row0 = (size_t)(block % tiles_m) * Rows::ROWS, column0 = (size_t)(block / tiles_m) * Rows::WIDTH;
    const ThinOperands p = {dy + row0 * of.n_out + part.first, b + (size_t)part.row * of.rank + column0, of.n_out, of.rank,
                            (unsigned)(rows - row0), (unsigned)(of.rank - column0), part.columns};
    Rows::tile(p, ds + row0 * of.ranks + index * of.rank + column0, of.ranks,
               [&](float sum) { return __fmul_rn(sum, scale); });
}

// One block: four neighbouring pieces of one tile of db[row + o, k] = (sum_t dy[t, first + o] * s[t, part * rank + k]) * scale;
// the scale multiplies the folded sum.
template <class Sum>
__device__ __forceinline__ void thin_up_grad_weight_tile(const unsigned short* dy, const unsigned short* s, float* db,
                                                         unsigned* arrivals, float4* partials, const Ranks& of, float scale,
                                                         const Cut& cut, const Parts& parts) {
    const unsigned groups = (cut.pieces + Sum::WARPS - 1) / Sum::WARPS, tiles = gridDim.x / groups;
    const unsigned tile = blockIdx.x % tiles, tiles_n = tiles_of(of.rank, Sum::COLUMNS);
    unsigned block = tile;
    const Part part = part_of<Sum::ROWS>(parts, tiles_n, block);
    const unsigned row0 = block / tiles_n * Sum::ROWS, column0 = block % tiles_n * Sum::COLUMNS;
    const TensorOutput<Sum, float> out(db + (size_t)part.row * of.rank, part.columns, of.rank, row0, column0);
    const bool pairs = out.aligned(8);
    Sum::sum(
        cut, tile, blockIdx.x / tiles, arrivals, partials,
        [&](size_t token, Columns& left, Columns& right) {
            left = columns_of(dy, token, of.n_out, part.first + row0, part.columns - row0);
            right = columns_of(s, token, of.ranks, part.index * of.rank + column0, of.rank - column0);
        },
        [&](unsigned q, float4 v) {
            const int i = q / Sum::ACROSS, j = q % Sum::ACROSS;
            store_floats<Sum>(out, i, j, 0, __fmul_rn(v.x, scale), __fmul_rn(v.y, scale), pairs, false);
            store_floats<Sum>(out, i, j, 1, __fmul_rn(v.z, scale), __fmul_rn(v.w, scale), pairs, false);
        });
}
