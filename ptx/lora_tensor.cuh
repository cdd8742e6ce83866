// Low-rank adapters on tensor cores: thin products whose operands are columns of wider matrices.
//
// Every output is one chain of steps, as in gemm_tensor.cuh; what is done to the finished sum is said at each
// kernel. With `VECTORS`, rows of all operands and of the output start at multiples of 16 bytes and are whole
// chunks of 16 bytes.
#pragma once
#include "gemm_tensor.cuh"
#include "lora.cuh"
#include "narrow.cuh"

__device__ __forceinline__ float widened(unsigned bits, Bf16) { return __uint_as_float(bits << 16); }
__device__ __forceinline__ float widened(unsigned bits, F16) {
    return narrow::widen(narrow::f16{(unsigned short)bits});
}

// A panel over `rows` rows whose lines start `width` elements apart: rows where terms are contiguous, else terms.
template <class Panel>
__device__ __forceinline__ Panel strided(const void* base, unsigned first, unsigned rows, unsigned width) {
    Panel panel(base, first, Panel::TERMS_INSIDE ? rows : width, width);
    if (!Panel::TERMS_INSIDE) {
        const unsigned row = first + Panel::inside();
        panel.here = row < rows ? rows - row : 0;
    }
    return panel;
}

// A part of a matrix whose rows start `stride` elements apart, and this thread's outputs of a tile in it. What they
// held is read before the sums are made, so that the read and the product overlap.
template <class Tile, class Word, bool VECTORS> struct Outputs {
    Word* c;
    unsigned m, n, stride, row0, column0;

    __device__ __forceinline__ unsigned row(int i, int below) const { return row0 + i * 16 + below * 8; }
    __device__ __forceinline__ unsigned column(int j) const { return column0 + j * 8 + lane_id() % 4 * 2; }
    __device__ __forceinline__ Word* at(unsigned row, unsigned column) const { return c + (size_t)row * stride + column; }
};

template <class Tile, class Word, bool VECTORS>
__device__ __forceinline__ Outputs<Tile, Word, VECTORS> outputs_of(Word* c, unsigned m, unsigned n, unsigned stride,
                                                                    unsigned tile_row, unsigned tile_column) {
    return {c, m, n, stride, tile_row + Tile::row() + lane_id() / 4, tile_column + Tile::column()};
}

// What this thread's outputs held, as they will be needed.
template <class Tile, class Word, bool VECTORS> struct Held {};

template <class Tile> struct Held<Tile, unsigned short, true> {
    static_assert(Tile::ACROSS % 4 == 0, "four fragments are eight neighbours for each of four lanes");
    uint4 words[Tile::DOWN][2][Tile::ACROSS / 4];
};

template <class Tile> struct Held<Tile, float, true> {
    float2 pairs[Tile::DOWN][2][Tile::ACROSS];
};

template <class Tile>
__device__ __forceinline__ void hold(Held<Tile, unsigned short, true>& held,
                                     const Outputs<Tile, unsigned short, true>& out) {
#pragma unroll
    for (int i = 0; i < Tile::DOWN; ++i) {
#pragma unroll
        for (int below = 0; below < 2; ++below) {
#pragma unroll
            for (int q = 0; q < Tile::ACROSS / 4; ++q) {
                const unsigned row = out.row(i, below), column = out.column0 + (q * 4 + lane_id() % 4) * 8;
                const bool exists = row < out.m && column < out.n;
                held.words[i][below][q] = exists ? *(const uint4*)out.at(row, column) : make_uint4(0, 0, 0, 0);
            }
        }
    }
}

