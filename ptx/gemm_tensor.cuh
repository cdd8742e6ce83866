// Matrix products on tensor cores: every output is one chain of tensor-core steps from +0.0, k ascending.
//
// C[m, n] = A[m, k] * B[k, n], with operands that lie as in gemm_f32.cuh. A stage is 128 bytes of terms: 64 of
// 16 bits, or 32 of tf32, which are binary32 in memory and are rounded in shared memory, where they stand. Terms
// beyond k are zeros: a product with a zero factor is absent from a step, and a step of absent products changes
// no accumulator, because a chain never holds -0.0. Rows and columns beyond the matrix are zeros and not stored.
//
// With `VECTORS`, operands start at multiples of 16 bytes and their contiguous extents are multiples of 16
// bytes; without, an operand may start at any element.
#pragma once
#include "async.cuh"
#include "pieces.cuh"
#include "tensor.cuh"
#include "tiles.cuh"

// Operands of one product.
struct TensorProduct {
    const void* a;
    const void* b;
    unsigned m, n, k;
};

// Bytes of a line of shared memory whose terms are contiguous, and of one step in it.
constexpr unsigned LINE_BYTES = 128, STEP_BYTES = 32, STEPS = LINE_BYTES / STEP_BYTES;

__device__ __forceinline__ unsigned lane_id() { return threadIdx.x % 32; }

