// dx[t, i] = sum_o dy[t, o] * w[o, i] in f16, one chain of steps over ascending o, by warpgroups; and what may follow it.
#include "matmul_warpgroup.cuh"

INPUT_GRADIENTS(matmul_grad_input_f16_sm90a, F16)