template <class Tile>
__device__ __forceinline__ void hold(Held<Tile, float, true>& held, const Outputs<Tile, float, true>& out) {
#pragma unroll
    for (int i = 0; i < Tile::DOWN; ++i) {
#pragma unroll
        for (int below = 0; below < 2; ++below) {
#pragma unroll
            for (int j = 0; j < Tile::ACROSS; ++j) {
                const unsigned row = out.row(i, below), column = out.column(j);
                const bool exists = row < out.m && column < out.n;
                held.pairs[i][below][j] = exists ? *(const float2*)out.at(row, column) : make_float2(0.0f, 0.0f);
            }
        }
    }
}

template <class Tile, class Word>
__device__ __forceinline__ void hold(Held<Tile, Word, false>&, const Outputs<Tile, Word, false>&) {}

// Writes `finish(sum, held)` of every output, rounded once to the storage.
template <class Tile, class Finish>
__device__ __forceinline__ void finish_all(const Outputs<Tile, unsigned short, true>& out,
                                           const Held<Tile, unsigned short, true>& held,
                                           const typename Tile::Sums& acc, Finish finish) {
    typedef typename Tile::Format T;
#pragma unroll
    for (int i = 0; i < Tile::DOWN; ++i) {
#pragma unroll
        for (int below = 0; below < 2; ++below) {
#pragma unroll
            for (int q = 0; q < Tile::ACROSS / 4; ++q) {
                const uint4 eight = held.words[i][below][q];
                const unsigned mine[4] = {eight.x, eight.y, eight.z, eight.w};
                // The exchange among four lanes that gathers a fragment also deals it out again.
                const uint4 dealt = gather_fragment(mine);
                const unsigned old[4] = {dealt.x, dealt.y, dealt.z, dealt.w};
                unsigned pairs[4];
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    const float(&sums)[4] = acc[i][q * 4 + j];
                    const float low = finish(sums[2 * below], widened(old[j] & 0xffffu, T()));
                    const float high = finish(sums[2 * below + 1], widened(old[j] >> 16, T()));
                    pairs[j] = T::narrow(low) | (unsigned)T::narrow(high) << 16;
                }
                const uint4 words = gather_fragment(pairs);
                const unsigned row = out.row(i, below), column = out.column0 + (q * 4 + lane_id() % 4) * 8;
                if (row < out.m && column < out.n) *(uint4*)out.at(row, column) = words;
            }
        }
    }
}

template <class Tile, class Finish>
__device__ __forceinline__ void finish_all(const Outputs<Tile, float, true>& out, const Held<Tile, float, true>& held,
                                           const typename Tile::Sums& acc, Finish finish) {
#pragma unroll
    for (int i = 0; i < Tile::DOWN; ++i) {
#pragma unroll
        for (int below = 0; below < 2; ++below) {
#pragma unroll
            for (int j = 0; j < Tile::ACROSS; ++j) {
                const unsigned row = out.row(i, below), column = out.column(j);
                const float2 old = held.pairs[i][below][j];
                const float2 pair = make_float2(finish(acc[i][j][2 * below], old.x), finish(acc[i][j][2 * below + 1], old.y));
                if (row < out.m && column < out.n) *(float2*)out.at(row, column) = pair;
            }
        }
    }
}

template <class T> __device__ __forceinline__ float element(const unsigned short* at, T format) { return widened(*at, format); }
__device__ __forceinline__ float element(const float* at, Tf32) { return *at; }

template <class Tile, class Word, class Finish>
__device__ __forceinline__ void finish_all(const Outputs<Tile, Word, false>& out, const Held<Tile, Word, false>&,
                                           const typename Tile::Sums& acc, Finish finish) {
    typedef typename Tile::Format T;
#pragma unroll
    for (int i = 0; i < Tile::DOWN; ++i) {
#pragma unroll
        for (int j = 0; j < Tile::ACROSS; ++j) {
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const unsigned row = out.row(i, e / 2), column = out.column(j) + e % 2;
                if (row >= out.m || column >= out.n) continue;
                Word* at = out.at(row, column);
                *at = T::narrow(finish(acc[i][j][e], element(at, T())));
            }
        }
    }
}