// Brings the next stage of ROWS rows (of A, or columns of B) to shared memory in 16-byte chunks, in the order
// they have in global memory: lines of terms, or a line a term. A chunk's place in its line is exchanged with
// others by the line's number, so that what a fragment reads at once lies in different banks.
template <class T, int ROWS, int THREADS, Inner INNER, bool VECTORS> struct TensorPanel {
    typedef typename T::Word Word;
    static constexpr unsigned SIZE = sizeof(Word), PER_CHUNK = 16 / SIZE, DEPTH = LINE_BYTES / SIZE;
    static constexpr bool TERMS_INSIDE = INNER == Inner::K;
    static constexpr unsigned LINE_CHUNKS = TERMS_INSIDE ? LINE_BYTES / 16 : ROWS * SIZE / 16;
    static constexpr unsigned LINES_AT_ONCE = THREADS / LINE_CHUNKS;
    static constexpr int CHUNKS = ROWS * LINE_BYTES / 16 / THREADS;
    static constexpr unsigned BYTES = ROWS * LINE_BYTES;
    static_assert(CHUNKS * THREADS * 16 == ROWS * LINE_BYTES, "whole chunks a thread");
    // Lines so many apart exchange their chunks alike.
    static constexpr unsigned PERIOD = SIZE == 4 && !TERMS_INSIDE ? 4 : 8;
    static_assert(LINES_AT_ONCE * LINE_CHUNKS == THREADS && LINES_AT_ONCE % PERIOD == 0, "chunks of a thread lie alike");

    const unsigned char* from;
    // Bytes from one chunk of this thread to its next.
    size_t pitch;
    // Elements of the matrix from this thread's first on: rows that its lines cross, or that its chunk holds.
    unsigned here;

    // What exchanges the chunks of a line.
    __device__ __forceinline__ static unsigned exchange(unsigned line) {
        if (TERMS_INSIDE) return line & 7;
        if (SIZE == 4) return (line & 3) << 1;
        return LINE_CHUNKS >= 8 ? line & 7 : line >> 1 & 3;
    }
    // A thread's number among those that bring a panel: the threads of the block, or of a warp.
    __device__ __forceinline__ static unsigned thread() { return THREADS == 32 ? lane_id() : threadIdx.x; }
    __device__ __forceinline__ static unsigned line() { return thread() / LINE_CHUNKS; }
    // The thread's first element within its line.
    __device__ __forceinline__ static unsigned inside() { return thread() % LINE_CHUNKS * PER_CHUNK; }
    // The place of the thread's first chunk in a stage.
    __device__ __forceinline__ static unsigned place() {
        return line() * LINE_CHUNKS * 16 + ((thread() % LINE_CHUNKS) ^ exchange(line())) * 16;
    }

    __device__ __forceinline__ TensorPanel(const void* base, unsigned first, unsigned rows, unsigned k) {
        const unsigned row = first + (TERMS_INSIDE ? line() : inside());
        here = row < rows ? rows - row : 0;
        const size_t width = TERMS_INSIDE ? k : rows;
        from = (const unsigned char*)base +
               (TERMS_INSIDE ? row * width + inside() : line() * width + row) * SIZE;
        pitch = LINES_AT_ONCE * width * SIZE;
    }

    // Copies the next stage, of which `left` terms exist; zeros stand for what does not.
    __device__ __forceinline__ void copy(unsigned stage, unsigned left) {
        const unsigned to = stage + place();
#pragma unroll
        for (int c = 0; c < CHUNKS; ++c) {
            const unsigned across = c * LINES_AT_ONCE;
            const bool exists = TERMS_INSIDE ? across < here : line() + across < left;
            const unsigned within = TERMS_INSIDE ? (inside() < left ? left - inside() : 0) : here;
            const unsigned char* source = from + c * pitch;
            if (VECTORS) {
                copy_chunk(to + c * THREADS * 16, source, exists && within > 0);
            } else {
                place_any((uint4*)(stages + to + c * THREADS * 16), (const Word*)source, exists ? within : 0);
            }
        }
        from += TERMS_INSIDE ? (size_t)LINE_BYTES : CHUNKS * pitch;
    }

    // Writes a chunk of which `n` elements exist.
    __device__ __forceinline__ static void place_any(uint4* to, const Word* source, unsigned n) {
        unsigned words[4] = {0, 0, 0, 0};
#pragma unroll
        for (unsigned e = 0; e < PER_CHUNK; ++e) {
            if (e >= n) continue;
            if (SIZE == 4) words[e % 4] = __float_as_uint((float)source[e]);
            else words[e / 2] |= (unsigned)source[e] << (e % 2 * 16);
        }
        *to = make_uint4(words[0], words[1], words[2], words[3]);
    }

    // Rounds what this thread has copied to a stage.
    __device__ __forceinline__ static void round(unsigned stage) {
        if (SIZE != 4) return;
#pragma unroll
        for (int c = 0; c < CHUNKS; ++c) {
            uint4* at = (uint4*)(stages + stage + place() + c * THREADS * 16);
            const uint4 v = *at;
            *at = make_uint4(Tf32::factor(v.x), Tf32::factor(v.y), Tf32::factor(v.z), Tf32::factor(v.w));
        }
    }

    __device__ __forceinline__ static unsigned word(unsigned stage, unsigned term, unsigned row) {
        return ((const unsigned*)(stages + stage))[term * ROWS + (row ^ exchange(term) * PER_CHUNK)];
    }

    // The fragments of step `s` as the left factor: 16 rows each, from `row0` on.
    template <int TILES>
    __device__ __forceinline__ static void left(unsigned stage, unsigned row0, unsigned s,
                                                unsigned (&out)[TILES][4]) {
        const unsigned lane = lane_id();
        if (TERMS_INSIDE) {
            const unsigned at = (row0 + lane % 16) * LINE_BYTES + ((lane / 16) ^ (lane & 7)) * 16;
#pragma unroll
            for (int i = 0; i < TILES; ++i) load_matrices(out[i], stage + (at ^ s * STEP_BYTES) + i * 16 * LINE_BYTES);
        } else if (SIZE == 2) {
            const unsigned term = s * 16 + lane / 16 * 8 + lane % 8, line = term * LINE_CHUNKS;
#pragma unroll
            for (int i = 0; i < TILES; ++i) {
                const unsigned chunk = row0 / 8 + i * 2 + (lane >> 3 & 1);
                load_transposed(out[i], stage + (line + (chunk ^ exchange(term))) * 16);
            }
        } else {
#pragma unroll
            for (int i = 0; i < TILES; ++i) {
#pragma unroll
                for (int q = 0; q < 4; ++q)
                    out[i][q] = word(stage, s * 8 + lane % 4 + q / 2 * 4, row0 + i * 16 + q % 2 * 8 + lane / 4);
            }
        }
    }

    // The fragments of step `s` as the right factor: 8 columns each, from `column0` on.
    template <int TILES>
    __device__ __forceinline__ static void right(unsigned stage, unsigned column0, unsigned s,
                                                 unsigned (&out)[TILES][2]) {
        static_assert(TILES % 2 == 0, "two tiles are loaded together");
        const unsigned lane = lane_id();
        if (TERMS_INSIDE || SIZE == 2) {
            const unsigned column = column0 + lane / 16 * 8 + lane % 8;
            const unsigned at = column * LINE_BYTES + ((lane >> 3 & 1) ^ (lane & 7)) * 16;
            const unsigned term = s * 16 + (lane >> 3 & 1) * 8 + lane % 8, line = term * LINE_CHUNKS;
#pragma unroll
            for (int p = 0; p < TILES / 2; ++p) {
                unsigned pair[4];
                const unsigned chunk = column0 / 8 + p * 2 + lane / 16;
                if (TERMS_INSIDE) load_matrices(pair, stage + (at ^ s * STEP_BYTES) + p * 16 * LINE_BYTES);
                else load_transposed(pair, stage + (line + (chunk ^ exchange(term))) * 16);
                out[2 * p][0] = pair[0], out[2 * p][1] = pair[1];
                out[2 * p + 1][0] = pair[2], out[2 * p + 1][1] = pair[3];
            }
        } else {
#pragma unroll
            for (int j = 0; j < TILES; ++j) {
#pragma unroll
                for (int q = 0; q < 2; ++q)
                    out[j][q] = word(stage, s * 8 + lane % 4 + q * 4, column0 + j * 8 + lane / 4);
            }
        }
    }
};

