// What the attention kernels of warpgroups share: Hopper's wgmma, for 16-bit operands and heads of 64 and 128
// columns. A step of wgmma is the contract's step, 64 rows at once, and its accumulators lie as those of
// attention_tensor.cuh, 16 rows a warp.
//
// A tile is 64 rows of a head in panels of 64 columns. A panel's row has 128 bytes, whose chunks of 16 stand as the
// tensor core's swizzle wants them: chunk c of row r at place c ^ (r mod 8). So a panel is Rows<H, 64>, begins at a
// multiple of 1024, and serves as a factor along its rows and across them without being copied.
#ifndef BITSTEP_ATTENTION_WARPGROUP_CUH
#define BITSTEP_ATTENTION_WARPGROUP_CUH

#include "attention_tensor.cuh"
#include "warpgroup.cuh"

namespace tensor {

// Whether a tile lies on the diagonal, as a type.
struct Yes {
    static constexpr bool VALUE = true;
};
struct No {
    static constexpr bool VALUE = false;
};

constexpr int GROUP_THREADS = 128;
constexpr int PANEL = 64 * 128;

// The matrix descriptor of a tile (PTX ISA, wgmma, matrix descriptor). Its low half is the start and the stride
// between panels, its high half the stride between 8 rows and the swizzle of 128 bytes; only the start ever changes.
#ifdef BITSTEP_HOST
typedef Address Descriptor;
__device__ __forceinline__ Descriptor descriptor(Address at) { return at; }
__device__ __forceinline__ Descriptor moved(Descriptor tile, int bytes) { return tile + bytes; }
#else
typedef unsigned Descriptor;
__device__ __forceinline__ Descriptor descriptor(Address at) { return at >> 4 | (PANEL >> 4) << 16; }
__device__ __forceinline__ Descriptor moved(Descriptor tile, int bytes) { return tile + (bytes >> 4); }
__device__ __forceinline__ unsigned long long whole(Descriptor low) {
    return (unsigned long long)(1u << 30 | 1024 >> 4) << 32 | low;
}
#endif

// A tile's step k of 16, along the head, and along the rows.
__device__ __forceinline__ Descriptor across(Descriptor tile, int k) {
    return moved(tile, (k >> 2) * PANEL + 32 * (k & 3));
}
__device__ __forceinline__ Descriptor down(Descriptor tile, int k) { return moved(tile, 2048 * k); }

__device__ __forceinline__ void settled(unsigned (&a)[4][4]) {
#ifndef BITSTEP_HOST
#pragma unroll
    for (int k = 0; k < 4; k++)
#pragma unroll
        for (int i = 0; i < 4; i++) asm volatile("" : "+r"(a[k][i])::"memory");
#endif
}

#ifdef BITSTEP_HOST
// An element of a factor whose panel begins at `tile`, by the address that the swizzle makes of its plain place.
__device__ __forceinline__ unsigned short host_element(Descriptor tile, int rows, int k, bool along_rows) {
    // Along the head: 8 rows a group of 1024. Along the rows: 64 columns a panel, 8 rows a group.
    const size_t plain = along_rows ? (k >> 3) * 1024 + (k & 7) * 128 + (rows >> 6) * PANEL + 2 * (rows & 63)
                                    : (rows >> 3) * 1024 + (rows & 7) * 128 + 2 * k;
    const size_t at = tile + plain;
    return *(const unsigned short*)(at ^ (at >> 3 & 0x70));
}
__device__ __forceinline__ unsigned host_pair(Descriptor tile, int row, int k, bool along_rows) {
    return host_element(tile, row, k, along_rows) | host_element(tile, row, k + 1, along_rows) << 16;
}
template <class H, int N, bool ALONG_ROWS>
__device__ __forceinline__ void host_products(float (&d)[N][4], const unsigned (&a)[4], Descriptor b) {
    const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
    for (int n = 0; n < N; n++)
        H::step(d[n], a, host_pair(b, 8 * n + g, 2 * t, ALONG_ROWS), host_pair(b, 8 * n + g, 2 * t + 8, ALONG_ROWS));
}
template <class H, int N>
__device__ __forceinline__ void host_products(float (&d)[N][4], Descriptor a, Descriptor b) {
    const int lane = threadIdx.x & 31, g = (threadIdx.x >> 5 & 3) * 16 + (lane >> 2), t = lane & 3;
    const unsigned left[4] = {host_pair(a, g, 2 * t, false), host_pair(a, g + 8, 2 * t, false),
                              host_pair(a, g, 2 * t + 8, false), host_pair(a, g + 8, 2 * t + 8, false)};
    host_products<H, N, false>(d, left, b);
}
#endif

// `dot`: d = left · right (STARTS) or d + left · right for 64 rows, both factors across their tiles. `add`:
// d + left · right with `left` in registers and `right` down the rows of its tile.
#ifdef BITSTEP_HOST
#define GROUP_STEPS(H, TYPE)                                                                                       \
    template <>                                                                                                    \
    struct Group<H> {                                                                                              \
        template <bool STARTS>                                                                                     \
        static void dot(float (&d)[8][4], Descriptor left, Descriptor right) {                     \
            if (STARTS) fill<8>(d, 0.0f);                                                                          \
            host_products<H, 8>(d, left, right);                                                                   \
        }                                                                                                          \
        template <int N>                                                                                           \
        static void add(float (&d)[N][4], const unsigned (&left)[4], Descriptor right) {                   \
            host_products<H, N, true>(d, left, right);                                                             \
        }                                                                                                          \
    };
#else
#define GROUP_STEPS(H, TYPE)                                                                                       \
    template <>                                                                                                    \
    struct Group<H> {                                                                                              \
        template <bool STARTS>                                                                                     \
        static __device__ __forceinline__ void dot(float (&d)[8][4], Descriptor left,                      \
                                                   Descriptor right) {                                     \
            asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %34, 0;\n"                                              \
                         "wgmma.mma_async.sync.aligned.m64n64k16.f32." TYPE "." TYPE " {" NUMBERS_32               \
                         "}, %32, %33, p, 1, 1, 0, 0;\n}"                                                          \
                         : EIGHT(d, 0), EIGHT(d, 2), EIGHT(d, 4), EIGHT(d, 6)                                      \
                         : "l"(whole(left)), "l"(whole(right)), "n"(STARTS ? 0 : 1));                              \
        }                                                                                                          \
        static __device__ __forceinline__ void add(float (&d)[8][4], const unsigned (&left)[4],                    \
                                                   Descriptor right) {                                     \
            asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, 1, 0;\n"                                               \
                         "wgmma.mma_async.sync.aligned.m64n64k16.f32." TYPE "." TYPE " {" NUMBERS_32               \
                         "}, {%32, %33, %34, %35}, %36, p, 1, 1, 1;\n}"                                            \
                         : EIGHT(d, 0), EIGHT(d, 2), EIGHT(d, 4), EIGHT(d, 6)                                      \
                         : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "l"(whole(right)));                    \
        }                                                                                                          \
        static __device__ __forceinline__ void add(float (&d)[16][4], const unsigned (&left)[4],                   \
                                                   Descriptor right) {                                     \
            asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, 1, 0;\n"                                               \
                         "wgmma.mma_async.sync.aligned.m64n128k16.f32." TYPE "." TYPE " {" NUMBERS_64              \
                         "}, {%64, %65, %66, %67}, %68, p, 1, 1, 1;\n}"                                            \
                         : EIGHT(d, 0), EIGHT(d, 2), EIGHT(d, 4), EIGHT(d, 6), EIGHT(d, 8), EIGHT(d, 10),          \
                           EIGHT(d, 12), EIGHT(d, 14)                                                              \
                         : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "l"(whole(right)));                    \
        }                                                                                                          \
    };
