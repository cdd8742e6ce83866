// Low-rank adapters whose outputs are wide and whose chains are short: what they do is read and write, and each warp
// does it alone, for a strip of 16-bit outputs of its own.
//
// Every output is one chain of steps, as in gemm_tensor.cuh. Rows of all operands start at multiples of 16 bytes and
// are whole chunks of 16 bytes. What a strip held is read first, so that it is under way while the sums are made.
#pragma once
#include "lora_tensor.cuh"

// Warps of a block; each has a strip.
constexpr unsigned STRIP_WARPS = 4;

// A warp's rectangle: D times 16 rows, S spans of A times 8 columns. What all spans held is read at once; the sums of
// one are finished before those of the next begin, so that registers are enough.
template <class T, int D, int A, int S> struct Strip {
    typedef T Format;
    static constexpr int DOWN = D, ACROSS = A, SPANS = S;
    static constexpr unsigned SPAN = A * 8, ROWS = D * 16, COLUMNS = SPAN * S, THREADS = STRIP_WARPS * 32;
    typedef float Sums[D][A][4];
    // A span is the whole tile of its warp.
    __device__ __forceinline__ static unsigned row() { return 0; }
    __device__ __forceinline__ static unsigned column() { return 0; }
};

// The number of this warp's strip.
__device__ __forceinline__ unsigned strip_number() { return blockIdx.x * STRIP_WARPS + threadIdx.x / 32; }

// Two neighbouring factors; zeros where they do not exist.
__device__ __forceinline__ unsigned pair_at(const unsigned short* matrix, unsigned line, unsigned width, unsigned at,
                                            bool exists) {
    return exists ? __ldg((const unsigned*)(matrix + (size_t)line * width + at)) : 0;
}

// The left factors of the step from term `k` on, of which `terms` exist: rows of `matrix` that start `width` elements
// apart.
template <class Tile>
__device__ __forceinline__ void left_factors(const unsigned short* matrix, unsigned row0, unsigned rows, unsigned width,
                                             unsigned k, unsigned terms, unsigned (&out)[Tile::DOWN][4]) {
#pragma unroll
    for (int i = 0; i < Tile::DOWN; ++i) {
#pragma unroll
        for (int q = 0; q < 4; ++q) {
            const unsigned row = row0 + i * 16 + q % 2 * 8 + lane_id() / 4, term = k + q / 2 * 8 + lane_id() % 4 * 2;
            out[i][q] = pair_at(matrix, row, width, term, row < rows && term < terms);
        }
    }
}

template <class Tile>
__device__ __forceinline__ void strip_step(typename Tile::Sums& acc, const unsigned (&left)[Tile::DOWN][4],
                                           const unsigned (&right)[Tile::ACROSS][2]) {
#pragma unroll
    for (int i = 0; i < Tile::DOWN; ++i) {
#pragma unroll
        for (int j = 0; j < Tile::ACROSS; ++j) Tile::Format::step(acc[i][j], left[i], right[j]);
    }
}

template <class Tile> __device__ __forceinline__ void clear_strip(typename Tile::Sums& acc) {
#pragma unroll
    for (int i = 0; i < Tile::DOWN; ++i) {
#pragma unroll
        for (int j = 0; j < Tile::ACROSS; ++j) acc[i][j][0] = acc[i][j][1] = acc[i][j][2] = acc[i][j][3] = 0.0f;
    }
}

// One warp: y[t, first + o] = fma(scale, sum_k s[t, part * rank + k] * b[row + o, k], y[t, first + o]) of a strip.
template <class Tile>
__device__ __forceinline__ void lora_up_strip(const unsigned short* s, const unsigned short* b, unsigned short* y,
                                              unsigned rows, const Ranks& of, float scale, const Parts& parts) {
    const unsigned lines = tiles_of(rows, Tile::ROWS);
    unsigned strip = strip_number();
    const Part part = part_of<Tile::COLUMNS>(parts, lines, strip);
    const unsigned across = tiles_of(part.columns, Tile::COLUMNS);
    if (strip >= lines * across) return;
    // Strips beside each other are a block's.
    const unsigned row0 = strip / across * Tile::ROWS, column0 = strip % across * Tile::COLUMNS;
    const auto span = [&](int i) {
        const unsigned first = column0 + i * Tile::SPAN;
        return outputs_of<Tile, unsigned short, true>(y + part.first, rows, part.columns, of.n_out, row0, first);
    };
    Held<Tile, unsigned short, true> held[Tile::SPANS];
#pragma unroll
    for (int i = 0; i < Tile::SPANS; ++i) hold(held[i], span(i));
#pragma unroll
    for (int i = 0; i < Tile::SPANS; ++i) {
        typename Tile::Sums acc;
        clear_strip<Tile>(acc);
        for (unsigned k = 0; k < of.rank; k += 16) {
            unsigned left[Tile::DOWN][4], right[Tile::ACROSS][2];
#pragma unroll
            for (int j = 0; j < Tile::ACROSS; ++j) {
                const unsigned column = column0 + i * Tile::SPAN + j * 8 + lane_id() / 4;
#pragma unroll
                for (int q = 0; q < 2; ++q) {
                    const unsigned term = k + q * 8 + lane_id() % 4 * 2;
                    right[j][q] = pair_at(b, part.row + column, of.rank, term, column < part.columns && term < of.rank);
                }
            }
            left_factors<Tile>(s + part.index * of.rank, row0, rows, of.ranks, k, of.rank, left);
            strip_step<Tile>(acc, left, right);
        }
        finish_all(span(i), held[i], acc, [&](float sum, float old) { return __fmaf_rn(scale, sum, old); });
    }
}