// A block computes BM x BN outputs, its WARPS_M x WARPS_N warps a rectangle each. STAGES stages are under way:
// while one is multiplied, the others are filled. With `AHEAD`, fragments are read one step ahead; otherwise a
// multiprocessor's other warps fill the wait. A tile of one warp concerns no other: a block can have several of
// them, each with stages of its own.
template <class T, int BM, int BN, int WARPS_M, int WARPS_N, int STAGES, Inner INNER_A, Inner INNER_B, bool VECTORS>
struct TensorTile {
    typedef T Format;
    static constexpr int ROWS = BM, COLUMNS = BN, THREADS = WARPS_M * WARPS_N * 32;
    static constexpr int WARP_ROWS = BM / WARPS_M, WARP_COLUMNS = BN / WARPS_N;
    static constexpr int DOWN = WARP_ROWS / 16, ACROSS = WARP_COLUMNS / 8;
    static constexpr bool AHEAD = DOWN * ACROSS < 16;
    using PanelA = TensorPanel<T, BM, THREADS, INNER_A, VECTORS>;
    using PanelB = TensorPanel<T, BN, THREADS, INNER_B, VECTORS>;
    static constexpr unsigned STAGE_BYTES = PanelA::BYTES + PanelB::BYTES, DEPTH = PanelA::DEPTH;
    static constexpr unsigned SHARED_BYTES = STAGES * STAGE_BYTES;
    static constexpr bool ROUNDS = sizeof(typename T::Word) == 4;
    typedef float Sums[DOWN][ACROSS][4];

    // The first row and column of this warp within the tile.
    __device__ __forceinline__ static unsigned warp() { return THREADS == 32 ? 0 : threadIdx.x / 32; }
    __device__ __forceinline__ static unsigned row() { return warp() % WARPS_M * WARP_ROWS; }
    __device__ __forceinline__ static unsigned column() { return warp() / WARPS_M * WARP_COLUMNS; }

    // The stage after another, round about; the stages stand from `base` on.
    __device__ __forceinline__ static unsigned after(unsigned stage, unsigned base) {
        return stage == base + (STAGES - 1) * STAGE_BYTES ? base : stage + STAGE_BYTES;
    }
    // Waits for the other threads of the tile.
    __device__ __forceinline__ static void meet() {
        if (THREADS == 32) __syncwarp();
        else __syncthreads();
    }

    // Waits for what this thread has copied to the stage that is needed next.
    __device__ __forceinline__ static void arrive(unsigned stage) {
        copy_async_wait<STAGES - 2>();
        PanelA::round(stage);
        PanelB::round(stage + PanelA::BYTES);
    }

