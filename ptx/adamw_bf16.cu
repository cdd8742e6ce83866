// One step of AdamW with a shadow in bf16.
#include "adamw.cuh"

ADAMW_SHADOW_ENTRY(adamw_bf16, bf16, false)
