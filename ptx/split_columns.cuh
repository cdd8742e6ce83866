// The columns of a matrix as two matrices, and back: bits are copied.
#pragma once
#include "narrow.cuh"

namespace split_columns {

/// Calls `copy(element of the matrix, element of the side, left)` for every element of `rows` rows.
template <typename Copy>
__device__ __forceinline__ void each(unsigned rows, unsigned n_left, unsigned n_right, Copy copy) {
    const unsigned columns = n_left + n_right;
    const size_t elements = (size_t)rows * columns;
    for (size_t i = (size_t)blockIdx.x * 256 + threadIdx.x; i < elements; i += (size_t)gridDim.x * 256) {
        const size_t row = i / columns;
        const unsigned j = (unsigned)(i - row * columns);
        const bool left = j < n_left;
        copy(i, left ? row * n_left + j : row * n_right + j - n_left, left);
    }
}

}  // namespace split_columns

#define SPLIT_COLUMNS_ENTRY(NAME, T)                                                                             \
    extern "C" __global__ void __launch_bounds__(256)                                                            \
    NAME(const T* __restrict__ x, T* __restrict__ left, T* __restrict__ right, unsigned rows, unsigned n_left,   \
         unsigned n_right) {                                                                                     \
        split_columns::each(rows, n_left, n_right,                                                               \
                            [&](size_t i, size_t side, bool is_left) { (is_left ? left : right)[side] = x[i]; }); \
    }

#define SPLIT_COLUMNS_GRAD_ENTRY(NAME, T)                                                                        \
    extern "C" __global__ void __launch_bounds__(256)                                                            \
    NAME(const T* __restrict__ left, const T* __restrict__ right, T* __restrict__ x, unsigned rows, unsigned n_left, \
         unsigned n_right) {                                                                                     \
        split_columns::each(rows, n_left, n_right,                                                               \
                            [&](size_t i, size_t side, bool is_left) { x[i] = (is_left ? left : right)[side]; }); \
    }
