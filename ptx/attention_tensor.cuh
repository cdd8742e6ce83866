// What the attention kernels of the tensor-core domains share: src/op/attention.rs, src/cpu/attention_tensor.rs.
//
// A warp owns 16 rows (queries, or keys in the key and value pass) and holds its accumulators as the tensor
// core lays them out: lane 4g + t has rows g and g + 8, and of every 8 columns 2t and 2t + 1. Scores stay in
// registers and become the left operand of the next product there. A step's sum has no order within it, so
// tf32 takes a step's keys as 0 2 4 6 1 3 5 7, which is how the accumulators hold them.
//
// Rows of a head lie in shared memory as chunks of 16 bytes: chunk c of row r stands at place c ^ (r mod 8),
// so that matrix loads of 8 rows, and loads of 4 rows 2 apart, meet every bank once.
#ifndef BITSTEP_ATTENTION_TENSOR_CUH
#define BITSTEP_ATTENTION_TENSOR_CUH

#include "async.cuh"
#include "contract.cuh"
#include "softmax.cuh"

namespace tensor {

// Keys of a softmax tile.
constexpr int TILE = 64;
// Others of a part of a tile in the backward passes.
constexpr int PART = 32;
// log2(e) / 128.
constexpr unsigned LOG2_E_UNIT = 0x3c38aa3bu;
__device__ __forceinline__ float infinite() { return contract::from_bits(0x7f800000u); }

// An address in shared memory.
#ifdef BITSTEP_HOST
typedef size_t Address;
__device__ __forceinline__ Address address_of(const char* p) { return (Address)p; }
#define TENSOR_STEP(NAME, TEXT)                                                                              \
    const unsigned b[2] = {b0, b1};                                                                          \
    emu_mma_##NAME(d, a, b)
#else
typedef unsigned Address;
__device__ __forceinline__ Address address_of(const char* p) { return (Address)__cvta_generic_to_shared(p); }
#define TENSOR_STEP(NAME, TEXT)                                                                              \
    asm volatile("mma.sync.aligned." TEXT " {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};" \
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])                                            \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1))
#endif

// Four 8 x 8 matrices of 16-bit numbers, of which each lane gives the address of a row.
__device__ __forceinline__ void load_matrices(unsigned (&r)[4], Address row) {
#ifdef BITSTEP_HOST
    emu_ldmatrix_x4(r, (const void*)row);
#else
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(row)
                 : "memory");
#endif
}

__device__ __forceinline__ void load_transposed(unsigned (&r)[4], Address row) {
#ifdef BITSTEP_HOST
    emu_ldmatrix_x4_trans(r, (const void*)row);
#else
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(row)
                 : "memory");
#endif
}

__device__ __forceinline__ unsigned load_word(Address at) {
#ifdef BITSTEP_HOST
    return *(const unsigned*)at;
#else
    unsigned word;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(word) : "r"(at) : "memory");
    return word;
#endif
}

// The greater of two numbers; a NaN if one is.
__device__ __forceinline__ float max_or_nan(float a, float b) {
#ifdef BITSTEP_HOST
    return a != a || b != b ? contract::from_bits(contract::NAN_BITS) : fmaxf(a, b);
#else
    float greater;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(greater) : "f"(a), "f"(b));
    return greater;
#endif
}

