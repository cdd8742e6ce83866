// The backward of the selective scan, by the blocks and threads of forward (see there).
//
// A block takes the chunks of its sequence from the last to the first, and of each the tiles so. From the stored state it computes
// the states before each tile of the chunk; then, tile by tile, the decays of all positions, which a thread keeps in shared
// memory; then half a tile after half a tile the states again, and the gradients. Sums over channels of dB and dC leave the
// block as partial sums, one a block and number, which a second kernel adds.
#pragma once
#include "scan.cuh"

namespace scan_grad {

using namespace scan;

/// Positions whose states a thread holds at once.
__device__ constexpr unsigned HALF = TILE / 2;
/// Positions whose sums a thread holds at once.
__device__ constexpr unsigned FOUR = 4;

/// Blocks of a multiprocessor, as their shared memory allows.
__device__ constexpr unsigned blocks(unsigned g) { return g == 4 || g == 8 ? 3 : 2; }

template <typename T>
struct Backward {
    const T *dout, *u, *dt, *bc, *xz;
    const float *a_log, *skip, *dt_bias, *starts;
    T *du, *ddt, *dxz;
    float *da_log, *dskip, *ddt_bias, *dstate;
    /// [blocks of channels, rows, 2 d_state].
    float* partial_bc;
    /// [sequences, blocks of channels, numbers of a block]: what `Weights` says.
    float* partial_weights;
    unsigned* counters;
};

struct Flags {
    bool weights, state;
};

/// Of a thread's quads of a tile, as stored.
template <unsigned G, typename T>
struct TileInputs {
    static constexpr unsigned EACH = Roles<G>::EACH;
    Stored<T> u[EACH], dt[EACH], z[EACH], dout[EACH];

    __device__ __forceinline__ void fetch(const Backward<T>& at, const Sizes& sizes, size_t row, unsigned first, unsigned count) {
#pragma unroll
        for (unsigned i = 0; i < EACH; ++i) {
            const unsigned c = first + Roles<G>::quad(i), p = Roles<G>::position(i);
            if (!Roles<G>::has(i) || p >= count || c >= sizes.d_inner) continue;
            const unsigned n = sizes.d_inner - c < 4 ? sizes.d_inner - c : 4;
            const size_t place = (row + p) * sizes.d_inner + c;
            u[i] = quads::fetch(at.u + place, n, sizes.whole);
            dt[i] = quads::fetch(at.dt + place, n, sizes.whole);
            dout[i] = quads::fetch(at.dout + place, n, sizes.whole);
            z[i] = quads::fetch(at.xz + ((row + p) * 2 + 1) * sizes.d_inner + c, n, sizes.whole);
        }
    }
};

/// What a channel beyond the last one gives: it leaves its states at zero and adds nothing to any sum over channels.
__device__ __forceinline__ float4 absent() { return make_float4(0.0f, -0.0f, -0.0f, 0.0f); }

template <unsigned G>
struct Shared {
    using R = Roles<G>;
    /// What the states take of a position: the time step, it times `u`, dy, and u.
    float4 given[TILE][R::CHANNELS];
    float columns[TILE][R::COLUMNS];
    /// y, p and q.
    float sums[3][TILE][R::CHANNELS];
    /// For each warp the sums over its channels, dB then dC.
    float warps[TILE][4][R::COLUMNS];
    /// What the chains of the weights take of each position: ddt, dy and u.
    float chains[3][TILE][R::CHANNELS];
    /// `dt_bias` and `skip`, zero beyond the last channel.
    float bias[R::CHANNELS], skip[R::CHANNELS];
};

/// Bytes of shared memory behind `Shared`: the decays of a tile, then the states before each tile of a chunk.
extern __shared__ __align__(16) float4 kept[];

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
    unsigned first, channel, group;
    size_t rows;
    Rates weights;
    /// Of the quads of the tile that is at hand.
    Quad dout[R::EACH], gate_slope[R::EACH], step_slope[R::EACH];

    __device__ __forceinline__ Pass(const Backward<T>& at, const Sizes& sizes, Shared<G>& shared)
        : at(at), sizes(sizes), shared(shared), first(blockIdx.x * R::CHANNELS), channel(R::channel()), group(R::group()),
          rows((size_t)blockIdx.y * sizes.seq_len),
          weights(at.a_log, ((size_t)first + channel) * sizes.d_state + OWN * group, OWN * group, sizes.d_state,
                  first + channel < sizes.d_inner) {}

