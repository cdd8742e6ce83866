// Chains of at most 48 terms added to a wide matrix of 16-bit elements in place, near what memory allows.
//
// A warp owns 64 columns and goes down a run of rows; the columns' factors stay in its registers. They are the left
// factor of the tensor-core step, so that an accumulator's rows are columns of the matrix: the lanes of a quad's place
// hold eight neighbours each, 128 bytes of four rows are one access, and nothing passes through shared memory. What the
// next rows hold is read before the sums of these are made, so that several KiB of each warp are always under way.
//
// Within a step its products are one exact sum, so the order of its terms is free: lane t of a quad has the terms 4 t to
// 4 t + 3 of both factors, which lie in 8 bytes. Terms beyond the chain are zeros and so absent.
#pragma once
#include "lora.cuh"
#include "narrow.cuh"
#include "tensor.cuh"

namespace wide {

// Columns of a warp, rows of one step, and warps of a block.
constexpr unsigned COLUMNS = 64, STEP_ROWS = 8, WARPS = 4;

typedef unsigned short Word;

template <class T> struct StorageOf {};
template <> struct StorageOf<Bf16> {
    typedef narrow::bf16 Type;
};
template <> struct StorageOf<F16> {
    typedef narrow::f16 Type;
};

__device__ __forceinline__ unsigned lane() { return threadIdx.x % 32; }
__device__ __forceinline__ unsigned warp() { return threadIdx.x / 32; }
// The lane's first column within the warp's, and its first term within a step.
__device__ __forceinline__ unsigned inside() { return lane() / 4 * 8; }
__device__ __forceinline__ unsigned term() { return lane() % 4 * 4; }

// Four terms at a multiple of 8 bytes, or zeros, for which nothing is read.
__device__ __forceinline__ uint2 four_terms(const Word* from, bool exist) {
#ifdef BITSTEP_HOST
    return exist ? *(const uint2*)from : make_uint2(0, 0);
#else
    uint2 four;
    asm volatile("{.reg .pred p; setp.ne.u32 p, %3, 0; mov.b32 %0, 0; mov.b32 %1, 0; @p ld.global.nc.v2.u32 {%0, %1}, [%2];}"
                 : "=&r"(four.x), "=&r"(four.y)
                 : "l"(from), "r"((unsigned)exist));
    return four;
#endif
}

// The factors of 64 columns: four fragments a step, the i-th with the columns 2 i and 2 i + 1 of every eight. There are
// more than 16 (STEPS - 1) terms.
template <int STEPS> struct Factors {
    unsigned words[STEPS][4][4];

    // From rows of `terms` terms, a row a column.
    __device__ __forceinline__ void load_rows(const Word* columns, unsigned terms) {
#pragma unroll
        for (int s = 0; s < STEPS; ++s) {
            const bool exist = s + 1 < STEPS || s * 16 + term() < terms;
            const Word* from = columns + inside() * terms + s * 16 + term();
#pragma unroll
            for (int c = 0; c < 8; ++c) {
                const uint2 four = four_terms(from + c * terms, exist);
                words[s][c / 2][c % 2] = four.x, words[s][c / 2][2 + c % 2] = four.y;
            }
        }
    }

    // From rows of `width` columns, a row a term.
    __device__ __forceinline__ void load_terms(const Word* columns, unsigned terms, unsigned width) {
#pragma unroll
        for (int s = 0; s < STEPS; ++s) {
#pragma unroll
            for (int pair = 0; pair < 2; ++pair) {
                uint4 eight[2];
#pragma unroll
                for (int q = 0; q < 2; ++q) {
                    const unsigned k = s * 16 + term() + pair * 2 + q;
                    const bool exists = s + 1 < STEPS || k < terms;
                    const uint4 read = *(const uint4*)(columns + (size_t)(exists ? k : 0) * width + inside());
                    eight[q] = exists ? read : make_uint4(0, 0, 0, 0);
                }
                const unsigned first[4] = {eight[0].x, eight[0].y, eight[0].z, eight[0].w};
                const unsigned second[4] = {eight[1].x, eight[1].y, eight[1].z, eight[1].w};
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    words[s][i][2 * pair] = __byte_perm(first[i], second[i], 0x5410);
                    words[s][i][2 * pair + 1] = __byte_perm(first[i], second[i], 0x7632);
                }
            }
        }
    }
};

