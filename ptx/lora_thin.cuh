// The gradient of adapters' upper matrices as a sum over tokens with a thin factor.
#pragma once
#include "lora.cuh"
#include "thin_sum.cuh"

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

// Kernels for thin factors of up to 16, 32 and 48 columns a tile, by the names of a storage and of its format.
#define UP_GRAD_WEIGHT_THIN_OF(STORAGE, FORMAT, RANKS)                                                           \
    extern "C" __global__ void __launch_bounds__(128, 3) lora_up_grad_weight_thin_##STORAGE##_##RANKS(            \
        const unsigned short* __restrict__ dy, const unsigned short* __restrict__ s, float* __restrict__ db,     \
        unsigned* arrivals, float4* partials, unsigned tokens, unsigned grain, unsigned piece,                   \
        unsigned pieces_of_grain, unsigned pieces, unsigned rank, unsigned ranks, unsigned n_out, float scale,   \
        PARTS_PARAMETERS) {                                                                                      \
        thin_up_grad_weight_tile<ThinSum<FORMAT, 64, RANKS>>(dy, s, db, arrivals, partials,                      \
                                                             Ranks{rank, ranks, n_out}, scale,                   \
                                                             Cut{tokens, grain, piece, pieces_of_grain, pieces}, \
                                                             PARTS_GIVEN);                                       \
    }
#define UP_GRAD_WEIGHT_THIN(STORAGE, FORMAT)                                                                     \
    UP_GRAD_WEIGHT_THIN_OF(STORAGE, FORMAT, 16)                                                                  \
    UP_GRAD_WEIGHT_THIN_OF(STORAGE, FORMAT, 32)                                                                  \
    UP_GRAD_WEIGHT_THIN_OF(STORAGE, FORMAT, 48)
