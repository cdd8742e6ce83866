// Matrix products in f32: every output is one chain `acc = fma(a_k, b_k, acc)` from +0.0, k ascending.
//
// C[m, n] = A[m, k] * B[k, n]. `Inner` says which index of an operand is contiguous in memory: `Inner::K`
// for A[m][k] and B[n][k], `Inner::OUTER` for A[k][m] and B[k][n].
//
// Rows and columns beyond the matrix are computed on whatever lies in shared memory and not stored. Terms
// beyond k are never computed: a padded term fma(0, 0, -0.0) would turn a chain that underflowed to -0.0
// into +0.0. With `VECTORS`, operands start at multiples of 16 bytes and their contiguous extents are
// multiples of 4; without, any 4-byte aligned operand does.
#pragma once
#include "async.cuh"

enum class Inner { K, OUTER };

// Operands of one product.
struct Product {
    const float* a;
    const float* b;
    unsigned m, n, k;
};

__device__ __forceinline__ unsigned least(unsigned a, unsigned b) { return a < b ? a : b; }

__device__ __forceinline__ bool aligned_16(const void* p) { return ((unsigned long long)p & 15) == 0; }

// Where a lane stands in its warp's tile. Lanes that read one address are a lane and its neighbour, or a
// lane and the next but one: then a 16-byte load of a half-warp is a single pass over the banks.
__device__ __forceinline__ unsigned lane_of_eight() { return threadIdx.x >> 1 & 7; }
__device__ __forceinline__ unsigned lane_of_four() { return (threadIdx.x & 1) | (threadIdx.x >> 3 & 2); }

// Tiles in bands of 16 tile rows, down each band's columns: blocks that run together share both operands.
__device__ __forceinline__ void place_tile(unsigned id, unsigned tiles_m, unsigned tiles_n, unsigned& tile_m,
                                           unsigned& tile_n) {
    const unsigned band_rows = 16;
    const unsigned band = id / (band_rows * tiles_n);
    const unsigned within = id - band * band_rows * tiles_n;
    const unsigned rows = least(band_rows, tiles_m - band * band_rows);
    tile_m = band * band_rows + within % rows;
    tile_n = within / rows;
}

// Brings DEPTH terms of ROWS rows (of A, or columns of B) to shared memory as [term][row], stride ROWS + 4.
template <int ROWS, int DEPTH, int THREADS, Inner INNER, bool VECTORS> struct Panel;

// Contiguous terms: through registers, so that the write transposes. A warp holds 16 rows of 8 terms; with
// the stride of 4 mod 32 its 32 writes meet 32 banks.
template <int ROWS, int DEPTH, int THREADS, bool VECTORS> struct Panel<ROWS, DEPTH, THREADS, Inner::K, VECTORS> {
    static constexpr int STRIDE = ROWS + 4;
    static constexpr int CHUNKS = ROWS * DEPTH / 4 / THREADS;
    static_assert(CHUNKS * THREADS * 4 == ROWS * DEPTH && DEPTH % 8 == 0, "whole chunks a thread");
    const float* from[CHUNKS];
    float held[CHUNKS][4];

    __device__ __forceinline__ static unsigned row(int c) {
        return (threadIdx.x + c * THREADS) % (ROWS * 2) >> 1;
    }
    __device__ __forceinline__ static unsigned term(int c) {
        return (threadIdx.x + c * THREADS) / (ROWS * 2) * 8 + (threadIdx.x & 1) * 4;
    }
    __device__ __forceinline__ Panel(const float* base, unsigned first, unsigned rows, unsigned k) {
#pragma unroll
        for (int c = 0; c < CHUNKS; ++c) {
            from[c] = base + (size_t)least(first + row(c), rows - 1) * k + term(c);
        }
    }
    // Reads the next DEPTH terms, of which `left` exist.
    __device__ __forceinline__ void fetch(float*, unsigned left) {
#pragma unroll
        for (int c = 0; c < CHUNKS; ++c) {
            if (VECTORS) {
                if (term(c) < left) {
                    const float4 v = *(const float4*)from[c];
                    held[c][0] = v.x, held[c][1] = v.y, held[c][2] = v.z, held[c][3] = v.w;
                }
            } else {
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    if (term(c) + e < left) held[c][e] = from[c][e];
                }
            }
            from[c] += DEPTH;
        }
    }
    __device__ __forceinline__ void place(float* shared) {
#pragma unroll
        for (int c = 0; c < CHUNKS; ++c) {
#pragma unroll
            for (int e = 0; e < 4; ++e) shared[(term(c) + e) * STRIDE + row(c)] = held[c][e];
        }
    }
};