    // The chains of the tile at (row0, column0); `acc` starts at +0.0.
    __device__ __forceinline__ static void run(const TensorProduct& p, unsigned row0, unsigned column0, Sums& acc,
                                               unsigned base = 0) {
        if (p.k == 0) return;
        stream(PanelA(p.a, row0, p.m, p.k), PanelB(p.b, column0, p.n, p.k), p.k, acc, base);
    }

    // The chains over the `k` terms that two panels bring, at least one.
    __device__ __forceinline__ static void stream(PanelA panel_a, PanelB panel_b, unsigned k, Sums& acc,
                                                  unsigned base = 0) {
        unsigned to_copy = k, filled = base;
        const auto fetch = [&]() {
            if (to_copy > 0) {
                panel_a.copy(filled, to_copy);
                panel_b.copy(filled + PanelA::BYTES, to_copy);
                to_copy -= least(to_copy, DEPTH);
            }
            filled = after(filled, base);
            // A group a round, even an empty one: the wait counts groups.
            copy_async_commit();
        };
        unsigned a[AHEAD ? 2 : 1][DOWN][4], b[AHEAD ? 2 : 1][ACROSS][2];
        const auto read = [&](unsigned stage, unsigned s) {
            PanelA::left(stage, row(), s, a[AHEAD ? s % 2 : 0]);
            PanelB::right(stage + PanelA::BYTES, column(), s, b[AHEAD ? s % 2 : 0]);
        };
#pragma unroll 1
        for (int s = 0; s < STAGES - 1; ++s) fetch();
        arrive(base);
        meet();
        if (AHEAD) read(base, 0);
        unsigned now = base;
#pragma unroll 1
        for (unsigned round = (k + DEPTH - 1) / DEPTH; round > 0; --round) {
            const unsigned next = after(now, base);
#pragma unroll
            for (unsigned s = 0; s < STEPS; ++s) {
                // The stage that was multiplied before this one is free since the last barrier.
                if (s == 0) fetch();
                if (!AHEAD) read(now, s);
                if (s == (ROUNDS ? 1 : STEPS - 1)) arrive(next);
                if (s == STEPS - 1) meet();
                if (AHEAD) read(s == STEPS - 1 ? next : now, (s + 1) % STEPS);
                const unsigned held = AHEAD ? s % 2 : 0;
#pragma unroll
                for (int i = 0; i < DOWN; ++i) {
#pragma unroll
                    for (int j = 0; j < ACROSS; ++j) T::step(acc[i][j], a[held][i], b[held][j]);
                }
            }
            now = next;
        }
    }

    __device__ __forceinline__ static void clear(Sums& acc) {
#pragma unroll
        for (int i = 0; i < DOWN; ++i) {
#pragma unroll
            for (int j = 0; j < ACROSS; ++j) {
#pragma unroll
                for (int e = 0; e < 4; ++e) acc[i][j][e] = 0.0f;
            }
        }
    }
};

// C[m, n], tight, and where this thread's outputs of a tile stand in it: those of a fragment are two neighbours
// in a row and two below them, eight rows down.
template <class Tile, class Element> struct TensorOutput {
    Element* c;
    unsigned m, n, row0, column0;

    __device__ __forceinline__ TensorOutput(Element* c, unsigned m, unsigned n, unsigned tile_row, unsigned tile_column)
        : c(c), m(m), n(n), row0(tile_row + Tile::row() + lane_id() / 4), column0(tile_column + Tile::column()) {}

    __device__ __forceinline__ unsigned row(int i, int below) const { return row0 + i * 16 + below * 8; }
    __device__ __forceinline__ unsigned column(int j) const { return column0 + j * 8 + lane_id() % 4 * 2; }
    // Whether rows of C start at multiples of `bytes` bytes.
    __device__ __forceinline__ bool aligned(unsigned bytes) const {
        return n % (bytes / sizeof(Element)) == 0 && ((unsigned long long)c & (bytes - 1)) == 0;
    }
};

