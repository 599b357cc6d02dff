#include "experts.cuh"

extern "C" __global__ void merge(const __grid_constant__ ExpertArgs a) { merge_block(a); }