// Contiguous rows: asynchronous copies.
template <int ROWS, int DEPTH, int THREADS, bool VECTORS> struct Panel<ROWS, DEPTH, THREADS, Inner::OUTER, VECTORS> {
    static constexpr int STRIDE = ROWS + 4;
    static constexpr int CHUNKS = ROWS * DEPTH / 4 / THREADS;
    static constexpr int TERMS = THREADS * 4 / ROWS;
    static_assert(CHUNKS * THREADS * 4 == ROWS * DEPTH && TERMS * ROWS == THREADS * 4, "whole chunks a thread");
    const float* from;
    size_t pitch;
    unsigned here;

    __device__ __forceinline__ static unsigned row() { return threadIdx.x % (ROWS / 4) * 4; }
    __device__ __forceinline__ static unsigned term() { return threadIdx.x / (ROWS / 4); }
    __device__ __forceinline__ Panel(const float* base, unsigned first, unsigned rows, unsigned) {
        const unsigned at = first + row();
        here = at < rows ? rows - at : 0;
        pitch = rows;
        from = base + term() * pitch + at;
    }
    // Starts copying the next DEPTH terms, of which `left` exist.
    __device__ __forceinline__ void fetch(float* shared, unsigned left) {
        float* to = shared + term() * STRIDE + row();
#pragma unroll
        for (int c = 0; c < CHUNKS; ++c) {
            const bool exists = term() + c * TERMS < left;
            if (VECTORS) {
                copy_async_16(to + c * TERMS * STRIDE, from, exists && here > 0);
            } else {
#pragma unroll
                for (unsigned e = 0; e < 4; ++e) {
                    copy_async_4(to + c * TERMS * STRIDE + e, from + e, exists && e < here);
                }
            }
            from += TERMS * pitch;
        }
    }
    __device__ __forceinline__ void place(float*) {}
};

// A block computes BM x BN outputs, a thread TM x TN of them in quads: rows 4 * lane + 32 * quad, columns
// 4 * lane + 16 * quad of its warp's tile of 8 TM x 4 TN.
template <int BM, int BN, int BK, int TM, int TN, Inner INNER_A, Inner INNER_B, bool VECTORS> struct Large {
    static constexpr int ROWS = BM, COLUMNS = BN, PER_ROW = TM, PER_COLUMN = TN;
    static constexpr int THREADS = BM * BN / (TM * TN);
    static constexpr int WARPS_M = BM / (8 * TM);
    static constexpr bool COLUMN_QUADS = true;
    using PanelA = Panel<BM, BK, THREADS, INNER_A, VECTORS>;
    using PanelB = Panel<BN, BK, THREADS, INNER_B, VECTORS>;
    static constexpr int FLOATS_A = BK * PanelA::STRIDE, FLOATS_B = BK * PanelB::STRIDE;

    __device__ __forceinline__ static unsigned row(int i) {
        return threadIdx.x / 32 % WARPS_M * (8 * TM) + i / 4 * 32 + lane_of_eight() * 4 + i % 4;
    }
    __device__ __forceinline__ static unsigned column(int j) {
        return threadIdx.x / 32 / WARPS_M * (4 * TN) + j / 4 * 16 + lane_of_four() * 4 + j % 4;
    }

    __device__ __forceinline__ static void step(const float* a_row, const float* b_row, float (&acc)[TM][TN]) {
        float a[TM], b[TN];
#pragma unroll
        for (int q = 0; q < TM / 4; ++q) {
            const float4 v = *(const float4*)(a_row + q * 32);
            a[4 * q] = v.x, a[4 * q + 1] = v.y, a[4 * q + 2] = v.z, a[4 * q + 3] = v.w;
        }
#pragma unroll
        for (int q = 0; q < TN / 4; ++q) {
            const float4 v = *(const float4*)(b_row + q * 16);
            b[4 * q] = v.x, b[4 * q + 1] = v.y, b[4 * q + 2] = v.z, b[4 * q + 3] = v.w;
        }
#pragma unroll
        for (int i = 0; i < TM; ++i) {
#pragma unroll
            for (int j = 0; j < TN; ++j) acc[i][j] = __fmaf_rn(a[i], b[j], acc[i][j]);
        }
    }

    // The chains of the tile at (row0, column0); `acc` starts at +0.0.
    __device__ __forceinline__ static void run(const Product& p, unsigned row0, unsigned column0,
                                               float (&acc)[TM][TN]) {
        __shared__ __align__(16) float shared_a[2][FLOATS_A];
        __shared__ __align__(16) float shared_b[2][FLOATS_B];
        if (p.k == 0) return;
        PanelA panel_a(p.a, row0, p.m, p.k);
        PanelB panel_b(p.b, column0, p.n, p.k);
        panel_a.fetch(shared_a[0], p.k);
        panel_b.fetch(shared_b[0], p.k);
        panel_a.place(shared_a[0]);
        panel_b.place(shared_b[0]);
        copy_async_commit();
        copy_async_wait<0>();
        __syncthreads();
        unsigned now = 0, left = p.k;
        const unsigned a_at = row(0), b_at = column(0);
        // One barrier a round: the copies of a round go to the half that the round before has read.
        for (; left > BK; left -= BK) {
            panel_a.fetch(shared_a[now ^ 1], left - BK);
            panel_b.fetch(shared_b[now ^ 1], left - BK);
            copy_async_commit();
            const float* a = shared_a[now] + a_at;
            const float* b = shared_b[now] + b_at;
#pragma unroll
            for (int t = 0; t < BK; ++t) step(a + t * PanelA::STRIDE, b + t * PanelB::STRIDE, acc);
            now ^= 1;
            panel_a.place(shared_a[now]);
            panel_b.place(shared_b[now]);
            copy_async_wait<0>();
            __syncthreads();
        }
        const float* a = shared_a[now] + a_at;
        const float* b = shared_b[now] + b_at;
#pragma unroll 1
        for (unsigned t = 0; t < left; ++t) step(a + t * PanelA::STRIDE, b + t * PanelB::STRIDE, acc);
    }
};

