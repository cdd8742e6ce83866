// Causal attention in the tensor-core domains, the forward pass: src/op/attention.rs, `Attention`.
//
// A block owns queries of one head and walks over the tiles of keys, of which the next is loaded while the present
// one is worked on. Lane 4g + t adds up p for its own keys, those of every 8 that are 2t and 2t + 1: the contract's
// four sums of a row.
#ifndef BITSTEP_ATTENTION_TENSOR_FORWARD_CUH
#define BITSTEP_ATTENTION_TENSOR_FORWARD_CUH

#include "attention_tensor.cuh"

namespace tensor {

// What a warp carries from tile to tile: M times 16 rows, of which a lane has two each.
template <int D, int M>
struct Carried {
    float acc[M][D / 8][4];
    float reference[M][2];
    float sum[M][2];

    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int m = 0; m < M; m++) {
            fill<D / 8>(acc[m], 0.0f);
#pragma unroll
            for (int h = 0; h < 2; h++) reference[m][h] = contract::from_bits(contract::NAN_BITS), sum[m][h] = 0.0f;
        }
    }
};

// Hides key j of a tile on the diagonal from row i where j > i: a score of minus infinity has no weight.
template <int M>
__device__ __forceinline__ void hide(float (&s)[M][8][4], int first_key, int first_row) {
    const int lane = threadIdx.x & 31, ahead = first_key + 2 * (lane & 3) - first_row - (lane >> 2);
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int n = 0; n < 8; n++)
#pragma unroll
            for (int e = 0; e < 4; e++)
                if (ahead + 8 * n + (e & 1) > 16 * m + 8 * (e >> 1)) s[m][n][e] = -infinite();
}

// Scores of a tile become weights; where one passes its row's reference, that is raised and the sums rescaled.
template <int D, int M>
__device__ __forceinline__ void softmax(float (&s)[M][8][4], Carried<D, M>& carried, float minus_k) {
    float top[M][2];
    bool passed = false;
#pragma unroll
    for (int m = 0; m < M; m++) {
        top[m][0] = top[m][1] = -infinite();
#pragma unroll
        for (int n = 0; n < 8; n++)
#pragma unroll
            for (int e = 0; e < 4; e++) top[m][e >> 1] = max_or_nan(top[m][e >> 1], s[m][n][e]);
#pragma unroll
        for (int h = 0; h < 2; h++) passed |= passes(top[m][h], minus_k, carried.reference[m][h]);
    }
    if (__any_sync(0xffffffffu, passed)) {
#pragma unroll
        for (int m = 0; m < M; m++)
#pragma unroll
            for (int h = 0; h < 2; h++) {
                float most = max_or_nan(top[m][h], __shfl_xor_sync(0xffffffffu, top[m][h], 1));
                most = max_or_nan(most, __shfl_xor_sync(0xffffffffu, most, 2));
                if (!passes(most, minus_k, carried.reference[m][h])) continue;
                float factor, addend;
                raise(carried.reference[m][h], factor, addend, most, minus_k);
                carried.sum[m][h] = __fmaf_rn(carried.sum[m][h], factor, addend);
#pragma unroll
                for (int n = 0; n < D / 8; n++)
#pragma unroll
                    for (int e = 2 * h; e < 2 * h + 2; e++)
                        carried.acc[m][n][e] = __fmaf_rn(carried.acc[m][n][e], factor, addend);
            }
    }
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int n = 0; n < 8; n++)
#pragma unroll
            for (int e = 0; e < 4; e++) {
                s[m][n][e] = score_weight(s[m][n][e], minus_k, carried.reference[m][e >> 1]);
                carried.sum[m][e >> 1] = __fadd_rn(carried.sum[m][e >> 1], s[m][n][e]);
            }
}

// Writes the output and the statistic of half h of the lane's rows: `o` and `lse` are the row's.
template <class H, int D, bool EXACT>
__device__ __forceinline__ void finish(typename H::Element* o, float* lse, const float (&acc)[D / 8][4], int half,
                                       float sum, float reference, int dim) {
    store_row<H, D, EXACT>(o, acc, half, __fdiv_rn(1.0f, sum), 0, dim);
    if ((threadIdx.x & 3) == 0) *lse = row_statistic(reference, sum);
}

