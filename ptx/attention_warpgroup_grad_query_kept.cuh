// The query columns of attention's gradient from the `ds` that the key and value pass has kept: the product with the
// keys alone, src/op/attention.rs, `AttentionGradQuery`.
//
// A block is GROUPS warpgroups of 64 queries each, which walk over the tiles of keys together, up to the diagonal.
// What limits them is memory, so STAGES - 1 tiles are on their way while one is worked on.
#ifndef BITSTEP_ATTENTION_WARPGROUP_GRAD_QUERY_KEPT_CUH
#define BITSTEP_ATTENTION_WARPGROUP_GRAD_QUERY_KEPT_CUH

#include "attention_tensor_together.cuh"
#include "attention_warpgroup_kept.cuh"

namespace tensor {

template <class Format, int COLUMNS, int GROUPS_, int STAGES_>
struct GroupGradQueryKept {
    typedef Format H;
    static constexpr int D = COLUMNS, GROUPS = GROUPS_, STAGES = STAGES_, AHEAD = STAGES - 1;
    static constexpr int THREADS = GROUPS * GROUP_THREADS, TILE_BYTES = D / 64 * PANEL;
    static constexpr int STAGE_BYTES = TILE_BYTES + GROUPS * KEPT;
};

// Grid: (batch · heads, blocks of queries, the last ones first). Shared memory: the stages of keys and of each group's
// `ds`.
template <class F>
__device__ __forceinline__ void group_grad_query_kept(const char* kept, const typename F::H::Element* qkv,
                                                      typename F::H::Element* dqkv, const Sizes<F::D, true>& sizes,
                                                      float scale, const Turning& with) {
    typedef typename F::H H;
    constexpr int D = F::D;
    extern __shared__ __align__(128) char raw[];
    char* const stages = panels(raw);

    const int seq_len = sizes.seq_len, group = threadIdx.x / GROUP_THREADS, lane = threadIdx.x & 31;
    const int head = blockIdx.x % sizes.n_heads;
    const size_t sequence = (size_t)(blockIdx.x / sizes.n_heads) * seq_len;
    const int kv_head = head / (sizes.n_heads / sizes.n_kv_heads);
    const size_t columns = sizes.columns();
    const typename H::Element* const keys_from = qkv + sequence * columns + (size_t)(sizes.n_heads + kv_head) * D;
    // Tiles of rows are dealt out from the end; the groups that are left over in the last block have none.
    const int all = (seq_len + TILE - 1) / TILE, last = all - 1 - (int)blockIdx.y * F::GROUPS;
    const int own = last - (F::GROUPS - 1) + group, tiles = last + 1;
    const char* const mine = kept + kept_at(blockIdx.x, all, own < 0 ? 0 : own, 0);

    auto stage = [&](int tile) { return stages + tile % F::STAGES * F::STAGE_BYTES; };
    auto load = [&](int tile) {
        if (tile < tiles)
            load_tile<H, D, F::THREADS>(stage(tile), keys_from + (size_t)tile * TILE * columns, columns,
                                        seq_len - tile * TILE, threadIdx.x);
        if (tile <= own)
            load_kept(stage(tile) + F::TILE_BYTES + group * KEPT, mine + (size_t)tile * KEPT,
                      threadIdx.x % GROUP_THREADS);
        copy_async_commit();
    };
#pragma unroll
    for (int tile = 0; tile < F::AHEAD; tile++) load(tile);

    float dq[D / 8][4];
    fill<D / 8>(dq, 0.0f);
    for (int tile = 0; tile < tiles; tile++) {
        copy_async_wait<F::AHEAD - 1>();
        // The last product's tile will be loaded over.
        wait_products<0>();
        settled(dq);
        publish();
        __syncthreads();
        load(tile + F::AHEAD);
        if (tile > own) continue;
        const Descriptor keys = descriptor(address_of(stage(tile)));
        begin_products();
        add_turned_tile<H>(dq, moved(keys, F::TILE_BYTES + group * KEPT), keys);
        commit_products();
    }
    const int row = own * TILE + 16 * (threadIdx.x >> 5 & 3) + (lane >> 2);
    Angles<D> angles;
    if (own >= 0) load_angles(angles, row, seq_len, with);
    wait_products<0>();
    settled(dq);
    if (own < 0) return;
#pragma unroll
    for (int h = 0; h < 2; h++)
        if (row + 8 * h < seq_len)
            store_gradient<H, D, true>(dqkv + (sequence + row + 8 * h) * columns + (size_t)head * D, dq, h, scale, D,
                                       angles, with);
}

}  // namespace tensor

// Rotates the gradient back if `turned`.
#define GROUP_GRAD_QUERY_KEPT(NAME, H, D, GROUPS, STAGES, BLOCKS)                                                 \
    extern "C" __global__ void __launch_bounds__(128 * GROUPS, BLOCKS)                                            \
        NAME(const char* kept, const tensor::H::Element* qkv, tensor::H::Element* dqkv, const float* table,       \
             unsigned turned, unsigned seq_len, unsigned n_heads, unsigned n_kv_heads, unsigned head_dim,         \
             float scale) {                                                                                       \
        typedef tensor::GroupGradQueryKept<tensor::H, D, GROUPS, STAGES> F;                                       \
        const tensor::Sizes<D, true> sizes = {(int)seq_len, (int)n_heads, (int)n_kv_heads, (int)head_dim};        \
        tensor::group_grad_query_kept<F>(kept, qkv, dqkv, sizes, scale, tensor::Turning{table, turned});          \
    }

#endif
