"""Kernels for packed weights on a card: CUDA C in ``kernels/``, and who launches it.

``source`` says what is compiled, ``arguments`` what a kernel is given, ``launch`` does both through
CuPy; ``linear`` and ``experts`` are what models call. The formats and their layout on disk are
those of ``offload.cpu_ops``: a block's bytes go up as they are. Nothing here imports CuPy before a
card is used.
"""
