// The adapters of a gate and an up projection, and SwiGLU of what they leave, for ranks up to 16: a warp has the same 64
// columns of both, and gates what it has rounded before it leaves the registers.
#pragma once
#include "lora_wide.cuh"
#include "swiglu.cuh"

namespace wide {

// A gated row's eight neighbours, of words that are stored.
template <class H> __device__ __forceinline__ uint4 gate(const uint4& gate_words, const uint4& up_words) {
    const narrow::Octet g = narrow::widen8<H>(gate_words), u = narrow::widen8<H>(up_words);
    narrow::Octet a;
#pragma unroll
    for (int i = 0; i < 8; ++i) a.v[i] = swiglu::gated(g.v[i], swiglu::sigmoid<H>(g.v[i]), u.v[i]);
    return narrow::round8<H>(a);
}

// A warp's columns of one of both projections.
struct Half {
    Factors<1> factors;
    Place<1> place;

    __device__ __forceinline__ void read(Coming<1>& coming, unsigned row) const {
#pragma unroll
        for (int e = 0; e < 2; ++e) coming.held[e] = __ldcg((const uint4*)place.at(row + e));
        place.read_terms(coming, row);
    }

    // The sums added to what two rows hold, rounded.
    template <class T> __device__ __forceinline__ void add(uint4* words, const Coming<1>& coming, float scale) const {
        float sums[4][4];
        chains<T, 1>(sums, factors, coming.terms);
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            words[e] = finished<T>(sums, e, coming.held[e], [&](float sum, float old) { return __fmaf_rn(scale, sum, old); });
        }
    }
};

// y[t, o] = fma(scale, sum_k s[t, o / d * rank + k] * b[o, k], y[t, o]) for o below 2 d, and
// a[t, o] = (y[t, o] * sigmoid(y[t, o])) * y[t, d + o]. DEPTH steps of rows are under way.
template <class T, int DEPTH>
__device__ __forceinline__ void up_swiglu(const Word* s, const Word* b, Word* y, Word* a, const Deal& deal, unsigned d,
                                          unsigned rank, float scale) {
    typedef typename StorageOf<T>::Type H;
    const unsigned column = deal.strip * COLUMNS, width = 2 * d;
    if (column >= d) return;
    Half gate_half = {{}, Place<1>(y + column, width, s, 2 * rank, rank, deal.row)};
    Half up_half = {{}, Place<1>(y + d + column, width, s + rank, 2 * rank, rank, deal.row)};
    gate_half.factors.load_rows(b + (size_t)column * rank, rank);
    up_half.factors.load_rows(b + (size_t)(d + column) * rank, rank);
    Word* out = a + (size_t)(deal.row + lane() % 4 * 2) * d + column + inside();
    Coming<1> gates[DEPTH], ups[DEPTH];
#pragma unroll
    for (int i = 0; i < DEPTH; ++i) {
        if (i * STEP_ROWS >= deal.rows) break;
        gate_half.read(gates[i], i * STEP_ROWS);
        up_half.read(ups[i], i * STEP_ROWS);
    }
#pragma unroll 1
    for (unsigned row = 0; row < deal.rows; row += DEPTH * STEP_ROWS) {
#pragma unroll
        for (int i = 0; i < DEPTH; ++i) {
            if (row + i * STEP_ROWS >= deal.rows) break;
            // The gate's two rows, then the other's.
            uint4 words[4];
            gate_half.add<T>(words, gates[i], scale);
            up_half.add<T>(words + 2, ups[i], scale);
            const unsigned next = i * STEP_ROWS + DEPTH * STEP_ROWS;
            if (row + next < deal.rows) {
                gate_half.read(gates[i], next);
                up_half.read(ups[i], next);
            }
            // Without a NaN or an infinity in both there is no NaN in what they give.
            const bool odd = canonical<T>(words);
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                const unsigned at = i * STEP_ROWS + e;
                *(uint4*)gate_half.place.at(at) = words[e];
                *(uint4*)up_half.place.at(at) = words[2 + e];
            }
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                uint4 gated = gate<H>(words[e], words[2 + e]);
                if (odd) gated = canonical<T>(gated);
                *(uint4*)(out + (i * STEP_ROWS + e) * (size_t)d) = gated;
            }
        }
        gate_half.place.advance(DEPTH * STEP_ROWS);
        up_half.place.advance(DEPTH * STEP_ROWS);
        out += DEPTH * STEP_ROWS * (size_t)d;
    }
}

}  // namespace wide

#define UP_SWIGLU(STORAGE, FORMAT)                                                                               \
    extern "C" __global__ void __launch_bounds__(wide::WARPS * 32, 4)                                            \
        lora_up_swiglu_##STORAGE(const unsigned short* __restrict__ s, const unsigned short* __restrict__ b,                  \
                     unsigned short* y, unsigned short* __restrict__ a, unsigned rows, unsigned run_rows,                     \
                     unsigned strip_blocks, unsigned d, unsigned rank, float scale) {                                         \
        wide::up_swiglu<FORMAT, 2>(s, b, y, a, wide::Deal(rows, run_rows, strip_blocks), d, rank, scale);        \
    }
