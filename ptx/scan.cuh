// The selective scan: what forward and backward share, and forward.
//
// A block of 128 threads serves some channels of one sequence, a thread four neighbouring states of one channel,
// so that G threads hold a channel of up to 4 G states. The threads of a channel lie 32 / G lanes apart: neighbouring lanes
// are neighbouring channels. Sums over states fold the threads of a channel, sums over channels the others.
//
// Positions pass in tiles of 16. For a tile the block first computes what does not depend on the state, each number once
// and four channels a thread; then the states pass through the tile; then the outputs are written, again four
// channels a thread.
#pragma once
#include "contract.cuh"
#include "gates.cuh"
#include "quads.cuh"

namespace scan {

using quads::Quad;
using quads::Stored;

__device__ constexpr unsigned THREADS = 128;
__device__ constexpr unsigned TILE = 16;
/// States of a thread.
__device__ constexpr unsigned OWN = 4;

/// log2(e) and ln(2), each rounded once.
__device__ constexpr unsigned LOG2_E = 0x3fb8aa3bu;
__device__ constexpr unsigned LN_2 = 0x3f317218u;

/// `2^x` for `x` up to zero, and `2^-125` below -125 and for a NaN.
__device__ __forceinline__ float decay(float x) {
    const float z = fmaxf(x, -125.0f);
    const float t = __fadd_rn(z, 12582912.0f);
    const float r = __fsub_rn(z, __fsub_rn(t, 12582912.0f));
    float q = __fmaf_rn(__uint_as_float(0x3920bc08u), r, __uint_as_float(0x3aaf84a8u));
    q = __fmaf_rn(q, r, __uint_as_float(0x3c1d96eau));
    q = __fmaf_rn(q, r, __uint_as_float(0x3d6357bdu));
    q = __fmaf_rn(q, r, __uint_as_float(0x3e75fdeeu));
    q = __fmaf_rn(q, r, __uint_as_float(0x3f317218u));
    const float p = __fmaf_rn(q, r, 1.0f);
    return __uint_as_float(__float_as_uint(p) + (__float_as_uint(t) << 23));
}

/// The sizes of a scan, the chunks of a sequence, and whether rows of channels and of `bc` can be read by four elements.
struct Sizes {
    unsigned seq_len, d_inner, d_state, chunk, chunks;
    bool whole;
};

/// The thread's number, asked for anew: what follows from it need not be kept in registers until here.
__device__ __forceinline__ unsigned thread_again() {
#ifdef BITSTEP_HOST
    return threadIdx.x;
#else
    unsigned x;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(x));
    return x;
#endif
}

/// How the block's threads share its work.
template <unsigned G>
struct Roles {
    static constexpr unsigned CHANNELS = THREADS / G;
    /// Channels of a warp.
    static constexpr unsigned ACROSS = 32 / G;
    /// Quads of channels of a tile, and of a thread.
    static constexpr unsigned QUADS = TILE * CHANNELS / 4;
    static constexpr unsigned EACH = (QUADS + THREADS - 1) / THREADS;
    /// Elements of a tile of `bc`, padded to whole groups.
    static constexpr unsigned COLUMNS = 2 * OWN * G;

    /// Of the states: the channel of the block and the first state.
    static __device__ __forceinline__ unsigned channel(unsigned thread) { return thread / 32 * ACROSS + thread % ACROSS; }
    static __device__ __forceinline__ unsigned group(unsigned thread) { return thread % 32 / ACROSS; }
    static __device__ __forceinline__ unsigned channel() { return channel(threadIdx.x); }
    static __device__ __forceinline__ unsigned group() { return group(threadIdx.x); }

    /// Of a thread's quad number `i`: whether there is one, the position in the tile, and the first channel of the block.
    static __device__ __forceinline__ bool has(unsigned i, unsigned thread = threadIdx.x) { return thread + i * THREADS < QUADS; }
    static __device__ __forceinline__ unsigned position(unsigned i, unsigned thread = threadIdx.x) {
        return (thread + i * THREADS) / (CHANNELS / 4);
    }
    static __device__ __forceinline__ unsigned quad(unsigned i, unsigned thread = threadIdx.x) {
        return (thread + i * THREADS) % (CHANNELS / 4) * 4;
    }
};

