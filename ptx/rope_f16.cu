// Rotates queries and keys stored in f16 in place.
#include "rope_narrow.cuh"

ROPE_NARROW_ENTRY(rope_f16, f16, false, false)
ROPE_NARROW_ENTRY(rope_f16_octets, f16, false, true)
