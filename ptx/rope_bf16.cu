// Rotates queries and keys stored in bf16 in place.
#include "rope_narrow.cuh"

ROPE_NARROW_ENTRY(rope_bf16, bf16, false, false)
ROPE_NARROW_ENTRY(rope_bf16_octets, bf16, false, true)
