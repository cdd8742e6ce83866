// The backward of the selective scan, by the blocks and threads of forward (see there).
//
// A block takes the chunks of its sequence from the last to the first, and of each the tiles so. From the stored state it computes
// the states before each tile of the chunk; then, tile by tile, the decays of all positions, which a thread keeps in shared
// memory; then half a tile after half a tile the states again, and the gradients. A tile that a sequence's end cuts goes position by
// position. Sums over channels of dB and dC, and a sequence's sums for the weights, leave the block as partial sums, which a
// second kernel adds (see scan_grad_fold.cuh).
#pragma once
#include "scan_grad_fold.cuh"
#include "scan_grad_tile.cuh"

namespace scan_grad {

/// One thread's states on their way back.
struct Gradients {
    float g[OWN], da_log[OWN];
};

template <unsigned G, bool RAGGED, typename T>
struct Pass {
    using R = Roles<G>;
    const Backward<T>& at;
    const Sizes& sizes;
    Shared<G>& shared;
    bool restore;
    unsigned first, channel, group, rows;
    Rates<RAGGED> weights;

    __device__ __forceinline__ Pass(const Backward<T>& at, const Sizes& sizes, Shared<G>& shared, bool restore)
        : at(at), sizes(sizes), shared(shared), restore(restore), first(blockIdx.x * R::CHANNELS), channel(R::channel()), group(R::group()),
          rows(blockIdx.y * sizes.seq_len),
          weights(at.a_log, ((size_t)first + channel) * sizes.d_state + OWN * group, OWN * group, sizes.d_state,
                  first + channel < sizes.d_inner) {}

    /// The part of the shared memory that this thread keeps numbers in.
    __device__ __forceinline__ float4* decays(unsigned p) { return &kept[p * THREADS + threadIdx.x]; }
    __device__ __forceinline__ float4& of_quad(unsigned i, unsigned which) { return kept[(TILE + 4 * i + which) * THREADS + threadIdx.x]; }
    __device__ __forceinline__ float4& before(unsigned tile) { return kept[(TILE + 4 * R::EACH + tile) * THREADS + threadIdx.x]; }

    /// What the states take of a tile: positions `0 .. count` from `t` on.
    __device__ __forceinline__ void stage(const TileInputs<G, T>& inputs, const Columns<G, T>& bc, unsigned t, unsigned count) {
#pragma unroll
        for (unsigned i = 0; i < R::EACH; ++i) {
            if (!R::has(i) || R::position(i) >= count) continue;
            const unsigned c = first + R::quad(i);
            float4* to = &shared.given[R::position(i)][R::quad(i)];
            if (c >= sizes.d_inner) {
#pragma unroll
                for (unsigned k = 0; k < 4; ++k) to[k] = absent();
                continue;
            }
            const Quad u = quads::widen<T>(inputs.u[i]), dt = quads::widen<T>(inputs.dt[i]);
            const Quad z = quads::widen<T>(inputs.z[i]);
            const Quad dout = quads::widen<T>(inputs.dout[i]);
            float gate_slope[4], step_slope[4], gate[4];
#pragma unroll
            for (unsigned k = 0; k < 4; ++k) {
                const float raw = __fadd_rn(dt.v[k], shared.bias[R::quad(i) + k]);
                const float delta = contract::softplus(raw), s = gates::sigmoid(z.v[k]);
                gate[k] = __fmul_rn(z.v[k], s);
                const float dy = __fmul_rn(dout.v[k], gate[k]);
                step_slope[k] = gates::sigmoid(raw);
                gate_slope[k] = __fmul_rn(s, __fmaf_rn(z.v[k], __fsub_rn(1.0f, s), 1.0f));
                to[k] = make_float4(delta, __fmul_rn(delta, u.v[k]), dy, u.v[k]);
            }
            of_quad(i, 0) = four(dout.v);
            of_quad(i, 1) = four(gate_slope);
            of_quad(i, 2) = four(step_slope);
            if (restore) of_quad(i, 3) = four(gate);
            if (sizes.whole) continue;
#pragma unroll
            for (unsigned k = 0; k < 4; ++k)
                if (c + k >= sizes.d_inner) to[k] = absent();
        }
        put_columns(bc, t, count);
    }

    __device__ __forceinline__ void put_columns(const Columns<G, T>& bc, unsigned t, unsigned count) {
        if (RAGGED) put_ragged<G>(at.bc + (size_t)(rows + t) * 2 * sizes.d_state, shared.columns[0], count, sizes.d_state);
        else bc.put(shared.columns[0], count);
    }

