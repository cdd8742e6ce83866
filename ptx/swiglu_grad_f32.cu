// With s = sigmoid(g): du = da * (g * s), dg = (da * u) * (s * fma(g, 1 - s, 1)), written over g and u.
//
// A block of 32 x 8 threads serves 32 columns (or quads of columns) and a run of 8 * `steps` rows.
#include "contract.cuh"

using namespace contract;

/// Replaces g by dg and u by du.
__device__ __forceinline__ void backward(float da, float& g, float& u) {
    const float s = sigmoid(g);
    const float du = __fmul_rn(da, __fmul_rn(g, s));
    g = __fmul_rn(__fmul_rn(da, u), __fmul_rn(s, __fmaf_rn(g, __fsub_rn(1.0f, s), 1.0f)));
    u = du;
}

extern "C" __global__ void __launch_bounds__(256)
swiglu_grad_f32(const float* __restrict__ da, float* __restrict__ gate_up, unsigned rows, unsigned d, unsigned steps) {
    const unsigned j = blockIdx.y * 32 + threadIdx.x;
    if (j >= d) return;
    unsigned row = blockIdx.x * 8 * steps + threadIdx.y;
    for (unsigned s = 0; s < steps && row < rows; ++s, row += 8) {
        float* gate = gate_up + (size_t)row * 2 * d + j;
        float g = gate[0], u = gate[d];
        backward(da[(size_t)row * d + j], g, u);
        gate[0] = g;
        gate[d] = u;
    }
}

extern "C" __global__ void __launch_bounds__(256)
swiglu_grad_f32_quads(const float* __restrict__ da, float* __restrict__ gate_up, unsigned rows, unsigned d, unsigned steps) {
    const unsigned j = (blockIdx.y * 32 + threadIdx.x) * 4;
    if (j >= d) return;
    unsigned row = blockIdx.x * 8 * steps + threadIdx.y;
    for (unsigned s = 0; s < steps && row < rows; ++s, row += 8) {
        float* gate = gate_up + (size_t)row * 2 * d + j;
        float4 g = load4(gate), u = load4(gate + d);
        const float4 y = load4(da + (size_t)row * d + j);
        backward(y.x, g.x, u.x);
        backward(y.y, g.y, u.y);
        backward(y.z, g.z, u.z);
        backward(y.w, g.w, u.w);
        store4(gate, g);
        store4(gate + d, u);
    }
}
