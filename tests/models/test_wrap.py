"""Streaming a model that is in memory, and giving it back bit for bit."""

from __future__ import annotations

import copy
import io
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from wrap_support import mlp, seeded_alone, tight

import offload
from offload.blocks import Tier
from offload.errors import ClosedError, OffloadError, PlanError, StoreError, UnsupportedModelError

Build = Callable[[], tuple[nn.Module, tuple[torch.Tensor, ...]]]


def encoder() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
    return nn.TransformerEncoder(layer, 6), (torch.randn(2, 5, 64),)


class Recurrent(nn.Module):
    """An LSTM keeps a second list of its parameters, and is a large leaf outside of any list."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(256, 256, 2, batch_first=True)
        self.up = nn.Linear(256, 2048)
        self.down = nn.Linear(2048, 256)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(self.rnn(x)[0]))


def recurrent() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    return Recurrent(), (torch.randn(2, 7, 256),)


class Conv(nn.Module):
    """Buffers, batch norm, a channels-last weight and a shared block."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 32, 3, padding=1).to(memory_format=torch.channels_last)
        blocks = [
            nn.Sequential(nn.Conv2d(32, 32, 3, padding=1), nn.BatchNorm2d(32)) for _ in range(4)
        ]
        self.blocks = nn.ModuleList([*blocks, blocks[0]])
        self.scale = nn.Parameter(torch.full((1,), 0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = x + self.scale * block(x)
        return x


def conv() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    return Conv(), (torch.randn(2, 3, 16, 16),)


def vit() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    from transformers import ViTConfig, ViTModel

    config = ViTConfig(
        hidden_size=64,
        num_hidden_layers=6,
        num_attention_heads=4,
        intermediate_size=128,
        image_size=32,
        patch_size=8,
    )
    return ViTModel(config), (torch.randn(2, 3, 32, 32),)


BUILDS: list[Build] = [mlp, encoder, recurrent, conv, vit]


def value(output: Any) -> torch.Tensor:
    return output if isinstance(output, torch.Tensor) else output[0]


@pytest.fixture(autouse=True)
def seeded() -> Iterator[None]:
    with seeded_alone():
        yield


@pytest.mark.parametrize("device", ["cpu", "sim"])
@pytest.mark.parametrize("build", BUILDS, ids=lambda b: b.__name__)
def test_same_bits_and_back(build: Build, device: str, tmp_path: Path) -> None:
    model, inputs = build()
    model.eval()
    with torch.no_grad():
        want = value(model(*inputs))
    state = {k: v.clone() for k, v in model.state_dict().items()}
    objects = [id(p) for p in model.parameters()]
    grads = [p.requires_grad for p in model.parameters()]
    budget = tight(model)
    gpu = {"gpu": budget} if device == "sim" else {}
    assert offload.wrap(model, ram=budget, disk=tmp_path, device=device, **gpu) is model
    assert os.listdir(tmp_path) == []  # the private file has no name
    for _ in range(3):
        with torch.no_grad():
            assert torch.equal(value(model(*inputs)), want)
    model.offload.executor.validate()
    streamed = model.offload.plan.streamed_bytes_per_pass
    assert streamed > 0, "nothing streamed: this tests nothing"
    offload.unwrap(model)
    assert [id(p) for p in model.parameters()] == objects
    assert [p.requires_grad for p in model.parameters()] == grads
    after = model.state_dict()
    assert after.keys() == state.keys()
    assert all(torch.equal(after[k], state[k]) for k in state)
    model.train()
    value(model(*inputs)).sum().backward()
    assert any(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())


@pytest.mark.parametrize("device", ["cpu", "sim"])
@pytest.mark.parametrize("kind", ["grouped_mm", "batched_mm", "eager"])
def test_experts_computed_all_at_once(kind: str, device: str, tmp_path: Path) -> None:
    """What transformers makes of a MoE in memory computes all experts in one product, which rounds
    otherwise than its loop over experts: it keeps doing so."""
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        hidden_size=64, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=4, vocab_size=96,
    )  # fmt: skip
    model = MixtralForCausalLM(config).eval()
    model.set_experts_implementation(kind)
    ids = torch.arange(3, 16)[None]
    with torch.no_grad():
        want = model(ids).logits
    budget = tight(model)
    gpu = {"gpu": budget} if device == "sim" else {}
    offload.wrap(model, ram=budget, disk=tmp_path, device=device, **gpu)
    notes = [n for n in model.offload.notes if "experts" in n]
    assert len(notes) == (kind != "eager")
    assert all("set_experts_implementation('eager')" in n for n in notes)
    assert model.offload.plan.streamed_bytes_per_pass > 0
    assert torch.equal(model(ids).logits, want)
    offload.unwrap(model)
    assert torch.equal(model(ids).logits, want)


def test_the_least_that_an_error_names_is_enough(tmp_path: Path) -> None:
    layers = [nn.Linear(2048, 1024), nn.Linear(1024, 2048)] * 3
    model, x = nn.Sequential(*map(copy.deepcopy, layers)).eval(), torch.randn(2, 2048)
    want = model(x)
    for ram in (1, 2**20, 6 * 2**20):
        with pytest.raises(PlanError) as error:
            offload.wrap(model, ram=ram, disk=tmp_path)
        least = int(str(error.value).split("at least ")[1].split()[0])
    offload.wrap(model, ram=least, disk=tmp_path)
    assert torch.equal(model(x), want)
    assert model.offload.plan.resident_bytes(Tier.RAM) <= least


def test_unwrap_gives_a_loaded_model_its_weights() -> None:
    from transformers import AutoModelForCausalLM

    path = Path(__file__).parents[2] / "examples" / "tiny_moe"
    model = offload.load(path, ram="8MiB", context=32, overhead_bytes=0)
    offload.unwrap(model)
    want = AutoModelForCausalLM.from_pretrained(path).state_dict()
    got = model.state_dict()
    assert got.keys() == want.keys()
    assert all(torch.equal(got[k], want[k]) for k in want)


def test_wrapping_twice_and_unwrapping_nothing_are_errors(tmp_path: Path) -> None:
    model, _ = mlp()
    with pytest.raises(OffloadError, match="not streamed"):
        offload.unwrap(model)
    offload.wrap(model, ram=tight(model), disk=tmp_path)
    with pytest.raises(OffloadError, match="streamed already"):
        offload.wrap(model, ram="1GiB", disk=tmp_path)
    model.offload.close()
    model.offload.close()
    with pytest.raises(ClosedError):
        offload.unwrap(model)


def test_a_failed_wrap_leaves_the_model_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, inputs = mlp()
    want = model(*inputs)
    budget = tight(model)

    def full(*_: Any, **__: Any) -> None:
        raise StoreError("no space left on the disk: needs 128.0 KiB, has 0 B")

    monkeypatch.setattr("offload.io.pack.reserve", full)
    with pytest.raises(StoreError, match="needs"):
        offload.wrap(model, ram=budget, disk=tmp_path)
    assert torch.equal(model(*inputs), want)
    assert not hasattr(model, "offload")


def test_weights_elsewhere_are_refused() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    with pytest.raises(OffloadError, match="has no data"):
        offload.wrap(model, ram="1GiB")


def test_an_unreadable_disk_directory_is_one_error(tmp_path: Path) -> None:
    model, _ = mlp()
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(OffloadError, match="cannot be used"):
        offload.wrap(model, ram="1GiB", disk=file / "below")


def test_a_killed_process_leaves_no_file(tmp_path: Path) -> None:
    code = textwrap.dedent(
        f"""
        import sys, torch, offload
        from torch import nn
        model = nn.Sequential(*[nn.Sequential(nn.Linear(256, 256)) for _ in range(8)])
        offload.wrap(model, ram="1MiB", disk={str(tmp_path)!r})
        print("wrapped", flush=True)
        with torch.no_grad():
            while True:
                model(torch.randn(1, 256))
        """
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline().strip() == "wrapped"
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"bogus": 1}, "bogus is no option; known are attention, batch"),
        ({"context": 0}, "context is 0; give 1 or more"),
        ({"batch": -2}, "batch is -2; give 1 or more"),
    ],
)
def test_options_that_cannot_be(wrong: dict[str, int], says: str) -> None:
    with pytest.raises(OffloadError, match=says):
        offload.wrap(torch.nn.Linear(4, 4), ram="2MiB", **wrong)
    with pytest.raises(OffloadError, match=says):
        offload.load("nowhere", ram="2MiB", **wrong)


