// FORMAT: of the weights (formats.cuh).
#include "dequantize.cuh"

extern "C" __global__ void dequantize(const DequantizeArgs a) { dequantize_block<FORMAT>(a); }