// What a block of the forward pass is: M times 16 rows a warp; with STAGES = 2 the next tile is loaded beside the
// present one; with HELD the queries stay in registers and their room in shared memory is the second stage's.
template <class Format, int COLUMNS, int M_, int WARPS_, int STAGES_, bool HELD_, bool EXACT_>
struct Forward {
    typedef Format H;
    static constexpr int D = COLUMNS, M = M_, WARPS = WARPS_, STAGES = STAGES_;
    static constexpr bool HELD = HELD_, EXACT = EXACT_;
    static constexpr int ROWS = 16 * M * WARPS, THREADS = 32 * WARPS;
    typedef Rows<H, D> R;
    static_assert(!HELD || (STAGES == 2 && ROWS <= 2 * TILE), "queries fit in a stage");
};

// One tile for a warp; on the diagonal its first `groups` groups of 16 keys, the others of which are hidden.
template <class F, class Left>
__device__ __forceinline__ void attend(Carried<F::D, F::M>& carried, Address keys, Address values, int first_key,
                                       int first_row, float minus_k, Left left) {
    typedef typename F::R R;
    const bool diagonal = first_key + TILE > first_row;
    const int groups = diagonal ? (first_row - first_key) / 16 + F::M : TILE / 16;
    float s[F::M][8][4];
#pragma unroll
    for (int m = 0; m < F::M; m++) fill<8>(s[m], 0.0f);
    const Address right = R::right(keys);
#pragma unroll
    for (int k = 0; k < R::STEPS; k++) {
        unsigned a[F::M][4];
#pragma unroll
        for (int m = 0; m < F::M; m++) left(m, k, a[m]);
#pragma unroll
        for (int n = 0; n < 4; n++) {
            unsigned b[4];
            load_matrices(b, R::step(right, k) + n * 16 * R::BYTES);
#pragma unroll
            for (int m = 0; m < F::M; m++) {
                F::H::step(s[m][2 * n], a[m], b[0], b[1]);
                F::H::step(s[m][2 * n + 1], a[m], b[2], b[3]);
            }
        }
    }
    if (diagonal) hide<F::M>(s, first_key, first_row);
    softmax<F::D, F::M>(s, carried, minus_k);
    chains<typename F::H, F::D, F::D, 8, F::M>(carried.acc, s, along<typename F::H, F::D>(values), groups, 0);
}

