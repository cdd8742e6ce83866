// What the matrix products share, whatever their arithmetic: how operands lie, and which tile a block takes.
#pragma once

// Which index of an operand is contiguous in memory: `K` for A[m][k] and B[n][k], `OUTER` for A[k][m] and B[k][n].
enum class Inner { K, OUTER };

__device__ __forceinline__ unsigned least(unsigned a, unsigned b) { return a < b ? a : b; }

__device__ __forceinline__ bool aligned_16(const void* p) { return ((unsigned long long)p & 15) == 0; }

// Tiles in bands of 16 tile rows, down each band's columns: blocks that run together share both operands.
__device__ __forceinline__ void place_tile(unsigned id, unsigned tiles_m, unsigned tiles_n, unsigned& tile_m,
                                           unsigned& tile_n) {
    const unsigned band_rows = 16;
    const unsigned band = id / (band_rows * tiles_n);
    const unsigned within = id - band * band_rows * tiles_n;
    const unsigned rows = least(band_rows, tiles_m - band * band_rows);
    tile_m = band * band_rows + within % rows;
    tile_n = within / rows;
}
