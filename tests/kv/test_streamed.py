"""A streamed model with its keys and values in blocks: the same tokens, planned, within budget."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from equivalence import Golden, golden, greedy, options
from families import tiny_config, write

from offload.blocks import Tier
from offload.errors import OffloadError, PlanError, UnsupportedModelError
from offload.models import load, toy
from offload.models.load import prepare

CONTEXT = 64
BLOCK = 4


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Golden:
    directory = tmp_path_factory.mktemp("llama")
    write("llama", directory, torch.bfloat16)
    return golden(directory)


@pytest.fixture(autouse=True)
def _no_toy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "warm_up", lambda *_: toy.Warm(baseline_rss=0))


def asked(tmp_path: Path, **more: Any) -> Any:
    base = {"context": CONTEXT, "prompt_tokens": 9, "kv_block_tokens": BLOCK, "disk": tmp_path}
    return options("cpu", **{**base, **more})


def test_the_budget_that_an_error_names_is_enough(llama: Golden, tmp_path: Path) -> None:
    how = {"sequences": 4}
    with pytest.raises(PlanError, match=r"of 4 sequence\(s\).*to \d+KiB or more") as refused:
        prepare(llama.directory, asked(tmp_path, kv_ram=1, **how))
    named = re.findall(r"to (\d+)KiB or more", str(refused.value))[0]
    assert prepare(llama.directory, asked(tmp_path, kv_ram=int(named) * 1024, **how)).kv is not None


def test_a_kv_budget_streams_and_changes_no_token(llama: Golden, tmp_path: Path) -> None:
    assert prepare(llama.directory, asked(tmp_path)).kv is None, "without the flag all are in RAM"
    whole = prepare(llama.directory, asked(tmp_path, kv_ram=2**30)).kv
    assert whole is not None
    assert whole.blocks[1] == 0
    budget = whole.need.least_bytes
    prepared = prepare(llama.directory, asked(tmp_path, kv_ram=budget))
    kv = prepared.kv
    assert kv is not None
    layers = len(kv.need.shapes)
    assert kv.homes.ram_bytes <= budget
    assert kv.blocks == (0, layers * CONTEXT // BLOCK)
    assert prepared.plan.reserves[Tier.RAM]["KV blocks"] == kv.homes.ram_bytes
    assert any("read once for each token" in note for note in prepared.notes)
    want = load_reference(llama).generate(llama.ids_BL, max_new_tokens=CONTEXT - 9, do_sample=False)
    model = prepared.open()
    try:
        got = model.generate(llama.ids_BL, max_new_tokens=CONTEXT - 9, do_sample=False)
        assert torch.equal(got, want)
        figures = model.offload.stats()["kv"]
        assert figures["written_bytes"] > 0
        assert figures["read_bytes"] > figures["written_bytes"]
        again = model.generate(llama.ids_BL, max_new_tokens=CONTEXT - 9, do_sample=False)
        assert torch.equal(again, want)
        with pytest.raises(OffloadError, match=r"cache_implementation='static'.*KV budget"):
            model.generate(llama.ids_BL, max_new_tokens=2, cache_implementation="static")
        none = copy.deepcopy(model.generation_config)
        none.use_cache = False  # whoever says so of a call gets it: without a cache, as ever
        for how in ({"use_cache": False}, {"generation_config": none}):
            few = model.generate(llama.ids_BL, max_new_tokens=3, do_sample=False, **how)
            assert torch.equal(few, want[:, : few.shape[1]])
    finally:
        model.offload.close()
    assert list(tmp_path.iterdir()) == [], "the file has a name"


def test_a_checkpoint_that_was_trained_without_a_cache(tmp_path: Path) -> None:
    """Trainers leave ``use_cache: false`` in the files they save: what a cache held was then read
    again with each token, at other positions."""
    directory = tmp_path / "model"
    write("llama", directory, torch.bfloat16)
    llama = golden(directory)
    want = load_reference(llama).generate(llama.ids_BL, max_new_tokens=12, do_sample=False)
    (directory / "generation_config.json").write_text('{"use_cache": false}')
    disk = tmp_path / "disk"
    disk.mkdir()
    model = prepare(directory, asked(disk, kv_ram=2**30)).open()
    settings = model.generation_config
    try:
        got = model.generate(llama.ids_BL, max_new_tokens=12, do_sample=False)
        assert torch.equal(got, want)
        assert settings.use_cache
    finally:
        model.offload.close()
    assert settings.use_cache is False, "it is given back as it was"


def load_reference(want: Golden) -> Any:
    from equivalence import reference

    return reference(want.directory, want.dtype)


def test_what_does_not_fit_beside_the_weights_is_spilled(llama: Golden, tmp_path: Path) -> None:
    """Without a flag: a context that was refused is planned, and keys and values get the rest."""
    ram = prepare(llama.directory, asked(tmp_path, context=8192)).minimum[Tier.RAM]
    while (kv := (prepared := prepare_long(llama, tmp_path, ram)).kv) is None:
        ram -= 256 * 1024  # in RAM it fits so far; refused (PlanError) it must never be first
    assert kv.blocks[1] > 0
    assert kv.homes.ram_bytes > kv.need.least_bytes
    assert prepared.plan.resident_bytes(Tier.RAM) <= ram
    with pytest.raises(PlanError, match="KV blocks"):
        prepare_long(llama, tmp_path, 2**16)


def prepare_long(want: Golden, tmp_path: Path, ram: int) -> Any:
    return prepare(want.directory, asked(tmp_path, ram=ram, context=8192))


def test_what_cannot_be_kept_in_blocks_is_refused(llama: Golden, tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"holds \d+ block.*--kv-ram.*iB or more"):
        prepare(llama.directory, asked(tmp_path, kv_ram=4096))
    with pytest.raises(UnsupportedModelError, match="drop --device"):
        prepare(llama.directory, options("sim", kv_ram=2**20))
    write("mamba", tmp_path / "mamba", torch.bfloat16, config=tiny_config("mamba"))
    with pytest.raises(UnsupportedModelError, match="drop --kv-ram"):
        prepare(tmp_path / "mamba", asked(tmp_path, kv_ram=2**20))


def test_attention_in_place(tmp_path: Path) -> None:
    """Planned without a layer in one piece, the same logits for any budget, near torch's."""
    directory = tmp_path / "model"
    write("llama", directory, torch.float32)
    want = golden(directory, torch.float32)
    spills = tmp_path / "spills"
    spills.mkdir()
    tight: dict[str, Any] = {}
    found = []
    for _ in range(2):
        base = {"kv_block_tokens": 16, "context": 256, "attention": "offload", **tight}
        prepared = prepare(directory, asked(spills, **base))
        kv = prepared.kv
        assert kv is not None
        reserves = prepared.plan.reserves[Tier.RAM]
        assert "KV of one layer in one piece" not in reserves
        assert reserves["attention over blocks"] > 0
        assert any("reads them where they are" in note for note in prepared.notes)
        assert (kv.blocks[1] > 0) == bool(tight)
        tight = {"kv_ram": kv.need.least_bytes}
        model = prepared.open()
        try:
            found.append(greedy(model, want.ids_BL))
            assert model.config._attn_implementation == "offload"
        finally:
            model.offload.close()
    assert torch.equal(found[0].sequences, want.sequences)
    assert all(map(torch.equal, found[0].logits, found[1].logits))
    for got, right in zip(found[0].logits, want.steps_BV, strict=True):
        torch.testing.assert_close(got, right, rtol=1e-4, atol=1e-4)
    write("mamba", tmp_path / "mamba", torch.bfloat16, config=tiny_config("mamba"))
    with pytest.raises(UnsupportedModelError, match="drop --attention offload"):
        prepare(tmp_path / "mamba", asked(spills, attention="offload"))
    with pytest.raises(OffloadError, match="multiple of 16 tokens"):
        prepare(directory, asked(spills, attention="offload"))
    with pytest.raises(UnsupportedModelError, match="float16"):
        prepare(directory, asked(spills, attention="offload", dtype="float16"))