// Eight rows as they come: what two of them hold in the lane's columns, and one row's terms.
template <int STEPS> struct Coming {
    uint4 held[2];
    uint2 terms[STEPS];
};

// Where a lane reads and writes, a stage of rows after the other.
template <int STEPS> struct Place {
    Word* columns;
    const Word* terms;
    unsigned stride, terms_stride;
    // Whether the lane's terms of the last step exist.
    bool all;

    __device__ __forceinline__ Place(Word* first, unsigned stride, const Word* first_terms, unsigned terms_stride,
                                     unsigned n_terms, unsigned row)
        : columns(first + inside() + (size_t)(row + lane() % 4 * 2) * stride),
          terms(first_terms + term() + (size_t)(row + lane() / 4) * terms_stride),
          stride(stride), terms_stride(terms_stride), all((STEPS - 1) * 16 + term() < n_terms) {}

    // The lane's columns of the `row`-th row from this stage's first on.
    __device__ __forceinline__ Word* at(unsigned row) const { return columns + row * (size_t)stride; }

    __device__ __forceinline__ void read_terms(Coming<STEPS>& coming, unsigned row) const {
        const Word* from = terms + row * (size_t)terms_stride;
#pragma unroll
        for (int s = 0; s < STEPS; ++s) coming.terms[s] = four_terms(from + s * 16, s + 1 < STEPS || all);
    }

    // Goes on by so many rows.
    __device__ __forceinline__ void advance(unsigned rows) {
        columns += rows * (size_t)stride;
        terms += rows * (size_t)terms_stride;
    }
};

// The chains of the lane's eight columns in two rows, where fragment i has columns 2 i and 2 i + 1.
template <class T, int STEPS>
__device__ __forceinline__ void chains(float (&sums)[4][4], const Factors<STEPS>& factors, const uint2 (&terms)[STEPS]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
        for (int e = 0; e < 4; ++e) sums[i][e] = 0.0f;
    }
#pragma unroll
    for (int s = 0; s < STEPS; ++s) {
        const unsigned right[2] = {terms[s].x, terms[s].y};
#pragma unroll
        for (int i = 0; i < 4; ++i) T::step(sums[i], factors.words[s][i], right);
    }
}

// `finish(sum, held)` of eight neighbours in the upper or lower of two rows, rounded once; NaNs are not canonical yet.
template <class T, class Finish>
__device__ __forceinline__ uint4 finished(const float (&sums)[4][4], int e, const uint4& held, Finish finish) {
    typedef typename StorageOf<T>::Type H;
    narrow::Octet eight = narrow::widen8<H>(held);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        eight.v[2 * i] = finish(sums[i][e], eight.v[2 * i]);
        eight.v[2 * i + 1] = finish(sums[i][2 + e], eight.v[2 * i + 1]);
    }
    return narrow::round8<H>(eight);
}

// `word` times zero added to `sum`: a sum of such is zero in both halves if and only if all were finite.
__device__ __forceinline__ unsigned add_nothing(unsigned sum, unsigned word, narrow::bf16) {
#ifdef BITSTEP_HOST
    return sum != 0 || (~word & 0x7f800000u) == 0 || (~word & 0x7f80u) == 0;
#else
    asm("fma.rn.bf16x2 %0, %1, %2, %0;" : "+r"(sum) : "r"(word), "r"(0));
    return sum;
#endif
}
__device__ __forceinline__ unsigned add_nothing(unsigned sum, unsigned word, narrow::f16) {
#ifdef BITSTEP_HOST
    return sum != 0 || (~word & 0x7c000000u) == 0 || (~word & 0x7c00u) == 0;
#else
    asm("fma.rn.f16x2 %0, %1, %2, %0;" : "+r"(sum) : "r"(word), "r"(0));
    return sum;
#endif
}

