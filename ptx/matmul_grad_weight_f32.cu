// dweight[o, i] (+)= sum_t dy[t, o] * x[t, i]: an fma chain over ascending tokens within a piece, pieces and
// grains folded by the balanced tree.
//
// A block computes one piece of one output tile. With more than one piece it leaves its partial sums in the
// workspace, and the block that arrives last at a tile folds them: every thread the outputs that it would
// have computed itself. Partials lie in the order of the threads' registers, so that all of it is 16-byte
// accesses whatever the matrix's shape.
#include "gemm_f32.cuh"
#include "pieces.cuh"

template <class Tile>
__device__ __forceinline__ void weight_tile(const float* dy, const float* x, float* dweight, unsigned* arrivals,
                                            float4* partials, unsigned n_in, unsigned n_out, const Cut& cut,
                                            unsigned add) {
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
        const unsigned piece = blockIdx.x / (tiles_m * tiles_n), tile = blockIdx.x % (tiles_m * tiles_n);
        unsigned tile_m, tile_n;
        place_tile(tile, tiles_m, tiles_n, tile_m, tile_n);
        if (threadIdx.x == 0) {
            place[0] = tile_m * Tile::ROWS, place[1] = tile_n * Tile::COLUMNS;
            place[2] = tile, place[3] = piece;
        }
        const unsigned grain = piece / cut.pieces_of_grain;
        const size_t start = (size_t)grain * cut.grain + (size_t)(piece % cut.pieces_of_grain) * cut.piece;
        const size_t grain_end = (size_t)(grain + 1) * cut.grain;
        const size_t end = grain_end < cut.tokens ? grain_end : cut.tokens;
        const unsigned terms = start < end ? (unsigned)(end - start < cut.piece ? end - start : cut.piece) : 0;
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

// dweight (+)= the tree over products that stand one after another, each `elements` long; T is float or float4.
template <class T>
__device__ __forceinline__ void fold_products(T* products, T* dweight, unsigned elements, unsigned pieces_of_grain,
                                              unsigned pieces, unsigned add) {
    const unsigned at = blockIdx.x * 256 + threadIdx.x;
    if (at >= elements) return;
    const T v = fold_grains(products + at, elements, pieces, pieces_of_grain);
    dweight[at] = add ? sum(dweight[at], v) : v;
}

#define GRAD_WEIGHT(NAME, TILE, BLOCKS)                                                                           \
    extern "C" __global__ void __launch_bounds__(TILE::THREADS, BLOCKS) matmul_grad_weight_f32_##NAME(            \
        const float* __restrict__ dy, const float* __restrict__ x, float* dweight, unsigned* arrivals,            \
        float4* partials, unsigned n_in, unsigned n_out, unsigned tokens, unsigned grain, unsigned piece,         \
        unsigned pieces_of_grain, unsigned pieces, unsigned add) {                                                \
        weight_tile<TILE>(dy, x, dweight, arrivals, partials, n_in, n_out,                                        \
                          Cut{tokens, grain, piece, pieces_of_grain, pieces}, add);                               \
    }

using Tile128x128 = Large<128, 128, 32, 8, 8, Inner::OUTER, Inner::OUTER, true>;
using Tile128x64 = Large<128, 64, 32, 8, 8, Inner::OUTER, Inner::OUTER, true>;
using Tile64x32 = Small<64, 32, 32, 3, 4, 4, Inner::OUTER, Inner::OUTER, true>;
using Tile32x32 = Small<32, 32, 32, 5, 2, 4, Inner::OUTER, Inner::OUTER, true>;
using Tile128x128Any = Large<128, 128, 8, 8, 8, Inner::OUTER, Inner::OUTER, false>;
using Tile32x32Any = Small<32, 32, 32, 5, 2, 4, Inner::OUTER, Inner::OUTER, false>;

GRAD_WEIGHT(128x128, Tile128x128, 2)
GRAD_WEIGHT(128x64, Tile128x64, 4)
GRAD_WEIGHT(64x32, Tile64x32, 4)
GRAD_WEIGHT(32x32, Tile32x32, 4)
GRAD_WEIGHT(128x128_any, Tile128x128Any, 2)
GRAD_WEIGHT(32x32_any, Tile32x32Any, 4)

// `elements` counts quads.
extern "C" __global__ void __launch_bounds__(256)
    matmul_grad_weight_f32_fold(float4* products, float4* dweight, unsigned elements, unsigned pieces_of_grain,
                                unsigned pieces, unsigned add) {
    fold_products(products, dweight, elements, pieces_of_grain, pieces, add);
}

extern "C" __global__ void __launch_bounds__(256)
    matmul_grad_weight_f32_fold_any(float* products, float* dweight, unsigned elements, unsigned pieces_of_grain,
                                    unsigned pieces, unsigned add) {
    fold_products(products, dweight, elements, pieces_of_grain, pieces, add);
}