def test_keys_and_values_in_few_bits(tmp_path: Path) -> None:
    """Less memory for the same context, said to be lossy, and by how much."""
    directory = tmp_path / "model"
    write("llama", directory, torch.float32, config=tiny_config("llama", head_dim=64))
    spills = tmp_path / "spills"
    spills.mkdir()
    base: dict[str, Any] = {"kv_block_tokens": 64, "context": 256}
    sizes = []
    for kind in ("bf16", "q8", "q4"):
        prepared = prepare(directory, asked(spills, kv=kind, **base))
        kv = prepared.kv
        assert kv is not None
        assert any(f"in {kind}, which is lossy" in note for note in prepared.notes)
        sizes.append(kv.homes.slot_bytes)
        tight = prepare(directory, asked(spills, kv=kind, kv_ram=kv.need.least_bytes, **base))
        model = tight.open()
        try:
            ids = torch.randint(3, 100, (1, 200))
            model.generate(ids, max_new_tokens=3, do_sample=False)
            figures = model.offload.stats()["kv"]
            assert figures["read_bytes"] > 0
            assert figures["kind"] == kind
            assert (figures["attention_error"] is not None) == (kind != "bf16")
        finally:
            model.offload.close()
    assert sizes[0] > sizes[1] >= sizes[2]
    with pytest.raises(OffloadError, match="drop --attention exact"):
        asked(spills, kv="q8", attention="exact")
    with pytest.raises(PlanError, match=r"newest ones.*--kv-ram"):
        prepare(directory, asked(spills, kv="q8", kv_ram=2**15, **base))
