// One step of AdamW without a shadow.
#include "adamw.cuh"

ADAMW_ENTRY(adamw_f32)