// The rows of `a` of one step in a warp's part of shared memory, where they are turned: 16 lines of a span's columns,
// whose chunks of 16 bytes are exchanged so that what a fragment reads at once lies in different banks.
template <class Tile> struct Turned {
    static constexpr unsigned CHUNKS = Tile::SPAN / 8, LINE = CHUNKS * 16, LOADS = 16 * CHUNKS / 32;
    static_assert(CHUNKS == 4 && Tile::ACROSS == 4, "two lines of 64 bytes fill the banks");
    unsigned base;

    __device__ __forceinline__ Turned() : base(threadIdx.x / 32 * 16 * LINE) {}
    __device__ __forceinline__ unsigned place(unsigned line, unsigned chunk) const {
        return base + line * LINE + (chunk ^ (line >> 1 & 3)) * 16;
    }
    __device__ __forceinline__ static unsigned line(unsigned load) { return (load * 32 + lane_id()) / CHUNKS; }
    __device__ __forceinline__ static unsigned chunk() { return lane_id() % CHUNKS; }

    __device__ __forceinline__ static void load(const unsigned short* a, unsigned k, unsigned ranks, unsigned column0,
                                                unsigned n_in, uint4 (&chunks)[LOADS]) {
        const unsigned column = column0 + chunk() * 8;
#pragma unroll
        for (unsigned c = 0; c < LOADS; ++c) {
            const unsigned term = k + line(c);
            const bool exists = term < ranks && column < n_in;
            chunks[c] = exists ? __ldg((const uint4*)(a + (size_t)term * n_in + column)) : make_uint4(0, 0, 0, 0);
        }
    }
    __device__ __forceinline__ void put(const uint4 (&chunks)[LOADS]) const {
#pragma unroll
        for (unsigned c = 0; c < LOADS; ++c) *(uint4*)(stages + place(line(c), chunk())) = chunks[c];
    }
    __device__ __forceinline__ void right(unsigned (&out)[Tile::ACROSS][2]) const {
        const unsigned lane = lane_id();
#pragma unroll
        for (int p = 0; p < Tile::ACROSS / 2; ++p) {
            unsigned pair[4];
            load_transposed(pair, place((lane >> 3 & 1) * 8 + lane % 8, p * 2 + lane / 16));
            out[2 * p][0] = pair[0], out[2 * p][1] = pair[1];
            out[2 * p + 1][0] = pair[2], out[2 * p + 1][1] = pair[3];
        }
    }
};

// One warp: dx[t, i] = sum_k ds[t, k] * a[k, i] of a strip, added to what dx holds where `add` says so.
template <class Tile>
__device__ __forceinline__ void lora_down_grad_strip(const unsigned short* ds, const unsigned short* a,
                                                     unsigned short* dx, unsigned rows, unsigned n_in, unsigned ranks,
                                                     bool add) {
    const unsigned lines = tiles_of(rows, Tile::ROWS), across = tiles_of(n_in, Tile::COLUMNS), strip = strip_number();
    if (strip >= lines * across) return;
    const unsigned row0 = strip / across * Tile::ROWS, column0 = strip % across * Tile::COLUMNS;
    const auto span = [&](int i) {
        return outputs_of<Tile, unsigned short, true>(dx, rows, n_in, n_in, row0, column0 + i * Tile::SPAN);
    };
    Held<Tile, unsigned short, true> held[Tile::SPANS] = {};
#pragma unroll
    for (int i = 0; i < Tile::SPANS; ++i) {
        if (add) hold(held[i], span(i));
    }
    const Turned<Tile> turned;
    uint4 chunks[Turned<Tile>::LOADS];
#pragma unroll
    for (int i = 0; i < Tile::SPANS; ++i) {
        const unsigned first = column0 + i * Tile::SPAN;
        typename Tile::Sums acc;
        clear_strip<Tile>(acc);
        turned.load(a, 0, ranks, first, n_in, chunks);
        for (unsigned k = 0; k < ranks; k += 16) {
            // The lines of the step before are read by now.
            __syncwarp();
            turned.put(chunks);
            __syncwarp();
            unsigned left[Tile::DOWN][4], right[Tile::ACROSS][2];
            left_factors<Tile>(ds, row0, rows, ranks, k, ranks, left);
            turned.load(a, k + 16, ranks, first, n_in, chunks);
            turned.right(right);
            strip_step<Tile>(acc, left, right);
        }
        finish_all(span(i), held[i], acc, [&](float sum, float old) { return add ? __fadd_rn(old, sum) : sum; });
    }
}
