// The rounded `ds` that the key and value pass of warpgroups leaves in memory for the query pass.
//
// A tile is 64 keys by 64 queries in 64 matrices of 8 keys by 8 queries, those of 8 keys one behind another; a matrix is
// 128 bytes, 16 for each key. A lane has a word of a matrix, so a warp stores one as a line. The tiles of a head are
// those on and below the diagonal, all tiles of keys of a tile of queries one behind another.
#ifndef BITSTEP_ATTENTION_WARPGROUP_KEPT_CUH
#define BITSTEP_ATTENTION_WARPGROUP_KEPT_CUH

#include "attention_warpgroup.cuh"

namespace tensor {

// Bytes of a tile.
constexpr int KEPT = 64 * 64 * 2;

// Where the tile of a head of a sequence stands, of `all` tiles of rows a sequence.
__device__ __forceinline__ size_t kept_at(int head, int all, int queries, int keys) {
    return ((size_t)head * (all * (all + 1) / 2) + queries * (queries + 1) / 2 + keys) * KEPT;
}

// Stores a tile that is the left operand of a product with keys as rows.
__device__ __forceinline__ void keep_tile(char* to, const unsigned (&ds)[4][4]) {
    unsigned* const mine = (unsigned*)to + (threadIdx.x >> 5 & 3) * 512 + (threadIdx.x & 31);
#pragma unroll
    for (int k = 0; k < 4; k++)
#pragma unroll
        for (int i = 0; i < 4; i++) mine[(i & 1) * 256 + (2 * k + (i >> 1)) * 32] = ds[k][i];
}

// Starts copying a tile to a panel whose rows are keys, with 128 threads, of which this is number `thread`.
__device__ __forceinline__ void load_kept(char* to, const char* from, int thread) {
#pragma unroll
    for (int at = 0; at < KEPT / 16; at += GROUP_THREADS) {
        const int i = at + thread, row = i >> 6 << 3 | (i & 7), chunk = i >> 3 & 7;
        copy_async_16((float*)(to + 128 * row + 16 * (chunk ^ (row & 7))), (const float*)(from + 16 * i), true);
    }
}

// d = d + left · right for 64 rows, which are the columns of the panel `left`; `right` is down the rows of its tile.
#ifdef BITSTEP_HOST
template <class H, int N>
__device__ __forceinline__ void add_turned(float (&d)[N][4], Descriptor left, Descriptor right) {
    const int lane = threadIdx.x & 31, g = (threadIdx.x >> 5 & 3) * 16 + (lane >> 2), t = lane & 3;
    const unsigned a[4] = {host_pair(left, g, 2 * t, true), host_pair(left, g + 8, 2 * t, true),
                           host_pair(left, g, 2 * t + 8, true), host_pair(left, g + 8, 2 * t + 8, true)};
    host_products<H, N, true>(d, a, right);
}
#else
#define TURNED_STEPS(H, TYPE)                                                                                      \
    static __device__ __forceinline__ void turned_step(H, float (&d)[8][4], Descriptor left, Descriptor right) {   \
        asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, 1, 0;\n"                                                   \
                     "wgmma.mma_async.sync.aligned.m64n64k16.f32." TYPE "." TYPE " {" NUMBERS_32                   \
                     "}, %32, %33, p, 1, 1, 1, 1;\n}"                                                              \
                     : EIGHT(d, 0), EIGHT(d, 2), EIGHT(d, 4), EIGHT(d, 6)                                          \
                     : "l"(whole(left)), "l"(whole(right)));                                                       \
    }                                                                                                              \
    static __device__ __forceinline__ void turned_step(H, float (&d)[16][4], Descriptor left, Descriptor right) {  \
        asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, 1, 0;\n"                                                   \
                     "wgmma.mma_async.sync.aligned.m64n128k16.f32." TYPE "." TYPE " {" NUMBERS_64                  \
                     "}, %64, %65, p, 1, 1, 1, 1;\n}"                                                              \
                     : EIGHT(d, 0), EIGHT(d, 2), EIGHT(d, 4), EIGHT(d, 6), EIGHT(d, 8), EIGHT(d, 10),              \
                       EIGHT(d, 12), EIGHT(d, 14)                                                                  \
                     : "l"(whole(left)), "l"(whole(right)));                                                       \
    }
TURNED_STEPS(Bf16, "bf16")
TURNED_STEPS(F16, "f16")
#undef TURNED_STEPS

template <class H, int N>
__device__ __forceinline__ void add_turned(float (&d)[N][4], Descriptor left, Descriptor right) {
    turned_step(H(), d, left, right);
}
#endif

// d = d + leftᵀ · others, chains along the rows of both tiles in ascending order.
template <class H, int N>
__device__ __forceinline__ void add_turned_tile(float (&d)[N][4], Descriptor left, Descriptor others) {
#pragma unroll
    for (int k = 0; k < 4; k++) add_turned<H>(d, down(left, k), down(others, k));
}

}  // namespace tensor

#endif