// One operand of a small tile in shared memory, in the order it has in global memory: [row][term] with
// stride DEPTH + 4, or [term][row]. A thread takes PER of its rows, LANES lanes side by side.
template <int ROWS, int DEPTH, int THREADS, int PER, int LANES, Inner INNER, bool VECTORS> struct Strip {
    static constexpr bool TERMS_INSIDE = INNER == Inner::K;
    static constexpr int STRIDE = TERMS_INSIDE ? DEPTH + 4 : ROWS;
    static constexpr int FLOATS = TERMS_INSIDE ? ROWS * STRIDE : DEPTH * STRIDE;
    static constexpr int CHUNKS = ROWS * DEPTH / 4 / THREADS;
    static constexpr int LINE = TERMS_INSIDE ? DEPTH : ROWS;
    static constexpr int LINES = THREADS * 4 / LINE;
    static constexpr int POINTERS = TERMS_INSIDE ? CHUNKS : 1;
    static_assert(CHUNKS * THREADS * 4 == ROWS * DEPTH && LINES * LINE == THREADS * 4, "whole chunks a thread");
    const float* from[POINTERS];
    size_t pitch;
    unsigned in, line, here;

    // Rows lie LANES apart where terms are contiguous, so that neighbouring lanes read neighbouring banks.
    __device__ __forceinline__ static unsigned row(unsigned lane, int i) {
        return TERMS_INSIDE ? lane + LANES * i : lane * PER + i;
    }
    __device__ __forceinline__ Strip(const float* base, unsigned first, unsigned rows, unsigned k) {
        in = threadIdx.x % (LINE / 4) * 4;
        line = threadIdx.x / (LINE / 4);
        pitch = rows;
        here = 0;
        if (TERMS_INSIDE) {
#pragma unroll
            for (int c = 0; c < POINTERS; ++c) {
                from[c] = base + (size_t)least(first + line + c * LINES, rows - 1) * k + in;
            }
        } else {
            const unsigned at = VECTORS ? least(first + in, rows - 4) : first + in;
            here = at < rows ? rows - at : 0;
            from[0] = base + line * pitch + at;
        }
    }
    // Starts copying the next DEPTH terms, of which `left` exist.
    __device__ __forceinline__ void fetch(float* shared, unsigned left) {
        float* to = shared + line * STRIDE + in;
#pragma unroll
        for (int c = 0; c < CHUNKS; ++c, to += LINES * STRIDE) {
            const float*& source = from[TERMS_INSIDE ? c : 0];
            const unsigned term = TERMS_INSIDE ? in : line + c * LINES;
            if (VECTORS) {
                copy_async_16(to, source, term < left);
            } else {
#pragma unroll
                for (unsigned e = 0; e < 4; ++e) {
                    copy_async_4(to + e, source + e, TERMS_INSIDE ? term + e < left : term < left && e < here);
                }
            }
            source += TERMS_INSIDE ? DEPTH : LINES * pitch;
        }
    }
    // The four terms from `term` of this thread's rows.
    __device__ __forceinline__ static void read4(const float* shared, unsigned row0, unsigned lane, int term,
                                                 float (&out)[4][PER]) {
        if (TERMS_INSIDE) {
#pragma unroll
            for (int i = 0; i < PER; ++i) {
                const float4 v = *(const float4*)(shared + (row0 + row(lane, i)) * STRIDE + term);
                out[0][i] = v.x, out[1][i] = v.y, out[2][i] = v.z, out[3][i] = v.w;
            }
        } else {
#pragma unroll
            for (int t = 0; t < 4; ++t) {
                const float* at = shared + (term + t) * STRIDE + row0 + row(lane, 0);
                if (PER == 4) {
                    const float4 v = *(const float4*)at;
                    out[t][0] = v.x, out[t][1] = v.y, out[t][PER - 2] = v.z, out[t][PER - 1] = v.w;
                } else {
                    const float2 v = *(const float2*)at;
                    out[t][0] = v.x, out[t][1] = v.y;
                }
            }
        }
    }
    __device__ __forceinline__ static float read1(const float* shared, unsigned at, unsigned term) {
        return TERMS_INSIDE ? shared[at * STRIDE + term] : shared[term * STRIDE + at];
    }
};

