#include "split_columns.cuh"

SPLIT_COLUMNS_GRAD_ENTRY(split_columns_grad_f16, narrow::f16)