// One block: y[t, first + o] = fma(scale, sum_k s[t, part * rank + k] * b[row + o, k], y[t, first + o]).
template <class Tile, bool VECTORS>
__device__ __forceinline__ void lora_up_tile(const typename Tile::Format::Word* s, const typename Tile::Format::Word* b,
                                             typename Tile::Format::Word* y, unsigned rows, const Ranks& of, float scale,
                                             const Parts& parts) {
    typedef typename Tile::Format::Word Word;
    const unsigned tiles_m = tiles_of(rows, Tile::ROWS);
    unsigned block = blockIdx.x, tile_m, tile_n;
    const Part part = part_of<Tile::COLUMNS>(parts, tiles_m, block);
    place_tile(block, tiles_m, tiles_of(part.columns, Tile::COLUMNS), tile_m, tile_n);
    const unsigned row0 = tile_m * Tile::ROWS, column0 = tile_n * Tile::COLUMNS;
    const auto out = outputs_of<Tile, Word, VECTORS>(y + part.first, rows, part.columns, of.n_out, row0, column0);
    Held<Tile, Word, VECTORS> held;
    hold(held, out);
    typename Tile::Sums acc;
    Tile::clear(acc);
    if (of.rank > 0) {
        const auto a = strided<typename Tile::PanelA>(s + part.index * of.rank, row0, rows, of.ranks);
        const auto right = strided<typename Tile::PanelB>(b + (size_t)part.row * of.rank, column0, part.columns, of.rank);
        Tile::stream(a, right, of.rank, acc);
    }
    finish_all(out, held, acc, [&](float sum, float old) { return __fmaf_rn(scale, sum, old); });
}

// One block: dx[t, i] = sum_k ds[t, k] * a[k, i], added to what dx holds where `add` says so.
template <class Tile, bool VECTORS>
__device__ __forceinline__ void lora_down_grad_tile(const typename Tile::Format::Word* ds,
                                                    const typename Tile::Format::Word* a,
                                                    typename Tile::Format::Word* dx, unsigned rows, unsigned n_in,
                                                    unsigned ranks, bool add) {
    typedef typename Tile::Format::Word Word;
    unsigned tile_m, tile_n;
    place_tile(blockIdx.x, tiles_of(rows, Tile::ROWS), tiles_of(n_in, Tile::COLUMNS), tile_m, tile_n);
    const unsigned row0 = tile_m * Tile::ROWS, column0 = tile_n * Tile::COLUMNS;
    const auto out = outputs_of<Tile, Word, VECTORS>(dx, rows, n_in, n_in, row0, column0);
    Held<Tile, Word, VECTORS> held = {};
    if (add) hold(held, out);
    typename Tile::Sums acc;
    Tile::clear(acc);
    Tile::run(TensorProduct{ds, a, rows, n_in, ranks}, row0, column0, acc);
    finish_all(out, held, acc, [&](float sum, float old) { return add ? __fadd_rn(old, sum) : sum; });
}

// One block: ds[t, part * rank + k] = (sum_o dy[t, first + o] * b[row + o, k]) * scale.
template <class Tile, bool VECTORS>
__device__ __forceinline__ void lora_up_grad_input_tile(const typename Tile::Format::Word* dy,
                                                        const typename Tile::Format::Word* b,
                                                        typename Tile::Format::Word* ds, unsigned rows, const Ranks& of,
                                                        float scale, const Parts& parts) {
    typedef typename Tile::Format::Word Word;
    const unsigned tiles_m = tiles_of(rows, Tile::ROWS), tiles = tiles_m * tiles_of(of.rank, Tile::COLUMNS);
    const unsigned index = blockIdx.x / tiles, block = blockIdx.x % tiles;
    const Part part = part_at(parts, index);
    const unsigned row0 = block % tiles_m * Tile::ROWS, column0 = block / tiles_m * Tile::COLUMNS;
    typename Tile::Sums acc;
    Tile::clear(acc);
    if (part.columns > 0) {
        const auto a = strided<typename Tile::PanelA>(dy + part.first, row0, rows, of.n_out);
        const auto right = strided<typename Tile::PanelB>(b + (size_t)part.row * of.rank, column0, of.rank, of.rank);
        Tile::stream(a, right, part.columns, acc);
    }
    const auto out = outputs_of<Tile, Word, VECTORS>(ds + index * of.rank, rows, of.rank, of.ranks, row0, column0);
    const Held<Tile, Word, VECTORS> none = {};
    finish_all(out, none, acc, [&](float sum, float) { return __fmul_rn(sum, scale); });
}