    /// The part of the shared memory that this thread keeps numbers in.
    __device__ __forceinline__ float4& decays(unsigned p) { return kept[p * THREADS + threadIdx.x]; }
    __device__ __forceinline__ float4& before(unsigned tile) { return kept[(TILE + tile) * THREADS + threadIdx.x]; }

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
            dout[i] = quads::widen<T>(inputs.dout[i]);
#pragma unroll
            for (unsigned k = 0; k < 4; ++k) {
                const bool there = c + k < sizes.d_inner;
                const float raw = __fadd_rn(dt.v[k], shared.bias[R::quad(i) + k]);
                const float delta = contract::softplus(raw), s = contract::sigmoid(z.v[k]);
                const float dy = __fmul_rn(dout[i].v[k], __fmul_rn(z.v[k], s));
                step_slope[i].v[k] = contract::sigmoid(raw);
                gate_slope[i].v[k] = __fmul_rn(s, __fmaf_rn(z.v[k], __fsub_rn(1.0f, s), 1.0f));
                to[k] = there ? make_float4(delta, __fmul_rn(delta, u.v[k]), dy, u.v[k]) : absent();
            }
        }
        put_columns(bc, t, count);
    }

    __device__ __forceinline__ void put_columns(const Columns<G, T>& bc, unsigned t, unsigned count) {
        if (RAGGED) put_ragged<G>(at.bc + (rows + t) * 2 * sizes.d_state, shared.columns[0], count, sizes.d_state);
        else bc.put(shared.columns[0], count);
    }

    /// Time step and `delta · u` alone, and the columns: what the states before the last tile of a chunk need.
    __device__ __forceinline__ void stage_forward(unsigned t) {
        TileInputs<G, T> inputs;
        Columns<G, T> bc;
        inputs.fetch(at, sizes, rows + t, first, TILE);
        if (!RAGGED) bc.fetch(at.bc + (rows + t) * 2 * sizes.d_state, TILE, sizes.whole);
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

    /// The decays of all positions of a tile, and the state before its second half.
    __device__ __forceinline__ float4 keep_decays(unsigned tile, unsigned count) {
        const float4 start = before(tile);
        float h[OWN] = {start.x, start.y, start.z, start.w};
#pragma unroll 4
        for (unsigned p = 0; p < HALF; ++p) {
            if (p >= count) break;
            const float4 given = shared.given[p][channel];
            float a[OWN];
            decays_of(given.x, a);
            decays(p) = make_float4(a[0], a[1], a[2], a[3]);
            advance(h, a, given.y, contract::load4(&shared.columns[p][OWN * group]));
        }
#pragma unroll 4
        for (unsigned p = HALF; p < TILE; ++p) {
            if (p >= count) break;
            float a[OWN];
            decays_of(shared.given[p][channel].x, a);
            decays(p) = make_float4(a[0], a[1], a[2], a[3]);
        }
        return make_float4(h[0], h[1], h[2], h[3]);
    }

    /// Half a tile back: positions `from .. from + HALF` below `count`, from the states before them.
    __device__ __forceinline__ void half(unsigned from, unsigned count, const float4& start, Gradients& gradients) {
        float h[HALF + 1][OWN] = {{start.x, start.y, start.z, start.w}};
        float y[FOUR], p[FOUR], q[FOUR];
        const float begin = RAGGED ? chain_start(weights.live) : 0.0f;
#pragma unroll
        for (unsigned i = 0; i < HALF; ++i) {
#pragma unroll
            for (unsigned k = 0; k < OWN; ++k) h[i + 1][k] = h[i][k];
            if (from + i >= count) continue;
            const float4 kept = decays(from + i);
            const float a[OWN] = {kept.x, kept.y, kept.z, kept.w};
            const float* row = shared.columns[from + i];
            advance(h[i + 1], a, shared.given[from + i][channel].y, contract::load4(row + OWN * group));
        }
#pragma unroll
        for (unsigned back = 1; back <= HALF; ++back) {
            const unsigned i = HALF - back, n = i % FOUR;
            if (n == FOUR - 1) {
#pragma unroll
                for (unsigned j = 0; j < FOUR; ++j) y[j] = p[j] = q[j] = begin;
            }
            if (from + i < count) {
                const float4 given = shared.given[from + i][channel];
                const float4 kept = decays(from + i);
                const float4 b = contract::load4(&shared.columns[from + i][OWN * group]);
                const float4 c = contract::load4(&shared.columns[from + i][OWN * (G + group)]);
                const float delta = given.x, step = given.y, dy = given.z;
                const float a[OWN] = {kept.x, kept.y, kept.z, kept.w}, cs[OWN] = {c.x, c.y, c.z, c.w};
                y[n] = chain<RAGGED>(c, h[i + 1], y[n], weights.live);
                float v[8], e[OWN];
#pragma unroll
                for (unsigned k = 0; k < OWN; ++k) gradients.g[k] = __fmaf_rn(cs[k], dy, gradients.g[k]);
                p[n] = chain<RAGGED>(b, gradients.g, p[n], weights.live);
#pragma unroll
                for (unsigned k = 0; k < OWN; ++k) {
                    v[k] = __fmul_rn(gradients.g[k], step);
                    v[OWN + k] = __fmul_rn(dy, h[i + 1][k]);
                    gradients.g[k] = __fmul_rn(gradients.g[k], a[k]);
                    e[k] = __fmul_rn(gradients.g[k], h[i][k]);
                    gradients.da_log[k] = __fmaf_rn(e[k], delta, gradients.da_log[k]);
                }
                const float4 rate = make_float4(weights.rate[0], weights.rate[1], weights.rate[2], weights.rate[3]);
                q[n] = chain<RAGGED>(rate, e, q[n], weights.live);
                const Across dealt = fold_channels<G>(v);
                float* to = shared.warps[from + i][threadIdx.x / 32];
#pragma unroll
                for (unsigned k = 0; k < 8; ++k) {
                    const unsigned which = dealt.first + k;
                    if (k < dealt.left && dealt.sole) to[which / OWN * OWN * G + OWN * group + which % OWN] = v[k];
                }
            }
            if (n > 0) continue;
            hand_on(0, from + i, y);
            hand_on(1, from + i, p);
            hand_on(2, from + i, q);
        }
    }

    /// A tile back.
    __device__ __forceinline__ void back(unsigned tile, unsigned count, Gradients& gradients) {
        float4 start = keep_decays(tile, count);
#pragma unroll 1
        for (unsigned from = TILE; from > 0;) {
            from -= HALF;
            if (from == 0) start = before(tile);
            if (from < count) half(from, count, start, gradients);
        }
    }

    /// The sums of the positions from `from` on; those beyond the tile's count are read by no one.
    __device__ __forceinline__ void hand_on(unsigned which, unsigned from, float (&v)[FOUR]) {
        const Dealt dealt = fold_states<G>(v);
#pragma unroll
        for (unsigned i = 0; i < FOUR; ++i)
            if (i < dealt.left && (G <= FOUR || group < FOUR)) shared.sums[which][from + dealt.first + i][channel] = v[i];
    }

    /// The gradients of a tile's positions, and its partial sums of dB and dC.
    __device__ __forceinline__ void finish(unsigned t, unsigned count) {
#pragma unroll
        for (unsigned i = 0; i < R::EACH; ++i) {
            const unsigned quad = R::quad(i), c = first + quad, p = R::position(i);
            if (!R::has(i) || p >= count || c >= sizes.d_inner) continue;
            const unsigned there = sizes.d_inner - c < 4 ? sizes.d_inner - c : 4;
            Quad du, ddt, dz;
#pragma unroll
            for (unsigned k = 0; k < 4; ++k) {
                const float4 given = shared.given[p][quad + k];
                const float skip = shared.skip[quad + k];
                const float y = __fmaf_rn(skip, given.w, shared.sums[0][p][quad + k]);
                const float sum = shared.sums[1][p][quad + k];
                const float rates = __fmul_rn(shared.sums[2][p][quad + k], __uint_as_float(LN_2));
                du.v[k] = __fmaf_rn(skip, given.z, __fmul_rn(sum, given.x));
                ddt.v[k] = __fmul_rn(__fmaf_rn(sum, given.w, rates), step_slope[i].v[k]);
                dz.v[k] = __fmul_rn(__fmul_rn(dout[i].v[k], y), gate_slope[i].v[k]);
                shared.chains[0][p][quad + k] = ddt.v[k];
                shared.chains[1][p][quad + k] = given.z;
                shared.chains[2][p][quad + k] = given.w;
            }
            const size_t row = rows + t + p;
            quads::put(at.du + row * sizes.d_inner + c, du, there, sizes.whole);
            quads::put(at.ddt + row * sizes.d_inner + c, ddt, there, sizes.whole);
            quads::put(at.dxz + (row * 2 + 1) * sizes.d_inner + c, dz, there, sizes.whole);
        }
        const unsigned columns = 2 * sizes.d_state;
        const size_t all = (size_t)gridDim.y * sizes.seq_len;
        float* to = at.partial_bc + (blockIdx.x * all + rows + t) * columns;
        for (unsigned i = threadIdx.x; i < count * columns; i += THREADS) {
            const unsigned p = i / columns, j = i % columns;
            const unsigned column = j < sizes.d_state ? j : j - sizes.d_state + OWN * G;
            const float (&warps)[4][R::COLUMNS] = shared.warps[p];
            to[i] = __fadd_rn(__fadd_rn(warps[0][column], warps[1][column]), __fadd_rn(warps[2][column], warps[3][column]));
        }
    }
};

