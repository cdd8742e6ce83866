#include "split_columns.cuh"

SPLIT_COLUMNS_GRAD_ENTRY(split_columns_grad_bf16, narrow::bf16)
