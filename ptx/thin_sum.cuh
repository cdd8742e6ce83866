// Sums over tokens with one thin factor: out[l, r] = sum_t left[t, l] * right[t, r], where one of both extents is a tile's
// 64 columns of a wide matrix and the other the ranks of adapters.
//
// A warp has a piece of the tokens alone, in stages of 16 of them, the terms of one step: it waits for no other warp
// while it reads. The pieces of a block's warps are neighbours, so their sum is a subtree of the balanced tree, and what
// goes through memory is one sum for every four pieces. All rows of both factors are whole chunks of 16 bytes.
#pragma once
#include "gemm_tensor.cuh"

// Columns of the matrix beside a sum: where those of a tile begin in the first of its tokens, elements from one token to the next, and
// how many of the columns exist.
struct Columns {
    const unsigned short* first;
    size_t pitch;
    unsigned here;
};

// 16 tokens of EXTENT columns in shared memory. A line is an odd number of chunks of 16 bytes, so that eight lines that
// a fragment reads lie in different banks.
template <unsigned EXTENT> struct Lines {
    static constexpr unsigned TOKENS = 16, CHUNKS = EXTENT / 8, PITCH = (CHUNKS + 1) * 16, BYTES = TOKENS * PITCH;
    static_assert(EXTENT % 16 == 0, "whole fragments, and an odd number of chunks");

    // Copies the next tokens, of which `left` exist; zeros stand for what does not.
    __device__ __forceinline__ static void copy(unsigned to, Columns& from, unsigned left) {
#pragma unroll
        for (unsigned c = 0; c < TOKENS * CHUNKS / 32; ++c) {
            const unsigned index = lane_id() + c * 32, token = index / CHUNKS, chunk = index % CHUNKS;
            copy_chunk(to + token * PITCH + chunk * 16, (const unsigned char*)(from.first + token * from.pitch + chunk * 8),
                       token < left && chunk * 8 < from.here);
        }
        from.first += TOKENS * from.pitch;
    }
    // The fragments as the left factor, 16 rows each.
    __device__ __forceinline__ static void left(unsigned stage, unsigned (&out)[EXTENT / 16][4]) {
        const unsigned lane = lane_id(), at = stage + (lane / 16 * 8 + lane % 8) * PITCH + (lane >> 3 & 1) * 16;
#pragma unroll
        for (unsigned i = 0; i < EXTENT / 16; ++i) load_transposed(out[i], at + i * 32);
    }
    // The fragments as the right factor, 8 columns each.
    __device__ __forceinline__ static void right(unsigned stage, unsigned (&out)[EXTENT / 8][2]) {
        const unsigned lane = lane_id(), at = stage + ((lane >> 3 & 1) * 8 + lane % 8) * PITCH + lane / 16 * 16;
#pragma unroll
        for (unsigned p = 0; p < EXTENT / 16; ++p) {
            unsigned pair[4];
            load_transposed(pair, at + p * 32);
            out[2 * p][0] = pair[0], out[2 * p][1] = pair[1];
            out[2 * p + 1][0] = pair[2], out[2 * p + 1][1] = pair[3];
        }
    }
};