/// A sum over the threads of a channel of each of `N` values: the tree over the groups of states. With `N` of 4 or 8 the values
/// are dealt out: afterwards a thread has the sums `first .. first + left` in `v[0 .. left]`.
struct Dealt {
    unsigned first, left;
};
template <unsigned G, unsigned N>
__device__ __forceinline__ Dealt fold_states(float (&v)[N]) {
    const unsigned group = Roles<G>::group();
    unsigned first = 0;
    unsigned left = N;
#pragma unroll
    for (unsigned level = 1; level < G; level *= 2) {
        const unsigned lanes = level * Roles<G>::ACROSS;
        if (left > 1) {
            const unsigned half = left / 2;
            const bool upper = (group & level) != 0;
#pragma unroll
            for (unsigned i = 0; i < N / 2; ++i) {
                if (i < half) {
                    const float give = upper ? v[i] : v[i + half], keep = upper ? v[i + half] : v[i];
                    v[i] = __fadd_rn(keep, __shfl_xor_sync(contract::WHOLE_WARP, give, lanes));
                }
            }
            first += upper ? half : 0;
            left = half;
        } else {
            v[0] = __fadd_rn(v[0], __shfl_xor_sync(contract::WHOLE_WARP, v[0], lanes));
        }
    }
    return {first, left};
}

/// The sum over the channels of a warp of each of 8 values; afterwards a thread has the sums `first .. first + left`
/// in `v[0 .. left]`, and `sole` says whether it is the thread that hands them on.
struct Across {
    unsigned first, left;
    bool sole;
};
template <unsigned G>
__device__ __forceinline__ Across fold_channels(float (&v)[8]) {
    const unsigned lane = threadIdx.x % Roles<G>::ACROSS;
    Across dealt = {0, 8, true};
#pragma unroll
    for (unsigned level = 1; level < Roles<G>::ACROSS; level *= 2) {
        const bool upper = (lane & level) != 0;
        if (dealt.left > 1) {
            const unsigned half = dealt.left / 2;
#pragma unroll
            for (unsigned i = 0; i < 4; ++i) {
                if (i < half) {
                    const float give = upper ? v[i] : v[i + half], keep = upper ? v[i + half] : v[i];
                    v[i] = __fadd_rn(keep, __shfl_xor_sync(contract::WHOLE_WARP, give, level));
                }
            }
            dealt.first += upper ? half : 0;
            dealt.left = half;
        } else {
            v[0] = __fadd_rn(v[0], __shfl_xor_sync(contract::WHOLE_WARP, v[0], level));
            dealt.sole = dealt.sole && !upper;
        }
    }
    return dealt;
}

/// The part of a tile's `bc` that a thread brings, as stored.
template <unsigned G, typename T>
struct Columns {
    static constexpr unsigned QUADS = TILE * Roles<G>::COLUMNS / 4;
    static constexpr unsigned EACH = (QUADS + THREADS - 1) / THREADS;
    Stored<T> part[EACH];

    /// From the row of the tile's first position; `count` positions. d_state is 4 G, so the rows of global and of shared
    /// memory are the same.
    __device__ __forceinline__ void fetch(const T* bc, unsigned count, bool whole) {
        const unsigned thread = thread_again();
#pragma unroll
        for (unsigned i = 0; i < EACH; ++i) {
            const unsigned at = 4 * (thread + i * THREADS);
            if (at < count * Roles<G>::COLUMNS) part[i] = quads::fetch(bc + at, 4, whole);
        }
    }
    __device__ __forceinline__ void put(float* tile, unsigned count) const {
#pragma unroll
        for (unsigned i = 0; i < EACH; ++i) {
            const unsigned at = 4 * (threadIdx.x + i * THREADS);
            const Quad x = quads::widen<T>(part[i]);
            if (at < count * Roles<G>::COLUMNS)
                contract::store4(tile + at, make_float4(x.v[0], x.v[1], x.v[2], x.v[3]));
        }
    }
};

/// The same where the states are fewer than 4 G: at once into shared memory, places without a state left as they are.
template <unsigned G, typename T>
__device__ __forceinline__ void put_ragged(const T* bc, float* tile, unsigned count, unsigned d_state) {
    const unsigned columns = 2 * d_state;
    for (unsigned i = threadIdx.x; i < count * columns; i += THREADS) {
        const unsigned row = i / columns, j = i % columns;
        const unsigned column = j < d_state ? j : j - d_state + OWN * G;
        tile[row * Roles<G>::COLUMNS + column] = quads::number(bc[i]);
    }
}

/// What a thread keeps of the weights of its states; with `RAGGED` a channel may have fewer than the threads have.
template <bool RAGGED>
struct Rates {
    float rate[OWN];
    /// Which of its states there are.
    bool live[OWN];

