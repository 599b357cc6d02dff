"""Kernels for the CPU, in Numba: packed weights, attention over blocks, optimizer steps."""