/// The chains over positions of one channel, which one thread of the block carries on.
struct Chains {
    float dskip, ddt_bias;

    template <unsigned G>
    __device__ __forceinline__ void take(const Shared<G>& shared, unsigned count) {
        if (threadIdx.x >= Roles<G>::CHANNELS) return;
#pragma unroll 4
        for (unsigned back = 1; back <= TILE; ++back) {
            const unsigned p = TILE - back;
            if (p >= count) continue;
            ddt_bias = __fadd_rn(ddt_bias, shared.chains[0][p][threadIdx.x]);
            dskip = __fmaf_rn(shared.chains[1][p][threadIdx.x], shared.chains[2][p][threadIdx.x], dskip);
        }
    }
};

/// Where the sums of a block's weights go: for each of its channels the states, then dskip, then ddt_bias.
template <unsigned G>
struct Weights {
    unsigned first, channels, d_state;
    float *da_log, *dskip, *ddt_bias;

    __device__ __forceinline__ unsigned numbers() const { return channels * (d_state + 2); }
    __device__ __forceinline__ void operator()(unsigned j, float sum) const {
        const unsigned states = channels * d_state;
        if (j < states) da_log[(size_t)first * d_state + j] = sum;
        else if (j < states + channels) dskip[first + j - states] = sum;
        else ddt_bias[first + j - states - channels] = sum;
    }
};

