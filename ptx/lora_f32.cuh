// Low-rank adapters in f32: thin products whose operands are columns of wider matrices, each output one chain as
// in gemm_f32.cuh. With `VECTORS`, rows of all operands start at multiples of 16 bytes and are whole quads.
#pragma once
#include "gemm_f32.cuh"
#include "lora.cuh"
#include "pieces.cuh"

// Calls `put(row, column, sum)` for each of this thread's sums in an output of m rows and n columns.
template <class Tile, class Put>
__device__ __forceinline__ void each_sum(const float (&acc)[Tile::PER_ROW][Tile::PER_COLUMN], unsigned row0,
                                         unsigned column0, unsigned m, unsigned n, Put put) {
#pragma unroll
    for (int i = 0; i < Tile::PER_ROW; ++i) {
#pragma unroll
        for (int j = 0; j < Tile::PER_COLUMN; ++j) {
            const unsigned row = row0 + Tile::row(i), column = column0 + Tile::column(j);
            if (row < m && column < n) put(row, column, acc[i][j]);
        }
    }
}

// One block: y[t, first + o] = fma(scale, sum_k s[t, part * rank + k] * b[row + o, k], y[t, first + o]).
template <class Tile>
__device__ __forceinline__ void lora_up_tile(const float* s, const float* b, float* y, unsigned rows, const Ranks& of,
                                             float scale, const Parts& parts) {
    const unsigned tiles_m = tiles_of(rows, Tile::ROWS);
    unsigned block = blockIdx.x, tile_m, tile_n;
    const Part part = part_of<Tile::COLUMNS>(parts, tiles_m, block);
    place_tile(block, tiles_m, tiles_of(part.columns, Tile::COLUMNS), tile_m, tile_n);
    const unsigned row0 = tile_m * Tile::ROWS, column0 = tile_n * Tile::COLUMNS;
    float acc[Tile::PER_ROW][Tile::PER_COLUMN];
    clear(acc);
    if (of.rank > 0) {
        Tile::stream(typename Tile::StripA(s + part.index * of.rank, row0, rows, of.ranks),
                     typename Tile::StripB(b + (size_t)part.row * of.rank, column0, part.columns, of.rank), of.rank, acc);
    }
    each_sum<Tile>(acc, row0, column0, rows, part.columns, [&](unsigned row, unsigned column, float sum) {
        float* at = y + (size_t)row * of.n_out + part.first + column;
        *at = __fmaf_rn(scale, sum, *at);
    });
}

// One block: dx[t, i] = sum_k ds[t, k] * a[k, i], added to what dx holds where `add` says so.
template <class Tile>
__device__ __forceinline__ void lora_down_grad_tile(const float* ds, const float* a, float* dx, unsigned rows,
                                                    unsigned n_in, unsigned ranks, bool add) {
    unsigned tile_m, tile_n;
    place_tile(blockIdx.x, tiles_of(rows, Tile::ROWS), tiles_of(n_in, Tile::COLUMNS), tile_m, tile_n);
    Output out(dx, rows, n_in, add);
    out.row0 = tile_m * Tile::ROWS, out.column0 = tile_n * Tile::COLUMNS;
    float acc[Tile::PER_ROW][Tile::PER_COLUMN];
    clear(acc);
    Tile::run(Product{ds, a, rows, n_in, ranks}, out.row0, out.column0, acc);
    store_tile<Tile>(out, acc);
}

// One block: ds[t, part * rank + k] = (sum_o dy[t, first + o] * b[row + o, k]) * scale.
template <class Tile>
__device__ __forceinline__ void lora_up_grad_input_tile(const float* dy, const float* b, float* ds, unsigned rows,
                                                        const Ranks& of, float scale, const Parts& parts) {
    const unsigned tiles_m = tiles_of(rows, Tile::ROWS), tiles = tiles_m * tiles_of(of.rank, Tile::COLUMNS);
    const unsigned index = blockIdx.x / tiles, block = blockIdx.x % tiles;
    const Part part = part_at(parts, index);
    const unsigned row0 = block % tiles_m * Tile::ROWS, column0 = block / tiles_m * Tile::COLUMNS;
    float acc[Tile::PER_ROW][Tile::PER_COLUMN];
    clear(acc);
    if (part.columns > 0) {
        Tile::stream(typename Tile::StripA(dy + part.first, row0, rows, of.n_out),
                     typename Tile::StripB(b + (size_t)part.row * of.rank, column0, of.rank, of.rank), part.columns, acc);
    }
    each_sum<Tile>(acc, row0, column0, rows, of.rank, [&](unsigned row, unsigned column, float sum) {
        ds[(size_t)row * of.ranks + index * of.rank + column] = __fmul_rn(sum, scale);
    });
}

// One block: one piece of one tile of db[row + o, k] = (sum_t dy[t, first + o] * s[t, part * rank + k]) * scale; the
// scale multiplies the folded sum.
template <class Tile>
__device__ __forceinline__ void lora_up_grad_weight_tile(const float* dy, const float* s, float* db, unsigned* arrivals,
                                                         float* partials, const Ranks& of, float scale, const Cut& cut,
                                                         const Parts& parts) {
    constexpr unsigned SUMS = Tile::PER_ROW * Tile::PER_COLUMN;
    const unsigned tiles = gridDim.x / cut.pieces, tile = blockIdx.x % tiles, piece = blockIdx.x / tiles;
    const unsigned tiles_n = tiles_of(of.rank, Tile::COLUMNS);
    unsigned block = tile;
    const Part part = part_of<Tile::ROWS>(parts, tiles_n, block);
    const unsigned row0 = block / tiles_n * Tile::ROWS, column0 = block % tiles_n * Tile::COLUMNS;
    const size_t start = cut.start(piece);
    const unsigned terms = cut.terms(piece);
    float acc[Tile::PER_ROW][Tile::PER_COLUMN];
    clear(acc);
    if (terms > 0) {
        Tile::stream(typename Tile::StripA(dy + start * of.n_out + part.first, row0, part.columns, of.n_out),
                     typename Tile::StripB(s + start * of.ranks + part.index * of.rank, column0, of.rank, of.ranks), terms, acc);
    }
    float* to = db + (size_t)part.row * of.rank;
    if (cut.pieces > 1) {
        const size_t stride = SUMS * Tile::THREADS;
        float* leaves = partials + (size_t)tile * cut.pieces * stride + threadIdx.x;
#pragma unroll
        for (unsigned q = 0; q < SUMS; ++q)
            leaves[piece * stride + q * Tile::THREADS] = acc[q / Tile::PER_COLUMN][q % Tile::PER_COLUMN];
        if (!last_to_arrive(arrivals + tile, cut.pieces)) return;
#pragma unroll
        for (unsigned q = 0; q < SUMS; ++q) {
            acc[q / Tile::PER_COLUMN][q % Tile::PER_COLUMN] =
                fold_grains(leaves + q * Tile::THREADS, stride, cut.pieces, cut.pieces_of_grain);
        }
    }
    each_sum<Tile>(acc, row0, column0, part.columns, of.rank, [&](unsigned row, unsigned column, float sum) {
        to[(size_t)row * of.rank + column] = __fmul_rn(sum, scale);
    });
}