    /// Time step and `delta · u` alone, and the columns: what the states before the last tile of a chunk need.
    __device__ __forceinline__ void stage_forward(unsigned t) {
        TileInputs<G, T> inputs;
        Columns<G, T> bc;
        inputs.fetch(at, sizes, rows + t, TILE);
        if (!RAGGED) bc.fetch(at.bc + (size_t)(rows + t) * 2 * sizes.d_state, TILE, sizes.whole);
#pragma unroll
        for (unsigned i = 0; i < R::EACH; ++i) {
            const unsigned c = first + R::quad(i);
            if (!R::has(i)) continue;
            const Quad u = quads::widen<T>(inputs.u[i]), dt = quads::widen<T>(inputs.dt[i]);
#pragma unroll
            for (unsigned k = 0; k < 4; ++k) {
                float4& to = shared.given[R::position(i)][R::quad(i) + k];
                to = absent();
                if (c + k >= sizes.d_inner) continue;
                const float delta = contract::softplus(__fadd_rn(dt.v[k], shared.bias[R::quad(i) + k]));
                to = make_float4(delta, __fmul_rn(delta, u.v[k]), 0.0f, 0.0f);
            }
        }
        put_columns(bc, t, TILE);
    }

    __device__ __forceinline__ void decays_of(float delta, float (&a)[OWN]) const {
#pragma unroll
        for (unsigned k = 0; k < OWN; ++k) a[k] = decay(__fmul_rn(delta, weights.rate[k]));
    }

    /// The states before each tile of a chunk from `t` on, of so many tiles, into `before`.
    __device__ __forceinline__ void starts_of(const float4& start, unsigned t, unsigned tiles) {
        float h[OWN] = {start.x, start.y, start.z, start.w};
        before(0) = start;
        for (unsigned tile = 0; tile + 1 < tiles; ++tile) {
            __syncthreads();
            stage_forward(t + tile * TILE);
            __syncthreads();
#pragma unroll 4
            for (unsigned p = 0; p < TILE; ++p) {
                const float4 given = shared.given[p][channel];
                float a[OWN];
                decays_of(given.x, a);
                advance(h, a, given.y, contract::load4(&shared.columns[p][OWN * group]));
            }
            before(tile + 1) = make_float4(h[0], h[1], h[2], h[3]);
        }
    }

    /// Keeps the decays of a position at their place, and gives them.
    __device__ __forceinline__ void keep(float4* place, float delta, float (&a)[OWN]) {
        decays_of(delta, a);
        *place = make_float4(a[0], a[1], a[2], a[3]);
    }

    /// The decays of all positions of a tile, and the state before its second half.
    __device__ __forceinline__ float4 keep_decays(unsigned tile) {
        const float4 start = before(tile);
        float h[OWN] = {start.x, start.y, start.z, start.w}, a[OWN];
#pragma unroll 4
        for (unsigned p = 0; p < HALF; ++p) {
            const float4 given = shared.given[p][channel];
            keep(decays(p), given.x, a);
            advance(h, a, given.y, contract::load4(&shared.columns[p][OWN * group]));
        }
#pragma unroll 4
        for (unsigned p = HALF; p < TILE; ++p) keep(decays(p), shared.given[p][channel].x, a);
        return make_float4(h[0], h[1], h[2], h[3]);
    }

    /// The state after the position from that before it, with the decays that were kept.
    __device__ __forceinline__ void step(float (&h)[OWN], unsigned p, const float4& decays) {
        const float a[OWN] = {decays.x, decays.y, decays.z, decays.w};
        advance(h, a, shared.given[p][channel].y, contract::load4(&shared.columns[p][OWN * group]));
    }

