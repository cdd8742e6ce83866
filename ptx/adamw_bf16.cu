// One step of AdamW with a shadow in bf16.
#include "adamw_narrow.cuh"

ADAMW_ENTRY(adamw_bf16, bf16, false)