@pytest.mark.parametrize("idle", [{"kv": "q8"}, {"context": 64}, {"hybrid": True, "device": "sim"}])
def test_options_that_change_nothing_in_a_wrapped_model(idle: dict[str, Any]) -> None:
    name = next(iter(idle))
    with pytest.raises(OffloadError, match=f"{name} changes nothing .*drop it .*guess") as caught:
        offload.wrap(mlp()[0], ram="64MiB", **idle)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("idle", "says"),
    [
        ({"prompt_cache_limit": "1GiB"}, "prompt_cache_limit needs a prompt cache"),
        ({"prompt_cache_chunk": 64}, "prompt_cache_chunk needs a prompt cache"),
        ({"train": True, "guess": False}, "guess cannot be combined with train"),
        ({"train": True, "prompt_cache_limit": 1 << 30}, "prompt_cache_limit cannot be combined"),
    ],
)
def test_options_that_change_nothing_in_a_loaded_model(idle: dict[str, Any], says: str) -> None:
    with pytest.raises(OffloadError, match=says):
        offload.load("nowhere", **idle)


def test_what_is_no_module() -> None:
    not_a_model: Any = "a/checkpoint"
    with pytest.raises(OffloadError, match=r"takes a torch\.nn\.Module, not a str"):
        offload.wrap(not_a_model, ram="2MiB")


