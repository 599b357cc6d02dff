"""Families whose prompts cannot be read in pieces are answered as if alone, or refused what needs
pieces."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from families import tiny_config, write
from measured_once import measured_once
from serve_support import CHUNK, Listener, make_engine, request

import offload
from offload.cli.chat_cache import can_reuse
from offload.errors import UnsupportedModelError
from offload.models.pieces import why_not_in_pieces

PROMPTS = [list(range(3, 3 + n)) for n in (3 * CHUNK + 5, CHUNK // 2, 2 * CHUNK)]


def meta(family: str, **more: Any) -> Any:
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(tiny_config(family, **more))


@pytest.mark.parametrize("family", ["jamba", "mamba", "recurrent_gemma", "llama"])
def test_answers_are_those_of_the_prompt_alone(family: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    directory = write(family, tmp_path, torch.float32)
    alone = AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, experts_implementation="eager"
    )
    with measured_once():
        model = offload.load(directory, ram="200MiB", context=96, sequences=3, overhead_bytes=0)
    engine = make_engine(model, None)
    engine.start()
    try:
        for ids, listener in [(ids, Listener(engine, request(ids))) for ids in PROMPTS]:
            how: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": []}
            if family == "llama":
                how["prefill_chunk_size"] = CHUNK
            want = alone.generate(torch.tensor([ids]), pad_token_id=0, **how)[0, len(ids) :]
            text, _ = listener.result()
            assert text == ",".join(map(str, want.tolist()))
    finally:
        engine.close()
        model.offload.close()


def test_families() -> None:
    assert why_not_in_pieces(meta("llama")) is None
    assert why_not_in_pieces(meta("qwen3_next")) is None
    assert "in pieces than of the whole" in str(why_not_in_pieces(meta("jamba")))
    assert "cannot go on behind a piece" in str(why_not_in_pieces(meta("mamba")))
    assert "no toy of it shows" in str(why_not_in_pieces(meta("zamba")))
    # Of these a toy runs only with what their own configs say, in words or with yes and no.
    assert "cannot go on behind a piece" in str(why_not_in_pieces(meta("reformer")))
    assert "cannot go on behind a piece" in str(why_not_in_pieces(meta("prophetnet")))
    assert "in pieces than of the whole" in str(why_not_in_pieces(meta("xmod")))
    assert why_not_in_pieces(meta("xmod", is_decoder=True)) is None


def test_what_needs_pieces_is_refused_or_left_out(tmp_path: Path) -> None:
    directory = write("jamba", tmp_path / "model")
    with pytest.raises(UnsupportedModelError, match="drop it"):
        offload.load(directory, ram="200MiB", context=64, prompt_cache=tmp_path / "prompts")
    with pytest.raises(UnsupportedModelError, match="drop kv_keep"):
        offload.load(directory, ram="200MiB", context=600, kv_keep=256)
    assert "in pieces" in str(can_reuse(meta("jamba"), 64))


def test_random_numbers_are_left_as_they_were() -> None:
    before = torch.get_rng_state()
    why_not_in_pieces(meta("olmo2"))
    assert torch.equal(torch.get_rng_state(), before)
