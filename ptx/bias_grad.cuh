// dbias[o] = the token sum of dy[t, o], where dy is stored in H, which is f32, bf16 or f16, and the sum in f32. A block of 32 x 8 threads serves
// 32 columns (or as many times what 16 bytes hold) and a group of 8 pieces of a grain: each warp runs the chains of one piece, the
// block folds the eight, and the last block of these columns folds the groups.
#pragma once
#include "contract.cuh"
#include "storage.cuh"

namespace bias_grad {

using namespace contract;

template <bool VECTORS, typename H>
__device__ __forceinline__ void columns(const H* __restrict__ dy, float* dbias, const TokenCut& cut, unsigned n_out,
                                        unsigned* counters, float* partials) {
    constexpr unsigned N = VECTORS ? 16 / sizeof(H) : 1, WIDTH = 32 * N;
    __shared__ __align__(16) float chains[8][WIDTH];
    const unsigned x = threadIdx.x, y = threadIdx.y, me = 32 * y + x;
    const unsigned first = blockIdx.y * WIDTH, columns = n_out - first < WIDTH ? n_out - first : WIDTH;
    const unsigned per_grain = cut.groups_per_grain(), grain = blockIdx.x / per_grain, group = blockIdx.x % per_grain;
    if (group >= cut.groups(grain)) return;
    const unsigned left = cut.pieces(grain) - 8 * group, pieces = left < 8 ? left : 8;
    float acc[N] = {};
    if (y < pieces && N * x < columns) {
        const unsigned end = cut.end(grain, 8 * group + y);
        const H* from = dy + first + N * x;
#pragma unroll 8
        for (unsigned t = cut.first(grain, 8 * group + y); t < end; ++t) {
            if constexpr (VECTORS) {
                const storage::Vector<H> v = storage::load_vector(from + (size_t)t * n_out);
#pragma unroll
                for (unsigned i = 0; i < N; ++i) acc[i] = __fadd_rn(acc[i], v.v[i]);
            } else {
                acc[0] = __fadd_rn(acc[0], storage::widen(from[(size_t)t * n_out]));
            }
        }
    }
#pragma unroll
    for (unsigned i = 0; i < N; ++i) chains[y][N * x + i] = acc[i];
    __syncthreads();
    float* partial = partials + (size_t)blockIdx.x * n_out + first;
    if (me < columns) {
        float leaf[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) leaf[i] = chains[i][me];
        partial[me] = tree_registers(leaf, pieces);
    }
    fold_rows(cut, GroupRows{partials, n_out, counters + blockIdx.y}, first, columns, ToRow{dbias + first});
}

}  // namespace bias_grad

#define BIAS_GRAD_ENTRY(NAME, H, VECTORS)                                                                      \
    extern "C" __global__ void __launch_bounds__(256)                                                         \
    NAME(const storage::H* dy, float* dbias, unsigned tokens, unsigned grain, unsigned piece, unsigned n_out,  \
         unsigned* counters, float* partials) {                                                               \
        bias_grad::columns<VECTORS>(dy, dbias, contract::TokenCut{tokens, grain, piece, 8}, n_out, counters, partials); \
    }

#define BIAS_GRAD_NONE(NAME)                                                                                  \
    extern "C" __global__ void __launch_bounds__(256) NAME(float* dbias, unsigned n_out) {                    \
        const unsigned j = blockIdx.x * 256 + threadIdx.x;                                                    \
        if (j < n_out) dbias[j] = 0.0f;                                                                       \
    }
