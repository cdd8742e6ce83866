// y[t, o] = sum_i x[t, i] * w[o, i] in f16, one chain of steps over ascending i, by warpgroups; and what may follow it.
#include "matmul_warpgroup.cuh"

FORWARD_PRODUCTS(matmul_f16_sm90a, F16)