#endif

template <class H>
struct Group;
GROUP_STEPS(Bf16, "bf16")
GROUP_STEPS(F16, "f16")

// d = own · othersᵀ, or d + own · othersᵀ, of two tiles, chains over the head.
template <class H, int D, bool STARTS>
__device__ __forceinline__ void dot_tiles(float (&d)[8][4], Descriptor own, Descriptor others) {
    Group<H>::template dot<STARTS>(d, across(own, 0), across(others, 0));
#pragma unroll
    for (int k = 1; k < D / 16; k++) Group<H>::template dot<false>(d, across(own, k), across(others, k));
}

// d = d + a · others, chains along the rows of a tile; `a` is what `operands` gives.
template <class H, int N>
__device__ __forceinline__ void add_tile(float (&d)[N][4], const unsigned (&a)[4][4], Descriptor others) {
#pragma unroll
    for (int k = 0; k < 4; k++) Group<H>::add(d, a[k], down(others, k));
}

// Accumulators of 64 columns as left operands of a tile's four steps.
template <class H>
__device__ __forceinline__ void operands(unsigned (&a)[4][4], const float (&s)[8][4]) {
#pragma unroll
    for (int k = 0; k < 4; k++) operand<H, 8>(a[k], s, k);
    settled(a);
}

// Starts copying a tile of a head of D columns with `THREADS` threads, of which this is number `thread`: the first
// `count` of its 64 rows, then zeros.
template <class H, int D, int THREADS>
__device__ __forceinline__ void load_tile(char* to, const typename H::Element* from, size_t stride, int count,
                                          int thread) {
    constexpr int CHUNKS = D / 8, STRIDE = THREADS / CHUNKS;
    static_assert(STRIDE % 8 == 0, "a thread's rows have one place");
    const int chunk = thread % CHUNKS, first = thread / CHUNKS;
    char* const target = to + (chunk >> 3) * PANEL + Rows<H, 64>::at(first, chunk & 7);
    const typename H::Element* const source = from + (size_t)first * stride + 8 * chunk;
#pragma unroll
    for (int at = 0; at < 64; at += STRIDE)
        if (64 % STRIDE == 0 || first + at < 64)
            copy_async_16((float*)(target + 128 * at), (const float*)(source + at * stride), first + at < count);
}

// The start of dynamic shared memory at a multiple of 1024, of which the host asks for 1024 bytes more.
__device__ __forceinline__ char* panels(char* shared) {
#ifdef BITSTEP_HOST
    const size_t at = (size_t)shared;
#else
    const unsigned at = (unsigned)__cvta_generic_to_shared(shared);
#endif
    return shared + ((1024 - (at & 1023)) & 1023);
}

}  // namespace tensor

#endif