    __device__ __forceinline__ Rates(const float* a_log, size_t at, unsigned n, unsigned d_state, bool channel) {
#pragma unroll
        for (unsigned k = 0; k < OWN; ++k) {
            live[k] = channel && (!RAGGED || n + k < d_state);
            const float a = contract::negate(live[k] ? contract::exp(a_log[at + k]) : 0.0f);
            rate[k] = __fmul_rn(a, __uint_as_float(LOG2_E));
        }
    }
};

/// The stored states of a thread, zero where it has none; `four`: it has four, and all threads' states are aligned by four.
__device__ __forceinline__ float4 fetch_states(const float* at, const bool (&live)[OWN], bool four) {
    if (four && live[0]) return contract::load4(at);
    return make_float4(live[0] ? at[0] : 0.0f, live[1] ? at[1] : 0.0f, live[2] ? at[2] : 0.0f, live[3] ? at[3] : 0.0f);
}
__device__ __forceinline__ void put_states(float* at, const float (&h)[OWN], const bool (&live)[OWN], bool four) {
    if (four) {
        if (live[0]) contract::store4(at, make_float4(h[0], h[1], h[2], h[3]));
        return;
    }
#pragma unroll
    for (unsigned k = 0; k < OWN; ++k)
        if (live[k]) at[k] = h[k];
}
/// Whether the stored states can be read and written by four, with d_state a multiple of four.
__device__ __forceinline__ bool by_four(const float* at) { return (reinterpret_cast<size_t>(at) & 15) == 0; }

/// What the outputs take of a thread's four channels, which are the same in all of its quads.
struct PerChannel {
    float bias[4], skip[4];

    __device__ __forceinline__ PerChannel(const float* dt_bias, const float* skips, unsigned c, unsigned d_inner) {
#pragma unroll
        for (unsigned k = 0; k < 4; ++k) {
            bias[k] = c + k < d_inner ? dt_bias[c + k] : 0.0f;
            skip[k] = c + k < d_inner ? skips[c + k] : 0.0f;
        }
    }
};

/// `h = fma(a, h, step · b)` of each state.
__device__ __forceinline__ void advance(float (&h)[OWN], const float (&a)[OWN], float step, const float4& b) {
    h[0] = __fmaf_rn(a[0], h[0], __fmul_rn(step, b.x));
    h[1] = __fmaf_rn(a[1], h[1], __fmul_rn(step, b.y));
    h[2] = __fmaf_rn(a[2], h[2], __fmul_rn(step, b.z));
    h[3] = __fmaf_rn(a[3], h[3], __fmul_rn(step, b.w));
}

/// `acc = fma(a_k, b_k, acc)` over ascending states; with `RAGGED` over those that there are.
template <bool RAGGED>
__device__ __forceinline__ float chain(const float4& a, const float (&b)[OWN], float acc, const bool (&live)[OWN]) {
    if (!RAGGED || live[0]) acc = __fmaf_rn(a.x, b[0], acc);
    if (!RAGGED || live[1]) acc = __fmaf_rn(a.y, b[1], acc);
    if (!RAGGED || live[2]) acc = __fmaf_rn(a.z, b[2], acc);
    if (!RAGGED || live[3]) acc = __fmaf_rn(a.w, b[3], acc);
    return acc;
}

/// Where a chain over a thread's states begins: at +0.0, or where it has none at -0.0, which adds nothing to any sum.
__device__ __forceinline__ float chain_start(const bool (&live)[OWN]) { return live[0] ? 0.0f : -0.0f; }

template <typename T>
struct Forward {
    const T *u, *dt, *bc, *xz;
    const float *a_log, *skip, *dt_bias, *state;
    const unsigned* keep;
    T* out;
    float *starts, *state_next;
};

/// Of a thread's quads of a tile: as stored.
template <unsigned G, typename T>
struct TileInputs {
    static constexpr unsigned EACH = Roles<G>::EACH;
    Stored<T> u[EACH], dt[EACH], z[EACH];

