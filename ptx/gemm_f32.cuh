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
#include "tiles.cuh"

// Operands of one product.
struct Product {
    const float* a;
    const float* b;
    unsigned m, n, k;
};

// Where a lane stands in its warp's tile. Lanes that read one address are a lane and its neighbour, or a
// lane and the next but one: then a 16-byte load of a half-warp is a single pass over the banks.
__device__ __forceinline__ unsigned lane_of_eight() { return threadIdx.x >> 1 & 7; }
__device__ __forceinline__ unsigned lane_of_four() { return (threadIdx.x & 1) | (threadIdx.x >> 3 & 2); }

// Where a lane stands among LANES lanes side by side, of four or eight.
template <int LANES> __device__ __forceinline__ unsigned lane_of() {
    static_assert(LANES == 4 || LANES == 8, "a warp is 4 lanes by 8");
    return LANES == 8 ? lane_of_eight() : lane_of_four();
}

// Brings DEPTH terms of ROWS rows (of A, or columns of B) to shared memory as [term][row].
template <int ROWS, int DEPTH, int THREADS, Inner INNER, bool VECTORS> struct Panel;

// Terms that pass through registers at a time.
constexpr int ROUND = 8;

// Contiguous terms: through registers, a round at a time, so that the write transposes. A warp holds 16 rows
// of 8 terms; with a stride of 4 mod 32 its 32 writes meet 32 banks.
template <int ROWS, int DEPTH, int THREADS, bool VECTORS> struct Panel<ROWS, DEPTH, THREADS, Inner::K, VECTORS> {
    static constexpr int STRIDE = ROWS + 4;
    static constexpr int CHUNKS = ROWS * ROUND / 4 / THREADS;
    static_assert(CHUNKS * THREADS * 4 == ROWS * ROUND && DEPTH % ROUND == 0, "whole chunks a thread");
    const float* from[CHUNKS];
    float held[CHUNKS][4];

    __device__ __forceinline__ static unsigned row(int c) { return (threadIdx.x + c * THREADS) >> 1; }
    __device__ __forceinline__ static unsigned term() { return (threadIdx.x & 1) * 4; }
    __device__ __forceinline__ Panel(const float* base, unsigned first, unsigned rows, unsigned k) {
#pragma unroll
        for (int c = 0; c < CHUNKS; ++c) {
            from[c] = base + (size_t)least(first + row(c), rows - 1) * k + term();
        }
    }
    __device__ __forceinline__ void copy(float*, unsigned) {}
    // Reads the next round, of which `left` terms exist.
    __device__ __forceinline__ void fetch(unsigned left) {
#pragma unroll
        for (int c = 0; c < CHUNKS; ++c) {
            if (VECTORS) {
                if (term() < left) {
                    const float4 v = *(const float4*)from[c];
                    held[c][0] = v.x, held[c][1] = v.y, held[c][2] = v.z, held[c][3] = v.w;
                }
            } else {
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    if (term() + e < left) held[c][e] = from[c][e];
                }
            }
            from[c] += ROUND;
        }
    }
    // Writes the round to its first term's place.
    __device__ __forceinline__ void place(float* shared) {
#pragma unroll
        for (int c = 0; c < CHUNKS; ++c) {
#pragma unroll
            for (int e = 0; e < 4; ++e) shared[(term() + e) * STRIDE + row(c)] = held[c][e];
        }
    }
};

// Contiguous rows: asynchronous copies of all DEPTH terms at once.
template <int ROWS, int DEPTH, int THREADS, bool VECTORS> struct Panel<ROWS, DEPTH, THREADS, Inner::OUTER, VECTORS> {
    static constexpr int STRIDE = ROWS;
    static constexpr int CHUNKS = ROWS * DEPTH / 4 / THREADS;
    static constexpr int TERMS = THREADS * 4 / ROWS;
    static_assert(CHUNKS * THREADS * 4 == ROWS * DEPTH && TERMS * ROWS == THREADS * 4, "whole chunks a thread");
    const float* from;
    size_t pitch;
    unsigned here;

    __device__ __forceinline__ static unsigned row() { return threadIdx.x % (ROWS / 4) * 4; }
    __device__ __forceinline__ static unsigned term() { return threadIdx.x / (ROWS / 4); }
    __device__ __forceinline__ Panel(const float* base, unsigned first, unsigned rows, unsigned) {
        const unsigned at = VECTORS ? least(first + row(), rows - 4) : first + row();
        here = at < rows ? rows - at : 0;
        pitch = rows;
        from = base + term() * pitch + at;
    }
    // Starts copying the next DEPTH terms, of which `left` exist.
    __device__ __forceinline__ void copy(float* shared, unsigned left) {
        float* to = shared + term() * STRIDE + row();
#pragma unroll
        for (int c = 0; c < CHUNKS; ++c) {
            const bool exists = term() + c * TERMS < left;
            const float* source = from + c * TERMS * pitch;
            if (VECTORS) {
                copy_async_16(to + c * TERMS * STRIDE, source, exists);
            } else {
#pragma unroll
                for (unsigned e = 0; e < 4; ++e) {
                    copy_async_4(to + c * TERMS * STRIDE + e, source + e, exists && e < here);
                }
            }
        }
        from += DEPTH * pitch;
    }
    __device__ __forceinline__ void fetch(unsigned) {}
    __device__ __forceinline__ void place(float*) {}
};

