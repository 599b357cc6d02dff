"""Blocks in full precision as the attention kernels know them. Pure."""

from __future__ import annotations

from offload.cpu_ops import block_layout
from offload.cpu_ops.block_layout import BlockKind
from offload.errors import UnsupportedModelError
from offload.kv.shape import BlockLayout, KvShape

KINDS = {"bfloat16": BlockKind.BF16, "float32": BlockKind.F32}
"""By torch's name of the dtype."""


def is_latent(shape: KvShape) -> bool:
    """Whether a model expands what it caches before it attends (MLA): a compressed vector and a
    rotated key, one of each for all heads. Attention then wants them in one piece."""
    return shape.key_heads == shape.value_heads == 1 and shape.key_dim != shape.value_dim


def kernel_layout(layout: BlockLayout) -> block_layout.BlockLayout:
    """A block as the kernels know it.

    Raises:
        UnsupportedModelError: they have nothing for its dtype, or for different numbers of heads.
        OffloadError: its head sizes or tokens are not what they take.
    """
    shape = layout.shape
    kind = KINDS.get(shape.dtype)
    if kind is None or shape.key_heads != shape.value_heads:
        raise UnsupportedModelError(
            f"attention 'offload' takes keys and values in {' or '.join(KINDS)} and as many heads "
            f"of each, not {shape.key_heads} and {shape.value_heads} in {shape.dtype}; drop "
            f"--attention offload or choose another --dtype"
        )
    found = block_layout.BlockLayout(
        kind, shape.key_heads, shape.key_dim, shape.value_dim, layout.tokens
    )
    if (found.values_at, found.nbytes) != (layout.value_at, layout.nbytes):
        raise AssertionError(f"{found} and {layout} disagree")
    return found
