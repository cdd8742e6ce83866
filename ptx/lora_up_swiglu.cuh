// The adapters of gate and up, and SwiGLU of what they leave, in one pass over both.
#pragma once
#include "lora_strip.cuh"
#include "swiglu.cuh"

// A warp's strip has one span of the gate's columns and one of the same columns of up.
template <class T> using GateUpStrip = Strip<T, 2, 4, 2>;

// fma(scale, sum, old) of eight neighbours, rounded once: what finish_all writes.
template <class Tile>
__device__ __forceinline__ uint4 finished(const uint4& held, const float (&acc)[Tile::ACROSS][4], int below, float scale) {
    static_assert(Tile::ACROSS == 4, "four fragments are eight neighbours for each of four lanes");
    typedef typename Tile::Format T;
    const unsigned mine[4] = {held.x, held.y, held.z, held.w};
    const uint4 dealt = gather_fragment(mine);
    const unsigned old[4] = {dealt.x, dealt.y, dealt.z, dealt.w};
    unsigned pairs[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
        const float low = __fmaf_rn(scale, acc[j][2 * below], widened(old[j] & 0xffffu, T()));
        const float high = __fmaf_rn(scale, acc[j][2 * below + 1], widened(old[j] >> 16, T()));
        pairs[j] = T::narrow(low) | (unsigned)T::narrow(high) << 16;
    }
    return gather_fragment(pairs);
}

// One warp: the adapters' sums are added to a strip of gate and of up, d columns each, and a = (g * sigmoid(g)) * u of
// what is written.
template <class Tile, class H>
__device__ __forceinline__ void lora_up_swiglu_strip(const unsigned short* s, const unsigned short* b, unsigned short* y,
                                                     H* a, unsigned rows, unsigned d, unsigned rank, float scale) {
    const unsigned lines = tiles_of(rows, Tile::ROWS), across = tiles_of(d, Tile::SPAN), strip = strip_number();
    if (strip >= lines * across) return;
    const unsigned row0 = strip / across * Tile::ROWS, column0 = strip % across * Tile::SPAN;
    const auto span = [&](int i) {
        return outputs_of<Tile, unsigned short, true>(y + (size_t)i * d, rows, d, 2 * d, row0, column0);
    };
    Held<Tile, unsigned short, true> held[2];
    hold(held[0], span(0));
    hold(held[1], span(1));
    const auto out = span(0);
    const unsigned column = out.column0 + lane_id() % 4 * 8;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        typename Tile::Sums acc;
        span_sums<Tile>(s + i * rank, b + (size_t)i * d * rank, row0, rows, 2 * rank, column0, d, rank, acc);
#pragma unroll
        for (int down = 0; down < Tile::DOWN; ++down) {
#pragma unroll
            for (int below = 0; below < 2; ++below) {
                uint4& words = held[i].words[down][below][0];
                words = finished<Tile>(words, acc[down], below, scale);
                const unsigned row = out.row(down, below);
                if (row < rows && column < d) *(uint4*)(y + (size_t)row * 2 * d + (size_t)i * d + column) = words;
            }
        }
    }
#pragma unroll
    for (int down = 0; down < Tile::DOWN; ++down) {
#pragma unroll
        for (int below = 0; below < 2; ++below) {
            const storage::Vector<H> g(held[0].words[down][below][0]), u(held[1].words[down][below][0]);
            const storage::Vector<H> sigmoid = swiglu::sigmoids(g);
            storage::Vector<H> gated;
#pragma unroll
            for (int e = 0; e < 8; ++e) gated.v[e] = swiglu::gated(g.v[e], sigmoid.v[e], u.v[e]);
            const unsigned row = out.row(down, below);
            if (row < rows && column < d) storage::store_vector(a + (size_t)row * d + column, gated);
        }
    }
}

#define LORA_UP_SWIGLU(NAME, FORMAT, H)                                                                          \
    extern "C" __global__ void __launch_bounds__(GateUpStrip<FORMAT>::THREADS, 4)                                \
        NAME(const unsigned short* __restrict__ s, const unsigned short* __restrict__ b, unsigned short* y, H* a, \
             unsigned rows, unsigned d, unsigned rank, float scale) {                                            \
        lora_up_swiglu_strip<GateUpStrip<FORMAT>, H>(s, b, y, a, rows, d, rank, scale);                          \
    }
