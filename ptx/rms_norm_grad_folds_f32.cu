// The sums over the pieces of up to 16 weight gradients of the RMS norm of one size, whose rows of partials lie side by
// side in the workspace: a block a gradient and 32 of its columns. Where the pieces form one tree, its warps read runs of
// 32 rows, all of a run under way together; by fact (2) of contract.cuh a run is a subtree. Sums with a tree for each
// grain, and very long ones, go through memory, a thread a column.
#include "contract.cuh"

using namespace contract;

/// Rows of a run, the most runs of a tree, and warps of a block.
constexpr unsigned RUN = 32, MOST_RUNS = 128, WARPS = 8;

/// The tree over n leaves that `leaf_at(i)` gives, 1 to a run of them. All loads of a run are under way together: what
/// stands for a leaf behind the last is not added.
template <typename Leaf>
__device__ __forceinline__ float tree_of_run(unsigned n, Leaf leaf_at) {
    float leaf[RUN];
#pragma unroll
    for (int i = 0; i < RUN; ++i) leaf[i] = leaf_at(i < n ? i : n - 1);
    return n == RUN ? tree_registers(leaf, RUN) : tree_registers(leaf, n);
}
__device__ __forceinline__ unsigned run_length(unsigned n, unsigned run) { return n - run * RUN < RUN ? n - run * RUN : RUN; }

/// Column j of a row of n leaves each, at most RUN * MOST_RUNS of them.
__device__ __forceinline__ void fold_runs(const float* __restrict__ rows, float* out, unsigned n, unsigned d) {
    __shared__ float sums[MOST_RUNS][32];
    const unsigned lane = threadIdx.x % 32, warp = threadIdx.x / 32, j = blockIdx.x * 32 + lane;
    unsigned nodes = (n + RUN - 1) / RUN;
    for (unsigned run = warp; run < nodes; run += WARPS) {
        const float* first = rows + (size_t)run * RUN * d + j;
        if (j < d) sums[run][lane] = tree_of_run(run_length(n, run), [&](unsigned i) { return first[(size_t)i * d]; });
    }
    __syncthreads();
    // The roots of a level stand in the first lines; all of them are read before those of the next are written.
    while (nodes > 1) {
        const unsigned runs = (nodes + RUN - 1) / RUN;
        float root = 0.0f;
        if (warp < runs && j < d) root = tree_of_run(run_length(nodes, warp), [&](unsigned i) { return sums[warp * RUN + i][lane]; });
        __syncthreads();
        if (warp < runs) sums[warp][lane] = root;
        __syncthreads();
        nodes = runs;
    }
    if (warp == 0 && j < d) out[j] = sums[0][lane];
}

#define OUTPUTS                                                                                               \
    float *out0, float *out1, float *out2, float *out3, float *out4, float *out5, float *out6, float *out7,   \
        float *out8, float *out9, float *out10, float *out11, float *out12, float *out13, float *out14,       \
        float *out15
#define OUTPUT                                                                                                \
    output(blockIdx.y, out0, out1, out2, out3, out4, out5, out6, out7, out8, out9, out10, out11, out12, out13, \
           out14, out15)

__device__ __forceinline__ float* output(unsigned number, OUTPUTS) {
    switch (number) {
        case 1: return out1;
        case 2: return out2;
        case 3: return out3;
        case 4: return out4;
        case 5: return out5;
        case 6: return out6;
        case 7: return out7;
        case 8: return out8;
        case 9: return out9;
        case 10: return out10;
        case 11: return out11;
        case 12: return out12;
        case 13: return out13;
        case 14: return out14;
        case 15: return out15;
        default: return out0;
    }
}

extern "C" __global__ void __launch_bounds__(256)
rms_norm_grad_folds_f32(const float* __restrict__ partials, unsigned rows, unsigned d, OUTPUTS) {
    fold_runs(partials + (size_t)blockIdx.y * rows * d, OUTPUT, rows, d);
}

extern "C" __global__ void __launch_bounds__(32)
rms_norm_grad_folds_f32_trees(const float* partials, unsigned tokens, unsigned grain, unsigned piece, unsigned d,
                              OUTPUTS) {
    const TokenCut cut{tokens, grain, piece, 1};
    const unsigned j = blockIdx.x * 32 + threadIdx.x;
    if (j >= d) return;
    const size_t rows = (size_t)cut.grains() * cut.pieces_per_grain();
    OUTPUT[j] = cut.root(partials + blockIdx.y * rows * d + j, d);
}
