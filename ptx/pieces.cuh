// Sums of pieces: leaves in the workspace, folded by the balanced tree within grains and over grains.
#pragma once
#include "tiles.cuh"

struct Cut {
    unsigned tokens, grain, piece;
    // Pieces of a whole grain, and of all grains.
    unsigned pieces_of_grain, pieces;

    // The first token of a piece, and how many it has.
    __device__ __forceinline__ size_t start(unsigned p) const {
        return (size_t)(p / pieces_of_grain) * grain + (size_t)(p % pieces_of_grain) * piece;
    }
    __device__ __forceinline__ unsigned terms(unsigned p) const {
        const size_t first = start(p), grain_end = (size_t)(p / pieces_of_grain + 1) * grain;
        const size_t end = grain_end < tokens ? grain_end : tokens;
        return first < end ? (unsigned)(end - first < piece ? end - first : piece) : 0;
    }
};

__device__ __forceinline__ float sum(float a, float b) { return __fadd_rn(a, b); }
__device__ __forceinline__ float4 sum(float4 a, float4 b) {
    return make_float4(__fadd_rn(a.x, b.x), __fadd_rn(a.y, b.y), __fadd_rn(a.z, b.z), __fadd_rn(a.w, b.w));
}

// The tree over 1 to 8 leaves: the largest power of two below n on the left is folding neighbours level by
// level, an odd last one kept.
template <class T> __device__ __forceinline__ T fold_held(T (&v)[8], unsigned n) {
#pragma unroll
    for (unsigned half = 1; half < 8; half *= 2) {
#pragma unroll
        for (unsigned i = 0; i < 8; i += 2 * half) {
            if (i + half < n) v[i] = sum(v[i], v[i + half]);
        }
    }
    return v[0];
}

// The same over leaves in memory. Other blocks wrote them, so the loads pass L1 by.
template <class T> __device__ __forceinline__ T fold_eight(const T* leaves, size_t stride, unsigned n) {
    T v[8];
#pragma unroll
    for (unsigned i = 0; i < 8; ++i) {
        if (i < n) v[i] = __ldcg(leaves + i * stride);
    }
    return fold_held(v, n);
}

// The tree over any number of leaves, eight at a time; the leaves are overwritten.
template <class T> __device__ __forceinline__ T fold_many(T* leaves, size_t stride, unsigned n) {
    while (n > 8) {
        const unsigned eights = (n + 7) / 8;
        for (unsigned e = 0; e < eights; ++e) {
            leaves[e * stride] = fold_eight(leaves + e * 8 * stride, stride, least(8, n - e * 8));
        }
        n = eights;
    }
    return fold_eight(leaves, stride, n);
}

// Whether the two trees are one tree over at most 8 leaves: with a power of two in a grain the tree over
// grains is the upper part of one tree over pieces.
__device__ __forceinline__ bool short_tree(unsigned pieces, unsigned of_grain) {
    return pieces <= 8 && (pieces <= of_grain || (of_grain & (of_grain - 1)) == 0);
}

// Pieces within grains, then the grains; the leaves may be overwritten.
template <class T>
__device__ __forceinline__ T fold_grains(T* leaves, size_t stride, unsigned pieces, unsigned of_grain) {
    if (short_tree(pieces, of_grain)) return fold_eight(leaves, stride, pieces);
    unsigned grains = 0;
    for (unsigned first = 0; first < pieces; first += of_grain, ++grains) {
        leaves[grains * stride] = fold_many(leaves + first * stride, stride, least(of_grain, pieces - first));
    }
    return fold_many(leaves, stride, grains);
}

// Whether this block is the last of `blocks` to come here with what it has written; the counter is zero again
// after the last.
__device__ __forceinline__ bool last_to_arrive(unsigned* counter, unsigned blocks) {
    __shared__ unsigned before;
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
        before = atomicAdd(counter, 1u);
        if (before + 1 == blocks) *counter = 0;
    }
    __syncthreads();
    __threadfence();
    return before + 1 == blocks;
}