// Writes, or adds, the two outputs that a thread has from (i, j) on, `below` or above.
template <class Tile>
__device__ __forceinline__ void store_floats(const TensorOutput<Tile, float>& out, int i, int j, int below, float x,
                                             float y, bool pairs, bool add) {
    const unsigned row = out.row(i, below), column = out.column(j);
    if (row >= out.m || column >= out.n) return;
    float* at = out.c + (size_t)row * out.n + column;
    if (pairs) {
        float2* pair = (float2*)at;
        float2 v = make_float2(x, y);
        if (add) {
            const float2 old = *pair;
            v = make_float2(__fadd_rn(old.x, x), __fadd_rn(old.y, y));
        }
        *pair = v;
        return;
    }
    at[0] = add ? __fadd_rn(at[0], x) : x;
    if (column + 1 < out.n) at[1] = add ? __fadd_rn(at[1], y) : y;
}

template <class Tile>
__device__ __forceinline__ void store_sums(const TensorOutput<Tile, float>& out, const typename Tile::Sums& acc,
                                           bool add = false) {
    const bool pairs = out.aligned(8);
#pragma unroll
    for (int i = 0; i < Tile::DOWN; ++i) {
#pragma unroll
        for (int j = 0; j < Tile::ACROSS; ++j) {
            store_floats<Tile>(out, i, j, 0, acc[i][j][0], acc[i][j][1], pairs, add);
            store_floats<Tile>(out, i, j, 1, acc[i][j][2], acc[i][j][3], pairs, add);
        }
    }
}

// Four lanes have a pair of each of four fragments side by side; gives each lane the eight outputs of one.
__device__ __forceinline__ uint4 gather_fragment(const unsigned (&pairs)[4]) {
    const unsigned lane = lane_id();
    const bool odd = lane & 1, high = lane & 2;
    const unsigned from_neighbour[2] = {__shfl_xor_sync(~0u, odd ? pairs[0] : pairs[1], 1),
                                        __shfl_xor_sync(~0u, odd ? pairs[2] : pairs[3], 1)};
    // Two pairs side by side of fragment 0 or 1, and of 2 or 3.
    const unsigned low_first = odd ? from_neighbour[0] : pairs[0], low_second = odd ? pairs[1] : from_neighbour[0];
    const unsigned high_first = odd ? from_neighbour[1] : pairs[2], high_second = odd ? pairs[3] : from_neighbour[1];
    const unsigned first = __shfl_xor_sync(~0u, high ? low_first : high_first, 2);
    const unsigned second = __shfl_xor_sync(~0u, high ? low_second : high_second, 2);
    return high ? make_uint4(first, second, high_first, high_second)
                : make_uint4(low_first, low_second, first, second);
}

// Rounds the sums of one row of fragments and writes them.
template <class Tile>
__device__ __forceinline__ void store_row(const TensorOutput<Tile, unsigned short>& out,
                                          const float (&acc)[Tile::ACROSS][4], int i, int below) {
    typedef typename Tile::Format T;
    const unsigned row = out.row(i, below);
    unsigned pairs[Tile::ACROSS];
#pragma unroll
    for (int j = 0; j < Tile::ACROSS; ++j) {
        pairs[j] = T::narrow(acc[j][2 * below]) | (unsigned)T::narrow(acc[j][2 * below + 1]) << 16;
    }
    unsigned short* line = out.c + (size_t)row * out.n;
    if (Tile::ACROSS % 4 == 0 && out.aligned(16)) {
#pragma unroll
        for (int j = 0; j < Tile::ACROSS / 4 * 4; j += 4) {
            const unsigned four[4] = {pairs[j], pairs[j + 1], pairs[j + 2], pairs[j + 3]};
            const uint4 eight = gather_fragment(four);
            const unsigned column = out.column0 + (j + lane_id() % 4) * 8;
            if (row < out.m && column < out.n) *(uint4*)(line + column) = eight;
        }
        return;
    }
    const bool together = out.aligned(4);
#pragma unroll
    for (int j = 0; j < Tile::ACROSS; ++j) {
        const unsigned column = out.column(j);
        if (row >= out.m || column >= out.n) continue;
        if (together) {
            *(unsigned*)(line + column) = pairs[j];
        } else {
            line[column] = (unsigned short)pairs[j];
            if (column + 1 < out.n) line[column + 1] = (unsigned short)(pairs[j] >> 16);
        }
    }
}