/// Leaves a sequence's sums for the weights, which the last sequence of these channels adds.
template <unsigned G, bool RAGGED, typename T>
__device__ __forceinline__ void weights(const Pass<G, RAGGED, T>& pass, const Gradients& gradients, const Chains& chains,
                                        unsigned grain) {
    using R = Roles<G>;
    const Sizes& sizes = pass.sizes;
    const unsigned left = sizes.d_inner - pass.first, n = sizes.d_state;
    const Weights<G> to = {pass.first, left < R::CHANNELS ? left : R::CHANNELS, n, pass.at.da_log, pass.at.dskip, pass.at.ddt_bias};
    const unsigned pitch = R::CHANNELS * (n + 2);
    const unsigned tokens = gridDim.y * sizes.seq_len;
    // One row a sequence for each block of channels, rows of one block one after another.
    float* at = pass.at.partial_weights + (size_t)blockIdx.x * gridDim.y * pitch;
    const contract::TokenCut cut = {tokens, grain, sizes.seq_len, 1};
    float* row = at + (size_t)blockIdx.y * pitch;
#pragma unroll
    for (unsigned k = 0; k < OWN; ++k) {
        if (!pass.weights.live[k]) continue;
        const unsigned state = OWN * pass.group + k;
        const float a = contract::negate(contract::exp(pass.at.a_log[((size_t)pass.first + pass.channel) * n + state]));
        row[pass.channel * n + state] = __fmul_rn(gradients.da_log[k], a);
    }
    if (threadIdx.x < to.channels) {
        row[to.channels * n + threadIdx.x] = chains.dskip;
        row[to.channels * (n + 1) + threadIdx.x] = chains.ddt_bias;
    }
    contract::fold_rows(cut, contract::GroupRows{at, pitch, pass.at.counters + blockIdx.x}, 0, to.numbers(), to);
}

