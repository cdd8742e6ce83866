// The rotation of queries and keys and causal attention over them at once, for sequences of no more rows than a tile:
// src/op/rope.rs, `Rope`, and src/op/attention.rs, `Attention`.
//
// A block has a key head of a sequence and all query heads that share it, 16 queries of one a warp, so that no other
// block reads what it rotates in place.
#ifndef BITSTEP_ATTENTION_TENSOR_TURNED_CUH
#define BITSTEP_ATTENTION_TENSOR_TURNED_CUH

#include "attention_tensor_forward.cuh"
#include "attention_tensor_together.cuh"

namespace tensor {

// What is multiplied of 16 bytes that are stored; only tf32 stores more.
template <class H>
__device__ __forceinline__ uint4 multiplied(uint4 words) {
    if constexpr (H::STEP == 16) {
        return words;
    } else {
        auto round = [](unsigned bits) { return H::round(contract::from_bits(bits)); };
        return make_uint4(round(words.x), round(words.y), round(words.z), round(words.w));
    }
}

// Rotates the block's queries and keys in place and copies them to shared memory, where they stand one behind the
// other, a tile of rows each; zeros stand in for rows that are not there. `row_of(row)` gives a row's position in the
// sequence, its first column, and whether it is there.
template <class H, int D, int THREADS, class RowOf>
__device__ __forceinline__ void turn_and_load(char* to, typename H::Element* sequence, size_t columns,
                                              const float* table, RowOf row_of) {
    typedef Rows<H, D> R;
    typedef decltype(stored(H())) Stored;
    constexpr int PAIRS = R::CHUNKS / 2, N = 2 * TILE * PAIRS / THREADS, E = R::PER_CHUNK;
    uint4 low[N], high[N];
    // A thread writes what it has read alone, so all its reads may come first.
#pragma unroll
    for (int n = 0; n < N; n++) {
        const int i = threadIdx.x + n * THREADS, chunk = i % PAIRS;
        const auto row = row_of(i / PAIRS);
        low[n] = high[n] = make_uint4(0, 0, 0, 0);
        if (!row.present) continue;
        const typename H::Element* const from = sequence + row.position * columns + row.column + chunk * E;
        low[n] = *(const uint4*)from;
        high[n] = *(const uint4*)(from + D / 2);
    }
#pragma unroll
    for (int n = 0; n < N; n++) {
        const int i = threadIdx.x + n * THREADS, chunk = i % PAIRS;
        const auto row = row_of(i / PAIRS);
        if (row.present) {
            storage::Vector<Stored> a(low[n]), b(high[n]);
            const float* const angles = table + (size_t)row.position * D + 2 * chunk * E;
#pragma unroll
            for (int j = 0; j < E / 2; j++) {
                const float4 two = __ldg((const float4*)(angles + 4 * j));
                rope::turn<false>(a.v[2 * j], b.v[2 * j], two.x, two.y);
                rope::turn<false>(a.v[2 * j + 1], b.v[2 * j + 1], two.z, two.w);
            }
            low[n] = a.words(), high[n] = b.words();
            typename H::Element* const at = sequence + row.position * columns + row.column + chunk * E;
            *(uint4*)at = low[n];
            *(uint4*)(at + D / 2) = high[n];
        }
        *(uint4*)(to + R::at(i / PAIRS, chunk)) = multiplied<H>(low[n]);
        *(uint4*)(to + R::at(i / PAIRS, chunk + PAIRS)) = multiplied<H>(high[n]);
    }
}

// Grid: batch · key heads. Shared memory: queries, keys and values, a tile of rows each. All queries of the group's
// heads, each head's rounded up to 16, are no more than a tile.
template <class F>
__device__ __forceinline__ void turned_forward(const float* table, typename F::H::Element* qkv,
                                               typename F::H::Element* o, float* lse, const Sizes<F::D, true>& sizes,
                                               float factor) {
    typedef typename F::H H;
    typedef typename F::R R;
    constexpr int D = F::D, OWN = TILE * R::BYTES;
    extern __shared__ __align__(128) char raw[];
    char *const queries = aligned(raw), *const keys = queries + OWN, *const values = keys + OWN;

    const int seq_len = sizes.seq_len, warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    const int kv_head = blockIdx.x % sizes.n_kv_heads, group = sizes.n_heads / sizes.n_kv_heads;
    const size_t first_token = (size_t)(blockIdx.x / sizes.n_kv_heads) * seq_len, columns = sizes.columns();
    const int slabs = (seq_len + 15) / 16, per_head = 16 * slabs;
    const int key_column = (sizes.n_heads + kv_head) * D;
    typename H::Element* const sequence = qkv + first_token * columns;

    load_rows<H, D, F::THREADS, true>(values, sequence + key_column + (size_t)sizes.n_kv_heads * D, columns, TILE,
                                      seq_len, D);
    copy_async_commit();
    struct Row {
        int position, column;
        bool present;
    };
    turn_and_load<H, D, F::THREADS>(queries, sequence, columns, table, [&](int row) -> Row {
        if (row >= TILE) return {row - TILE, key_column, row - TILE < seq_len};
        const int head = row / per_head, position = row % per_head;
        return {position, (kv_head * group + head) * D, head < group && position < seq_len};
    });
    copy_async_wait<0>();
    settle<H, D, F::THREADS>(values, TILE);
    __syncthreads();

    const int head = warp / slabs, first_row = warp % slabs * 16;
    if (head >= group) return;
    const Address own = R::left(address_of(queries) + warp * 16 * R::BYTES);
    Carried<D, 1> carried;
    carried.clear();
    attend<F>(carried, address_of(keys), address_of(values), 0, first_row, contract::negate(factor),
              [&](int, int k, unsigned(&a)[4]) { load_matrices(a, R::step(own, k)); });
#pragma unroll
    for (int h = 0; h < 2; h++) {
        float sum = carried.sum[0][h];
        sum = __fadd_rn(sum, __shfl_xor_sync(0xffffffffu, sum, 1));
        sum = __fadd_rn(sum, __shfl_xor_sync(0xffffffffu, sum, 2));
        const int i = first_row + 8 * h + (lane >> 2), query_head = kv_head * group + head;
        if (i >= seq_len) continue;
        const size_t token = first_token + i;
        finish<H, D, true>(o + token * sizes.query_columns() + (size_t)query_head * D,
                           lse + token * sizes.n_heads + query_head, carried.acc[0], h, sum, carried.reference[0][h],
                           D);
    }
}

}  // namespace tensor

#define ATTENTION_TURNED(NAME, H, D)                                                                              \
    extern "C" __global__ void __launch_bounds__(128, 2)                                                          \
        NAME(const float* table, tensor::H::Element* qkv, tensor::H::Element* o, float* lse, unsigned seq_len,    \
             unsigned n_heads, unsigned n_kv_heads, unsigned head_dim, float factor) {                            \
        typedef tensor::Forward<tensor::H, D, 1, 4, 2, true, true> F;                                             \
        const tensor::Sizes<D, true> sizes = {(int)seq_len, (int)n_heads, (int)n_kv_heads, (int)head_dim};        \
        tensor::turned_forward<F>(table, qkv, o, lse, sizes, factor);                                             \
    }

#endif