template <class Tile>
__device__ __forceinline__ void store_sums(const TensorOutput<Tile, unsigned short>& out,
                                           const typename Tile::Sums& acc) {
#pragma unroll
    for (int i = 0; i < Tile::DOWN; ++i) {
        store_row<Tile>(out, acc[i], i, 0);
        store_row<Tile>(out, acc[i], i, 1);
    }
}

// One block: one tile of a product that is a single chain an output; `bias[n]`, where there is one, is added
// once, before the one rounding to the format.
template <class Tile>
__device__ __forceinline__ void tensor_product_tile(const TensorProduct& p, typename Tile::Format::Word* c,
                                                    const float* bias, unsigned tile) {
    unsigned tile_m, tile_n;
    place_tile(tile, (p.m + Tile::ROWS - 1) / Tile::ROWS, (p.n + Tile::COLUMNS - 1) / Tile::COLUMNS, tile_m,
               tile_n);
    typename Tile::Sums acc;
    Tile::clear(acc);
    Tile::run(p, tile_m * Tile::ROWS, tile_n * Tile::COLUMNS, acc);
    const TensorOutput<Tile, typename Tile::Format::Word> out(c, p.m, p.n, tile_m * Tile::ROWS, tile_n * Tile::COLUMNS);
    if (bias != nullptr) {
#pragma unroll
        for (int j = 0; j < Tile::ACROSS; ++j) {
            const unsigned column = out.column(j);
            const float first = bias[least(column, p.n - 1)], second = bias[least(column + 1, p.n - 1)];
#pragma unroll
            for (int i = 0; i < Tile::DOWN; ++i) {
#pragma unroll
                for (int e = 0; e < 4; ++e) acc[i][j][e] = __fadd_rn(acc[i][j][e], e % 2 == 0 ? first : second);
            }
        }
    }
    store_sums<Tile>(out, acc);
}

// One block: one piece of one tile of a sum over tokens, as matmul_grad_weight_f32.cu has it.
template <class Tile>
__device__ __forceinline__ void tensor_weight_tile(const void* dy, const void* x, float* dweight, unsigned* arrivals,
                                                   float4* partials, unsigned n_in, unsigned n_out, const Cut& cut,
                                                   unsigned add) {
    constexpr unsigned SIZE = sizeof(typename Tile::Format::Word), QUADS = Tile::DOWN * Tile::ACROSS;
    const unsigned tiles_m = (n_out + Tile::ROWS - 1) / Tile::ROWS;
    const unsigned tiles_n = (n_in + Tile::COLUMNS - 1) / Tile::COLUMNS;
    // All tiles of a piece follow each other: they share its tokens.
    const unsigned piece = blockIdx.x / (tiles_m * tiles_n), tile = blockIdx.x % (tiles_m * tiles_n);
    unsigned tile_m, tile_n;
    place_tile(tile, tiles_m, tiles_n, tile_m, tile_n);
    typename Tile::Sums acc;
    Tile::clear(acc);
    {
        const size_t start = cut.start(piece);
        const TensorProduct p = {(const unsigned char*)dy + start * n_out * SIZE,
                                 (const unsigned char*)x + start * n_in * SIZE, n_out, n_in, cut.terms(piece)};
        Tile::run(p, tile_m * Tile::ROWS, tile_n * Tile::COLUMNS, acc);
    }
    const TensorOutput<Tile, float> out(dweight, n_out, n_in, tile_m * Tile::ROWS, tile_n * Tile::COLUMNS);
    if (cut.pieces == 1) {
        store_sums<Tile>(out, acc, add != 0);
        return;
    }
    const size_t stride = QUADS * Tile::THREADS;
    float4* leaves = partials + (size_t)tile * cut.pieces * stride + threadIdx.x;
#pragma unroll
    for (unsigned q = 0; q < QUADS; ++q) {
        const float* v = acc[q / Tile::ACROSS][q % Tile::ACROSS];
        leaves[piece * stride + q * Tile::THREADS] = make_float4(v[0], v[1], v[2], v[3]);
    }
    if (!last_to_arrive(arrivals + tile, cut.pieces)) return;
    const bool pairs = out.aligned(8);
    const auto store = [&](unsigned q, float4 v) {
        store_floats<Tile>(out, q / Tile::ACROSS, q % Tile::ACROSS, 0, v.x, v.y, pairs, add != 0);
        store_floats<Tile>(out, q / Tile::ACROSS, q % Tile::ACROSS, 1, v.z, v.w, pairs, add != 0);
    };
    // A large tile has no registers left for more than one quad.
    if (QUADS > 8 || !short_tree(cut.pieces, cut.pieces_of_grain)) {
#pragma unroll 1
        for (unsigned q = 0; q < QUADS; ++q)
            store(q, fold_grains(leaves + q * Tile::THREADS, stride, cut.pieces, cut.pieces_of_grain));
        return;
    }
    static_assert(QUADS > 8 || QUADS % 2 == 0, "quads are folded in pairs");
    // Two quads together: the loads of both are under way before the first is used.
#pragma unroll 1
    for (unsigned q = 0; q < QUADS; q += 2) {
        const float4 first = fold_eight(leaves + q * Tile::THREADS, stride, cut.pieces);
        const float4 second = fold_eight(leaves + (q + 1) * Tile::THREADS, stride, cut.pieces);
        store(q, first);
        store(q + 1, second);
    }
}

