#include "records.cuh"

extern "C" __global__ void quantize(const QuantizeArgs a) { quantize_block(a); }