// One block: one piece of one tile of db[row + o, k] = (sum_t dy[t, first + o] * s[t, part * rank + k]) * scale; the
// scale multiplies the folded sum.
template <class Tile>
__device__ __forceinline__ void lora_up_grad_weight_tile(const typename Tile::Format::Word* dy,
                                                         const typename Tile::Format::Word* s, float* db,
                                                         unsigned* arrivals, float4* partials, const Ranks& of,
                                                         float scale, const Cut& cut, const Parts& parts) {
    constexpr unsigned QUADS = Tile::DOWN * Tile::ACROSS;
    const unsigned tiles = gridDim.x / cut.pieces, tile = blockIdx.x % tiles, piece = blockIdx.x / tiles;
    const unsigned tiles_n = tiles_of(of.rank, Tile::COLUMNS);
    unsigned block = tile;
    const Part part = part_of<Tile::ROWS>(parts, tiles_n, block);
    const unsigned row0 = block / tiles_n * Tile::ROWS, column0 = block % tiles_n * Tile::COLUMNS;
    const size_t start = cut.start(piece);
    const unsigned terms = cut.terms(piece);
    typename Tile::Sums acc;
    Tile::clear(acc);
    if (terms > 0) {
        const auto a = strided<typename Tile::PanelA>(dy + start * of.n_out + part.first, row0, part.columns, of.n_out);
        const auto right = strided<typename Tile::PanelB>(s + start * of.ranks + part.index * of.rank, column0, of.rank, of.ranks);
        Tile::stream(a, right, terms, acc);
    }
    const TensorOutput<Tile, float> out(db + (size_t)part.row * of.rank, part.columns, of.rank, row0, column0);
    const bool pairs = out.aligned(8);
    const auto store = [&](unsigned q, float4 v) {
        const int i = q / Tile::ACROSS, j = q % Tile::ACROSS;
        store_floats<Tile>(out, i, j, 0, __fmul_rn(v.x, scale), __fmul_rn(v.y, scale), pairs, false);
        store_floats<Tile>(out, i, j, 1, __fmul_rn(v.z, scale), __fmul_rn(v.w, scale), pairs, false);
    };
    // Fragments beyond the rank are neither kept nor folded.
    const auto exists = [&](unsigned q) { return out.column0 + q % Tile::ACROSS * 8 < of.rank; };
    const size_t stride = QUADS * Tile::THREADS;
    float4* leaves = partials + (size_t)tile * cut.pieces * stride + threadIdx.x;
#pragma unroll
    for (unsigned q = 0; q < QUADS; ++q) {
        const float* v = acc[q / Tile::ACROSS][q % Tile::ACROSS];
        const float4 quad = make_float4(v[0], v[1], v[2], v[3]);
        if (cut.pieces == 1) store(q, quad);
        else if (exists(q)) leaves[piece * stride + q * Tile::THREADS] = quad;
    }
    if (cut.pieces == 1 || !last_to_arrive(arrivals + tile, cut.pieces)) return;
#pragma unroll 1
    for (unsigned q = 0; q < QUADS; ++q) {
        if (exists(q)) store(q, fold_grains(leaves + q * Tile::THREADS, stride, cut.pieces, cut.pieces_of_grain));
    }
}