    /// `count` positions from row `row` on; block's channels from `first` on.
    __device__ __forceinline__ void fetch(const Forward<T>& at, const Sizes& sizes, size_t row, unsigned first, unsigned count) {
#pragma unroll
        for (unsigned i = 0; i < EACH; ++i) {
            const unsigned c = first + Roles<G>::quad(i), p = Roles<G>::position(i);
            if (!Roles<G>::has(i) || p >= count || c >= sizes.d_inner) continue;
            const unsigned n = sizes.d_inner - c < 4 ? sizes.d_inner - c : 4;
            const bool whole = sizes.whole;
            const size_t place = (row + p) * sizes.d_inner + c;
            u[i] = quads::fetch(at.u + place, n, whole);
            dt[i] = quads::fetch(at.dt + place, n, whole);
            z[i] = quads::fetch(at.xz + (2 * place + sizes.d_inner - c), n, whole);
        }
    }
};

template <unsigned G>
struct Tile {
    /// The time step and it times `u`.
    float2 steps[TILE][Roles<G>::CHANNELS];
    float columns[TILE][Roles<G>::COLUMNS];
    float sums[TILE][Roles<G>::CHANNELS];
};

/// The states through `count` positions of a tile, with their sums; `before` is called before each position.
template <unsigned G, bool RAGGED, typename Before>
__device__ __forceinline__ void pass(Tile<G>& shared, float (&h)[OWN], const Rates<RAGGED>& weights, unsigned count, const Before& before) {
    const unsigned channel = Roles<G>::channel(), group = Roles<G>::group();
#pragma unroll 1
    for (unsigned four = 0; four < count; four += 4) {
        float y[4];
#pragma unroll
        for (unsigned i = 0; i < 4; ++i) {
            const unsigned p = four + i;
            y[i] = 0.0f;
            if (p >= count) continue;
            before(p);
            const float2 step = shared.steps[p][channel];
            const float4 in = contract::load4(&shared.columns[p][OWN * group]);
            const float4 out = contract::load4(&shared.columns[p][OWN * (G + group)]);
            float a[OWN];
#pragma unroll
            for (unsigned k = 0; k < OWN; ++k) a[k] = decay(__fmul_rn(step.x, weights.rate[k]));
            advance(h, a, step.y, in);
            y[i] = chain<RAGGED>(out, h, RAGGED ? chain_start(weights.live) : 0.0f, weights.live);
        }
        const Dealt dealt = fold_states<G>(y);
#pragma unroll
        for (unsigned i = 0; i < 4; ++i)
            if (i < dealt.left && (G <= 4 || group < 4)) shared.sums[four + dealt.first + i][channel] = y[i];
    }
}