def test_a_lazy_module_is_run_first() -> None:
    model = nn.Sequential(nn.LazyLinear(4), nn.LazyLinear(4))
    with pytest.raises(OffloadError, match=r"0\.weight has no shape yet .* run the model once"):
        offload.wrap(model, ram="2MiB")
    x = torch.randn(2, 8)
    want = model(x)
    assert torch.equal(offload.wrap(model, ram="2MiB")(x), want)
    offload.unwrap(model)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("how", ["whole", "part", "traced"])
def test_torchscript_is_refused(how: str, tmp_path: Path) -> None:
    """Its weights are in C++: hooks, and parameters put in place, do not reach them."""
    inner, x = nn.Linear(8, 8), torch.randn(2, 8)
    made = torch.jit.trace(inner, x) if how == "traced" else torch.jit.script(inner)
    model = made if how == "whole" else nn.Sequential(nn.Linear(8, 8), made)
    want = model(x)
    with pytest.raises(UnsupportedModelError, match=r"is a TorchScript module.*made from"):
        offload.wrap(model, ram="16MiB", disk=tmp_path)
    assert torch.equal(model(x), want)


def test_a_streamed_model_is_not_copied() -> None:
    model = offload.wrap(mlp()[0], ram="64MiB")  # all of it resident: nothing else refuses
    try:
        with pytest.raises(OffloadError, match="cannot be copied or pickled"):
            copy.deepcopy(model)
    finally:
        offload.unwrap(model)
    assert copy.deepcopy(model) is not model


def test_a_streamed_model_is_neither_pickled_nor_loaded_into() -> None:
    model, _ = mlp()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    ones = {name: torch.ones_like(value) for name, value in state.items()}
    offload.wrap(model, ram="64MiB")
    outer = nn.Sequential(model)
    try:
        for held in (model, outer):
            with pytest.raises(OffloadError, match=r"pickled, torch\.save of all of it included"):
                torch.save(held, io.BytesIO())
        with pytest.raises(OffloadError, match=r"would change \S+, which is streamed"):
            model.load_state_dict(ones)
        with pytest.raises(OffloadError, match=r"would change 0\.\S+, which is streamed"):
            outer.load_state_dict({f"0.{name}": value for name, value in ones.items()})
        model.load_state_dict({}, strict=False)
    finally:
        offload.unwrap(model)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    model.load_state_dict(ones)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"ram": [1]}, r"\[1\] is not a size"),
        ({"ram": 1.5}, r"1\.5 is no whole number of bytes; write e\.g\. '1\.5GiB'"),
        ({"context": "12"}, "context is '12'; give a whole number"),
        ({"context": 1.5}, r"context is 1\.5; give a whole number"),
        ({"batch": True}, "batch is True; give a whole number"),
        ({"guess": "no"}, "guess is 'no'; give True or False"),
        ({"device": 3}, "device is 3; give a text"),
        ({"disk": 3}, "disk is 3; give a text or a path"),
        ({"kv_keep": "x"}, "kv_keep is 'x'; give a whole number"),
        ({"queue_depth": 0}, "queue_depth is 0; give 1 or more"),
        ({"progress": 3}, "progress is 3; give a function"),
        ({"dtype": 8}, "dtype is 8; give a text or a torch dtype"),
        ({"train": True, "seed": "x"}, "seed is 'x'; give a whole number"),
        ({"train": True, "context": "x"}, "context is 'x'; give a whole number"),
        ({"train": True, "context": 0}, "context=0 must be at least 1"),
    ],
)
def test_options_of_another_type(wrong: dict[str, Any], says: str) -> None:
    with pytest.raises(OffloadError, match=says):
        offload.load("nowhere", **wrong)


@pytest.mark.parametrize("path", [None, 3, ["a"]])
def test_a_path_that_is_none(path: Any) -> None:
    with pytest.raises(OffloadError, match="give a directory, a file or a hub id"):
        offload.load(path, ram="2MiB")


def test_other_kinds_of_numbers_and_paths(tmp_path: Path) -> None:
    numpy = pytest.importorskip("numpy")
    options: dict[str, Any] = {"queue_depth": numpy.int64(2), "device": torch.device("cpu")}
    model = offload.wrap(mlp()[0], ram=2.0**26, disk=os.fsencode(tmp_path), **options)
    offload.unwrap(model)


FORKED = """
import os, sys, warnings
import torch
import offload
from offload.errors import ClosedError
warnings.simplefilter("ignore")  # of a fork beside threads, which is what this is about
model = torch.nn.Sequential(*[torch.nn.Linear(256, 256) for _ in range(32)])
x = torch.randn(3, 256)
with torch.no_grad():
    want = model(x)
    offload.wrap(model, ram="4MiB")
    child = os.fork()
    if child == 0:
        try:
            model(x)
        except ClosedError as error:
            model.offload.close()
            os._exit(7 if "load it in the process that runs it" in str(error) else 8)
        os._exit(9)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert torch.equal(model(x), want)
"""


def test_a_forks_child_is_told_that_the_threads_are_elsewhere() -> None:
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "-c", FORKED], check=True, timeout=120, env=env)