template <class T> __device__ __forceinline__ uint4 canonical(const uint4& words) {
    typedef typename StorageOf<T>::Type H;
    return make_uint4(narrow::canonical2<H>(words.x), narrow::canonical2<H>(words.y), narrow::canonical2<H>(words.z),
                      narrow::canonical2<H>(words.w));
}

// Makes NaNs canonical. They are rare, and so are infinities: one question for all, and whether there was one.
template <class T, int N> __device__ __forceinline__ bool canonical(uint4 (&words)[N]) {
    typedef typename StorageOf<T>::Type H;
    unsigned sum = 0;
#pragma unroll
    for (int i = 0; i < N; ++i) {
        sum = add_nothing(sum, words[i].x, H()), sum = add_nothing(sum, words[i].y, H());
        sum = add_nothing(sum, words[i].z, H()), sum = add_nothing(sum, words[i].w, H());
    }
    if (sum == 0) return false;
#pragma unroll
    for (int i = 0; i < N; ++i) words[i] = canonical<T>(words[i]);
    return true;
}

// The next `rows` rows, a multiple of a stage's, of a warp's columns; DEPTH stages of STAGE steps of rows are under way.
template <class T, int STEPS, int DEPTH, int STAGE, class Finish>
__device__ __forceinline__ void walk(Place<STEPS> place, const Factors<STEPS>& factors, unsigned rows, bool holds,
                                     Finish finish) {
    constexpr unsigned STAGE_ROWS = STAGE * STEP_ROWS, ALL_ROWS = DEPTH * STAGE_ROWS;
    Coming<STEPS> coming[DEPTH][STAGE];
    const auto read = [&](Coming<STEPS>(&stage)[STAGE], unsigned row) {
#pragma unroll
        for (int u = 0; u < STAGE; ++u) {
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                const uint4* from = (const uint4*)place.at(row + u * STEP_ROWS + e);
                stage[u].held[e] = holds ? __ldcg(from) : make_uint4(0, 0, 0, 0);
            }
            place.read_terms(stage[u], row + u * STEP_ROWS);
        }
    };
#pragma unroll
    for (int d = 0; d < DEPTH; ++d) {
        if (d * STAGE_ROWS < rows) read(coming[d], d * STAGE_ROWS);
    }
#pragma unroll 1
    for (unsigned row = 0; row < rows; row += ALL_ROWS) {
#pragma unroll
        for (int d = 0; d < DEPTH; ++d) {
            const unsigned inner = d * STAGE_ROWS;
            if (row + inner >= rows) break;
#pragma unroll
            for (int u = 0; u < STAGE; ++u) {
                float sums[4][4];
                chains<T, STEPS>(sums, factors, coming[d][u].terms);
                uint4 words[2];
#pragma unroll
                for (int e = 0; e < 2; ++e) words[e] = finished<T>(sums, e, coming[d][u].held[e], finish);
                canonical<T>(words);
#pragma unroll
                for (int e = 0; e < 2; ++e) *(uint4*)place.at(inner + u * STEP_ROWS + e) = words[e];
            }
            if (row + inner + ALL_ROWS < rows) read(coming[d], inner + ALL_ROWS);
        }
        place.advance(ALL_ROWS);
    }
}

// The rows of a block that has the `run`-th of them, and its warp's strip of columns, where strips of a block are
// neighbours.
struct Deal {
    unsigned row, rows, strip;

    __device__ __forceinline__ Deal(unsigned all_rows, unsigned run_rows, unsigned strip_blocks) {
        row = blockIdx.x / strip_blocks * run_rows;
        rows = least(all_rows - row, run_rows);
        strip = blockIdx.x % strip_blocks * WARPS + warp();
    }
};