    /// The position `at` back, from the states before and after it: a thread's parts of y, p and q, which begin as they are.
    __device__ __forceinline__ void position(unsigned at, const float4& kept, const float (&h)[OWN], const float (&after)[OWN],
                                             Gradients& gradients, float& y, float& p, float& q) {
        const float4 given = shared.given[at][channel];
        const float4 b = contract::load4(&shared.columns[at][OWN * group]);
        const float4 c = contract::load4(&shared.columns[at][OWN * (G + group)]);
        const float delta = given.x, step = given.y, dy = given.z;
        const float a[OWN] = {kept.x, kept.y, kept.z, kept.w}, cs[OWN] = {c.x, c.y, c.z, c.w};
        y = chain<RAGGED>(c, after, y, weights.live);
        float v[8], e[OWN];
#pragma unroll
        for (unsigned k = 0; k < OWN; ++k) gradients.g[k] = __fmaf_rn(cs[k], dy, gradients.g[k]);
        p = chain<RAGGED>(b, gradients.g, p, weights.live);
#pragma unroll
        for (unsigned k = 0; k < OWN; ++k) {
            v[k] = __fmul_rn(gradients.g[k], step);
            v[OWN + k] = __fmul_rn(dy, after[k]);
            gradients.g[k] = __fmul_rn(gradients.g[k], a[k]);
            e[k] = __fmul_rn(gradients.g[k], h[k]);
            gradients.da_log[k] = __fmaf_rn(e[k], delta, gradients.da_log[k]);
        }
        const float4 rate = make_float4(weights.rate[0], weights.rate[1], weights.rate[2], weights.rate[3]);
        q = chain<RAGGED>(rate, e, q, weights.live);
        const Across dealt = fold_channels<G>(v);
        float* to = shared.warps[at][threadIdx.x / 32];
#pragma unroll
        for (unsigned k = 0; k < 8; ++k) {
            const unsigned which = dealt.first + k;
            if (k < dealt.left && dealt.sole) to[which / OWN * OWN * G + OWN * group + which % OWN] = v[k];
        }
    }

    /// Half a tile back: positions `from .. from + HALF`, from the states before them.
    __device__ __forceinline__ void half(unsigned from, const float4& start, Gradients& gradients) {
        float h[HALF + 1][OWN] = {{start.x, start.y, start.z, start.w}};
        float y[FOUR], p[FOUR], q[FOUR];
        const float4* kept = decays(from);
        const float begin = RAGGED ? chain_start(weights.live) : 0.0f;
#pragma unroll
        for (unsigned i = 0; i < HALF; ++i) {
#pragma unroll
            for (unsigned k = 0; k < OWN; ++k) h[i + 1][k] = h[i][k];
            step(h[i + 1], from + i, kept[i * THREADS]);
        }
#pragma unroll
        for (unsigned back = 1; back <= HALF; ++back) {
            const unsigned i = HALF - back, n = i % FOUR;
            y[n] = p[n] = q[n] = begin;
            position(from + i, kept[i * THREADS], h[i], h[i + 1], gradients, y[n], p[n], q[n]);
            if (n > 0) continue;
            hand_on<FOUR>(0, from + i, y);
            hand_on<FOUR>(1, from + i, p);
            hand_on<FOUR>(2, from + i, q);
        }
    }

    /// A whole tile back.
    __device__ __forceinline__ void back(unsigned tile, Gradients& gradients) {
        float4 start = keep_decays(tile);
#pragma unroll 1
        for (unsigned from = TILE; from > 0;) {
            from -= HALF;
            if (from == 0) start = before(tile);
            half(from, start, gradients);
        }
    }

    /// The first `count` positions of a tile back, the states before each from the tile's first one.
    __device__ __forceinline__ void back_cut(unsigned tile, unsigned count, Gradients& gradients) {
        float a[OWN];
#pragma unroll 1
        for (unsigned p = 0; p < count; ++p) keep(decays(p), shared.given[p][channel].x, a);
        const float begin = RAGGED ? chain_start(weights.live) : 0.0f;
#pragma unroll 1
        for (unsigned at = count; at-- > 0;) {
            const float4 start = before(tile);
            float h[OWN] = {start.x, start.y, start.z, start.w};
#pragma unroll 1
            for (unsigned i = 0; i < at; ++i) step(h, i, *decays(i));
            float after[OWN] = {h[0], h[1], h[2], h[3]}, y[1] = {begin}, p[1] = {begin}, q[1] = {begin};
            step(after, at, *decays(at));
            position(at, *decays(at), h, after, gradients, y[0], p[0], q[0]);
            hand_on<1>(0, at, y);
            hand_on<1>(1, at, p);
            hand_on<1>(2, at, q);
        }
    }

    /// The sums of `N` positions from `from` on.
    template <unsigned N>
    __device__ __forceinline__ void hand_on(unsigned which, unsigned from, float (&v)[N]) {
        const Dealt dealt = fold_states<G>(v);
#pragma unroll
        for (unsigned i = 0; i < N; ++i)
            if (i < dealt.left && (G <= N || group < N)) shared.sums[which][from + dealt.first + i][channel] = v[i];
    }

