// dweight[o, i] (+)= sum_t dy[t, o] * x[t, i]: an fma chain over ascending tokens within a piece, pieces and
// grains folded by the balanced tree.
//
// Of a small output a block computes all pieces of a smaller tile, a warp a piece, and folds them itself.
#include "gemm_f32.cuh"
#include "weight_f32.cuh"

// A warp computes the chains of one piece of a BM x BN tile, a thread TM x TN of them. It copies its operands
// for itself, STAGES blocks of DEPTH terms under way, so that no warp waits for another before the fold.
template <int BM, int BN, int TM, int TN> struct Whole {
    static constexpr int DEPTH = 16, STAGES = 4, STAGE = DEPTH * (BM + BN);
    static constexpr int LANES_M = BM / TM, LANES_N = BN / TN;
    static constexpr int QUADS_OF_ROW = BN / 4, QUADS = BM * QUADS_OF_ROW;
    // Outputs in the order of the matrix.
    static constexpr bool COLUMN_QUADS = true;
    __device__ __forceinline__ static unsigned row(int i) { return i; }
    __device__ __forceinline__ static unsigned column(int j) { return j; }
    static_assert(LANES_M * LANES_N == 32 && TN == 4 && (TM == 2 || TM == 4 || TM == 6), "a warp is a tile");

    // One operand, [term][ROWS] in shared memory and as wide as the matrix in global memory: this thread copies
    // every 32nd quad of a stage.
    template <int ROWS> struct Strip {
        static constexpr int COPIES = DEPTH * ROWS / 128;
        static_assert(COPIES * 128 == DEPTH * ROWS, "whole copies a thread");
        const float* from[COPIES];
        size_t step;

        __device__ __forceinline__ static unsigned quad(int c) { return (threadIdx.x & 31) + 32 * c; }
        __device__ __forceinline__ Strip(const float* base, unsigned first, unsigned rows) : step((size_t)rows * DEPTH) {
#pragma unroll
            for (int c = 0; c < COPIES; ++c) {
                const unsigned term = quad(c) / (ROWS / 4), at = quad(c) % (ROWS / 4) * 4;
                from[c] = base + (size_t)term * rows + least(first + at, rows - 4);
            }
        }
        __device__ __forceinline__ void copy(float* to, unsigned left) {
#pragma unroll
            for (int c = 0; c < COPIES; ++c, to += 128) {
                copy_async_16(to + (threadIdx.x & 31) * 4, from[c], quad(c) / (ROWS / 4) < left);
                from[c] += step;
            }
        }
    };

    // The tile's row of a thread's row i: four side by side, the fifth and sixth behind all fours.
    __device__ __forceinline__ static unsigned tile_row(int i) {
        const unsigned lane = lane_of<LANES_M>();
        if (TM == 2) return 2 * lane + i;
        return i < 4 ? 4 * lane + i : 4 * LANES_M + 2 * lane + i - 4;
    }
    // One term of all chains of this thread.
    __device__ __forceinline__ static void step(const float* a_row, const float* b_row, float (&acc)[TM][TN]) {
        float a[6];
        if (TM >= 4) {
            const float4 v = *(const float4*)(a_row + tile_row(0));
            a[0] = v.x, a[1] = v.y, a[2] = v.z, a[3] = v.w;
        }
        if (TM != 4) {
            const float2 v = *(const float2*)(a_row + tile_row(TM - 2));
            a[TM - 2] = v.x, a[TM - 1] = v.y;
        }
        const float4 b = *(const float4*)(b_row + 4 * lane_of<LANES_N>());
#pragma unroll
        for (int i = 0; i < TM; ++i) {
            acc[i][0] = __fmaf_rn(a[i], b.x, acc[i][0]);
            acc[i][1] = __fmaf_rn(a[i], b.y, acc[i][1]);
            acc[i][2] = __fmaf_rn(a[i], b.z, acc[i][2]);
            acc[i][3] = __fmaf_rn(a[i], b.w, acc[i][3]);
        }
    }

    // The chains of a piece; `stages` is this warp's own shared memory.
    __device__ __forceinline__ static void run(const Product& p, unsigned row0, unsigned column0, float* stages,
                                               float (&acc)[TM][TN]) {
        Strip<BM> strip_a(p.a, row0, p.m);
        Strip<BN> strip_b(p.b, column0, p.n);
        unsigned to_copy = p.k, copied = 0;
        const auto fetch = [&]() {
            if (to_copy > 0) {
                strip_a.copy(stages + copied * STAGE, to_copy);
                strip_b.copy(stages + copied * STAGE + DEPTH * BM, to_copy);
                to_copy -= least(to_copy, DEPTH);
                copied = copied + 1 == STAGES ? 0 : copied + 1;
            }
            // A group a round, even an empty one: the wait counts groups.
            copy_async_commit();
        };
#pragma unroll 1
        for (int s = 0; s < STAGES - 1; ++s) fetch();
        unsigned now = 0;
#pragma unroll 1
        for (unsigned left = p.k; left > 0; left -= least(left, DEPTH)) {
            copy_async_wait<STAGES - 2>();
            __syncwarp();
            fetch();
            const float *a = stages + now * STAGE, *b = a + DEPTH * BM;
            if (left >= DEPTH) {
#pragma unroll
                for (int t = 0; t < DEPTH; ++t) step(a + t * BM, b + t * BN, acc);
            } else {
#pragma unroll 1
                for (unsigned t = 0; t < left; ++t) step(a + t * BM, b + t * BN, acc);
            }
            now = now + 1 == STAGES ? 0 : now + 1;
        }
    }
};

