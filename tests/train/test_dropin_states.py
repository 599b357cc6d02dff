"""What a drop-in model keeps, saves and resumes, and ``offload.load(train=...)``."""

from __future__ import annotations

import errno
import logging
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from dropin_support import EPS, batches, close, groups_of, loop, maker, resident, streamed

import offload
from offload.errors import OffloadError, StoreError
from offload.train.optimizer import AdamW
from offload.train.steps import Group
from offload.train.tiles import Slot, SlotKind


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


def test_states_of_another_model_say_in_words_what_differs(tiny: Any, tmp_path: Path) -> None:
    """In a foreign loop, too, and not by two digests."""
    disk = tmp_path / "states"
    with streamed(tiny(), disk=disk) as model:
        model.offload.commit()
    changes: list[tuple[str, dict[str, Any], str]] = [
        ("qwen2", {}, "checkpoint has other files"),
        ("llama", {"train": lambda name: "mlp" in name}, "other weights are trained"),
    ]
    for family, how, what in changes:
        with (
            pytest.raises(OffloadError, match=rf"^resume: .*{what}.* another disk="),
            streamed(tiny(family), disk=disk, resume=True, **how),
        ):
            pass
    with streamed(tiny(), disk=disk, resume=True) as model:
        assert model.offload.commit() == 1


@pytest.mark.parametrize("in_backward", [False, True])
def test_another_optimizer_begins_without_moments(tiny: Any, in_backward: bool) -> None:
    """It went on with those of the one before it, and with its count of steps."""
    directory, data = tiny(), list(batches(4))
    how: dict[str, Any] = {"in_backward": True} if in_backward else {}

    def train(model: Any, kind: Any, **how: Any) -> None:
        for lr, half in ((1e-3, data[:2]), (5e-4, data[2:])):
            optimizer = kind(model.parameters(), lr=lr, eps=EPS, **how)
            if kind is AdamW:  # as accelerate does, whatever there is
                optimizer.load_state_dict(optimizer.state_dict())
            for ids in half:
                model(input_ids=ids, labels=ids).loss.backward()
                optimizer.step()
                optimizer.zero_grad()

    wanted = resident(directory)
    train(wanted, torch.optim.AdamW)
    with streamed(directory) as model:
        train(model, AdamW, **how)
        assert close(model, wanted)


@pytest.mark.parametrize("states", ["fp32", "bf16", "8bit"])
def test_a_first_step_finds_no_moments(states: str) -> None:
    kind, n, some = SlotKind(states, "bfloat16"), 8192, slice(4096, 8192)
    numbers = np.random.default_rng(0)
    weights = (numbers.standard_normal(n).astype(np.float32).view(np.uint32) >> 16).astype(
        np.uint16
    )
    gradient = weights[::-1].copy()
    used, fresh = (Slot(kind, n, np.zeros(kind.offsets(n)[-1], np.uint8)) for _ in range(2))
    for slot in (used, fresh):
        slot.start(weights)
    for i, name in enumerate(kind.names[kind.names.index("m") :]):
        used.part(name)[:] = 60 + i
    for slot in (used, fresh):
        slot.update(Group(lr=1e-3).step(1, 1.0), gradient[some], 4096, 4096, seed=0, first=0,
                    workers=1)  # fmt: skip
    for name in kind.names:
        size = used.part(name).size // 2
        assert np.array_equal(used.part(name)[size:], fresh.part(name)[size:]), name
        assert name in ("copy", "p") or used.part(name)[0] >= 60, "the other half is another's"


def test_optimizers_in_turns(tiny: Any) -> None:
    """Each has moments of its own parameters; there is no room for two of the same."""
    directory, data = tiny(), list(batches(4))

    def train(model: Any, kind: Any) -> None:
        parts = model.model.layers[1], model.model.layers[2]
        both = [kind(p.parameters(), lr=1e-3, eps=EPS) for p in parts]
        model.requires_grad_(False)
        for i, ids in enumerate(data):
            parts[i % 2].requires_grad_(True)
            model(input_ids=ids, labels=ids).loss.backward()
            both[i % 2].step()
            both[i % 2].zero_grad()
            parts[i % 2].requires_grad_(False)

    wanted = resident(directory)
    train(wanted, torch.optim.AdamW)
    with streamed(directory) as model:
        train(model, AdamW)
        assert close(model, wanted)
        model.requires_grad_(True)
        one, other = (AdamW(model.parameters(), lr=1e-3) for _ in range(2))
        for optimizer in (one, other):
            model(input_ids=data[0], labels=data[0]).loss.backward()
            optimizer.step()
        model(input_ids=data[0], labels=data[0]).loss.backward()
        with pytest.raises(OffloadError, match="one optimizer per parameter"):
            one.step()


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


@pytest.mark.parametrize("refused", ["mkdir", "fsync", "replace", "unlink"])
def test_a_disk_that_refuses_a_saved_model(
    tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: str
) -> None:
    """One error of ours, and at every moment the old model or the new one: weights that are not of
    the new one go when that is there. What a killed program has left goes, too."""
    out = tmp_path / "out"
    with streamed(tiny()) as model:
        model.save_pretrained(out)
        loop(model, AdamW(model.parameters(), lr=1e-3))
        (out / ".saving.0123abcd.tmp").mkdir()
        real = getattr(os, refused)

        def refuse(path: Any, *rest: Any, **how: Any) -> Any:
            if refused == "fsync" or str(path).startswith(str(out)):
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return real(path, *rest, **how)

        with monkeypatch.context() as patch:
            patch.setattr(os, refused, refuse)
            with pytest.raises(StoreError, match=f"{out}: Input/output error|model-00001.*out: In"):
                model.save_pretrained(out, max_shard_size="64KiB")
        assert not list(out.glob(".*"))
        # transformers takes one file before it takes an index.
        assert close(resident(out), resident(tiny()), 0.0)
        model.save_pretrained(out, max_shard_size="64KiB")
        assert close(model, resident(out), 0.0)
        assert not (out / "model.safetensors").exists()


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


def test_weights_that_a_trainer_has_saved_are_not_said_to_be_lost(
    tiny: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It writes the model first, and then the optimizer's states: a commit, private here."""
    with caplog.at_level(logging.WARNING, logger="offload"), streamed(tiny()) as model:
        optimizer = AdamW(model.parameters())
        loop(model, optimizer, steps=1)
        model.save_pretrained(tmp_path / "checkpoint-1")
        optimizer.state_dict()
    assert "private directory" in caplog.text
    assert "not all of them saved" not in caplog.text


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
