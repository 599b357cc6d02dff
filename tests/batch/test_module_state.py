"""What models keep in their modules between two passes is each sequence's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from batch_support import logits, opened
from families import tiny_config, write
from torch import nn

import offload
from offload.batch.conductor import Conductor
from offload.cli.chat_cache import can_reuse
from offload.errors import UnsupportedModelError
from offload.models.module_state import OwnState, Place, state_places, states_of

PROMPTS = ((5, 6, 7), tuple(range(3, 30)), (9,), tuple(range(40, 3, -1)))


def growing() -> Any:
    """Positions that are scaled by the longest text so far, from 16 tokens on."""
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
    return tiny_config("llama", max_position_embeddings=16, rope_parameters=rope)


@pytest.mark.parametrize("family", ["recurrent_gemma", "growing"])
@pytest.mark.parametrize("ram", ["200MiB", "1500KiB"])
def test_sequences_do_not_see_each_others(family: str, ram: str, tmp_path: Path) -> None:
    config = growing() if family == "growing" else None
    directory = write("llama" if config else family, tmp_path, config=config)
    alone = []
    for ids in PROMPTS:  # of a model that has read nothing before
        with opened(directory, ram, sequences=1) as model:
            alone.append(logits(model, ids, 6))
    with opened(directory, ram) as model:
        with Conductor(model) as conductor:
            running = [conductor.start(lambda ids=ids: logits(model, ids, 6)) for ids in PROMPTS]
            conductor.run()
        for sequence, want in zip(running, alone, strict=True):
            assert sequence.error is None
            assert torch.equal(sequence.result, want)
        assert torch.equal(logits(model, PROMPTS[0], 6), alone[0]), "nothing is left behind"


def test_a_short_text_does_not_change_the_attention_of_others(tmp_path: Path) -> None:
    sparse = {"attention_type": "block_sparse", "block_size": 4, "num_random_blocks": 1}
    directory = write("big_bird", tmp_path, config=tiny_config("big_bird", **sparse))
    long, short = tuple(range(40, 3, -1)), (5, 6, 7)  # blocks are for more than 28 tokens
    with opened(directory, "200MiB", sequences=1) as model:
        alone = logits(model, long, 3)
        assert not torch.equal(logits(model, long, 3), alone), "transformers' own does not go back"
    with opened(directory, "200MiB") as model:
        with Conductor(model) as conductor:
            conductor.start(lambda: logits(model, short, 3))
            running = [conductor.start(lambda: logits(model, long, 3))]
            conductor.run()
            running.append(conductor.start(lambda: logits(model, long, 3)))
            conductor.run()
        for sequence in running:
            assert torch.equal(sequence.result, alone)
        assert torch.equal(logits(model, long, 3), alone), "nothing is left behind"


def test_a_state_in_modules_is_no_prefix(tmp_path: Path) -> None:
    directory = write("recurrent_gemma", tmp_path / "model")
    with pytest.raises(UnsupportedModelError, match=r"keeps its state .*not in a cache"):
        offload.load(directory, ram="200MiB", context=48, prompt_cache=tmp_path / "prompts")
    with opened(directory, "200MiB") as model:
        assert "conv1d_state" in str(can_reuse(model, 48))


def test_where_it_is() -> None:
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        stateful = AutoModelForCausalLM.from_config(tiny_config("recurrent_gemma"))
        plain = AutoModelForCausalLM.from_config(tiny_config("llama"))
        mamba = AutoModelForCausalLM.from_config(tiny_config("mamba"))
        scaled = AutoModelForCausalLM.from_config(growing())
    names = {name for names in states_of(stateful).values() for name in names}
    assert names == {"conv1d_state", "recurrent_states"}
    assert len(state_places(stateful)) >= 2
    assert state_places(plain) == state_places(mamba) == []
    assert {place.name for place in state_places(scaled)} >= {"inv_freq", "max_seq_len_cached"}


def test_swapped_and_back() -> None:
    module = nn.Module()
    own = module.__dict__
    own["a"] = torch.zeros(2)
    first = own["a"]
    state = OwnState([Place(own, "a"), Place(own, "b")])
    first += 1  # in place: the other began with what was there
    state.swap()
    assert own["a"].tolist() == [0, 0]
    own["b"] = 3
    state.swap()
    assert own["a"] is first
    assert "b" not in own
    state.swap()
    assert own["b"] == 3
