// Gradients of weights in f32, by tiles and pieces.
//
// A block computes one piece of one output tile. With more than one piece it leaves its partial sums in the
// workspace, and the block that arrives last at a tile folds them: every thread the outputs that it would
// have computed itself. Partials lie in the order of the threads' registers, so that all of it is 16-byte
// accesses whatever the matrix's shape.
#pragma once
#include "gemm_f32.cuh"
#include "pieces.cuh"

template <class Tile>
__device__ __forceinline__ void weight_tile(const float* dy, const float* x, float* dweight, unsigned* arrivals,
                                            float4* partials, unsigned n_in, unsigned n_out, const Cut& cut,
                                            unsigned add, unsigned block) {
    constexpr unsigned QUADS_OF_ROW = Tile::PER_COLUMN / 4, QUADS = Tile::PER_ROW * QUADS_OF_ROW;
    static_assert(QUADS % 2 == 0, "quads are folded in pairs");
    // What is needed after the chains waits in shared memory: the chains need all registers.
    __shared__ unsigned place[4];
    float acc[Tile::PER_ROW][Tile::PER_COLUMN];
    clear(acc);
    {
        const unsigned tiles_m = (n_out + Tile::ROWS - 1) / Tile::ROWS;
        const unsigned tiles_n = (n_in + Tile::COLUMNS - 1) / Tile::COLUMNS;
        // All tiles of a piece follow each other: they share its tokens.
        const unsigned piece = block / (tiles_m * tiles_n), tile = block % (tiles_m * tiles_n);
        unsigned tile_m, tile_n;
        place_tile(tile, tiles_m, tiles_n, tile_m, tile_n);
        if (threadIdx.x == 0) {
            place[0] = tile_m * Tile::ROWS, place[1] = tile_n * Tile::COLUMNS;
            place[2] = tile, place[3] = piece;
        }
        const size_t start = cut.start(piece);
        const unsigned terms = cut.terms(piece);
        Tile::run(Product{dy + start * n_out, x + start * n_in, n_out, n_in, terms}, tile_m * Tile::ROWS,
                  tile_n * Tile::COLUMNS, acc);
    }
    __syncthreads();
    Output out(dweight, n_out, n_in, add != 0);
    out.row0 = place[0], out.column0 = place[1];
    const unsigned tile = place[2], piece = place[3];
    if (cut.pieces == 1) {
        store_tile<Tile>(out, acc);
        return;
    }
    const size_t stride = QUADS * Tile::THREADS;
    float4* leaves = partials + (size_t)tile * cut.pieces * stride + threadIdx.x;
#pragma unroll
    for (unsigned q = 0; q < QUADS; ++q) {
        const float* v = &acc[q / QUADS_OF_ROW][q % QUADS_OF_ROW * 4];
        leaves[piece * stride + q * Tile::THREADS] = make_float4(v[0], v[1], v[2], v[3]);
    }
    if (!last_to_arrive(arrivals + tile, cut.pieces)) return;
    if (!short_tree(cut.pieces, cut.pieces_of_grain)) {
#pragma unroll 1
        for (unsigned q = 0; q < QUADS; ++q) {
            const float4 v = fold_grains(leaves + q * Tile::THREADS, stride, cut.pieces, cut.pieces_of_grain);
            store_quad<Tile>(out, q / QUADS_OF_ROW, q % QUADS_OF_ROW * 4, v);
        }
        return;
    }
    // Two quads together: the loads of both are under way before the first is used.
#pragma unroll 1
    for (unsigned q = 0; q < QUADS; q += 2) {
        const float4 first = fold_eight(leaves + q * Tile::THREADS, stride, cut.pieces);
        const float4 second = fold_eight(leaves + (q + 1) * Tile::THREADS, stride, cut.pieces);
        store_quad<Tile>(out, q / QUADS_OF_ROW, q % QUADS_OF_ROW * 4, first);
        store_quad<Tile>(out, (q + 1) / QUADS_OF_ROW, (q + 1) % QUADS_OF_ROW * 4, second);
    }
}