template <unsigned G, bool RAGGED, typename T>
__device__ __forceinline__ void backward(const Backward<T>& at, const Sizes& sizes, unsigned grain, Flags flags) {
    __shared__ __align__(16) Shared<G> shared;
    const unsigned n = sizes.d_state, chunks = sizes.chunks();
    Pass<G, RAGGED, T> pass(at, sizes, shared);
    const size_t own = ((size_t)pass.first + pass.channel) * n + OWN * pass.group;
    if (threadIdx.x < Roles<G>::CHANNELS) {
        const unsigned c = pass.first + threadIdx.x;
        shared.bias[threadIdx.x] = c < sizes.d_inner ? at.dt_bias[c] : 0.0f;
        shared.skip[threadIdx.x] = c < sizes.d_inner ? at.skip[c] : 0.0f;
    }
    Gradients gradients = {};
    Chains chains = {};
    unsigned chained = 0;
    TileInputs<G, T> inputs;
    Columns<G, T> bc;
    const bool four = !RAGGED && by_four(at.starts);
    const auto fetch_start = [&](unsigned chunk) {
        const size_t states = (size_t)sizes.d_inner * n;
        return fetch_states(at.starts + (blockIdx.y * (size_t)chunks + chunk) * states + own, pass.weights.live, four);
    };
    const auto fetch_tile = [&](unsigned t, unsigned count) {
        inputs.fetch(at, sizes, pass.rows + t, pass.first, count);
        if (!RAGGED) bc.fetch(at.bc + (pass.rows + t) * 2 * n, count, sizes.whole);
    };
    float4 begin = fetch_start(chunks - 1);
    for (unsigned chunk = chunks; chunk-- > 0;) {
        const unsigned start = chunk * sizes.chunk;
        const unsigned length = sizes.seq_len - start < sizes.chunk ? sizes.seq_len - start : sizes.chunk;
        const unsigned tiles = (length + TILE - 1) / TILE, last = (tiles - 1) * TILE;
        // Of all chunks but the last one, the chunk after has fetched the last tile.
        if (chunk + 1 == chunks) fetch_tile(start + last, length - last);
        pass.starts_of(begin, start, tiles);
        for (unsigned tile = tiles; tile-- > 0;) {
            const unsigned t = start + tile * TILE, count = length - tile * TILE < TILE ? length - tile * TILE : TILE;
            // Everyone has finished the tile before.
            __syncthreads();
            pass.stage(inputs, bc, t, count);
            chains.take(shared, chained);
            __syncthreads();
            pass.back(tile, count, gradients);
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
#pragma unroll
        for (unsigned k = 0; k < OWN; ++k)
            if (pass.weights.live[k]) at.dstate[blockIdx.y * (size_t)sizes.d_inner * n + own + k] = gradients.g[k];
    }
    if (flags.weights) weights(pass, gradients, chains, grain);
}

/// dB and dC from the partial sums of `blocks` blocks of channels.
template <typename T>
__device__ __forceinline__ void fold(const float* __restrict__ partials, T* __restrict__ dbc, unsigned elements, unsigned blocks) {
    const unsigned i = blockIdx.x * 256 + threadIdx.x;
    if (i < elements) dbc[i] = quads::Round<T>::to(contract::tree_memory(partials + i, elements, blocks));
}

}  // namespace scan_grad

/// `flags`: 1 for whole quads, 2 with the gradients of the weights, 4 with that of the first states.
#define SCAN_GRAD_ENTRY(NAME, T, G, RAGGED)                                                                            \
    extern "C" __global__ void __launch_bounds__(128, scan_grad::blocks(G))                                            \
    NAME(const T* __restrict__ dout, const T* __restrict__ u, const T* __restrict__ dt, const T* __restrict__ bc,      \
         const T* __restrict__ xz, const float* __restrict__ a_log, const float* __restrict__ skip,                    \
         const float* __restrict__ dt_bias, const float* __restrict__ starts, T* __restrict__ du, T* __restrict__ ddt, \
         T* __restrict__ dxz, float* da_log, float* dskip, float* ddt_bias, float* dstate, float* partial_bc,          \
         float* partial_weights, unsigned* counters, unsigned seq_len, unsigned d_inner, unsigned d_state,             \
         unsigned chunk, unsigned grain, unsigned flags) {                                                             \
        scan_grad::backward<G, RAGGED, T>({dout, u, dt, bc, xz, a_log, skip, dt_bias, starts, du, ddt, dxz, da_log,    \
                                           dskip, ddt_bias, dstate, partial_bc, partial_weights, counters},            \
                                          {seq_len, d_inner, d_state, chunk, (flags & 1) != 0}, grain,                 \
                                          {(flags & 2) != 0, (flags & 4) != 0});                                       \
    }

#define SCAN_GRAD_ENTRIES(STORAGE, T)                                                                                  \
    SCAN_GRAD_ENTRY(scan_grad_##STORAGE##_8, T, 2, false)                                                              \
    SCAN_GRAD_ENTRY(scan_grad_##STORAGE##_16, T, 4, false)                                                             \
    SCAN_GRAD_ENTRY(scan_grad_##STORAGE##_32, T, 8, false)                                                             \
    SCAN_GRAD_ENTRY(scan_grad_##STORAGE##_64, T, 16, false)                                                            \
    SCAN_GRAD_ENTRY(scan_grad_##STORAGE##_any, T, 16, true)                                                            \
    extern "C" __global__ void __launch_bounds__(256)                                                                  \
    scan_grad_##STORAGE##_fold(const float* __restrict__ partials, T* __restrict__ dbc, unsigned elements, unsigned blocks) { \
        scan_grad::fold<T>(partials, dbc, elements, blocks);                                                           \
    }
