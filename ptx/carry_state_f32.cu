// Hands the recurrent state of a window to the next one where the step is applied (src/op/carry_state.rs).

/// The word of the report that says so (src/op/step_values.rs).
#define REPORT_APPLIED 3

/// The number of elements is two words, the low one first.
extern "C" __global__ void __launch_bounds__(256)
carry_state_f32(const float* __restrict__ next, const unsigned* __restrict__ report, float* __restrict__ state, unsigned low,
                unsigned high) {
    if (report[REPORT_APPLIED] == 0) return;
    const size_t elements = (size_t)high << 32 | low;
    for (size_t i = (size_t)blockIdx.x * 256 + threadIdx.x; i < elements; i += (size_t)gridDim.x * 256) state[i] = next[i];
}
