// What the blocks of the scan's backward leave, added: dB and dC over the channels, the gradients of the weights over the sequences.
#pragma once
#include "contract.cuh"
#include "quads.cuh"

namespace scan_grad {

/// The sums for the weights of one block of channels and one sequence: for each channel the states, then dskip, then ddt_bias.
struct PartialWeights {
    unsigned first, most, channels, d_state;

    __device__ __forceinline__ PartialWeights(unsigned block, unsigned channels_of_block, unsigned d_inner, unsigned d_state)
        : first(block * channels_of_block), most(channels_of_block),
          channels(d_inner - first < channels_of_block ? d_inner - first : channels_of_block), d_state(d_state) {}

    __device__ __forceinline__ unsigned numbers() const { return channels * (d_state + 2); }
    __device__ __forceinline__ unsigned pitch() const { return most * (d_state + 2); }
};

struct Fold {
    /// [blocks of channels, rows, 2 d_state], and [blocks of channels, sequences, numbers of a block].
    const float *partial_bc, *partial_weights;
    float *da_log, *dskip, *ddt_bias;
    unsigned batch, seq_len, d_inner, d_state, blocks, grain;

    /// Number `j` of a block of channels.
    __device__ __forceinline__ void weight(unsigned block, unsigned channels, unsigned j) const {
        const PartialWeights of(block, channels, d_inner, d_state);
        if (j >= of.numbers()) return;
        const contract::TokenCut cut = {batch * seq_len, grain, seq_len, 1};
        const float sum = cut.root(partial_weights + (size_t)block * batch * of.pitch() + j, of.pitch());
        const unsigned states = of.channels * d_state;
        if (j < states) da_log[(size_t)of.first * d_state + j] = sum;
        else if (j < states + of.channels) dskip[of.first + j - states] = sum;
        else ddt_bias[of.first + j - states - of.channels] = sum;
    }
};

/// Blocks of 256 threads: the first ones have an element of dB or dC a thread, the others a number of the weights.
template <typename T>
__device__ __forceinline__ void fold(const Fold& at, T* dbc, unsigned channels) {
    const unsigned elements = at.batch * at.seq_len * 2 * at.d_state, first = (elements + 255) / 256;
    if (blockIdx.x < first) {
        const unsigned i = blockIdx.x * 256 + threadIdx.x;
        if (i < elements) dbc[i] = quads::Round<T>::to(contract::tree_memory(at.partial_bc + i, elements, at.blocks));
        return;
    }
    const unsigned pitch = channels * (at.d_state + 2), j = (blockIdx.x - first) * 256 + threadIdx.x;
    if (j < at.blocks * pitch) at.weight(j / pitch, channels, j % pitch);
}

}  // namespace scan_grad

/// `channels`: those of a block of the scan.
#define SCAN_GRAD_FOLD_ENTRY(NAME, T)                                                                                  \
    extern "C" __global__ void __launch_bounds__(256)                                                                  \
    NAME(const float* __restrict__ partial_bc, const float* __restrict__ partial_weights, T* __restrict__ dbc,         \
         float* __restrict__ da_log, float* __restrict__ dskip, float* __restrict__ ddt_bias, unsigned batch,          \
         unsigned seq_len, unsigned d_inner, unsigned d_state, unsigned blocks, unsigned grain, unsigned channels) {   \
        scan_grad::fold<T>({partial_bc, partial_weights, da_log, dskip, ddt_bias, batch, seq_len, d_inner, d_state,    \
                            blocks, grain},                                                                            \
                           dbc, channels);                                                                             \
    }
