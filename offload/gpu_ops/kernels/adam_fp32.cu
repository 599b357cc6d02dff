#include "adam.cuh"

extern "C" __global__ void adam_fp32(const __grid_constant__ AdamArgs a) { adam_fp32_block(a); }