// Small tiles with STAGES blocks of terms under way: for products whose time is latency. Four lanes a warp
// along the rows, eight along the columns; the warps stand below each other.
template <int BM, int BN, int BK, int STAGES, int TM, int TN, Inner INNER_A, Inner INNER_B, bool VECTORS>
struct Small {
    static constexpr int ROWS = BM, COLUMNS = BN, PER_ROW = TM, PER_COLUMN = TN;
    static constexpr int THREADS = BM * BN / (TM * TN);
    static constexpr bool COLUMN_QUADS = INNER_B == Inner::OUTER;
    static_assert(BN == 8 * TN && TN == 4 && (TM == 2 || TM == 4), "the warps stand below each other");
    using StripA = Strip<BM, BK, THREADS, TM, 4, INNER_A, VECTORS>;
    using StripB = Strip<BN, BK, THREADS, TN, 8, INNER_B, VECTORS>;

    __device__ __forceinline__ static unsigned row(int i) {
        return threadIdx.x / 32 * (4 * TM) + StripA::row(lane_of_four(), i);
    }
    __device__ __forceinline__ static unsigned column(int j) { return StripB::row(lane_of_eight(), j); }

    // The chains of the tile at (row0, column0); `acc` starts at +0.0.
    __device__ __forceinline__ static void run(const Product& p, unsigned row0, unsigned column0,
                                               float (&acc)[TM][TN]) {
        __shared__ __align__(16) float shared_a[STAGES][StripA::FLOATS];
        __shared__ __align__(16) float shared_b[STAGES][StripB::FLOATS];
        if (p.k == 0) return;
        StripA strip_a(p.a, row0, p.m, p.k);
        StripB strip_b(p.b, column0, p.n, p.k);
        unsigned to_copy = p.k, copied = 0;
        const auto fetch = [&]() {
            if (to_copy > 0) {
                strip_a.fetch(shared_a[copied], to_copy);
                strip_b.fetch(shared_b[copied], to_copy);
                to_copy -= least(to_copy, BK);
                copied = copied + 1 == STAGES ? 0 : copied + 1;
            }
            // A group a round, even an empty one: the wait counts groups.
            copy_async_commit();
        };
#pragma unroll 1
        for (int s = 0; s < STAGES - 1; ++s) fetch();
        const unsigned warp_row = threadIdx.x / 32 * (4 * TM);
        unsigned now = 0, left = p.k;
#pragma unroll 1
        for (; left >= BK; left -= BK) {
            copy_async_wait<STAGES - 2>();
            __syncthreads();
            fetch();
#pragma unroll
            for (int t = 0; t < BK; t += 4) {
                float a[4][TM], b[4][TN];
                StripA::read4(shared_a[now], warp_row, lane_of_four(), t, a);
                StripB::read4(shared_b[now], 0, lane_of_eight(), t, b);
#pragma unroll
                for (int u = 0; u < 4; ++u) multiply(a[u], b[u], acc);
            }
            now = now + 1 == STAGES ? 0 : now + 1;
        }
        if (left == 0) return;
        copy_async_wait<0>();
        __syncthreads();
#pragma unroll 1
        for (unsigned t = 0; t < left; ++t) {
            float a[TM], b[TN];
#pragma unroll
            for (int i = 0; i < TM; ++i) a[i] = StripA::read1(shared_a[now], row(i), t);
#pragma unroll
            for (int j = 0; j < TN; ++j) b[j] = StripB::read1(shared_b[now], column(j), t);
            multiply(a, b, acc);
        }
    }

