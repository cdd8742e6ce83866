// s[t, r] = sum_i x[t, i] * a[r, i] for up to 48 ranks: one chain of steps over ascending i an output, in 16-bit formats.
//
// A warp has eight rows of x alone and all ranks of theirs. The ranks are the step's left factor, so one step serves
// sixteen of them, and 4,096 rows are four warps for each multiprocessor. Both factors come straight to registers as the
// step takes them: within a step the order of the terms is free, as lora_wide.cuh has it, and a lane has four neighbours.
// So no warp waits for another, and AHEAD steps of its rows, 8 KiB, are under way. Terms beyond the chain are zeros.
#pragma once
#include "lora_wide.cuh"

namespace down {

using wide::Word;
using wide::four_terms;

// Warps of a block, rows of a warp; steps of the rows, and of the ranks, that are under way.
constexpr unsigned WARPS = 4, ROWS = 8;
constexpr int AHEAD = 32, RANKS_AHEAD = 8;
static_assert(AHEAD % RANKS_AHEAD == 0, "a round begins at the first of both rings");

template <class T, int GROUPS>
__device__ __forceinline__ void chains(const Word* x, const Word* a, Word* s, unsigned rows, unsigned n_in,
                                       unsigned ranks) {
    const unsigned lane = wide::lane(), first = lane / 4;
    const unsigned row = (blockIdx.x * WARPS + wide::warp()) * ROWS;
    if (row >= rows) return;
    // Where a row or a rank does not exist, the first is read; what comes of it is not stored.
    const Word* of_row = x + (size_t)(row + first < rows ? row + first : row) * n_in + wide::term();
    const Word* of_ranks[2 * GROUPS];
#pragma unroll
    for (int h = 0; h < 2 * GROUPS; ++h) {
        const unsigned rank = first + h * 8;
        of_ranks[h] = a + (size_t)(rank < ranks ? rank : 0) * n_in + wide::term();
    }
    // Terms of the lane from this round's first step on.
    int left = (int)n_in - (int)wide::term();
    uint2 coming[AHEAD];
    uint2 factors[RANKS_AHEAD][2 * GROUPS];
    const auto fetch_row = [&](int step) { coming[step % AHEAD] = four_terms(of_row + step * 16, step * 16 < left); };
    const auto fetch_ranks = [&](int step) {
#pragma unroll
        for (int h = 0; h < 2 * GROUPS; ++h)
            factors[step % RANKS_AHEAD][h] = four_terms(of_ranks[h] + step * 16, step * 16 < left);
    };
#pragma unroll
    for (int i = 0; i < AHEAD; ++i) {
        fetch_row(i);
        if (i < RANKS_AHEAD) fetch_ranks(i);
    }
    float sums[GROUPS][4] = {};
#pragma unroll 1
    for (unsigned done = 0; done < n_in; done += AHEAD * 16) {
#pragma unroll
        for (int i = 0; i < AHEAD; ++i) {
            const unsigned right[2] = {coming[i].x, coming[i].y};
#pragma unroll
            for (int g = 0; g < GROUPS; ++g) {
                const uint2 upper = factors[i % RANKS_AHEAD][2 * g], lower = factors[i % RANKS_AHEAD][2 * g + 1];
                const unsigned words[4] = {upper.x, lower.x, upper.y, lower.y};
                T::step(sums[g], words, right);
            }
            fetch_row(i + AHEAD);
            fetch_ranks(i + RANKS_AHEAD);
        }
        of_row += AHEAD * 16, left -= AHEAD * 16;
#pragma unroll
        for (int h = 0; h < 2 * GROUPS; ++h) of_ranks[h] += AHEAD * 16;
    }
#pragma unroll
    for (int g = 0; g < GROUPS; ++g) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            const unsigned t = row + lane % 4 * 2 + e % 2, rank = first + g * 16 + e / 2 * 8;
            if (t < rows && rank < ranks) s[(size_t)t * ranks + rank] = T::narrow(sums[g][e]);
        }
    }
}

}  // namespace down

#define DOWN_OF(NAME, FORMAT, GROUPS)                                                                              \
    extern "C" __global__ void __launch_bounds__(down::WARPS * 32, 1)                                              \
        NAME(const unsigned short* __restrict__ x, const unsigned short* __restrict__ a, unsigned short* s,        \
             unsigned rows, unsigned n_in, unsigned ranks) {                                                       \
        down::chains<FORMAT, GROUPS>(x, a, s, rows, n_in, ranks);                                                  \
    }

// For up to 16, 32 and 48 ranks.
#define DOWN(MATH, FORMAT)                      \
    DOWN_OF(lora_down_##MATH##_16, FORMAT, 1)   \
    DOWN_OF(lora_down_##MATH##_32, FORMAT, 2)   \
    DOWN_OF(lora_down_##MATH##_48, FORMAT, 3)