// One tile and all its pieces, at most eight in a short tree: the stages of the warps, then their partial sums.
template <class Tile, int TM, int TN>
__device__ __forceinline__ void whole_tile(const float* dy, const float* x, float* dweight, unsigned n_in,
                                           unsigned n_out, const Cut& cut, unsigned add) {
    constexpr int BM = Tile::QUADS / Tile::QUADS_OF_ROW, BN = 4 * Tile::QUADS_OF_ROW;
    unsigned tile_m, tile_n;
    place_tile(blockIdx.x, (n_out + BM - 1) / BM, (n_in + BN - 1) / BN, tile_m, tile_n);
    Output out(dweight, n_out, n_in, add != 0);
    out.row0 = tile_m * BM, out.column0 = tile_n * BN;
    const unsigned piece = threadIdx.x / 32;
    const size_t start = cut.start(piece);
    float acc[TM][TN];
    clear(acc);
    Tile::run(Product{dy + start * n_out, x + start * n_in, n_out, n_in, cut.terms(piece)}, out.row0, out.column0,
              large_shared + piece * (Tile::STAGES * Tile::STAGE), acc);
    __syncthreads();
    float4* leaves = (float4*)large_shared;
#pragma unroll
    for (int i = 0; i < TM; ++i) {
        const unsigned at = Tile::tile_row(i) * Tile::QUADS_OF_ROW + lane_of<Tile::LANES_N>();
        leaves[piece * Tile::QUADS + at] = make_float4(acc[i][0], acc[i][1], acc[i][2], acc[i][3]);
    }
    __syncthreads();
    for (unsigned q = threadIdx.x; q < Tile::QUADS; q += blockDim.x) {
        float4 v[8];
#pragma unroll
        for (unsigned i = 0; i < 8; ++i) {
            if (i < cut.pieces) v[i] = leaves[i * Tile::QUADS + q];
        }
        store_quad<Tile>(out, q / Tile::QUADS_OF_ROW, q % Tile::QUADS_OF_ROW * 4, fold_held(v, cut.pieces));
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
                          Cut{tokens, grain, piece, pieces_of_grain, pieces}, add, blockIdx.x);                   \
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

#define WHOLE(BM, BN, TM, TN)                                                                                     \
    extern "C" __global__ void __launch_bounds__(256) matmul_grad_weight_f32_whole_##BM##x##BN(                   \
        const float* __restrict__ dy, const float* __restrict__ x, float* dweight, unsigned n_in, unsigned n_out, \
        unsigned tokens, unsigned grain, unsigned piece, unsigned pieces_of_grain, unsigned pieces,               \
        unsigned add) {                                                                                           \
        whole_tile<Whole<BM, BN, TM, TN>, TM, TN>(dy, x, dweight, n_in, n_out,                                    \
                                                  Cut{tokens, grain, piece, pieces_of_grain, pieces}, add);       \
    }

WHOLE(24, 32, 6, 4)
WHOLE(16, 32, 4, 4)
WHOLE(16, 16, 2, 4)

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