    __device__ __forceinline__ static void multiply(const float (&a)[TM], const float (&b)[TN], float (&acc)[TM][TN]) {
#pragma unroll
        for (int i = 0; i < TM; ++i) {
#pragma unroll
            for (int j = 0; j < TN; ++j) acc[i][j] = __fmaf_rn(a[i], b[j], acc[i][j]);
        }
    }
};

template <int TM, int TN> __device__ __forceinline__ void clear(float (&acc)[TM][TN]) {
#pragma unroll
    for (int i = 0; i < TM; ++i) {
#pragma unroll
        for (int j = 0; j < TN; ++j) acc[i][j] = 0.0f;
    }
}

// C[m, n], tight, and the place of a tile in it.
struct Output {
    float* c;
    unsigned m, n, row0, column0;
    bool add;
    // Rows of C start at multiples of 16 bytes.
    bool quads;

    __device__ __forceinline__ Output(float* c, unsigned m, unsigned n, bool add)
        : c(c), m(m), n(n), row0(0), column0(0), add(add), quads(n % 4 == 0 && aligned_16(c)) {}

    __device__ __forceinline__ void put(size_t at, float v) const { c[at] = add ? __fadd_rn(c[at], v) : v; }
};

// Writes, or adds, the four outputs that a thread has from (i, j) on.
template <class Tile>
__device__ __forceinline__ void store_quad(const Output& out, int i, int j, float4 v) {
    const unsigned row = out.row0 + Tile::row(i), column = out.column0 + Tile::column(j);
    if (row >= out.m) return;
    const size_t line = (size_t)row * out.n;
    if (Tile::COLUMN_QUADS && out.quads) {
        if (column >= out.n) return;
        float4* at = (float4*)(out.c + line + column);
        if (out.add) {
            const float4 old = *at;
            v = make_float4(__fadd_rn(old.x, v.x), __fadd_rn(old.y, v.y), __fadd_rn(old.z, v.z),
                            __fadd_rn(old.w, v.w));
        }
        *at = v;
        return;
    }
    const float values[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int e = 0; e < 4; ++e) {
        const unsigned at = out.column0 + Tile::column(j + e);
        if (at < out.n) out.put(line + at, values[e]);
    }
}

template <class Tile>
__device__ __forceinline__ void store_tile(const Output& out, const float (&acc)[Tile::PER_ROW][Tile::PER_COLUMN]) {
#pragma unroll
    for (int i = 0; i < Tile::PER_ROW; ++i) {
#pragma unroll
        for (int j = 0; j < Tile::PER_COLUMN; j += 4) {
            store_quad<Tile>(out, i, j, make_float4(acc[i][j], acc[i][j + 1], acc[i][j + 2], acc[i][j + 3]));
        }
    }
}

// One block: one tile of a product that is a single chain an output, `bias[n]` added once where there is one.
template <class Tile>
__device__ __forceinline__ void product_tile(const Product& p, float* c, const float* bias) {
    unsigned tile_m, tile_n;
    place_tile(blockIdx.x, (p.m + Tile::ROWS - 1) / Tile::ROWS, (p.n + Tile::COLUMNS - 1) / Tile::COLUMNS, tile_m,
               tile_n);
    Output out(c, p.m, p.n, false);
    out.row0 = tile_m * Tile::ROWS, out.column0 = tile_n * Tile::COLUMNS;
    float acc[Tile::PER_ROW][Tile::PER_COLUMN];
    clear(acc);
    Tile::run(p, out.row0, out.column0, acc);
    if (bias != nullptr) {
#pragma unroll
        for (int j = 0; j < Tile::PER_COLUMN; ++j) {
            const float b = bias[least(out.column0 + Tile::column(j), p.n - 1)];
#pragma unroll
            for (int i = 0; i < Tile::PER_ROW; ++i) acc[i][j] = __fadd_rn(acc[i][j], b);
        }
    }
    store_tile<Tile>(out, acc);
}