// Grid: (batch · heads, blocks of queries, the last ones first).
template <class F>
__device__ __forceinline__ void forward(const typename F::H::Element* qkv, typename F::H::Element* o, float* lse,
                                        const Sizes<F::D, F::EXACT>& sizes, float factor) {
    typedef typename F::H H;
    typedef typename F::R R;
    constexpr int D = F::D, M = F::M;
    extern __shared__ __align__(128) char raw[];
    char* const shared = aligned(raw);
    constexpr int STAGE = 2 * TILE * R::BYTES;
    // The queries lie in the second stage if they are held, behind the stages otherwise.
    char* const queries = shared + (F::HELD ? 1 : F::STAGES) * STAGE;

    const int d = sizes.dim(), seq_len = sizes.seq_len, warp = threadIdx.x >> 5;
    const int head = blockIdx.x % sizes.n_heads;
    const size_t sequence = (size_t)(blockIdx.x / sizes.n_heads) * seq_len;
    const int first = (int)(gridDim.y - 1 - blockIdx.y) * F::ROWS;
    const int end = first + F::ROWS < seq_len ? first + F::ROWS : seq_len;
    const int kv_head = head / (sizes.n_heads / sizes.n_kv_heads);
    const size_t columns = sizes.columns();
    const typename H::Element* const q_from = qkv + (sequence + first) * columns + (size_t)head * d;
    const typename H::Element* const k_from = qkv + sequence * columns + (size_t)(sizes.n_heads + kv_head) * d;
    const typename H::Element* const v_from = k_from + (size_t)sizes.n_kv_heads * d;
    const int tiles = (end + TILE - 1) / TILE;

    auto stage = [&](int tile) { return shared + (F::STAGES == 2 && (tile & 1) ? STAGE : 0); };
    auto load_tile = [&](int tile) {
        if (tile < tiles) {
            // Keys behind the block's last query are hidden from all of it.
            const int at = tile * TILE, count = end - at < TILE ? end - at : TILE;
            load_rows<H, D, F::THREADS, F::EXACT>(stage(tile), k_from + at * columns, columns, TILE, count, d);
            load_rows<H, D, F::THREADS, F::EXACT>(stage(tile) + STAGE / 2, v_from + at * columns, columns, TILE, count,
                                                  d);
        }
        copy_async_commit();
    };
    load_rows<H, D, F::THREADS, F::EXACT>(queries, q_from, columns, F::ROWS, end - first, d);
    load_tile(0);

    const int first_row = first + warp * 16 * M;
    const Address own = R::left(address_of(queries) + warp * 16 * M * R::BYTES);
    unsigned held[F::HELD ? M : 1][F::HELD ? R::STEPS : 1][4];
    if constexpr (F::HELD) {
        copy_async_wait<0>();
        settle<H, D, F::THREADS>(queries, F::ROWS);
        __syncthreads();
#pragma unroll
        for (int m = 0; m < M; m++)
#pragma unroll
            for (int k = 0; k < R::STEPS; k++) load_matrices(held[m][k], R::step(own, k) + m * 16 * R::BYTES);
    }
    auto left = [&](int m, int k, unsigned(&a)[4]) {
        if constexpr (F::HELD) {
#pragma unroll
            for (int i = 0; i < 4; i++) a[i] = held[m][k][i];
        } else {
            load_matrices(a, R::step(own, k) + m * 16 * R::BYTES);
        }
    };

    Carried<D, M> carried;
    carried.clear();
    const int diagonal = first_row < end ? first_row / TILE : -1;
    for (int tile = 0; tile < tiles; tile++) {
        copy_async_wait<0>();
        settle<H, D, F::THREADS>(stage(tile), 2 * TILE);
        if (!F::HELD && tile == 0) settle<H, D, F::THREADS>(queries, F::ROWS);
        __syncthreads();
        if (F::STAGES == 2) load_tile(tile + 1);
        const Address keys = address_of(stage(tile)), values = keys + STAGE / 2;
        if (tile <= diagonal)
            attend<F>(carried, keys, values, tile * TILE, first_row, contract::negate(factor), left);
        if (F::STAGES == 1) {
            __syncthreads();
            load_tile(tile + 1);
        }
    }

#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
            float sum = carried.sum[m][h];
            sum = __fadd_rn(sum, __shfl_xor_sync(0xffffffffu, sum, 1));
            sum = __fadd_rn(sum, __shfl_xor_sync(0xffffffffu, sum, 2));
            const int lane = threadIdx.x & 31, i = first_row + 16 * m + 8 * h + (lane >> 2);
            if (i >= seq_len) continue;
            const size_t token = sequence + i;
            finish<H, D, F::EXACT>(o + token * sizes.query_columns() + (size_t)head * d,
                                   lse + token * sizes.n_heads + head, carried.acc[m], h, sum,
                                   carried.reference[m][h], d);
        }
}

}  // namespace tensor

#define ATTENTION(NAME, H, D, M, WARPS, STAGES, HELD, EXACT, BLOCKS)                                              \
    extern "C" __global__ void __launch_bounds__(32 * WARPS, BLOCKS)                                              \
        NAME(const tensor::H::Element* qkv, tensor::H::Element* o, float* lse, unsigned seq_len,                  \
             unsigned n_heads, unsigned n_kv_heads, unsigned head_dim, float factor) {                             \
        typedef tensor::Forward<tensor::H, D, M, WARPS, STAGES, HELD, EXACT> F;                                   \
        const tensor::Sizes<D, EXACT> sizes = {(int)seq_len, (int)n_heads, (int)n_kv_heads, (int)head_dim};       \
        tensor::forward<F>(qkv, o, lse, sizes, factor);                                                            \
    }

#endif
