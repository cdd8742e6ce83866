// x[t] = table[ids[t]] from a table stored as f16.
#include "embed_frozen.cuh"

EMBED_FROZEN(f16, narrow::f16)
