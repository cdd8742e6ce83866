// The sums over the pieces of up to 16 weight gradients of the RMS norm of one size, whose rows of partials lie side by
// side in the workspace: a block a gradient and 32 of its columns. Its warps read runs of 32 rows, all of a run under
// way together; by fact (2) of contract.cuh a run is a subtree.
#include "contract.cuh"

using namespace contract;

/// Rows of a run, and the most runs whose sums a block holds; longer or ragged sums go through memory.
constexpr unsigned RUN = 32, MOST_RUNS = 128, WARPS = 8;

/// The tree over n leaves that `leaf_at(i)` gives, at most a run of them.
template <typename Leaf>
__device__ __forceinline__ float tree_of_run(unsigned n, Leaf leaf_at) {
    float leaf[RUN];
#pragma unroll
    for (int i = 0; i < RUN; ++i) leaf[i] = i < n ? leaf_at(i) : 0.0f;
    return tree_registers(leaf, n);
}
__device__ __forceinline__ unsigned run_length(unsigned n, unsigned run) { return n - run * RUN < RUN ? n - run * RUN : RUN; }

__device__ __forceinline__ void fold(const float* rows, float* out, const TokenCut& cut, unsigned d) {
    __shared__ float sums[MOST_RUNS][32];
    const unsigned lane = threadIdx.x % 32, warp = threadIdx.x / 32, j = blockIdx.x * 32 + lane;
    const unsigned pieces = cut.pieces(0);
    if (cut.grains() > 1 || pieces > RUN * MOST_RUNS) {
        if (warp == 0 && j < d) out[j] = cut.root(rows + j, d);
        return;
    }
    // The roots of each level stand in the first lines; a warp reads the lines of a run before it writes its own.
    unsigned nodes = (pieces + RUN - 1) / RUN;
    for (unsigned run = warp; run < nodes; run += WARPS) {
        const float* first = rows + (size_t)run * RUN * d + j;
        if (j < d) sums[run][lane] = tree_of_run(run_length(pieces, run), [&](unsigned i) { return load_other(first + (size_t)i * d); });
    }
    __syncthreads();
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

extern "C" __global__ void __launch_bounds__(256)
rms_norm_grad_folds_f32(const float* partials, unsigned tokens, unsigned grain, unsigned piece, unsigned d,
                        float* out0, float* out1, float* out2, float* out3, float* out4, float* out5, float* out6,
                        float* out7, float* out8, float* out9, float* out10, float* out11, float* out12, float* out13,
                        float* out14, float* out15) {
    const TokenCut cut{tokens, grain, piece, 1};
    float* out = out0;
    switch (blockIdx.y) {
        case 1: out = out1; break;
        case 2: out = out2; break;
        case 3: out = out3; break;
        case 4: out = out4; break;
        case 5: out = out5; break;
        case 6: out = out6; break;
        case 7: out = out7; break;
        case 8: out = out8; break;
        case 9: out = out9; break;
        case 10: out = out10; break;
        case 11: out = out11; break;
        case 12: out = out12; break;
        case 13: out = out13; break;
        case 14: out = out14; break;
        case 15: out = out15; break;
    }
    const size_t rows = (size_t)cut.grains() * cut.pieces_per_grain();
    fold(partials + blockIdx.y * rows * d, out, cut, d);
}
