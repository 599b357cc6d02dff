"""Copies and pickles of a model in training, and of its parts."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from dropin_support import close, maker, resident, streamed

from offload.errors import OffloadError


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return maker(tmp_path_factory)


def test_a_copy_of_a_part_is_an_ordinary_module(tiny: Any) -> None:
    """What peft does with ``modules_to_save``; a whole model is too large for that."""
    directory = tiny()
    wanted = resident(directory)
    with streamed(directory) as model:
        x = torch.randn(2, 3, wanted.config.hidden_size)
        for path in ("lm_head", "model.layers.1.mlp"):
            copied = copy.deepcopy(model.get_submodule(path))
            ours = [type(p) for p in copied.parameters()]
            assert set(ours) == {torch.nn.Parameter}
            assert torch.equal(copied(x), wanted.get_submodule(path)(x))
        with pytest.raises(OffloadError, match="load it a second time"):
            copy.deepcopy(model)


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_a_copy_of_the_model_is_refused_before_weights_are_read(
    tiny: Any, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copied part by part first, it would take the memory of all weights."""
    with streamed(tiny(family)) as model:
        with monkeypatch.context() as patch:
            patch.setattr(model.offload.loop, "read", None)
            with pytest.raises(OffloadError, match="load it a second time"):
                copy.deepcopy(model)
        assert copy.copy(model).offload is model.offload


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_pickling_says_what_can_be_saved(tiny: Any, family: str) -> None:
    wanted = resident(tiny(family))
    with streamed(tiny(family)) as model:
        for what in (model, model.model, model.model.layers[0], model.offload):
            with pytest.raises(OffloadError, match="save_pretrained"):
                pickle.dumps(what)
        part = pickle.loads(pickle.dumps(model.model.layers[1].self_attn))
        assert all(type(p) is torch.nn.Parameter and p.requires_grad for p in part.parameters())
        expected = wanted.model.layers[1].self_attn.state_dict()
        assert all(torch.equal(v, expected[n]) for n, v in part.state_dict().items())
        assert {type(v) for v in pickle.loads(pickle.dumps(model.state_dict())).values()} == {
            torch.Tensor
        }


def test_experts_cannot_be_copied(tiny: Any) -> None:
    with streamed(tiny("qwen3_moe")) as model:
        with pytest.raises(OffloadError, match="modules_to_save"):
            copy.deepcopy(model.model.layers[0].mlp)
        assert close(model, resident(tiny("qwen3_moe")))
