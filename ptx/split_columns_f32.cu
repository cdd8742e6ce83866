#include "split_columns.cuh"

SPLIT_COLUMNS_ENTRY(split_columns_f32, float)
