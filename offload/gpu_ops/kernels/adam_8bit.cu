#include "adam.cuh"

extern "C" __global__ void adam_8bit(const __grid_constant__ AdamArgs a) { adam_8bit_block(a); }
