// What attention's gradient kernels take over from their neighbours in a graph: the dot products of the output with
// its gradient, and the rotation back of the gradients of queries and keys. Both give the bits of the kernels that do
// them alone: src/op/attention.rs, `AttentionDelta`, and src/op/rope.rs, `RopeGrad`.
#ifndef BITSTEP_ATTENTION_TENSOR_TOGETHER_CUH
#define BITSTEP_ATTENTION_TENSOR_TOGETHER_CUH

#include "attention_tensor.cuh"
#include "rope.cuh"

namespace tensor {

// A block's place in the grid of its pass.
struct Place {
    int x, y, of_y;
};
__device__ __forceinline__ Place place_in_grid() { return {(int)blockIdx.x, (int)blockIdx.y, (int)gridDim.y}; }

// What a pass does alone: nothing else.
struct Alone {
    static constexpr bool DELTA = false, TURN = false;
    const float* table;
    unsigned turned;
};

// Where the rotation's table lies, and whether there is a rotation.
struct Turning {
    static constexpr bool DELTA = false, TURN = true;
    const float* table;
    unsigned turned;
};

// As well the output, and where the dot products go.
template <class Element>
struct WithDelta {
    static constexpr bool DELTA = true, TURN = true;
    const float* table;
    unsigned turned;
    const Element* o;
    float* delta;
};

// The storage type of a format.
__device__ __forceinline__ narrow::bf16 stored(Bf16) { return narrow::bf16(); }
__device__ __forceinline__ narrow::f16 stored(F16) { return narrow::f16(); }
__device__ __forceinline__ storage::f32 stored(Tf32) { return storage::f32(); }

// Eight neighbours of a row as they are stored.
template <class H>
struct Eight {
    static constexpr int WORDS = sizeof(typename H::Element) / 2;
    uint4 words[WORDS];

    __device__ __forceinline__ void load(const typename H::Element* from, bool present) {
#pragma unroll
        for (int w = 0; w < WORDS; w++) {
            words[w] = make_uint4(0, 0, 0, 0);
            if (present) words[w] = *(const uint4*)(from + 8 / WORDS * w);
        }
    }
    __device__ __forceinline__ void widen(float (&x)[8]) const {
#pragma unroll
        for (int w = 0; w < WORDS; w++) {
            const unsigned word[4] = {words[w].x, words[w].y, words[w].z, words[w].w};
#pragma unroll
            for (int i = 0; i < 4; i++) {
                if constexpr (H::STEP == 8) {
                    x[4 * w + i] = contract::from_bits(word[i]);
                } else {
                    const float2 pair = narrow::widen2(word[i], stored(H()));
                    x[2 * i] = pair.x, x[2 * i + 1] = pair.y;
                }
            }
        }
    }
};

// A level of the fold over lanes: each of two lanes adds up the half of the numbers that it keeps, the upper one if
// `upper`.
template <int N>
__device__ __forceinline__ void fold_half(float (&to)[N / 2], const float (&v)[N], bool upper, int distance) {
#pragma unroll
    for (int i = 0; i < N / 2; i++) {
        const float kept = upper ? v[i + N / 2] : v[i], sent = upper ? v[i] : v[i + N / 2];
        to[i] = __fadd_rn(kept, __shfl_xor_sync(0xffffffffu, sent, distance));
    }
}

// The contract's sum of a row of 8 · WORDS products, of which each of WORDS lanes has 8 neighbours: first the same
// places of all lanes, then places 4, 2 and 1 apart. An addition has the same bits either way round, so lanes part
// the places among them. All lanes have the sum.
template <int WORDS>
__device__ __forceinline__ float fold_row(const float (&v)[8]) {
    const int lane = threadIdx.x & 31;
    auto plus = [](float x, int distance) { return __fadd_rn(x, __shfl_xor_sync(0xffffffffu, x, distance)); };
    float two[2];
    if constexpr (WORDS == 4) {
        // Places in the order of their bits reversed, so that 4 apart is what remains in a lane.
        const float u[8] = {v[0], v[4], v[2], v[6], v[1], v[5], v[3], v[7]};
        float four[4];
        fold_half(four, u, lane & 2, 2);
        fold_half(two, four, lane & 1, 1);
        return plus(plus(__fadd_rn(two[0], two[1]), 1), 2);
    } else {
        constexpr int FAR = WORDS / 2;
        float four[4], one[1];
        fold_half(four, v, lane & FAR, FAR);
        fold_half(two, four, lane & (FAR / 2), FAR / 2);
        fold_half(one, two, lane & (FAR / 4), FAR / 4);
        if constexpr (WORDS == 16) one[0] = plus(one[0], 1);
        return plus(plus(plus(one[0], FAR), FAR / 2), FAR / 4);
    }
}

// The dot products of 16 rows of a warp's, of which the first `count` are there, with those beside them: lane 4g + t
// has those of rows g and g + 8. All lanes of the warp call it.
template <class H, int D>
__device__ __forceinline__ void row_dots(float (&result)[2], const typename H::Element* dout,
                                         const typename H::Element* o, size_t stride, int count) {
    constexpr int WORDS = D / 8, ROWS = 32 / WORDS, PASSES = 16 / ROWS, PER_HALF = PASSES / 2;
    const int lane = threadIdx.x & 31;
    // Loads of all passes are under way at once, of tf32 those of as many as registers hold.
    constexpr int AT_ONCE = H::STEP == 16 || PASSES < 4 ? PASSES : 4;
    float sum[PASSES];
#pragma unroll
    for (int first = 0; first < PASSES; first += AT_ONCE) {
        Eight<H> a[AT_ONCE], b[AT_ONCE];
#pragma unroll
        for (int p = 0; p < AT_ONCE; p++) {
            const int row = (first + p) * ROWS + lane / WORDS;
            const size_t at = row * stride + lane % WORDS * 8;
            a[p].load(dout + at, row < count);
            b[p].load(o + at, row < count);
        }
#pragma unroll
        for (int p = 0; p < AT_ONCE; p++) {
            float x[8], y[8];
            a[p].widen(x);
            b[p].widen(y);
            // Lanes behind the row are +0.0, and one addition of +0.0 stands for the folds with them.
#pragma unroll
            for (int i = 0; i < 8; i++) x[i] = __fadd_rn(__fmaf_rn(x[i], y[i], 0.0f), 0.0f);
            sum[first + p] = fold_row<WORDS>(x);
        }
    }
    const int g = lane >> 2, from = g % ROWS * WORDS;
#pragma unroll
    for (int h = 0; h < 2; h++)
#pragma unroll
        for (int q = 0; q < PER_HALF; q++) {
            const float x = __shfl_sync(0xffffffffu, sum[h * PER_HALF + q], from);
            if (q == 0 || g / ROWS == q) result[h] = x;
        }
}

// The angles of a lane's two rows, a cosine and a sine for each pair of columns i and i + D / 2, of which the lane has
// both. All are loaded before anything is stored, so that no load waits for a store.
template <int D>
struct Angles {
    float4 of[2][D / 16];

