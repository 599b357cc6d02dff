"""Inputs are moved to where the model computes, and nothing else is touched."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from offload.errors import DeviceError, PlanError
from offload.models.inputs import take_inputs, to_device

META = torch.device("meta")


class Model(torch.nn.Module):
    def forward(self, ids: torch.Tensor, *, mask: Any = None) -> tuple[torch.device, Any]:
        return ids.device, mask

    def generate(self, ids: torch.Tensor, **kwargs: Any) -> tuple[torch.device, Any]:
        return ids.device, kwargs


def test_tensors_move_wherever_they_are() -> None:
    other = object()
    given = {"a": [torch.ones(2), (torch.ones(3), 1)], "b": other}
    found = to_device(given, META)
    assert found["a"][0].device == META
    assert found["a"][1][0].device == META
    assert isinstance(found["a"][1], tuple)
    assert found["b"] is other
    there = [torch.ones(2)]
    assert to_device(there, torch.device("cpu")) is there


def test_a_models_inputs_are_taken_to_its_device_until_undone() -> None:
    model = Model()
    ids = torch.ones(2)
    undo = take_inputs(model, META)
    assert model(ids, mask={"m": ids})[0] == META
    assert model(ids, mask={"m": ids})[1]["m"].device == META
    assert model.generate(ids, n=3) == (META, {"n": 3})
    for each in undo:
        each()
    assert model(ids)[0] == ids.device
    assert model.generate(ids)[0] == ids.device
    assert "generate" not in model.__dict__
    assert take_inputs(model, torch.device("cpu")) == []


def test_memory_that_runs_out_is_an_error_of_the_plan() -> None:
    class Full(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB\nand more")

    model = Full()
    undo = take_inputs(model, META)
    with pytest.raises(PlanError, match=r"memory of meta ran out .*allocate 2 GiB\): plan for"):
        model(torch.zeros(1))
    while undo:
        undo.pop()()
    with pytest.raises(torch.OutOfMemoryError):
        model(torch.zeros(1))


def test_a_kernel_that_fails_is_an_error_of_the_card() -> None:
    class Broken(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise torch.AcceleratorError("CUDA error: an illegal memory access\nand more")

    model = Broken()
    undo = take_inputs(model, META)
    with pytest.raises(DeviceError, match=r"the card failed in the middle of a pass: CUDA error"):
        model(torch.zeros(1))
    while undo:
        undo.pop()()
