// FORMAT: of gate and up (formats.cuh). TOKENS: that a block computes together.
#include "experts.cuh"

extern "C" __global__ void __launch_bounds__(256) gate_up(const __grid_constant__ ExpertArgs a) {
    gate_up_block<FORMAT, TOKENS>(a);
}
