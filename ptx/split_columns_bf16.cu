#include "split_columns.cuh"

SPLIT_COLUMNS_ENTRY(split_columns_bf16, narrow::bf16)
