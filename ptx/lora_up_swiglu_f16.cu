// The adapters of gate and up in f16, and a = (g * sigmoid(g)) * u behind them.
#include "lora_up_swiglu.cuh"

UP_SWIGLU(f16, F16)