    /// The gradients of a tile's positions, and its partial sums of dB and dC.
    __device__ __forceinline__ void finish(unsigned t, unsigned count) {
        const unsigned thread = thread_again();
#pragma unroll
        for (unsigned i = 0; i < R::EACH; ++i) {
            const unsigned quad = R::quad(i, thread), c = first + quad, p = R::position(i, thread);
            if (!R::has(i, thread) || p >= count || c >= sizes.d_inner) continue;
            const unsigned there = sizes.d_inner - c < 4 ? sizes.d_inner - c : 4;
            const Quad ys = quad_of(&shared.sums[0][p][quad]), ps = quad_of(&shared.sums[1][p][quad]);
            const Quad qs = quad_of(&shared.sums[2][p][quad]), skip = quad_of(&shared.skip[quad]);
            const Quad dout = quad_of(&of_quad(i, 0).x), gate_slope = quad_of(&of_quad(i, 1).x), step_slope = quad_of(&of_quad(i, 2).x);
            Quad du, ddt, dz, dy, u, out;
            if (restore) out = quad_of(&of_quad(i, 3).x);
#pragma unroll
            for (unsigned k = 0; k < 4; ++k) {
                const float4 given = shared.given[p][quad + k];
                const float y = __fmaf_rn(skip.v[k], given.w, ys.v[k]);
                const float rates = __fmul_rn(qs.v[k], __uint_as_float(LN_2));
                du.v[k] = __fmaf_rn(skip.v[k], given.z, __fmul_rn(ps.v[k], given.x));
                ddt.v[k] = __fmul_rn(__fmaf_rn(ps.v[k], given.w, rates), step_slope.v[k]);
                dz.v[k] = __fmul_rn(__fmul_rn(dout.v[k], y), gate_slope.v[k]);
                if (restore) out.v[k] = __fmul_rn(y, out.v[k]);
                dy.v[k] = given.z;
                u.v[k] = given.w;
            }
            contract::store4(&shared.chains[0][p][quad], four(ddt.v));
            contract::store4(&shared.chains[1][p][quad], four(dy.v));
            contract::store4(&shared.chains[2][p][quad], four(u.v));
            const size_t place = (size_t)(rows + t + p) * sizes.d_inner + c;
            quads::put(at.du + place, du, there, sizes.whole);
            quads::put(at.ddt + place, ddt, there, sizes.whole);
            if (restore) quads::put(at.out + place, out, there, sizes.whole);
            quads::put(at.dxz + (2 * place + sizes.d_inner - c), dz, there, sizes.whole);
        }
        put_partials(t, count);
    }

    /// The block's sums of dB and dC.
    __device__ __forceinline__ void put_partials(unsigned t, unsigned count) {
        const unsigned columns = 2 * sizes.d_state;
        const size_t all = (size_t)gridDim.y * sizes.seq_len;
        float* to = at.partial_bc + (blockIdx.x * all + rows + t) * columns;
        if (RAGGED) {
            for (unsigned i = threadIdx.x; i < count * columns; i += THREADS) {
                const unsigned p = i / columns, j = i % columns;
                const unsigned column = j < sizes.d_state ? j : j - sizes.d_state + OWN * G;
                const float (&warps)[4][R::COLUMNS] = shared.warps[p];
                to[i] = __fadd_rn(__fadd_rn(warps[0][column], warps[1][column]), __fadd_rn(warps[2][column], warps[3][column]));
            }
            return;
        }
#pragma unroll
        for (unsigned i = 4 * thread_again(); i < TILE * R::COLUMNS; i += 4 * THREADS) {
            if (i >= count * R::COLUMNS) continue;
            const float (&warps)[4][R::COLUMNS] = shared.warps[i / R::COLUMNS];
            float4 w[4];
#pragma unroll
            for (unsigned j = 0; j < 4; ++j) w[j] = contract::load4(&warps[j][i % R::COLUMNS]);
            contract::store4(to + i, make_float4(__fadd_rn(__fadd_rn(w[0].x, w[1].x), __fadd_rn(w[2].x, w[3].x)),
                                                 __fadd_rn(__fadd_rn(w[0].y, w[1].y), __fadd_rn(w[2].y, w[3].y)),
                                                 __fadd_rn(__fadd_rn(w[0].z, w[1].z), __fadd_rn(w[2].z, w[3].z)),
                                                 __fadd_rn(__fadd_rn(w[0].w, w[1].w), __fadd_rn(w[2].w, w[3].w))));
        }
    }
};

/// A chain over the positions of one channel, which one thread of the block carries on: that of ddt_bias in the first half of the
/// block, that of dskip in the second one.
template <unsigned G>
struct Chain {
    static constexpr unsigned SECOND = THREADS / 2;
    float sum;