#ifdef BITSTEP_HOST
// As the conversions below: a NaN becomes 7fff.
__device__ __forceinline__ unsigned host_bf16(float x) {
    const unsigned bits = contract::to_bits(x);
    if (contract::is_nan(x)) return 0x7fff;
    return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
__device__ __forceinline__ unsigned host_f16(float x) {
    const unsigned sign = contract::to_bits(x) >> 16 & 0x8000, size = contract::to_bits(x) & 0x7fffffff;
    if (contract::is_nan(x)) return 0x7fff;
    const unsigned exponent = size >> 23;
    unsigned bits = size, drop = 13, base = 112u << 23;
    if (exponent < 102) return sign;
    if (exponent > 142) return sign | 0x7c00;
    if (exponent < 113) bits = (size & 0x7fffff) | 0x800000, drop = 126 - exponent, base = 0;
    bits -= base;
    return sign | (bits + (1u << (drop - 1)) - 1 + (bits >> drop & 1)) >> drop;
}
#endif

// A format of operands: its step, its rounding, and how accumulators become a left operand.
struct Bf16 {
    typedef unsigned short Element;
    static constexpr int STEP = 16;
    static constexpr unsigned NAN_ELEMENT = 0x7fc0;

    static __device__ __forceinline__ void step(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
        TENSOR_STEP(m16n8k16_bf16, "m16n8k16.row.col.f32.bf16.bf16.f32");
    }
    // Two numbers rounded to the format, the first one in the low half.
    static __device__ __forceinline__ unsigned pair(float low, float high) {
#ifdef BITSTEP_HOST
        return host_bf16(high) << 16 | host_bf16(low);
#else
        unsigned word;
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
        return word;
#endif
    }
};

struct F16 {
    typedef unsigned short Element;
    static constexpr int STEP = 16;
    static constexpr unsigned NAN_ELEMENT = 0x7e00;

    static __device__ __forceinline__ void step(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
        TENSOR_STEP(m16n8k16_f16, "m16n8k16.row.col.f32.f16.f16.f32");
    }
    static __device__ __forceinline__ unsigned pair(float low, float high) {
#ifdef BITSTEP_HOST
        return host_f16(high) << 16 | host_f16(low);
#else
        unsigned word;
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
        return word;
#endif
    }
};

struct Tf32 {
    typedef float Element;
    static constexpr int STEP = 8;

    static __device__ __forceinline__ void step(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
        TENSOR_STEP(m16n8k8_tf32, "m16n8k8.row.col.f32.tf32.tf32.f32");
    }
    static __device__ __forceinline__ unsigned round(float x) {
        const unsigned bits = contract::to_bits(x), rounded = (bits + 0xfff + (bits >> 13 & 1)) & 0xffffe000u;
        return contract::is_nan(x) ? contract::NAN_BITS : rounded;
    }
};

// The left operand of a product's step `k` from accumulators of as many columns as there are terms.
template <class H, int N>
__device__ __forceinline__ void operand(unsigned (&a)[4], const float (&s)[N][4], int k) {
    if constexpr (H::STEP == 16) {
        a[0] = H::pair(s[2 * k][0], s[2 * k][1]);
        a[1] = H::pair(s[2 * k][2], s[2 * k][3]);
        a[2] = H::pair(s[2 * k + 1][0], s[2 * k + 1][1]);
        a[3] = H::pair(s[2 * k + 1][2], s[2 * k + 1][3]);
    } else {
        a[0] = H::round(s[k][0]);
        a[1] = H::round(s[k][2]);
        a[2] = H::round(s[k][1]);
        a[3] = H::round(s[k][3]);
    }
}

using softmax::passes;
using softmax::raise;
using softmax::saturated;
using softmax::score_weight;
using softmax::weight;

__device__ __forceinline__ float row_statistic(float reference, float sum) {
    return contract::canonical_nan(sum, __fmaf_rn(contract::log(sum), contract::from_bits(LOG2_E_UNIT), reference));
}

// The sizes of a call. In a kernel of exact size the head has D columns and rows begin at multiples of 16
// bytes; in the others it has at most D, and zeros stand in for the rest.
template <int D, bool EXACT>
struct Sizes {
    int seq_len, n_heads, n_kv_heads, runtime_dim;

    __device__ __forceinline__ int dim() const { return EXACT ? D : runtime_dim; }
    __device__ __forceinline__ size_t columns() const { return (size_t)(n_heads + 2 * n_kv_heads) * dim(); }
    __device__ __forceinline__ size_t query_columns() const { return (size_t)n_heads * dim(); }
};

// Rows of a head of D elements in shared memory.
template <class H, int D>
struct Rows {
    static constexpr int PER_CHUNK = 16 / sizeof(typename H::Element);
    static constexpr int CHUNKS = D / PER_CHUNK;
    static constexpr int BYTES = 16 * CHUNKS;
    // Steps of a chain over the head.
    static constexpr int STEPS = CHUNKS / 2;
    static_assert(CHUNKS == 4 || CHUNKS % 8 == 0, "the places of chunks");

    static __device__ __forceinline__ int place(int row) { return CHUNKS == 4 ? row >> 1 & 3 : row & 7; }
    static __device__ __forceinline__ int at(int row, int chunk) { return row * BYTES + 16 * (chunk ^ place(row)); }
    // Chunk 2 · step of what a lane loads: its first chunk is that of step 0.
    static __device__ __forceinline__ Address step(Address first, int step) {
        return (first ^ (32 * step & 96)) + (32 * step & ~127);
    }
    // The lane's address for 16 rows as left operand, or as the right operand of a chain along rows.
    static __device__ __forceinline__ Address left(Address rows) {
        const int lane = threadIdx.x & 31;
        return rows + at(lane & 15, lane >> 4);
    }
    // The lane's address for 16 rows as right operand of a chain over the head.
    static __device__ __forceinline__ Address right(Address rows) {
        const int lane = threadIdx.x & 31;
        return rows + at((lane & 7) + (lane >> 4) * 8, lane >> 3 & 1);
    }
};

// Starts copying rows of a head to shared memory: the first `count` of `rows`, then zeros.
template <class H, int D, int THREADS, bool EXACT>
__device__ __forceinline__ void load_rows(char* to, const typename H::Element* from, size_t stride, int rows,
                                          int count, int dim) {
    typedef Rows<H, D> R;
#pragma unroll 4
    for (int i = threadIdx.x; i < rows * R::CHUNKS; i += THREADS) {
        const int row = i / R::CHUNKS, chunk = i % R::CHUNKS;
        char* const target = to + R::at(row, chunk);
        const typename H::Element* const source = from + row * stride + chunk * R::PER_CHUNK;
        if constexpr (EXACT) {
            copy_async_16((float*)target, (const float*)source, row < count);
        } else {
#pragma unroll 1
            for (int e = 0; e < R::PER_CHUNK; e++) {
                const bool present = row < count && chunk * R::PER_CHUNK + e < dim;
                ((typename H::Element*)target)[e] = present ? source[e] : (typename H::Element)0;
            }
        }
    }
}

// Rounds what this thread has copied, once it has arrived; only tf32 stores more than it multiplies.
template <class H, int D, int THREADS>
__device__ __forceinline__ void settle(char* at, int rows) {
    if constexpr (H::STEP == 8) {
        typedef Rows<H, D> R;
#pragma unroll 2
        for (int i = threadIdx.x; i < rows * R::CHUNKS; i += THREADS) {
            float4* const chunk = (float4*)(at + R::at(i / R::CHUNKS, i % R::CHUNKS));
            const float4 x = *chunk;
            *chunk = make_float4(contract::from_bits(H::round(x.x)), contract::from_bits(H::round(x.y)),
                                 contract::from_bits(H::round(x.z)), contract::from_bits(H::round(x.w)));
        }
    }
}

// s[n] goes on with own · others[8n..], chains over the head, for the first `groups` groups of 16 others (a
// constant N / 2 in most calls). `left(k, a)` gives the own rows of step k; `others` is the lane's address as right
// operand.
template <class H, int D, int N, class Left>
__device__ __forceinline__ void dots(float (&s)[N][4], Address others, int groups, Left left) {
    typedef Rows<H, D> R;
#pragma unroll
    for (int k = 0; k < R::STEPS; k++) {
        unsigned a[4];
        left(k, a);
#pragma unroll
        for (int n = 0; n < N / 2; n++) {
            if (n >= groups) continue;
            unsigned b[4];
            load_matrices(b, R::step(others, k) + n * 16 * R::BYTES);
            H::step(s[2 * n], a, b[0], b[1]);
            H::step(s[2 * n + 1], a, b[2], b[3]);
        }
    }
}

// acc[m] = acc[m] + s[m] · others, chains along the first 16 · groups others in ascending order, for M times 16 own
// rows; C columns of the head from column `first` on (a multiple of 64). `others` is what `along` gives.
template <class H, int D, int C, int N, int M>
__device__ __forceinline__ void chains(float (&acc)[M][C / 8][4], const float (&s)[M][N][4], Address others,
                                       int groups, int first) {
    typedef Rows<H, D> R;
#pragma unroll
    for (int k = 0; k < 8 * N / H::STEP; k++) {
        if (k * H::STEP >= 16 * groups) continue;
        unsigned a[M][4];
#pragma unroll
        for (int m = 0; m < M; m++) operand<H, N>(a[m], s[m], k);
        if constexpr (H::STEP == 16) {
            const Address rows = others + k * 16 * R::BYTES + 2 * first;
#pragma unroll
            for (int c = 0; c < C / 16; c++) {
                unsigned b[4];
                load_transposed(b, R::step(rows, c));
#pragma unroll
                for (int m = 0; m < M; m++) {
                    H::step(acc[m][2 * c], a[m], b[0], b[1]);
                    H::step(acc[m][2 * c + 1], a[m], b[2], b[3]);
                }
            }
        } else {
            // The lane's rows are 2t and 2t + 1 of the step's 8, whose places are their numbers.
            const int lane = threadIdx.x & 31, group = lane >> 2, row = 2 * (lane & 3);
            const Address at = others + (k * 8 + row) * R::BYTES + 4 * first + 4 * (group & 3);
#pragma unroll
            for (int c = 0; c < C / 8; c++) {
                const int chunk = 2 * c + (group >> 2);
                const unsigned b0 = load_word(at + 16 * (chunk ^ row));
                const unsigned b1 = load_word(at + R::BYTES + 16 * (chunk ^ (row + 1)));
#pragma unroll
                for (int m = 0; m < M; m++) H::step(acc[m][c], a[m], b0, b1);
            }
        }
    }
}

// The lane's address of rows for `chains`.
template <class H, int D>
__device__ __forceinline__ Address along(Address rows) {
    return H::STEP == 16 ? Rows<H, D>::left(rows) : rows;
}

// Writes the lane's two elements of every 8 columns of a row; `to` is the row's first column of the head, `first`
// the column of acc[0].
template <class H, int C, bool EXACT>
__device__ __forceinline__ void store_row(typename H::Element* to, const float (&acc)[C / 8][4], int half, float factor,
                                          int first, int dim) {
    const int column = 2 * (threadIdx.x & 3);
#pragma unroll
    for (int n = 0; n < C / 8; n++) {
        const int c = first + 8 * n + column;
        const float x = __fmul_rn(acc[n][2 * half], factor), y = __fmul_rn(acc[n][2 * half + 1], factor);
        if constexpr (H::STEP == 8) {
            const float u = contract::canonical_nan(x, x), v = contract::canonical_nan(y, y);
            if constexpr (EXACT) {
                *(float2*)(to + c) = make_float2(u, v);
            } else {
                if (c < dim) to[c] = u;
                if (c + 1 < dim) to[c + 1] = v;
            }
        } else {
            // The conversion has made 7fff of a NaN.
            unsigned word = H::pair(x, y);
            if ((word & 0x7fff) == 0x7fff) word = (word & 0xffff0000u) | H::NAN_ELEMENT;
            if ((word >> 16 & 0x7fff) == 0x7fff) word = (word & 0xffff) | H::NAN_ELEMENT << 16;
            if constexpr (EXACT) {
                *(unsigned*)(to + c) = word;
            } else {
                if (c < dim) to[c] = (unsigned short)word;
                if (c + 1 < dim) to[c + 1] = (unsigned short)(word >> 16);
            }
        }
    }
}

// The start of dynamic shared memory at a multiple of 128, of which the host asks for 128 bytes more.
__device__ __forceinline__ char* aligned(char* shared) {
    return shared + ((128 - ((unsigned)(size_t)shared & 127)) & 127);
}

template <int N>
__device__ __forceinline__ void fill(float (&s)[N][4], float x) {
#pragma unroll
    for (int n = 0; n < N; n++)
#pragma unroll
        for (int e = 0; e < 4; e++) s[n][e] = x;
}

// From scores to `p` of pairs in place: `statistic(n, e)` is that of the query of accumulator e of columns n.
template <int N, class Statistic>
__device__ __forceinline__ void probabilities(float (&s)[N][4], float minus_k, Statistic statistic) {
#pragma unroll
    for (int n = 0; n < N; n++)
#pragma unroll
        for (int e = 0; e < 4; e++) s[n][e] = score_weight(s[n][e], minus_k, statistic(n, e));
}

// From `dp`, which has begun at -delta, to `ds` in place.
template <int N>
__device__ __forceinline__ void score_grads(float (&dp)[N][4], const float (&p)[N][4]) {
#pragma unroll
    for (int n = 0; n < N; n++)
#pragma unroll
        for (int e = 0; e < 4; e++) dp[n][e] = __fmul_rn(dp[n][e], p[n][e]);
}

// Makes zeros of hidden pairs, on the diagonal.
template <int N, class Hidden>
__device__ __forceinline__ void hide_pairs(float (&p)[N][4], float (&ds)[N][4], Hidden hidden) {
#pragma unroll
    for (int n = 0; n < N; n++)
#pragma unroll
        for (int e = 0; e < 4; e++)
            if (hidden(n, e)) p[n][e] = ds[n][e] = 0.0f;
}

}  // namespace tensor

#endif