// Shared memory of large tiles, sized by the launch.
extern __shared__ __align__(16) float large_shared[];

// A block computes BM x BN outputs, a thread TM x TN of them in quads. Two stages of BK terms each: while one
// is multiplied, the other is filled, and a barrier stands between stages alone.
//
// Which way lanes lie and in which order a term's products are issued changes no chain. Both are what the
// compiler's register allocation was measured to like best.
template <int BM, int BN, int BK, int TM, int TN, Inner INNER_A, Inner INNER_B, bool VECTORS> struct Large {
    static constexpr int ROWS = BM, COLUMNS = BN, PER_ROW = TM, PER_COLUMN = TN;
    static constexpr int THREADS = BM * BN / (TM * TN);
    static constexpr bool THROUGH_REGISTERS = INNER_A == Inner::K;
    static constexpr int LANES_M = THROUGH_REGISTERS ? 4 : 8, LANES_N = 32 / LANES_M;
    static constexpr int WARPS_M = BM / (LANES_M * TM);
    static constexpr bool COLUMN_QUADS = true;
    using PanelA = Panel<BM, BK, THREADS, INNER_A, VECTORS>;
    using PanelB = Panel<BN, BK, THREADS, INNER_B, VECTORS>;
    static constexpr int FLOATS_A = BK * PanelA::STRIDE, STAGE = FLOATS_A + BK * PanelB::STRIDE;
    static constexpr int SHARED_BYTES = 2 * STAGE * 4;

    __device__ __forceinline__ static unsigned row(int i) {
        return threadIdx.x / 32 % WARPS_M * (LANES_M * TM) + i / 4 * (4 * LANES_M) + lane_of<LANES_M>() * 4 + i % 4;
    }
    __device__ __forceinline__ static unsigned column(int j) {
        return threadIdx.x / 32 / WARPS_M * (LANES_N * TN) + j / 4 * (4 * LANES_N) + lane_of<LANES_N>() * 4 + j % 4;
    }

    template <int PER, int LANES> __device__ __forceinline__ static void read(const float* at, float (&v)[PER]) {
#pragma unroll
        for (int q = 0; q < PER / 4; ++q) {
            const float4 x = *(const float4*)(at + q * 4 * LANES);
            v[4 * q] = x.x, v[4 * q + 1] = x.y, v[4 * q + 2] = x.z, v[4 * q + 3] = x.w;
        }
    }

    // One term of all chains of this thread.
    __device__ __forceinline__ static void step(const float* a_row, const float* b_row, float (&acc)[TM][TN]) {
        float a[TM], b[TN];
        read<TM, LANES_M>(a_row, a);
        read<TN, LANES_N>(b_row, b);
#pragma unroll
        for (int i = 0; i < TM; ++i) {
#pragma unroll
            for (int to_right = 0; to_right < TN; ++to_right) {
                const int j = THROUGH_REGISTERS && i % 2 == 1 ? TN - 1 - to_right : to_right;
                acc[i][j] = __fmaf_rn(a[i], b[j], acc[i][j]);
            }
        }
    }

    __device__ __forceinline__ static void steps(const float* a, const float* b, float (&acc)[TM][TN]) {
#pragma unroll
        for (int t = 0; t < ROUND; ++t) step(a + t * PanelA::STRIDE, b + t * PanelB::STRIDE, acc);
    }

    // The chains of the tile at (row0, column0); `acc` starts at +0.0.
    __device__ __forceinline__ static void run(const Product& p, unsigned row0, unsigned column0,
                                               float (&acc)[TM][TN]) {
        if (p.k == 0) return;
        PanelA panel_a(p.a, row0, p.m, p.k);
        PanelB panel_b(p.b, column0, p.n, p.k);
        const auto copy = [&](float* to, unsigned left) {
            panel_a.copy(to, left);
            panel_b.copy(to + FLOATS_A, left);
            copy_async_commit();
        };
        const auto fetch = [&](unsigned first, unsigned left) {
            const unsigned here = left > first ? left - first : 0;
            panel_a.fetch(here);
            panel_b.fetch(here);
        };
        const auto place = [&](float* to, unsigned first) {
            panel_a.place(to + first * PanelA::STRIDE);
            panel_b.place(to + FLOATS_A + first * PanelB::STRIDE);
        };
        copy(large_shared, p.k);
#pragma unroll
        for (unsigned first = 0; first < BK; first += ROUND) {
            fetch(first, p.k);
            place(large_shared, first);
        }
        copy_async_wait<0>();
        __syncthreads();
        unsigned now = 0, left = p.k;
        const unsigned a_at = row(0), b_at = FLOATS_A + column(0);
#pragma unroll 1
        for (; left > BK; left -= BK) {
            const float* a = large_shared + now + a_at;
            const float* b = large_shared + now + b_at;
            now = STAGE - now;
            float* to = large_shared + now;
            copy(to, left - BK);
#pragma unroll
            for (unsigned first = 0; first < BK; first += ROUND) {
                fetch(first, left - BK);
                steps(a + first * PanelA::STRIDE, b + first * PanelB::STRIDE, acc);
                place(to, first);
            }
            copy_async_wait<0>();
            __syncthreads();
        }
        const float* a = large_shared + now + a_at;
        const float* b = large_shared + now + b_at;
#pragma unroll 1
        for (; left >= ROUND; left -= ROUND) {
            steps(a, b, acc);
            a += ROUND * PanelA::STRIDE;
            b += ROUND * PanelB::STRIDE;
        }
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
    // Lines of the operand start `width` elements apart.
    __device__ __forceinline__ Strip(const float* base, unsigned first, unsigned rows, unsigned width) {
        in = threadIdx.x % (LINE / 4) * 4;
        line = threadIdx.x / (LINE / 4);
        pitch = width;
        here = 0;
        if (TERMS_INSIDE) {
#pragma unroll
            for (int c = 0; c < POINTERS; ++c) {
                from[c] = base + least(first + line + c * LINES, rows - 1) * pitch + in;
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
    static constexpr int THREADS = BM * BN / (TM * TN), STAGES_OF_TERMS = STAGES;
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
        if (p.k == 0) return;
        stream(strip_a(p, row0), strip_b(p, column0), p.k, acc);
    }
    __device__ __forceinline__ static StripA strip_a(const Product& p, unsigned row0) {
        return StripA(p.a, row0, p.m, StripA::TERMS_INSIDE ? p.k : p.m);
    }
    __device__ __forceinline__ static StripB strip_b(const Product& p, unsigned column0) {
        return StripB(p.b, column0, p.n, StripB::TERMS_INSIDE ? p.k : p.n);
    }

    // The chains over the `k` terms that two strips bring, at least one.
    __device__ __forceinline__ static void stream(StripA strip_a, StripB strip_b, unsigned k, float (&acc)[TM][TN]) {
        __shared__ __align__(16) float shared_a[STAGES][StripA::FLOATS];
        __shared__ __align__(16) float shared_b[STAGES][StripB::FLOATS];
        stream_through(shared_a, shared_b, strip_a, strip_b, k, acc);
    }

    // The same through shared memory that the caller has for the stages of both strips.
    __device__ __forceinline__ static void stream_through(float (*shared_a)[StripA::FLOATS],
                                                          float (*shared_b)[StripB::FLOATS], StripA strip_a,
                                                          StripB strip_b, unsigned k, float (&acc)[TM][TN]) {
        unsigned to_copy = k, copied = 0;
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
        unsigned now = 0, left = k;
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

// A small tile whose stages stand in the shared memory that the launch sizes: kernels with several tiles have it once.
template <class Tile> struct InSharedOfLaunch : Tile {
    static constexpr unsigned FLOATS_A = Tile::STAGES_OF_TERMS * Tile::StripA::FLOATS;

    __device__ __forceinline__ static void run(const Product& p, unsigned row0, unsigned column0,
                                               float (&acc)[Tile::PER_ROW][Tile::PER_COLUMN]) {
        if (p.k == 0) return;
        Tile::stream_through((float(*)[Tile::StripA::FLOATS])large_shared,
                             (float(*)[Tile::StripB::FLOATS])(large_shared + FLOATS_A), Tile::strip_a(p, row0),
                             Tile::strip_b(p, column0), p.k, acc);
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
__device__ __forceinline__ void product_tile(const Product& p, float* c, const float* bias, unsigned block) {
    unsigned tile_m, tile_n;
    place_tile(block, (p.m + Tile::ROWS - 1) / Tile::ROWS, (p.n + Tile::COLUMNS - 1) / Tile::COLUMNS, tile_m,
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
