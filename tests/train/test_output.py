"""A written model directory is the source's with other values, whole or not there at all."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # before transformers is imported
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import pytest
import torch
from families import CORE, FLOAT32_ONLY, tail, write
from safetensors import safe_open

from offload.errors import UnsupportedModelError
from offload.io.safetensors import read_header
from offload.models.meta import MetaModel, build, model_class, read_config
from offload.models.sources import Source
from offload.train import output, output_tensors
from offload.train.output import write_model
from offload.train.output_header import plan_shards
from offload.train.output_tensors import OutputTensors, check_writable

PERMUTED = ("inkling2_text",)
"""transformers de-interleaves their experts when it loads them."""


@pytest.fixture(scope="module", autouse=True)
def _quiet() -> Iterator[None]:
    from transformers.utils import logging

    logging.disable_progress_bar()
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def load(directory: Path, dtype: torch.dtype) -> Any:
    """By transformers itself: the names and values that ours are compared with."""
    kind: Any = model_class(read_config(directory))
    return kind.from_pretrained(directory, dtype=dtype)


def tensors_of(directory: Path) -> dict[str, torch.Tensor]:
    found = {}
    for file in sorted(directory.glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            found.update({name: opened.get_tensor(name) for name in opened.keys()})  # noqa: SIM118
    return found


def save(meta: MetaModel, state: dict[str, torch.Tensor], target: Path, **how: Any) -> Path:
    dtype = str(meta.dtype).removeprefix("torch.")

    def parameter(name: str, start: int, count: int) -> torch.Tensor:
        return state[name].detach().reshape(-1)[start : start + count]

    with OutputTensors(meta.mapping, parameter) as values:
        write_model(
            target, meta.directory, values.tensors, values.read, run_id="run", dtype=dtype, **how
        )
    return target


def perturb(model: torch.nn.Module) -> None:
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for p in model.parameters():
            if p.is_floating_point():
                p.add_(torch.randn(p.shape, generator=generator).to(p.dtype) * 0.25)


def check_family(family: str, tmp_path: Path) -> None:
    dtype = torch.float32 if family in FLOAT32_ONLY else torch.bfloat16
    source = write(family, tmp_path / "source", dtype)
    meta = build(source, dtype)
    model = load(source, dtype)

    before, same = tensors_of(source), tensors_of(save(meta, model.state_dict(), tmp_path / "same"))
    assert same.keys() == before.keys()
    for name, tensor in before.items():
        assert same[name].shape == tensor.shape
        assert torch.equal(same[name], tensor.to(same[name].dtype)), name

    perturb(model)
    changed = save(meta, model.state_dict(), tmp_path / "changed", shard_bytes=100_000)
    assert len(list(changed.glob("*.safetensors"))) > 1
    want, got = model.state_dict(), load(changed, dtype).state_dict()
    assert got.keys() == want.keys()
    for name, tensor in want.items():
        assert got[name].dtype == tensor.dtype
        assert torch.equal(got[name], tensor), name
    assert any(not torch.equal(t, before[n].to(t.dtype)) for n, t in tensors_of(changed).items())


@pytest.mark.sampled(2)
@pytest.mark.parametrize("family", [*CORE, *PERMUTED])
def test_values_come_back_under_the_checkpoints_names(family: str, tmp_path: Path) -> None:
    check_family(family, tmp_path)


@pytest.mark.sweep
@pytest.mark.parametrize("family", [f for f in tail() if f not in PERMUTED])
def test_values_come_back_in_every_other_family(family: str, tmp_path: Path) -> None:
    check_family(family, tmp_path)


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory: pytest.TempPathFactory) -> tuple[MetaModel, dict[str, torch.Tensor]]:
    source = write("mixtral", tmp_path_factory.mktemp("mixtral"))
    return build(source), load(source, torch.bfloat16).state_dict()


def test_fused_experts_are_written_one_by_one(mixtral: Any, tmp_path: Path) -> None:
    meta, state = mixtral
    assert any("experts.3.w1" in name for name in tensors_of(meta.directory))
    assert any(name.endswith("experts.gate_up_proj") for name in state)
    asked: list[int] = []

    def parameter(name: str, start: int, count: int) -> torch.Tensor:
        asked.append(count)
        return state[name].reshape(-1)[start : start + count]

    with OutputTensors(meta.mapping, parameter) as values:
        w1 = torch.cat(list(values.read("model.layers.1.block_sparse_moe.experts.3.w1.weight")))
    inner = state["model.layers.1.mlp.experts.gate_up_proj"].shape[1] // 2
    assert torch.equal(w1, state["model.layers.1.mlp.experts.gate_up_proj"][3, :inner].reshape(-1))
    assert asked == [w1.numel()]


def test_pieces_are_small(mixtral: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    meta, state = mixtral
    monkeypatch.setattr(output_tensors, "CHUNK_ELEMENTS", 1000)
    monkeypatch.setattr(output, "SYNC_BYTES", 5000)
    heard: list[tuple[int, int]] = []
    written = save(
        meta, state, tmp_path / "out", progress=lambda done, total: heard.append((done, total))
    )
    before, after = tensors_of(meta.directory), tensors_of(written)
    assert all(torch.equal(after[n], before[n]) for n in before)
    sizes = [b - a for (a, _), (b, _) in itertools.pairwise(heard)]
    assert max(sizes) <= 2000
    assert heard[-1][0] == heard[-1][1] == meta.index.total_bytes


def test_large_tensors_start_at_pages(mixtral: Any, tmp_path: Path) -> None:
    meta, state = mixtral
    header = read_header(save(meta, state, tmp_path / "out") / "model.safetensors")
    assert header.data_start % 4096 == 0
    large = [t for t in header.tensors.values() if t.nbytes % 4096 == 0]
    assert len(large) > 10
    assert all(t.offset % 4096 == 0 for t in large)
    assert all(t.offset % 2 == 0 for t in header.tensors.values())


def test_tensors_keep_their_order_and_fill_files() -> None:
    plan = [("a", "float32", (1024,)), ("b", "bfloat16", (3,)), ("c", "float32", (3,)),
            ("d", "uint8", (4096,)), ("e", "float32", (4096,))]  # fmt: skip
    one = plan_shards(plan, 10**9)
    assert [t.name for t in one[0].tensors] == ["a", "d", "e", "c", "b"]
    some = plan_shards(plan, 4200)
    assert [[t.name for t in s.tensors] for s in some] == [["a", "c", "b"], ["d"], ["e"]]
    assert some[1].file == "model-00002-of-00003.safetensors"
    with pytest.raises(ValueError, match="twice"):
        plan_shards([plan[0], plan[0]], 100)
    with pytest.raises(ValueError, match="no dtype int3"):
        plan_shards([("a", "int3", (1,))], 100)


def test_tied_weights_are_written_as_the_source_has_them(tmp_path: Path) -> None:
    source = write("gpt2", tmp_path / "source")
    model = load(source, torch.bfloat16)
    perturb(model)
    out = save(build(source), model.state_dict(), tmp_path / "out")
    assert tensors_of(out).keys() == tensors_of(source).keys()
    again = load(out, torch.bfloat16)
    assert again.lm_head.weight is again.transformer.wte.weight
    assert torch.equal(again.lm_head.weight, model.lm_head.weight)


def add_tensors(directory: Path, extra: dict[str, torch.Tensor]) -> None:
    from safetensors.torch import save_file

    found = tensors_of(directory)
    save_file({**found, **extra}, directory / "model.safetensors", metadata={"format": "pt"})


def test_a_tied_weight_that_the_source_has_twice_is_written_twice(tmp_path: Path) -> None:
    source = write("gpt2", tmp_path / "source")
    wte = next(t for n, t in tensors_of(source).items() if n.endswith("wte.weight"))
    add_tensors(source, {"lm_head.weight": wte.clone()})
    model = load(source, torch.bfloat16)
    perturb(model)
    found = tensors_of(save(build(source), model.state_dict(), tmp_path / "out"))
    assert torch.equal(found["lm_head.weight"], model.lm_head.weight)
    assert torch.equal(next(t for n, t in found.items() if "wte" in n), model.lm_head.weight)


def test_what_the_model_does_not_use_is_copied(tmp_path: Path) -> None:
    source = write("qwen3", tmp_path / "source")
    extra = {"visual.w": torch.randn(5, 3, dtype=torch.float64), "visual.n": torch.arange(4)}
    add_tensors(source, extra)
    model = load(source, torch.bfloat16)
    found = tensors_of(save(build(source), model.state_dict(), tmp_path / "out"))
    assert all(torch.equal(found[n], t) and found[n].dtype == t.dtype for n, t in extra.items())


def test_untrained_parameters_keep_the_sources_values(tmp_path: Path) -> None:
    source = write("inkling2_text", tmp_path / "source")
    meta, model = build(source), load(source, torch.bfloat16)
    perturb(model)
    state = model.state_dict()
    experts = sorted(n for n in state if n.endswith("experts.gate_up_proj"))
    trained = {experts[0], "model.norm.weight"}
    assert trained <= state.keys()

    def parameter(name: str, start: int, count: int) -> torch.Tensor:
        assert name in trained
        return state[name].reshape(-1)[start : start + count]

    with OutputTensors(meta.mapping, parameter, trained=trained) as values:
        write_model(tmp_path / "out", source, values.tensors, values.read, run_id="r")
    original = load(source, torch.bfloat16).state_dict()
    for name, value in load(tmp_path / "out", torch.bfloat16).state_dict().items():
        assert torch.equal(value, (state if name in trained else original)[name]), name


def test_another_dtype(tmp_path: Path) -> None:
    source = write("qwen3_moe", tmp_path / "source")
    meta, model = build(source), load(source, torch.bfloat16).float()
    perturb(model)
    values = OutputTensors(meta.mapping, lambda n, s, c: model.state_dict()[n].view(-1)[s : s + c],
                           dtype=torch.float32)  # fmt: skip
    write_model(tmp_path / "out", source, values.tensors, values.read, run_id="r", dtype="float32")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["dtype"] == "float32"
    from transformers import AutoModelForCausalLM

    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    assert again.dtype == torch.float32
    want = model.state_dict()
    assert all(torch.equal(t, want[n]) for n, t in again.state_dict().items())


def test_a_conversion_without_a_way_back_is_refused_before_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    meta = build(write("inkling2_text", tmp_path / "source"))
    check_writable(meta.mapping)
    from transformers.core_model_loading import Interleave

    def no_way_back(self: Any) -> Any:
        raise NotImplementedError("none")

    monkeypatch.setattr(Interleave, "reverse_op", no_way_back)
    with pytest.raises(UnsupportedModelError, match="save_pretrained"):
        check_writable(meta.mapping)


def test_a_tensor_in_two_parameters_is_refused(tmp_path: Path) -> None:
    meta = build(write("llama", tmp_path / "source"))
    sources = meta.mapping.map.sources
    one, two = "model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.gate_proj.weight"
    copy: Source = sources[one]
    sources[two] = Source(two, copy.shape, copy.dtype, copy.tensors, copy.placed, "", copy.found)
    with pytest.raises(UnsupportedModelError, match="no single place"):
        check_writable(meta.mapping)


# The other files.


def test_the_other_files_come_along(mixtral: Any, tmp_path: Path) -> None:
    import shutil

    meta, _ = mixtral
    source = tmp_path / "source"
    shutil.copytree(meta.directory, source)
    kept = ("tokenizer.json", "tokenizer_config.json", "merges.txt", "vocab.json", "spiece.model",
            "chat_template.jinja", "additional_chat_templates/tools.jinja", "LICENSE",
            "generation_config.json", "NOTICE.txt")  # fmt: skip
    left = ("modeling_own.py", "README.md", "model.safetensors.index.json", "pytorch_model.bin",
            "pytorch_model.bin.index.json", ".gitattributes", "logo.png", "heldout.txt",
            "loss.json", "trainer_state.json", "requirements.txt")  # fmt: skip
    (source / "additional_chat_templates").mkdir()
    for name in (*kept, *left):
        (source / name).write_text("{}")
    config = json.loads((source / "config.json").read_text())
    config.update(torch_dtype="bfloat16", dtype="bfloat16", auto_map={"AutoModel": "m.py"})
    config["part"] = {"dtype": "bfloat16"}
    config["other"] = {"dtype": "float64"}
    (source / "config.json").write_text(json.dumps(config))
    out = tmp_path / "out"
    write_model(out, source, [("a", "uint8", (2,))], lambda _: memoryview(b"ab"), run_id="r",
                dtype="float32", metadata={"steps": "9"})  # fmt: skip
    present = {str(p.relative_to(out)) for p in out.rglob("*") if p.is_file()}
    assert present == {*kept, "config.json", "model.safetensors", "offload_training.json"}
    written = json.loads((out / "config.json").read_text())
    assert written["torch_dtype"] == written["dtype"] == written["part"]["dtype"] == "float32"
    assert written["other"]["dtype"] == "float64"
    assert "auto_map" not in written
    assert read_header(out / "model.safetensors").metadata == {"steps": "9", "format": "pt"}
