// FORMAT: of down (formats.cuh). TOKENS: that a block computes together.
#include "experts.cuh"

extern "C" __global__ void __launch_bounds__(256) down(const __grid_constant__ ExpertArgs a) {
    down_block<FORMAT, TOKENS>(a);
}
