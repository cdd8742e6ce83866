// The loss from the row losses (src/op/cross_entropy.rs): chains over the tokens of a piece, pieces and
// grains folded by the balanced tree (src/num/tree.rs).
#pragma once

namespace loss_sum {

constexpr int INV_NORMALISER = 6;
// Elements of a chain that are loaded together.
constexpr int BATCH = 32;

// acc + the elements of a piece, ascending.
__device__ __forceinline__ float chain(const float* x, unsigned n)
{
    float acc = 0.0f;
    unsigned i = 0;
    for (; i + BATCH <= n; i += BATCH) {
        float part[BATCH];
        if (((unsigned long long)(x + i) & 15) == 0) {
#pragma unroll
            for (int j = 0; j < BATCH; j += 4) {
                const float4 four = *(const float4*)(x + i + j);
                part[j] = four.x, part[j + 1] = four.y, part[j + 2] = four.z, part[j + 3] = four.w;
            }
        } else {
#pragma unroll
            for (int j = 0; j < BATCH; j++) {
                part[j] = x[i + j];
            }
        }
#pragma unroll
        for (int j = 0; j < BATCH; j++) {
            acc = __fadd_rn(acc, part[j]);
        }
    }
#pragma unroll 4
    for (; i < n; i++) {
        acc = __fadd_rn(acc, x[i]);
    }
    return acc;
}

// One level of the trees of all grains: within each grain of `width` places, of which the last grain fills
// `last`, place p takes place p + s for p = 0, 2s, 4s, …
__device__ __forceinline__ void fold_level(float* leaves, unsigned grains, unsigned width, unsigned last,
                                           unsigned s)
{
    const unsigned merges = (width - s + 2 * s - 1) / (2 * s);
    for (unsigned i = threadIdx.x; i < grains * merges; i += blockDim.x) {
        const unsigned grain = i / merges, p = i % merges * 2 * s;
        if (p + s < (grain + 1 < grains ? width : last)) {
            float* left = leaves + (size_t)grain * width + p;
            left[0] = __fadd_rn(left[0], left[s]);
        }
    }
    __syncthreads();
}

// By one block. A grain has `width` pieces; `leaves` holds a float for every piece of every grain, the last
// one counted as whole.
__device__ __forceinline__ void sum(const float* row_loss, const float* scalars, float* loss, float* leaves,
                                    unsigned tokens, unsigned grain, unsigned piece)
{
    const float inv = scalars[INV_NORMALISER];
    const unsigned width = (grain + piece - 1) / piece;
    const unsigned grains = (tokens + grain - 1) / grain;
    const unsigned last_tokens = tokens - (grains > 0 ? grains - 1 : 0) * grain;
    const unsigned last = (last_tokens + piece - 1) / piece;
    const unsigned count = grains > 0 ? (grains - 1) * width + last : 0;
    for (unsigned i = threadIdx.x; i < count; i += blockDim.x) {
        const unsigned g = i / width, p = i % width;
        const unsigned of_grain = g + 1 < grains ? grain : last_tokens;
        const unsigned n = of_grain - p * piece < piece ? of_grain - p * piece : piece;
        leaves[i] = chain(row_loss + (size_t)g * grain + (size_t)p * piece, n);
    }
    __syncthreads();
    for (unsigned s = 1; s < width; s *= 2) {
        fold_level(leaves, grains, width, last, s);
    }
    // The grains' sums stand `width` apart: one tree over grains * width places from level `width` on.
    for (unsigned s = 1; s < grains; s *= 2) {
        for (unsigned i = threadIdx.x; 2 * s * i + s < grains; i += blockDim.x) {
            float* left = leaves + (size_t)(2 * s * i) * width;
            left[0] = __fadd_rn(left[0], left[(size_t)s * width]);
        }
        __syncthreads();
    }
    if (threadIdx.x == 0) {
        loss[0] = __fmul_rn(count > 0 ? leaves[0] : 0.0f, inv);
    }
}

}  // namespace loss_sum
