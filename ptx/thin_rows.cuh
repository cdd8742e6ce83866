// Products with few columns, the ranks of adapters: out[t, r] = sum_k wide[t, k] * thin(k, r), every output one chain over
// ascending k.
//
// The rows are all there is to deal out: a block has 32 of them, so that about one block stands on each multiprocessor,
// and brings the terms of many steps ahead, 256 bytes of a row at a time. A warp has 16 rows and 16 columns. All rows of the
// operands and of the output are whole chunks of 16 bytes.
#pragma once
#include "gemm_tensor.cuh"

// The operands of a tile from its first row, term and column on; `wide_pitch` and `thin_pitch` elements lie between their
// lines, and so many rows and columns exist.
struct ThinOperands {
    const unsigned short* wide;
    const unsigned short* thin;
    size_t wide_pitch, thin_pitch;
    unsigned rows, columns, terms;
};

// A tile of 32 rows and COLUMNS columns; STAGES stages are under way. The thin factor lies with its terms side by side (`K`)
// or with its columns side by side.
template <class T, unsigned COLUMNS, Inner INNER, unsigned STAGES> struct ThinRows {
    static constexpr unsigned ROWS = 32, WIDTH = COLUMNS, THREADS = 4 * COLUMNS, DEPTH = 128, STEPS = DEPTH / 16;
    static constexpr bool TERMS_INSIDE = INNER == Inner::K;
    // Lines of an odd number of chunks of 16 bytes: eight that a fragment reads lie in different banks.
    static constexpr unsigned WIDE_PITCH = DEPTH * 2 + 16, THIN_PITCH = TERMS_INSIDE ? WIDE_PITCH : COLUMNS * 2 + 16;
    static constexpr unsigned WIDE_BYTES = ROWS * WIDE_PITCH, THIN_BYTES = (TERMS_INSIDE ? COLUMNS : DEPTH) * THIN_PITCH;
    static constexpr unsigned STAGE_BYTES = WIDE_BYTES + THIN_BYTES;
    // Chunks of a line, and lines that all threads bring at once.
    static constexpr unsigned WIDE_CHUNKS = DEPTH / 8, WIDE_LINES = THREADS / WIDE_CHUNKS;
    static constexpr unsigned THIN_CHUNKS = TERMS_INSIDE ? WIDE_CHUNKS : COLUMNS / 8, THIN_LINES = THREADS / THIN_CHUNKS;
    static constexpr unsigned WIDE_COPIES = (ROWS + WIDE_LINES - 1) / WIDE_LINES, THIN_COPIES = 4;
    static_assert(THIN_COPIES * THREADS * 16 == COLUMNS * DEPTH * 2, "whole chunks a thread");
    typedef float Sums[2][4];

    // The first row and column of this warp.
    __device__ __forceinline__ static unsigned row() { return threadIdx.x / 32 % 2 * 16; }
    __device__ __forceinline__ static unsigned column() { return threadIdx.x / 64 * 16; }

    // Copies part `c` of a stage, of which `left` terms exist; zeros stand for what does not.
    __device__ __forceinline__ static void copy_wide(const ThinOperands& p, unsigned stage, unsigned c, unsigned left) {
        const unsigned line = threadIdx.x / WIDE_CHUNKS + c * WIDE_LINES, inside = threadIdx.x % WIDE_CHUNKS * 8;
        if (ROWS % WIDE_LINES != 0 && line >= ROWS) return;
        copy_chunk(stage + line * WIDE_PITCH + inside * 2, (const unsigned char*)(p.wide + line * p.wide_pitch + inside),
                   line < p.rows && inside < left);
    }
    __device__ __forceinline__ static void copy_thin(const ThinOperands& p, unsigned stage, unsigned c, unsigned left) {
        const unsigned line = threadIdx.x / THIN_CHUNKS + c * THIN_LINES, inside = threadIdx.x % THIN_CHUNKS * 8;
        const bool exists = TERMS_INSIDE ? line < p.columns && inside < left : line < left && inside < p.columns;
        copy_chunk(stage + WIDE_BYTES + line * THIN_PITCH + inside * 2,
                   (const unsigned char*)(p.thin + line * p.thin_pitch + inside), exists);
    }

    // The chains of this warp; `acc` starts at +0.0.
    __device__ __forceinline__ static void run(ThinOperands p, Sums& acc) {
        const unsigned lane = lane_id();
        const unsigned left_at = (row() + lane % 16) * WIDE_PITCH + lane / 16 * 16;
        const unsigned right_at =
            WIDE_BYTES + (TERMS_INSIDE ? (column() + lane / 16 * 8 + lane % 8) * THIN_PITCH + (lane >> 3 & 1) * 16
                                       : ((lane >> 3 & 1) * 8 + lane % 8) * THIN_PITCH + (column() / 8 + lane / 16) * 16);
        unsigned to_copy = p.terms, filled = 0;
        const auto after = [](unsigned stage) { return stage == (STAGES - 1) * STAGE_BYTES ? 0 : stage + STAGE_BYTES; };
        // Part of the copies of a stage, `part` of `STEPS`; those of all parts are a group, even an empty one: the wait
        // counts groups.
        const auto fetch = [&](unsigned part) {
            if (to_copy > 0) {
#pragma unroll
                for (unsigned c = part; c < WIDE_COPIES; c += STEPS) copy_wide(p, filled, c, to_copy);
#pragma unroll
                for (unsigned c = 0; c < THIN_COPIES; ++c) {
                    if (2 * c == part) copy_thin(p, filled, c, to_copy);
                }
            }
            if (part + 1 < STEPS) return;
            p.wide += DEPTH;
            p.thin += TERMS_INSIDE ? DEPTH : DEPTH * p.thin_pitch;
            to_copy -= least(to_copy, DEPTH);
            filled = after(filled);
            copy_async_commit();
        };
        unsigned a[2][4], b[2][2][2];
        const auto read = [&](unsigned stage, unsigned s) {
            load_matrices(a[s % 2], stage + left_at + s * 32);
            unsigned pair[4];
            if (TERMS_INSIDE) load_matrices(pair, stage + right_at + s * 32);
            else load_transposed(pair, stage + right_at + s * 16 * THIN_PITCH);
            b[s % 2][0][0] = pair[0], b[s % 2][0][1] = pair[1];
            b[s % 2][1][0] = pair[2], b[s % 2][1][1] = pair[3];
        };
        // Waits for the oldest stage, of all threads; no thread reads the one before any more.
        const auto arrive = [&]() {
            copy_async_wait<STAGES - 2>();
            __syncthreads();
        };
#pragma unroll 1
        for (unsigned stage = 0; stage < STAGES - 1; ++stage) {
#pragma unroll
            for (unsigned part = 0; part < STEPS; ++part) fetch(part);
        }
        arrive();
        read(0, 0);
        unsigned now = 0;
#pragma unroll 1
        for (unsigned round = (p.terms + DEPTH - 1) / DEPTH; round > 0; --round) {
            const unsigned next = after(now);
#pragma unroll
            for (unsigned s = 0; s < STEPS; ++s) {
                fetch(s);
                if (s == STEPS - 1) arrive();
                read(s == STEPS - 1 ? next : now, (s + 1) % STEPS);
#pragma unroll
                for (unsigned j = 0; j < 2; ++j) T::step(acc[j], a[s % 2], b[s % 2][j]);
            }
            now = next;
        }
    }

    // The tile, whose first output is at `out` and whose rows are `pitch` elements apart; `finish` takes a sum.
    template <class Finish>
    __device__ __forceinline__ static void tile(const ThinOperands& p, unsigned short* out, size_t pitch, Finish finish) {
        Sums acc = {};
        run(p, acc);
#pragma unroll
        for (unsigned below = 0; below < 2; ++below) {
#pragma unroll
            for (unsigned j = 0; j < 2; ++j) {
                const unsigned row = ThinRows::row() + lane_id() / 4 + below * 8, column = ThinRows::column() + j * 8 + lane_id() % 4 * 2;
                const unsigned low = T::narrow(finish(acc[j][2 * below])), high = T::narrow(finish(acc[j][2 * below + 1]));
                if (row < p.rows && column < p.columns) *(unsigned*)(out + row * pitch + column) = low | high << 16;
            }
        }
    }
};
