// Both gradients of the RMS norm, a block a piece. Each warp serves every so many-th row by itself: its row lies in
// a part of shared memory that asynchronous copies fill again as soon as it has been read, so that rows are on their
// way while others are computed and no barrier holds up a warp. The columns' chains lie in shared memory, one for
// the block; the warp with a piece's first row begins them, and each hands them on to the warp with the next row.
#pragma once
#include "async.cuh"
#include "mbarrier.cuh"
#include "rms_norm_grad.cuh"

namespace norm_grad {

/// copy_async_16 for 8 bytes, both addresses a multiple of 8.
template <typename H>
__device__ __forceinline__ void copy_async_8(H* to, const H* from) {
#ifdef BITSTEP_HOST
    emu_cp_async(to, from, 8);
#else
    const unsigned address = (unsigned)__cvta_generic_to_shared(to);
    asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(address), "l"(from) : "memory");
#endif
}

/// Four neighbouring elements as they are stored.
template <typename H>
struct Four {
    uint2 words;

    __device__ __forceinline__ static Four at(const H* p) { return Four{*reinterpret_cast<const uint2*>(p)}; }
    __device__ __forceinline__ static Four rounded(float4 y) {
        return Four{make_uint2(narrow::round2(y.x, y.y, H()), narrow::round2(y.z, y.w, H()))};
    }
    __device__ __forceinline__ float4 widened() const {
        const float2 a = narrow::widen2(words.x, H()), b = narrow::widen2(words.y, H());
        return make_float4(a.x, a.y, b.x, b.y);
    }
    /// Not zero where one of them, just rounded, is a NaN.
    __device__ __forceinline__ unsigned nan() const { return narrow::nan_halves(words.x) | narrow::nan_halves(words.y); }
    __device__ __forceinline__ Four canonical() const {
        return Four{make_uint2(narrow::canonical2<H>(words.x), narrow::canonical2<H>(words.y))};
    }
    __device__ __forceinline__ void store(H* p) const { *reinterpret_cast<uint2*>(p) = words; }
    __device__ __forceinline__ static void copy(H* to, const H* from) { copy_async_8(to, from); }
};
template <>
struct Four<storage::f32> {
    float4 v;

    __device__ __forceinline__ static Four at(const float* p) { return Four{load4(p)}; }
    __device__ __forceinline__ static Four rounded(float4 y) { return Four{y}; }
    __device__ __forceinline__ float4 widened() const { return v; }
    __device__ __forceinline__ unsigned nan() const { return 0; }
    __device__ __forceinline__ Four canonical() const { return *this; }
    __device__ __forceinline__ void store(float* p) const { store4(p, v); }
    __device__ __forceinline__ static void copy(float* to, const float* from) { copy_async_16(to, from, true); }
};

/// The most warps of a relay with chains, whose barriers come first in its shared memory.
__device__ constexpr unsigned RELAY_WARPS = 8;

/// `QUADS`: d / 128 where a thread holds its quads of a row in registers, all of them under way together; 0 for rows
/// of any d, which stay in shared memory until their turn is over. `CHAINS`: the weight has a gradient, and the
/// chains go from warp to warp by a barrier each. An even number of warps; a thread reads only what it has copied.
template <int QUADS, bool CHAINS, typename H>
struct Relay {
    const Params<H>& p;
    const Piece at;
    unsigned warp, warps;
    /// The barrier of each warp at which the one before it hands on the chains.
    mbarrier::Word* barriers;
    float* chains;
    /// This warp's row: dh, r and what is added to.
    H* dh;
    float* r;
    float* old;

    __device__ __forceinline__ Relay(const Params<H>& params, float* shared)
        : p(params), at(params.cut), warp(threadIdx.x / 32), warps(blockDim.x / 32),
          barriers(reinterpret_cast<mbarrier::Word*>(shared)), chains(shared + 2 * RELAY_WARPS) {
        float* rows = CHAINS ? chains + p.d : shared;
        r = rows + (size_t)warp * p.d;
        H* rows_dh = reinterpret_cast<H*>(rows + (size_t)warps * p.d);
        dh = rows_dh + (size_t)warp * p.d;
        old = reinterpret_cast<float*>(rows_dh + (size_t)warps * p.d) + (size_t)warp * p.d;
    }