    static __device__ __forceinline__ unsigned channel(unsigned thread) { return thread % SECOND; }
    static __device__ __forceinline__ bool of_skip(unsigned thread) { return thread >= SECOND; }

    __device__ __forceinline__ void take(const Shared<G>& shared, unsigned count) {
        const unsigned thread = thread_again(), c = channel(thread);
        if (c >= Roles<G>::CHANNELS) return;
        const bool skip = of_skip(thread);
        if (count == TILE) {
#pragma unroll
            for (unsigned back = 1; back <= TILE; ++back) add(shared, TILE - back, c, skip);
        } else {
            while (count > 0) add(shared, --count, c, skip);
        }
    }

    __device__ __forceinline__ void add(const Shared<G>& shared, unsigned p, unsigned c, bool skip) {
        sum = skip ? __fmaf_rn(shared.chains[1][p][c], shared.chains[2][p][c], sum) : __fadd_rn(sum, shared.chains[0][p][c]);
    }
};

/// The states of a thread among those of all channels: the place of the first one, and which of them there are.
template <unsigned G, bool RAGGED>
struct States {
    unsigned channel, state, first;
    bool live[OWN];

    __device__ __forceinline__ explicit States(const Sizes& sizes) {
        const unsigned thread = thread_again();
        channel = blockIdx.x * Roles<G>::CHANNELS + Roles<G>::channel(thread);
        state = OWN * Roles<G>::group(thread);
        first = channel * sizes.d_state + state;
#pragma unroll
        for (unsigned k = 0; k < OWN; ++k) live[k] = channel < sizes.d_inner && (!RAGGED || state + k < sizes.d_state);
    }
};

/// Leaves a sequence's sums for the weights.
template <unsigned G, bool RAGGED, typename T>
__device__ __forceinline__ void put_weights(const Pass<G, RAGGED, T>& pass, const Gradients& gradients, const Chain<G>& chain) {
    const PartialWeights to(blockIdx.x, Roles<G>::CHANNELS, pass.sizes.d_inner, pass.sizes.d_state);
    float* row = pass.at.partial_weights + ((size_t)blockIdx.x * gridDim.y + blockIdx.y) * to.pitch();
    const unsigned n = pass.sizes.d_state, thread = thread_again();
    const States<G, RAGGED> own(pass.sizes);
#pragma unroll
    for (unsigned k = 0; k < OWN; ++k) {
        if (!own.live[k]) continue;
        const float a = contract::negate(contract::exp(pass.at.a_log[own.first + k]));
        row[own.first - to.first * n + k] = __fmul_rn(gradients.da_log[k], a);
    }
    const unsigned c = chain.channel(thread);
    if (c < to.channels) row[to.channels * (n + (chain.of_skip(thread) ? 0 : 1)) + c] = chain.sum;
}

template <unsigned G, bool RAGGED, typename T>
__device__ __forceinline__ void backward(const Backward<T>& at, const Sizes& sizes, Flags flags) {
    __shared__ __align__(16) Shared<G> shared;
    const unsigned n = sizes.d_state;
    Pass<G, RAGGED, T> pass(at, sizes, shared, flags.restore);
    if (threadIdx.x < Roles<G>::CHANNELS) {
        const unsigned c = pass.first + threadIdx.x;
        shared.bias[threadIdx.x] = c < sizes.d_inner ? at.dt_bias[c] : 0.0f;
        shared.skip[threadIdx.x] = c < sizes.d_inner ? at.skip[c] : 0.0f;
    }
    Gradients gradients = {};
    Chain<G> chains = {};
    unsigned chained = 0;
    TileInputs<G, T> inputs;
    Columns<G, T> bc;
    const bool by_fours = !RAGGED && by_four(at.starts);
    const auto fetch_start = [&](unsigned chunk) {
        const size_t states = (size_t)sizes.d_inner * n;
        const States<G, RAGGED> own(sizes);
        return fetch_states(at.starts + (blockIdx.y * sizes.chunks + chunk) * states + own.first, own.live, by_fours);
    };
    const auto fetch_tile = [&](unsigned t, unsigned count) {
        inputs.fetch(at, sizes, pass.rows + t, count);
        if (!RAGGED) bc.fetch(at.bc + (size_t)(pass.rows + t) * 2 * n, count, sizes.whole);
    };
    float4 begin = fetch_start(sizes.chunks - 1);
    for (unsigned chunk = sizes.chunks; chunk-- > 0;) {
        const unsigned start = chunk * sizes.chunk;
        const unsigned length = sizes.seq_len - start < sizes.chunk ? sizes.seq_len - start : sizes.chunk;
        const unsigned tiles = (length + TILE - 1) / TILE, last = (tiles - 1) * TILE;
        // Of all chunks but the last one, the chunk after has fetched the last tile.
        if (chunk + 1 == sizes.chunks) fetch_tile(start + last, length - last);
        pass.starts_of(begin, start, tiles);
        for (unsigned tile = tiles; tile-- > 0;) {
            const unsigned t = start + tile * TILE, count = length - tile * TILE < TILE ? length - tile * TILE : TILE;
            // Everyone has finished the tile before.
            __syncthreads();
            pass.stage(inputs, bc, t, count);
            chains.take(shared, chained);
            __syncthreads();
            if (count == TILE) pass.back(tile, gradients);
            else pass.back_cut(tile, count, gradients);
            // The next tile's numbers arrive while this one's gradients are written.
            if (tile > 0) {
                fetch_tile(t - TILE, TILE);
            } else if (chunk > 0) {
                const unsigned before = (sizes.chunk - 1) / TILE * TILE;
                fetch_tile(start - sizes.chunk + before, sizes.chunk - before);
                begin = fetch_start(chunk - 1);
            }
            __syncthreads();
            pass.finish(t, count);
            chained = count;
        }
    }
    __syncthreads();
    chains.take(shared, chained);
    if (flags.state) {
        const States<G, RAGGED> own(sizes);
#pragma unroll
        for (unsigned k = 0; k < OWN; ++k)
            if (own.live[k]) at.dstate[blockIdx.y * (size_t)sizes.d_inner * n + own.first + k] = gradients.g[k];
    }
    if (flags.weights) put_weights(pass, gradients, chains);
}

}  // namespace scan_grad

