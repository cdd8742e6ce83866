// The dot products of attention's output with its gradient, stored in bf16.
#include "attention_delta_narrow.cuh"

ATTENTION_DELTA_ENTRIES(bf16)
