"""Decisions without torch, Numba or I/O: plans, residency, eviction, simulation."""
