"""Where the LM head and its loss are computed: what they would be on a device, and the choice."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from offload.blocks import DTYPE_BYTES
from offload.errors import OffloadError
from offload.io.pack_manifest import Layout
from offload.train.head_find import HeadForm
from offload.train.head_place import HeadPlacement, HeadSlice, head_slices
from offload.train.head_weights import wide_dtype
from offload.train.layout import TrainLayout
from offload.train.needs import OnMeta, kept_bytes, slices_bytes
from offload.train.options import TrainOptions
from offload.train.packed_base import PackedBase
from offload.train.plan import TrainPlan
from offload.train.predicting import Prediction


def place_head(
    meta: OnMeta, options: TrainOptions, form: HeadForm, layout: TrainLayout,
    base: PackedBase | None, grad_dtype: str | None,
) -> HeadPlacement | str:  # fmt: skip
    """The head on a device with the fewest slots, or why it cannot be there."""
    module = meta.model.get_submodule(form.head)
    names = {id(p.tensor): name for name, p in layout.params.items()}
    weight = names[id(module.weight)]
    bias = None if module.bias is None else names[id(module.bias)]
    found = head_slices(layout, weight, bias, {} if base is None else base.recipes)
    if isinstance(found, str):
        return found
    slices, part = found
    unit = next((u.index for u in layout.units if u.module is module), None)
    dtype, tokens = module.weight.dtype, options.batch_size * options.seq_len
    blocks = {cut.block for s in slices for cut in (s.weight, s.bias) if cut is not None}
    gradients: tuple[int, ...] = ()
    if layout.blocks[slices[0].weight.block].trained:
        size = DTYPE_BYTES[grad_dtype] if grad_dtype else dtype.itemsize
        gradients = tuple(_elements(s, form.width, layout) * size for s in slices)
    place = HeadPlacement(
        unit=unit, slices=slices, slots=1, width=form.width,
        dtype=str(dtype).removeprefix("torch."), part=part,
        trained=any(layout.blocks[b].trained for b in blocks),
        shared=unit is None or any(layout.users[b] != [unit] for b in blocks),
        arguments=tokens * (form.width * dtype.itemsize + torch.int64.itemsize),
        results=tokens * form.width * dtype.itemsize + wide_dtype(dtype).itemsize,
        gradients=gradients, work_bytes=slices_bytes(meta, form, options, grad_dtype)
        + tokens * form.width * dtype.itemsize,
        host_bytes=kept_bytes(meta, form, options),
    )  # fmt: skip
    return place


def _elements(cut: HeadSlice, width: int, layout: TrainLayout) -> int:
    """Of a slice's gradients."""
    rows = cut.end - cut.first
    trained = cut.bias is not None and layout.blocks[cut.bias.block].trained
    return rows * (width + trained)


def head_places(
    meta: OnMeta, options: TrainOptions, gpu: int | None, form: HeadForm | None,
    layout: TrainLayout, base: PackedBase | None, grad_dtype: str | None, *, card: bool = False,
) -> tuple[list[HeadPlacement | None], str]:  # fmt: skip
    """Where the head and the loss can be computed (None: in RAM), the place that is taken where
    nothing says which is faster first; and why there is only one.

    ``card``: the device is one, and not simulated.

    Raises:
        OffloadError: it was asked for on the device, and cannot be there.
    """
    if gpu is None:
        return [None], ""
    if options.head == "cpu":
        return [None], "--head cpu"
    found = (
        "the model's own loss is used, with whole logits"
        if form is None
        else place_head(meta, options, form, layout, base, grad_dtype)
    )
    part = None if isinstance(found, str) else found.part
    if card and part is not None and part.layout is Layout.ROWS:
        found = "its table lies in rows, which only the CPU unpacks"
    if isinstance(found, str):
        if options.head == "gpu":
            raise OffloadError(f"--head gpu: the head cannot be on the device ({found}); drop it")
        return [None], found
    return ([found], "--head gpu") if options.head == "gpu" else ([found, None], "")


def with_reason(
    taken: Mapping[bool, tuple[TrainPlan, Prediction | None]], why: str
) -> tuple[tuple[TrainPlan, Prediction | None], str]:
    """The faster one of the head on the device (True) and in RAM, and why."""
    if len(taken) == 1 or why:
        return next(iter(taken.values())), why
    (_, there), (_, here) = taken[True], taken[False]
    if there is None or here is None:
        return taken[True], "it fits"
    on_device = there.seconds < here.seconds
    texts = [_seconds(p.seconds) for p in ((there, here) if on_device else (here, there))]
    other = "in RAM" if on_device else "there"
    return taken[on_device], f"a step takes {texts[0]}, {texts[1]} with them {other}"


def _seconds(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 0.1 else f"{seconds * 1e3:.2f} ms"


__all__ = ["head_places", "place_head", "with_reason"]