    /// Waits until the warp with the row before t has handed on the chains; each time is a phase of this warp's barrier.
    __device__ __forceinline__ void take_chains(unsigned t) const {
        mbarrier::wait(barriers + warp, (t - at.first - 1) / warps & 1);
    }
    /// Every lane arrives, for what it has stored itself.
    __device__ __forceinline__ void hand_on_chains() const {
        mbarrier::arrive(barriers + (warp + 1 == warps ? 0 : warp + 1));
    }

    /// `step(k, i)` for the thread's quads of a row, number k from element i on.
    template <typename Step>
    __device__ __forceinline__ void each(Step step) const {
        const unsigned first = 4 * (threadIdx.x & 31u);
        if constexpr (QUADS == 0) {
            for (unsigned i = first, k = 0; i < p.d; i += 128, ++k) step(k, i);
        } else {
#pragma unroll
            for (int k = 0; k < QUADS; ++k) step(k, first + 128 * k);
        }
    }

    /// Starts to bring dh and r of row t, or what is added to; a group each.
    __device__ __forceinline__ void fetch(unsigned t) const {
        const size_t start = (size_t)t * p.d;
        if (t < at.end) {
            each([&](int, unsigned i) {
                copy_async_16(r + i, p.r + start + i, true);
                Four<H>::copy(dh + i, p.dh + start + i);
            });
        }
        copy_async_commit();
    }
    __device__ __forceinline__ void fetch_old(unsigned t) const {
        const size_t start = (size_t)t * p.d;
        if (p.adds() && t < at.end) each([&](int, unsigned i) { copy_async_16(old + i, p.dr + start + i, true); });
        copy_async_commit();
    }

    /// Stores what the row's gradient is; so many quads are computed together.
    template <typename Gradient>
    __device__ __forceinline__ void store_row(unsigned t, Gradient gradient) const {
        constexpr int TOGETHER = QUADS % 4 == 0 ? 4 : 3;
        static_assert(QUADS % TOGETHER == 0, "whole parts");
        const size_t start = (size_t)t * p.d + 4 * (threadIdx.x & 31u);
#pragma unroll
        for (int part = 0; part < QUADS; part += TOGETHER) {
            float4 y[TOGETHER];
#pragma unroll
            for (int k = 0; k < TOGETHER; ++k) y[k] = gradient(part + k);
#pragma unroll
            for (int k = 0; k < TOGETHER; ++k) store4(p.dr + start + 128 * (part + k), y[k]);
            if (!p.copies()) continue;
            Four<H> copy[TOGETHER];
            unsigned nan = 0;
#pragma unroll
            for (int k = 0; k < TOGETHER; ++k) copy[k] = Four<H>::rounded(y[k]), nan |= copy[k].nan();
            if (nan != 0) {
#pragma unroll
                for (int k = 0; k < TOGETHER; ++k) copy[k] = copy[k].canonical();
            }
#pragma unroll
            for (int k = 0; k < TOGETHER; ++k) copy[k].store(p.ddelta + start + 128 * (part + k));
        }
    }

    /// A row of which each thread takes its quads to registers, so that the next one may come.
    __device__ __forceinline__ void row_from_registers(unsigned t, float rstd, float* partial) const {
        const unsigned lane4 = 4 * (threadIdx.x & 31u);
        Four<H> a[QUADS];
        float4 x[QUADS];
        float lanes[8] = {};
        copy_async_wait<1>();
        each([&](int k, unsigned i) {
            a[k] = Four<H>::at(dh + i);
            x[k] = times(load4(r + i), rstd);
        });
        each([&](int k, unsigned i) { chain_step(times(a[k].widened(), load4(p.weight + i)), x[k], lanes + 4 * (k & 1)); });
        const float c = __fdiv_rn(contract::fold_quads(lanes), __uint2float_rn(p.d));
        // The sum has taken all of dh and r.
        fetch(t + warps);
        copy_async_wait<1>();
        auto gradient = [&](int k) {
            return input_gradient(times(a[k].widened(), load4(p.weight + lane4 + 128 * k)), x[k], rstd, c);
        };
        if (p.adds()) store_row(t, [&](int k) { return plus(load4(old + lane4 + 128 * k), gradient(k)); });
        else store_row(t, gradient);
        fetch_old(t + warps);
        if constexpr (CHAINS) chains_from_registers(t, a, x, partial);
    }

