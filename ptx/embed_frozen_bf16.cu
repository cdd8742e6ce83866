// x[t] = table[ids[t]] from a table stored as bf16.
#include "embed_frozen.cuh"

EMBED_FROZEN(bf16, narrow::bf16)
