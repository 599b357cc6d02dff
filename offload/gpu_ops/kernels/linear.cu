// FORMAT: of the weights (formats.cuh). TOKENS: that a block computes together.
#include "linear.cuh"

extern "C" __global__ void __launch_bounds__(256) linear(const __grid_constant__ LinearArgs a) {
    linear_block<FORMAT, TOKENS>(a);
}
