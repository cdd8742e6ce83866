// a = (g * sigmoid(g)) * u, where a row of gate_up holds g then u.
//
// A block of 32 x 8 threads serves 32 columns (or quads of columns) and a run of 8 * `steps` rows.
#include "contract.cuh"

using namespace contract;

__device__ __forceinline__ float gated(float g, float u) { return __fmul_rn(__fmul_rn(g, sigmoid(g)), u); }

extern "C" __global__ void __launch_bounds__(256)
swiglu_f32(const float* __restrict__ gate_up, float* __restrict__ a, unsigned rows, unsigned d, unsigned steps) {
    const unsigned j = blockIdx.y * 32 + threadIdx.x;
    if (j >= d) return;
    unsigned row = blockIdx.x * 8 * steps + threadIdx.y;
    for (unsigned s = 0; s < steps && row < rows; ++s, row += 8) {
        const float* gate = gate_up + (size_t)row * 2 * d + j;
        a[(size_t)row * d + j] = gated(gate[0], gate[d]);
    }
}

extern "C" __global__ void __launch_bounds__(256)
swiglu_f32_quads(const float* __restrict__ gate_up, float* __restrict__ a, unsigned rows, unsigned d, unsigned steps) {
    const unsigned j = (blockIdx.y * 32 + threadIdx.x) * 4;
    if (j >= d) return;
    unsigned row = blockIdx.x * 8 * steps + threadIdx.y;
    for (unsigned s = 0; s < steps && row < rows; ++s, row += 8) {
        const float* gate = gate_up + (size_t)row * 2 * d + j;
        const float4 g = load4(gate), u = load4(gate + d);
        store4(a + (size_t)row * d + j, make_float4(gated(g.x, u.x), gated(g.y, u.y), gated(g.z, u.z), gated(g.w, u.w)));
    }
}