    /// Row t of the chains.
    template <int N>
    __device__ __forceinline__ void chains_from_registers(unsigned t, const Four<H> (&a)[N], const float4 (&x)[N],
                                                          float* partial) const {
        const bool first = t == at.first, last = t + 1 == at.end;
        float4 acc[N];
        if (first) {
            each([&](int k, unsigned) { acc[k] = make_float4(0.0f, 0.0f, 0.0f, 0.0f); });
        } else {
            take_chains(t);
            each([&](int k, unsigned i) { acc[k] = load4(chains + i); });
        }
        each([&](int k, unsigned) {
            float sums[4] = {acc[k].x, acc[k].y, acc[k].z, acc[k].w};
            chain_step(a[k].widened(), x[k], sums);
            acc[k] = make_float4(sums[0], sums[1], sums[2], sums[3]);
        });
        if (last) {
            each([&](int k, unsigned i) { store4(partial + i, acc[k]); });
        } else {
            each([&](int k, unsigned i) { store4(chains + i, acc[k]); });
            hand_on_chains();
        }
    }

    /// A row that stays where the copies have brought it.
    __device__ __forceinline__ void row_from_shared(unsigned t, float rstd, float* partial) const {
        copy_async_wait<0>();
        row_gradient<true>(p, t, Row<H>{dh, r, old});
        if constexpr (CHAINS) chains_from_shared(t, rstd, partial);
        fetch(t + warps);
        fetch_old(t + warps);
    }

    __device__ __forceinline__ void chains_from_shared(unsigned t, float rstd, float* partial) const {
        const bool first = t == at.first, last = t + 1 == at.end;
        if (!first) take_chains(t);
#pragma unroll 4
        for (unsigned i = 4 * (threadIdx.x & 31u); i < p.d; i += 128) {
            const float4 before = first ? make_float4(0.0f, 0.0f, 0.0f, 0.0f) : load4(chains + i);
            float acc[4] = {before.x, before.y, before.z, before.w};
            chain_step(load4(dh + i), times(load4(r + i), rstd), acc);
            store4((last ? partial : chains) + i, make_float4(acc[0], acc[1], acc[2], acc[3]));
        }
        if (!last) hand_on_chains();
    }

    /// The rows of the piece and, with chains, its row of partials.
    __device__ __forceinline__ void run() const {
        float* partial = p.partials + (size_t)blockIdx.x * p.d;
        unsigned t = at.first + warp;
        fetch(t);
        fetch_old(t);
        if constexpr (CHAINS) {
            if (threadIdx.x == 0) {
                for (unsigned of = 0; of < warps; ++of) mbarrier::init(barriers + of, 32);
            }
            __syncthreads();
        }
        float rstd = t < at.end ? p.rstd[t] : 0.0f;
        for (; t < at.end; t += warps) {
            const float next = t + warps < at.end ? p.rstd[t + warps] : 0.0f;
            if constexpr (QUADS == 0) row_from_shared(t, rstd, partial);
            else row_from_registers(t, rstd, partial);
            rstd = next;
        }
    }
};

template <int QUADS, bool CHAINS, typename H>
__device__ __forceinline__ void piece_by_relay(const Params<H>& p, float* shared) {
    const Relay<QUADS, CHAINS, H> relay(p, shared);
    if (relay.at.exists(p.cut)) relay.run();
}

}  // namespace norm_grad