// A block has LEFT x RIGHT outputs and a piece a warp; STAGES stages of each warp are under way.
template <class T, unsigned LEFT, unsigned RIGHT> struct ThinSum {
    static constexpr int ROWS = LEFT, COLUMNS = RIGHT;
    static constexpr unsigned WARPS = 4, THREADS = 32 * WARPS, STAGES = 6, DOWN = LEFT / 16, ACROSS = RIGHT / 8;
    static constexpr unsigned STAGE_BYTES = Lines<LEFT>::BYTES + Lines<RIGHT>::BYTES, WARP_BYTES = STAGES * STAGE_BYTES;
    // Four outputs of a thread are a quad; a warp's are kept where its stages were.
    static constexpr unsigned QUADS = DOWN * ACROSS;
    static_assert(QUADS * 32 * sizeof(float4) <= WARP_BYTES, "sums lie where the stages lay");
    static_assert(QUADS % (2 * WARPS) == 0, "every warp folds as many quads, in pairs");
    typedef float Sums[DOWN][ACROSS][4];

    // A tile begins at its own first row and column.
    __device__ __forceinline__ static unsigned row() { return 0; }
    __device__ __forceinline__ static unsigned column() { return 0; }

    // The chains of a warp over `terms` tokens; `acc` starts at +0.0, and the stages stand from `base` on.
    __device__ __forceinline__ static void chain(Columns left, Columns right, unsigned terms, unsigned base, Sums& acc) {
        unsigned to_copy = terms, filled = base;
        const auto after = [&](unsigned stage) {
            return stage == base + (STAGES - 1) * STAGE_BYTES ? base : stage + STAGE_BYTES;
        };
        const auto fetch = [&]() {
            if (to_copy > 0) {
                Lines<LEFT>::copy(filled, left, to_copy);
                Lines<RIGHT>::copy(filled + Lines<LEFT>::BYTES, right, to_copy);
                to_copy -= least(to_copy, 16);
            }
            filled = after(filled);
            // A group a round, even an empty one: the wait counts groups.
            copy_async_commit();
        };
#pragma unroll 1
        for (unsigned s = 0; s < STAGES - 1; ++s) fetch();
        unsigned now = base;
#pragma unroll 1
        for (unsigned rounds = (terms + 15) / 16; rounds > 0; --rounds) {
            copy_async_wait<STAGES - 2>();
            // What every lane has copied is here, and no lane reads the stage before any more.
            __syncwarp();
            fetch();
            unsigned a[DOWN][4], b[ACROSS][2];
            Lines<LEFT>::left(now, a);
            Lines<RIGHT>::right(now + Lines<LEFT>::BYTES, b);
#pragma unroll
            for (unsigned i = 0; i < DOWN; ++i) {
#pragma unroll
                for (unsigned j = 0; j < ACROSS; ++j) T::step(acc[i][j], a[i], b[j]);
            }
            now = after(now);
        }
        // A group that is still under way is empty; no lane reads a stage any more.
        __syncwarp();
    }

    // One block: four neighbouring pieces of one tile, `group` being their number among such groups. `of_piece` gives the
    // factors of a piece from its first token on, `put` takes a quad of the finished sum.
    template <class Factors, class Put>
    __device__ __forceinline__ static void sum(const Cut& cut, unsigned tile, unsigned group, unsigned* arrivals,
                                               float4* partials, Factors of_piece, Put put) {
        const unsigned warp = threadIdx.x / 32, groups = (cut.pieces + WARPS - 1) / WARPS;
        const unsigned piece = group * WARPS + warp, base = warp * WARP_BYTES;
        float4* leaves = (float4*)(stages + base) + lane_id();
        if (piece < cut.pieces) {
            Sums acc;
#pragma unroll
            for (unsigned q = 0; q < QUADS; ++q) {
                float(&v)[4] = acc[q / ACROSS][q % ACROSS];
                v[0] = v[1] = v[2] = v[3] = 0.0f;
            }
            Columns left, right;
            of_piece(cut.start(piece), left, right);
            chain(left, right, cut.terms(piece), base, acc);
#pragma unroll
            for (unsigned q = 0; q < QUADS; ++q) {
                const float(&v)[4] = acc[q / ACROSS][q % ACROSS];
                leaves[q * 32] = make_float4(v[0], v[1], v[2], v[3]);
            }
        }
        __syncthreads();
        const unsigned held = least(WARPS, cut.pieces - group * WARPS);
        float4* kept = partials + (size_t)tile * groups * QUADS * 32 + lane_id();
        const float4* all = (const float4*)stages + lane_id();
#pragma unroll
        for (unsigned n = 0; n < QUADS; n += WARPS) {
            const unsigned q = n + warp;
            float4 v[8];
#pragma unroll
            for (unsigned i = 0; i < WARPS; ++i) {
                if (i < held) v[i] = all[i * (WARP_BYTES / 16) + q * 32];
            }
            const float4 folded = fold_held(v, held);
            if (groups == 1) put(q, folded);
            else kept[(group * QUADS + q) * 32] = folded;
        }
        if (groups == 1 || !last_to_arrive(arrivals + tile, groups)) return;
        if (groups > 8) {
#pragma unroll 1
            for (unsigned q = warp; q < QUADS; q += WARPS) put(q, fold_many(kept + q * 32, QUADS * 32, groups));
            return;
        }
        // Two quads together: the loads of both are under way before the first is used.
#pragma unroll 1
        for (unsigned q = warp; q < QUADS; q += 2 * WARPS) {
            const float4 first = fold_eight(kept + q * 32, QUADS * 32, groups);
            const float4 second = fold_eight(kept + (q + WARPS) * 32, QUADS * 32, groups);
            put(q, first);
            put(q + WARPS, second);
        }
    }
};

// From a token and a column on, of a matrix whose rows are `pitch` elements apart; `exist` columns are there.
__device__ __forceinline__ Columns columns_of(const unsigned short* matrix, size_t token, size_t pitch, unsigned first,
                                              unsigned exist) {
    return {matrix + token * pitch + first, pitch, exist};
}
