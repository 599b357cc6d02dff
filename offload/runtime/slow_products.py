"""Which dtypes torch has no fast matrix products for on this processor.

oneDNN multiplies bfloat16 where it has AVX-512 or AVX-NE-CONVERT, and float16 where it has
AVX-512-FP16 or AMX-FP16. Elsewhere torch's own loops do, a dot product at a time: on x86 some times
slower than float32 for products with a weight as it lies (a prompt's), and tens of times slower for
those of backward. Torch is asked, as it decides by the processor, by its build, and by what the
environment allows to oneDNN.
"""

from __future__ import annotations

import platform

import torch

TWICE = "which takes twice the bytes and rounds differently"
"""What the way out, to compute in float32, costs."""

_X86 = ("x86_64", "AMD64", "i686")


def multiplies_slowly(dtype: torch.dtype) -> bool:
    """Whether products of many rows are far slower in ``dtype`` than in float32; False where that
    cannot be told."""
    mkldnn = torch.backends.mkldnn
    available = mkldnn.is_available()  # type: ignore[no-untyped-call, unused-ignore]
    if platform.machine() not in _X86 or not available:
        return False
    question = {
        torch.bfloat16: "_is_mkldnn_bf16_supported",
        torch.float16: "_is_mkldnn_fp16_supported",
    }.get(dtype)
    asked = getattr(torch.ops.mkldnn, question, None) if question else None
    if asked is None:
        return False
    return not (mkldnn.enabled and asked())


def slowness(dtype: torch.dtype) -> str | None:
    """The beginning of a sentence for users: why products take long; ``None`` where they do not."""
    if not multiplies_slowly(dtype):
        return None
    name = str(dtype).removeprefix("torch.")
    needs = "AVX-512" if dtype == torch.bfloat16 else "AVX-512-FP16"
    return f"torch has no fast products of {name} on this processor (they need {needs})"
