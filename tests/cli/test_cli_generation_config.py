"""What a checkpoint's generation_config.json says: obeyed, or refused before anything is loaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from cli_support import Cli, refused

IDS = ("--prompt-ids", "5,6,7", "-n", 4, "--no-predict")


@pytest.mark.parametrize(
    ("wrong", "flag"), [({"top_k": -3}, "--top-k"), ({"top_p": "high"}, "--top-p")]
)
def test_generation_settings_that_are_nothing(
    cli: Cli, bare: Path, wrong: dict[str, Any], flag: str
) -> None:
    (bare / "generation_config.json").write_text(json.dumps(wrong))
    name, value = next(iter(wrong.items()))
    said = f"generation_config.json says {name} {value!r}"
    refused(cli("generate", "-m", bare, *IDS, "--temp", 1), said, f"give {name} yourself")
    good = (flag, 1)
    assert cli("generate", "-m", bare, *IDS, "--temp", 1, *good).code == 0


@pytest.mark.parametrize(
    "wrong",
    [
        {"repetition_penalty": 0},
        {"repetition_penalty": "high"},
        {"no_repeat_ngram_size": "two"},
        {"bad_words_ids": []},
        {"bad_words_ids": [[999999]]},
        {"stop_strings": 3},
        {"forced_eos_token_id": 999999},
        {"forced_eos_token_id": "</s>"},
        {"suppress_tokens": ["a"]},
        {"begin_suppress_tokens": ["a"]},
        {"exponential_decay_length_penalty": 3},
        {"exponential_decay_length_penalty": [1]},
        {"exponential_decay_length_penalty": ["a", 1.5]},
        {"sequence_bias": {"(1, 2)": 3.0}},
        {"sequence_bias": [[[999999], 3.0]]},
        {"min_length": "long"},
        {"max_time": "short"},
        {"forced_bos_token_id": 999999},
        {"prefill_chunk_size": 0},
        {"prefill_chunk_size": "all"},
        {"decoder_start_token_id": "<s>"},
        {"eos_token_id": 10**30},
    ],
)
def test_generation_settings_of_logits_that_are_nothing(
    cli: Cli, bare: Path, wrong: dict[str, Any]
) -> None:
    (bare / "generation_config.json").write_text(json.dumps(wrong))
    name, value = next(iter(wrong.items()))
    refused(
        cli("generate", "-m", bare, *IDS),
        f"generation_config.json says {name} {value!r}",
        "correct",
    )


@pytest.mark.parametrize(
    "wrong",
    [
        {"typical_p": 0},
        {"typical_p": "most"},
        {"epsilon_cutoff": "small"},
        {"eta_cutoff": "small"},
        {"top_h": 0},
        {"top_h": 1.5},
        {"top_k": True},
    ],
)
def test_generation_settings_of_sampling_that_are_nothing(
    cli: Cli, bare: Path, wrong: dict[str, Any]
) -> None:
    (bare / "generation_config.json").write_text(json.dumps(wrong))
    assert cli("generate", "-m", bare, *IDS).code == 0, "greedy, it is not looked at"
    name, value = next(iter(wrong.items()))
    said = f"generation_config.json says {name} {value!r}"
    refused(cli("generate", "-m", bare, *IDS, "--temp", 1), said, "correct")


@pytest.mark.parametrize("wrong", [{"suppress_tokens": 3}, {"watermarking_config": {"a": 1}}])
def test_generation_settings_that_transformers_cannot_read(
    cli: Cli, bare: Path, wrong: dict[str, Any]
) -> None:
    (bare / "generation_config.json").write_text(json.dumps(wrong))
    refused(cli("generate", "-m", bare, *IDS), "generation_config.json of bare")


@pytest.mark.parametrize("flags", [(), ("--temp", 1)])
def test_no_token_is_allowed(cli: Cli, bare: Path, flags: tuple[Any, ...]) -> None:
    size = json.loads((bare / "config.json").read_text())["vocab_size"]
    every = {"suppress_tokens": list(range(size))}
    (bare / "generation_config.json").write_text(json.dumps(every))
    said = refused(cli("generate", "-m", bare, *IDS, *flags), "no token can follow", "suppress_")
    assert "damaged" not in said


@pytest.mark.parametrize(
    "fine",
    [
        {"suppress_tokens": [999999]},
        {"exponential_decay_length_penalty": [3, 1.5], "eos_token_id": 2},
        {"sequence_bias": [[[5], -3.0]]},
        {"forced_eos_token_id": [2]},
    ],
)
def test_generation_settings_that_work_as_in_transformers(
    cli: Cli, bare: Path, fine: dict[str, Any]
) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    (bare / "generation_config.json").write_text(json.dumps(fine))
    model = AutoModelForCausalLM.from_pretrained(bare, experts_implementation="eager").eval()
    ids = torch.tensor([[5, 6, 7]])
    want = model.generate(ids, max_new_tokens=4, do_sample=False)[0, 3:].tolist()
    result = cli("generate", "-m", bare, *IDS)
    assert result.code == 0, result.err
    got = [int(i) for i in result.out.strip().split(",")]
    assert got == (want[:-1] if len(got) < len(want) else want)  # an end is not printed


@pytest.mark.parametrize(
    "wish",
    [
        {"penalty_alpha": 0.6, "top_k": 4},
        {"dola_layers": "low"},
        {"force_words_ids": [[3]]},
        {"is_assistant": True},
        {"token_healing": True},
        {"cache_implementation": "offloaded"},
        {"use_cache": False},
        {"exponential_decay_length_penalty": [0, 1.5]},  # of an end that there is not
        {"output_hidden_states": "all", "output_attentions": True, "output_logits": True},
        {"num_beams": 3, "num_return_sequences": 2},
    ],
)
def test_the_checkpoints_way_to_generate_is_not_taken(
    cli: Cli, bare: Path, wish: dict[str, Any]
) -> None:
    """Greedy, as it says, and not what needs code from the hub, a tokenizer or another cache."""
    (bare / "generation_config.json").write_text("{}")
    plain = cli("generate", "-m", bare, *IDS)
    (bare / "generation_config.json").write_text(json.dumps(wish))
    result = cli("generate", "-m", bare, *IDS)
    assert (result.code, result.out) == (0, plain.out)
