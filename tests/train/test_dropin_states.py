"""What a drop-in model keeps, saves and resumes, and ``offload.load(train=...)``."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from dropin_support import EPS, batches, close, groups_of, loop, maker, resident, streamed

import offload
from offload.errors import OffloadError
from offload.train.optimizer import AdamW


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return maker(tmp_path_factory)


def test_a_state_dict_is_a_reference_that_resumes(tiny: Any, tmp_path: Path) -> None:
    directory, disk, data = tiny(), tmp_path / "states", list(batches(4))

    def step(model: Any, optimizer: Any, ids: torch.Tensor) -> None:
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()

    with streamed(directory, disk=disk, keep=2) as model:
        optimizer = AdamW(model.parameters(), lr=1e-3)
        fresh = optimizer.state_dict()
        optimizer.load_state_dict(fresh)  # as accelerate does at the start
        step(model, optimizer, data[0])
        first = optimizer.state_dict()
        step(model, optimizer, data[1])
        torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
        assert (tmp_path / "optimizer.pt").stat().st_size < 10_000
        for ids in data[2:]:
            step(model, optimizer, ids)
        wanted = {n: p.detach().clone() for n, p in model.named_parameters()}
        with pytest.raises(OffloadError, match="resume=1"):
            optimizer.load_state_dict(first)
        model.offload.commit()
    saved = torch.load(tmp_path / "optimizer.pt", weights_only=True)
    with streamed(directory, "ram", disk=disk, keep=2, resume=tmp_path) as model:
        optimizer = AdamW(model.parameters(), lr=5e-4)
        optimizer.load_state_dict(saved)
        assert optimizer.param_groups[0]["lr"] == 1e-3
        for ids in data[2:]:
            step(model, optimizer, ids)
        assert all(torch.equal(p, wanted[n]) for n, p in model.named_parameters())
        model.offload.commit()
    with pytest.raises(OffloadError, match="resume=True"), streamed(directory, disk=disk):
        pass


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_a_saved_model_is_an_ordinary_one(tiny: Any, tmp_path: Path, family: str) -> None:
    directory = tiny(family)
    with streamed(directory) as model:
        loop(model, AdamW(model.parameters(), lr=1e-3))
        model.save_pretrained(tmp_path / "out")
        model.save_pretrained(tmp_path / "out", max_shard_size="64KiB")
        assert len(list((tmp_path / "out").glob("*.safetensors"))) > 1
        assert close(model, resident(tmp_path / "out"), 0.0)
        if family == "llama":
            ordinary = resident(tmp_path / "out").state_dict()
            model.load_state_dict(ordinary)
            ordinary["lm_head.weight"] += 1
            with pytest.raises(OffloadError, match="cannot be replaced"):
                model.load_state_dict(ordinary)


def test_what_is_lost_at_the_end_is_said(tiny: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="offload"):
        with streamed(tiny()) as model:
            loop(model, AdamW(model.parameters()), steps=1)
        assert "not all of them saved" in caplog.text
        assert not model.offload.directory.exists()
        caplog.clear()
        with streamed(tiny()):
            pass
        assert not caplog.text


# -- the public door --------------------------------------------------------------------------


def test_load_plans_and_trains(tiny: Any, tmp_path: Path) -> None:
    directory = tiny()
    wanted = resident(directory)
    expected = loop(wanted, torch.optim.AdamW(groups_of(wanted), lr=1e-3, eps=EPS))
    model = offload.load(
        directory, train=True, ram="512MiB", disk=tmp_path / "states", context=16, batch=2
    )
    with model.offload:
        assert model.offload.plan.ram_bytes <= 512 << 20
        found = loop(model, offload.AdamW(groups_of(model), lr=1e-3, eps=EPS))
        assert found == pytest.approx(expected, rel=2e-5)
        assert close(model, wanted)
        model.offload.commit()
    again = offload.load(
        directory, train=True, ram="1GiB", disk=tmp_path / "states", context=16, resume=True
    )
    with again.offload:
        assert close(again, wanted)
        assert again.offload.loop.steps == 3


def test_load_says_what_cannot_be(tiny: Any) -> None:
    for match, how in (
        ("too small by", {"ram": "8MiB"}),
        ("cannot be combined", {"quant": "q4"}),
        ("train='lora'", {"train": "lora"}),
        ("states='int4'", {"states": "int4"}),
        ("no option of training", {"routing": "x"}),
    ):
        with pytest.raises(OffloadError, match=match):
            offload.load(tiny(), **{"train": True, "context": 16, **how})
