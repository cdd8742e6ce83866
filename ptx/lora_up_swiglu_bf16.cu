// The adapters of gate and up in bf16, and a = (g * sigmoid(g)) * u behind them.
#include "lora_up_swiglu.cuh"

UP_SWIGLU(bf16, Bf16)
