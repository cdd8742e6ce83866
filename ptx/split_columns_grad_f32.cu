#include "split_columns.cuh"

SPLIT_COLUMNS_GRAD_ENTRY(split_columns_grad_f32, float)