/// The threads of `G` a channel; `RAGGED`: d_state is not 4 G but less.
template <unsigned G, bool RAGGED, typename T>
__device__ __forceinline__ void forward(const Forward<T>& at, const Sizes& sizes, bool carried) {
    using R = Roles<G>;
    __shared__ __align__(16) Tile<G> shared;
    const unsigned first = blockIdx.x * R::CHANNELS, b = blockIdx.y;
    const unsigned d = sizes.d_inner, n = sizes.d_state;
    const unsigned channel = R::channel(), group = R::group(), c = first + channel;
    const bool mine = c < d;
    const size_t states = ((size_t)b * d + c) * n + OWN * group;
    const Rates<RAGGED> weights(at.a_log, (size_t)c * n + OWN * group, OWN * group, n, mine);
    float h[OWN];
    const bool kept = carried && at.keep[b] != 0;
#pragma unroll
    for (unsigned k = 0; k < OWN; ++k) {
        h[k] = kept && weights.live[k] ? at.state[states + k] : 0.0f;
        h[k] = __fmaf_rn(weights.rate[k], 0.0f, h[k]);
    }
    const PerChannel own(at.dt_bias, at.skip, first + R::quad(0), d);
    const bool four = !RAGGED && by_four(at.starts);
    const size_t rows = (size_t)b * sizes.seq_len;
    TileInputs<G, T> inputs;
    Columns<G, T> bc;
    const unsigned first_count = sizes.seq_len < TILE ? sizes.seq_len : TILE;
    inputs.fetch(at, sizes, rows, first, first_count);
    if (!RAGGED) bc.fetch(at.bc + rows * 2 * n, first_count, sizes.whole);
    unsigned next_start = 0;
    size_t start_at = (size_t)b * sizes.chunks * d * n + (size_t)c * n + OWN * group;
    for (unsigned tile = 0; tile < sizes.seq_len; tile += TILE) {
        const unsigned count = sizes.seq_len - tile < TILE ? sizes.seq_len - tile : TILE;
        Quad u[R::EACH], gate[R::EACH];
#pragma unroll
        for (unsigned i = 0; i < R::EACH; ++i) {
            if (!R::has(i) || R::position(i) >= count || first + R::quad(i) >= d) continue;
            const Quad dt = quads::widen<T>(inputs.dt[i]), z = quads::widen<T>(inputs.z[i]);
            u[i] = quads::widen<T>(inputs.u[i]);
#pragma unroll
            for (unsigned k = 0; k < 4; ++k) {
                const float delta = contract::softplus(__fadd_rn(dt.v[k], own.bias[k]));
                shared.steps[R::position(i)][R::quad(i) + k] = make_float2(delta, __fmul_rn(delta, u[i].v[k]));
                gate[i].v[k] = __fmul_rn(z.v[k], gates::sigmoid(z.v[k]));
            }
        }
        if (RAGGED) put_ragged<G>(at.bc + (rows + tile) * 2 * n, shared.columns[0], count, n);
        else bc.put(shared.columns[0], count);
        __syncthreads();
        if (tile + TILE < sizes.seq_len) {
            const unsigned after = sizes.seq_len - tile - TILE < TILE ? sizes.seq_len - tile - TILE : TILE;
            inputs.fetch(at, sizes, rows + tile + TILE, first, after);
            if (!RAGGED) bc.fetch(at.bc + (rows + tile + TILE) * 2 * n, after, sizes.whole);
        }
        if (next_start == tile) {
            put_states(at.starts + start_at, h, weights.live, four);
            next_start += sizes.chunk;
            start_at += (size_t)d * n;
        }
        // A whole tile without a start inside needs no question at a position, which lets positions overlap.
        if (count == TILE && next_start - tile >= TILE) {
            pass<G, RAGGED>(shared, h, weights, TILE, [](unsigned) {});
        } else {
            pass<G, RAGGED>(shared, h, weights, count, [&](unsigned p) {
                if (tile + p != next_start) return;
                put_states(at.starts + start_at, h, weights.live, four);
                next_start += sizes.chunk;
                start_at += (size_t)d * n;
            });
        }
        __syncthreads();
#pragma unroll
        for (unsigned i = 0; i < R::EACH; ++i) {
            const unsigned quad = first + R::quad(i), p = R::position(i);
            if (!R::has(i) || p >= count || quad >= d) continue;
            const float4 y = contract::load4(&shared.sums[p][R::quad(i)]);
            const float sum[4] = {y.x, y.y, y.z, y.w};
            const unsigned there = d - quad < 4 ? d - quad : 4;
            Quad out;
#pragma unroll
            for (unsigned k = 0; k < 4; ++k) out.v[k] = __fmul_rn(__fmaf_rn(own.skip[k], u[i].v[k], sum[k]), gate[i].v[k]);
            quads::put(at.out + (rows + tile + p) * d + quad, out, there, sizes.whole);
        }
    }
    if (carried) {
#pragma unroll
        for (unsigned k = 0; k < OWN; ++k)
            if (weights.live[k]) at.state_next[states + k] = h[k];
    }
}

}  // namespace scan

/// `flags`: 1 for whole quads, 2 where sequences go on.
#define SCAN_ENTRY(NAME, T, G, RAGGED)                                                                          \
    extern "C" __global__ void __launch_bounds__(128, 4)                                                        \
    NAME(const T* __restrict__ u, const T* __restrict__ dt, const T* __restrict__ bc, const T* __restrict__ xz, \
         const float* __restrict__ a_log, const float* __restrict__ skip, const float* __restrict__ dt_bias,    \
         const float* __restrict__ state, const unsigned* __restrict__ keep, T* __restrict__ out,               \
         float* __restrict__ starts, float* __restrict__ state_next, unsigned seq_len, unsigned d_inner,        \
         unsigned d_state, unsigned chunk, unsigned chunks, unsigned flags) {                                   \
        scan::forward<G, RAGGED, T>({u, dt, bc, xz, a_log, skip, dt_bias, state, keep, out, starts, state_next}, \
                                    {seq_len, d_inner, d_state, chunk, chunks, (flags & 1) != 0}, (flags & 2) != 0); \
    }

#define SCAN_ENTRIES(STORAGE, T)             \
    SCAN_ENTRY(scan_##STORAGE##_8, T, 2, false)   \
    SCAN_ENTRY(scan_##STORAGE##_16, T, 4, false)  \
    SCAN_ENTRY(scan_##STORAGE##_32, T, 8, false)  \
    SCAN_ENTRY(scan_##STORAGE##_64, T, 16, false) \
    SCAN_ENTRY(scan_##STORAGE##_any, T, 16, true)