// Columns of the parts in turn: y[t, first + o] = fma(scale, sum_k s[t, part * rank + k] * b[row + o, k], y[t, first + o]).
template <class T, int STEPS, int DEPTH, int STAGE>
__device__ __forceinline__ void up(const Word* s, const Word* b, Word* y, const Deal& deal, const Ranks& of, float scale,
                                   const Parts& parts) {
    unsigned strip = deal.strip;
    const Part part = part_of<COLUMNS>(parts, 1, strip);
    const unsigned column = strip * COLUMNS;
    if (column >= part.columns) return;
    Factors<STEPS> factors;
    factors.load_rows(b + (size_t)(part.row + column) * of.rank, of.rank);
    const Place<STEPS> place(y + part.first + column, of.n_out, s + part.index * of.rank, of.ranks, of.rank, deal.row);
    walk<T, STEPS, DEPTH, STAGE>(place, factors, deal.rows, true,
                                 [&](float sum, float old) { return __fmaf_rn(scale, sum, old); });
}

// dx[t, i] = sum_k ds[t, k] * a[k, i], added to what dx holds where `add` says so.
template <class T, int STEPS, int DEPTH, int STAGE>
__device__ __forceinline__ void down_grad(const Word* ds, const Word* a, Word* dx, const Deal& deal, unsigned n_in,
                                          unsigned ranks, bool add) {
    const unsigned column = deal.strip * COLUMNS;
    if (column >= n_in) return;
    Factors<STEPS> factors;
    factors.load_terms(a + column, ranks, n_in);
    const Place<STEPS> place(dx + column, n_in, ds, ranks, ranks, deal.row);
    walk<T, STEPS, DEPTH, STAGE>(place, factors, deal.rows, add,
                                 [&](float sum, float old) { return add ? __fadd_rn(old, sum) : sum; });
}

}  // namespace wide

// Both kernels for chains of up to 16, 32 and 48 terms, by the names of a storage and of its format.
#define UP_WIDE_OF(STORAGE, FORMAT, TERMS, DEPTH, STAGE)                                                         \
    extern "C" __global__ void __launch_bounds__(wide::WARPS * 32, 4)                                            \
        lora_up_##STORAGE##_wide_##TERMS(const unsigned short* __restrict__ s, const unsigned short* __restrict__ b, unsigned short* y, \
                     unsigned rows, unsigned run_rows, unsigned strip_blocks, unsigned rank, unsigned ranks, unsigned n_out,    \
                     float scale, PARTS_PARAMETERS) {                                                            \
        wide::up<FORMAT, TERMS / 16, DEPTH, STAGE>(s, b, y, wide::Deal(rows, run_rows, strip_blocks),            \
                                                   Ranks{rank, ranks, n_out}, scale, PARTS_GIVEN);               \
    }
#define UP_WIDE(STORAGE, FORMAT)                                                                                 \
    UP_WIDE_OF(STORAGE, FORMAT, 16, 2, 2)                                                                        \
    UP_WIDE_OF(STORAGE, FORMAT, 32, 2, 2)                                                                        \
    UP_WIDE_OF(STORAGE, FORMAT, 48, 3, 1)

#define DOWN_GRAD_WIDE_OF(STORAGE, FORMAT, TERMS, DEPTH, STAGE)                                                  \
    extern "C" __global__ void __launch_bounds__(wide::WARPS * 32, 4)                                            \
        lora_down_grad_input_##STORAGE##_wide_##TERMS(const unsigned short* __restrict__ ds, const unsigned short* __restrict__ a, \
                     unsigned short* dx, unsigned rows, unsigned run_rows, unsigned strip_blocks, unsigned n_in, unsigned ranks, \
                     unsigned add) {                                                                             \
        wide::down_grad<FORMAT, TERMS / 16, DEPTH, STAGE>(ds, a, dx, wide::Deal(rows, run_rows, strip_blocks), n_in, ranks, \
                                                          add != 0);                                             \
    }
#define DOWN_GRAD_WIDE(STORAGE, FORMAT)                                                                          \
    DOWN_GRAD_WIDE_OF(STORAGE, FORMAT, 16, 2, 2)                                                                 \
    DOWN_GRAD_WIDE_OF(STORAGE, FORMAT, 32, 2, 2)                                                                 \
    DOWN_GRAD_WIDE_OF(STORAGE, FORMAT, 48, 3, 1)
