// One step of AdamW with a shadow in f16 and gradients that carry a loss scale.
#include "adamw.cuh"

ADAMW_SHADOW_ENTRY(adamw_f16, f16, true)