    __device__ __forceinline__ void load(const float* table, int row, int seq_len) {
        const float* const from = table + (size_t)row * D + 4 * (threadIdx.x & 3);
#pragma unroll
        for (int h = 0; h < 2; h++)
#pragma unroll
            for (int n = 0; n < D / 16; n++) {
                of[h][n] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
                if (row + 8 * h < seq_len) of[h][n] = __ldg((const float4*)(from + 8 * h * D + 16 * n));
            }
    }
};

// As store_row for a whole head, then the rotation back of what was stored.
template <class H, int D>
__device__ __forceinline__ void store_turned(typename H::Element* to, const float (&acc)[D / 8][4], int half,
                                             float factor, const Angles<D>& angles) {
    const int column = 2 * (threadIdx.x & 3);
#pragma unroll
    for (int n = 0; n < D / 16; n++) {
        const int c = 8 * n + column, e = 2 * half;
        const float4 angle = angles.of[half][n];
        float a[2], b[2];
#pragma unroll
        for (int i = 0; i < 2; i++) {
            a[i] = __fmul_rn(acc[n][e + i], factor);
            b[i] = __fmul_rn(acc[n + D / 16][e + i], factor);
        }
        if constexpr (H::STEP == 16) {
            const float2 x = narrow::widen2(H::pair(a[0], a[1]), stored(H()));
            const float2 y = narrow::widen2(H::pair(b[0], b[1]), stored(H()));
            a[0] = x.x, a[1] = x.y, b[0] = y.x, b[1] = y.y;
        }
        rope::turn<true>(a[0], b[0], angle.x, angle.y);
        rope::turn<true>(a[1], b[1], angle.z, angle.w);
        if constexpr (H::STEP == 16) {
            *(unsigned*)(to + c) = narrow::narrow2(a[0], a[1], stored(H()));
            *(unsigned*)(to + c + D / 2) = narrow::narrow2(b[0], b[1], stored(H()));
        } else {
            *(float2*)(to + c) = make_float2(a[0], a[1]);
            *(float2*)(to + c + D / 2) = make_float2(b[0], b[1]);
        }
    }
}

// Loads the angles of the lane's rows from `row` on where they will be asked for.
template <int D, class With>
__device__ __forceinline__ void load_angles(Angles<D>& angles, int row, int seq_len, const With& with) {
    if constexpr (With::TURN)
        if (with.turned) angles.load(with.table, row, seq_len);
}

// A row of a gradient that may be rotated back.
template <class H, int D, bool EXACT, class With>
__device__ __forceinline__ void store_gradient(typename H::Element* to, const float (&acc)[D / 8][4], int half,
                                               float factor, int dim, const Angles<D>& angles, const With& with) {
    if constexpr (With::TURN) {
        if (with.turned) {
            store_turned<H, D>(to, acc, half, factor, angles);
            return;
        }
    }
    store_row<H, D, EXACT>(to, acc, half, factor, 0, dim);
}

}  // namespace tensor

#endif