/// `flags`: 1 for whole quads, 2 with the gradients of the weights, 4 with that of the first states, 8 with `out`.
#define SCAN_GRAD_ENTRY(NAME, T, G, RAGGED)                                                                            \
    extern "C" __global__ void __launch_bounds__(128, scan_grad::blocks<T>(G))                                         \
    NAME(const T* __restrict__ dout, const T* __restrict__ u, const T* __restrict__ dt, const T* __restrict__ bc,      \
         const T* __restrict__ xz, const float* __restrict__ a_log, const float* __restrict__ skip,                    \
         const float* __restrict__ dt_bias, const float* __restrict__ starts, T* __restrict__ du, T* __restrict__ ddt, \
         T* __restrict__ dxz, float* dstate, T* out, float* partial_bc, float* partial_weights, unsigned seq_len,      \
         unsigned d_inner, unsigned d_state, unsigned chunk, unsigned chunks, unsigned flags) {                        \
        scan_grad::backward<G, RAGGED, T>({dout, u, dt, bc, xz, a_log, skip, dt_bias, starts, du, ddt, dxz, dstate, out, \
                                           partial_bc, partial_weights},                                               \
                                          {seq_len, d_inner, d_state, chunk, chunks, (flags & 1) != 0},                \
                                          {(flags & 2) != 0, (flags & 4) != 0, (flags & 8) != 0});                     \
    }

#define SCAN_GRAD_ENTRIES(STORAGE, T)                   \
    SCAN_GRAD_ENTRY(scan_grad_##STORAGE##_8, T, 2, false)   \
    SCAN_GRAD_ENTRY(scan_grad_##STORAGE##_16, T, 4, false)  \
    SCAN_GRAD_ENTRY(scan_grad_##STORAGE##_32, T, 8, false)  \
    SCAN_GRAD_ENTRY(scan_grad_##STORAGE##_64, T, 16, false) \
    SCAN_GRAD_ENTRY(scan_grad_##STORAGE##_any, T, 16, true) \
    SCAN_GRAD_FOLD_ENTRY(scan_grad_##STORAGE##_fold, T)
