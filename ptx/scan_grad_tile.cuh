// What the threads of a block of the scan's backward share of a tile.
#pragma once
#include "scan.cuh"

namespace scan_grad {

using namespace scan;

/// Positions whose states a thread holds at once.
__device__ constexpr unsigned HALF = TILE / 2;
/// Positions whose sums a thread holds at once.
__device__ constexpr unsigned FOUR = 4;

/// Blocks of a multiprocessor, as their shared memory and the registers for their elements allow.
template <typename T>
__device__ constexpr unsigned blocks(unsigned g) {
    return g == 4 || (g == 8 && sizeof(T) == 2) ? 3 : 2;
}

template <typename T>
struct Backward {
    const T *dout, *u, *dt, *bc, *xz;
    const float *a_log, *skip, *dt_bias, *starts;
    T *du, *ddt, *dxz;
    float* dstate;
    T* out;
    /// [blocks of channels, rows, 2 d_state].
    float* partial_bc;
    /// [blocks of channels, sequences, numbers of a block]: what scan_grad_fold.cuh says.
    float* partial_weights;
};

struct Flags {
    bool weights, state, restore;
};

/// Of a thread's quads of a tile, as stored.
template <unsigned G, typename T>
struct TileInputs {
    static constexpr unsigned EACH = Roles<G>::EACH;
    Stored<T> u[EACH], dt[EACH], z[EACH], dout[EACH];

    __device__ __forceinline__ void fetch(const Backward<T>& at, const Sizes& sizes, unsigned row, unsigned count) {
        const unsigned thread = thread_again();
#pragma unroll
        for (unsigned i = 0; i < EACH; ++i) {
            const unsigned c = blockIdx.x * Roles<G>::CHANNELS + Roles<G>::quad(i, thread), p = Roles<G>::position(i, thread);
            if (!Roles<G>::has(i, thread) || p >= count || c >= sizes.d_inner) continue;
            const unsigned n = sizes.d_inner - c < 4 ? sizes.d_inner - c : 4;
            const size_t place = (size_t)(row + p) * sizes.d_inner + c;
            u[i] = quads::fetch(at.u + place, n, sizes.whole);
            dt[i] = quads::fetch(at.dt + place, n, sizes.whole);
            dout[i] = quads::fetch(at.dout + place, n, sizes.whole);
            z[i] = quads::fetch(at.xz + (2 * place + sizes.d_inner - c), n, sizes.whole);
        }
    }
};

__device__ __forceinline__ float4 four(const float (&v)[4]) { return make_float4(v[0], v[1], v[2], v[3]); }
__device__ __forceinline__ Quad quad_of(const float* p) {
    const float4 x = contract::load4(p);
    return {{x.x, x.y, x.z, x.w}};
}

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

/// What a thread keeps in the shared memory behind `Shared`: the decays of a tile, what its gradients take of each of the thread's quads
/// (`dout`, the slopes of gate and time step, and the gate), and the states before each tile of a chunk.
extern __shared__ __align__(16) float4 kept[];

}  // namespace scan_grad
