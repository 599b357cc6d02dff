#include "adam.cuh"

extern "C" __global__ void adam_bf16(const __grid_constant__ AdamArgs a) { adam_bf16_block(a); }