// One block: all pieces of one tile, at most eight in a short tree. Warp w computes the pieces w, w + warps, …, at most
// AGAIN of them, alone.
template <class Tile, int AGAIN>
__device__ __forceinline__ void tensor_whole_tile(const void* dy, const void* x, float* dweight, unsigned n_in,
                                                  unsigned n_out, const Cut& cut, unsigned add, unsigned tile) {
    static_assert(Tile::THREADS == 32, "a warp is a tile");
    constexpr unsigned SIZE = sizeof(typename Tile::Format::Word), QUADS = Tile::DOWN * Tile::ACROSS;
    const unsigned warp = threadIdx.x / 32, warps = blockDim.x / 32;
    unsigned tile_m, tile_n;
    place_tile(tile, (n_out + Tile::ROWS - 1) / Tile::ROWS, (n_in + Tile::COLUMNS - 1) / Tile::COLUMNS, tile_m, tile_n);
    typename Tile::Sums acc[AGAIN];
#pragma unroll
    for (int r = 0; r < AGAIN; ++r) {
        const unsigned piece = warp + r * warps;
        Tile::clear(acc[r]);
        if (piece >= cut.pieces) continue;
        const size_t start = cut.start(piece);
        const TensorProduct p = {(const unsigned char*)dy + start * n_out * SIZE,
                                 (const unsigned char*)x + start * n_in * SIZE, n_out, n_in, cut.terms(piece)};
        Tile::run(p, tile_m * Tile::ROWS, tile_n * Tile::COLUMNS, acc[r], warp * Tile::SHARED_BYTES);
    }
    // Nothing is copied any more: the stages have served.
    __syncthreads();
    float4* leaves = (float4*)stages + lane_id();
#pragma unroll
    for (int r = 0; r < AGAIN; ++r) {
        const unsigned piece = warp + r * warps;
        if (piece >= cut.pieces) continue;
#pragma unroll
        for (unsigned q = 0; q < QUADS; ++q) {
            const float* v = acc[r][q / Tile::ACROSS][q % Tile::ACROSS];
            leaves[(piece * QUADS + q) * 32] = make_float4(v[0], v[1], v[2], v[3]);
        }
    }
    __syncthreads();
    const TensorOutput<Tile, float> out(dweight, n_out, n_in, tile_m * Tile::ROWS, tile_n * Tile::COLUMNS);
    const bool pairs = out.aligned(8);
    for (unsigned q = warp; q < QUADS; q += warps) {
        float4 v[8];
#pragma unroll
        for (unsigned i = 0; i < 8; ++i) {
            if (i < cut.pieces) v[i] = leaves[(i * QUADS + q) * 32];
        }
        const float4 sum = fold_held(v, cut.pieces);
        store_floats<Tile>(out, q / Tile::ACROSS, q % Tile::ACROSS, 0, sum.x, sum.y, pairs, add != 0);
        store_floats<Tile>(out, q / Tile::ACROSS, q % Tile::ACROSS, 1, sum.z, sum.w, pairs, add != 0);
    }
}
