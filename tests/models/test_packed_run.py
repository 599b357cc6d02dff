"""Models that run on packed weights: near the model that has the very same values, and the same
bits whatever the budget."""

from __future__ import annotations

import inspect
import shutil
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from families import write
from pack_support import open_pack, value_of
from test_pack_families import expert_of
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.models.llama.modeling_llama import LlamaModel

import offload
from offload.blocks import Tier
from offload.errors import ClosedError, OffloadError, PlanError, UnsupportedModelError
from offload.models.lean_cache import LeanCache
from offload.models.lean_forward import LeanForward
from offload.models.meta import read_config
from offload.models.options import Options
from offload.models.pack_checkpoint import CheckpointSource
from offload.models.pack_reader import PackedModel
from offload.models.pack_run import pack
from offload.models.packed_load import PackedPrepared, plan_packed
from offload.models.toy import Warm

RUNS = {
    "qwen3_moe": "experts, a norm on every head",
    "mixtral": "w1, w2, w3 on disk",
    "olmoe": "a norm on q and k",
    "qwen2_moe": "a shared expert with a gate of its own",
    "deepseek_v3": "shared experts, a correction bias, a dense first layer",
    "gpt_oss": "clamped, with biases, interleaved and transposed",
    "qwen3_next": "linear attention beside packed projections",
    "llama": "no experts",
    "gemma": "tied embedding, scaled",
    "phi3": "fused projections",
}
IDS = torch.tensor([[5, 9, 17, 3, 44, 21, 8]])


_checkpoints = TemporaryDirectory(prefix="packed-")


def packed(family: str, tmp_path: Path, quant: str) -> tuple[Path, Path]:
    """A copy of a tiny checkpoint and of its pack, which are made once."""
    made = Path(_checkpoints.name)
    whole, small = made / family / "m", made / family / quant
    if not whole.exists():
        write(family, whole)
    if not small.exists():
        with closing(CheckpointSource.open(whole)) as source:
            pack(source, small, quant=quant)
    shutil.copytree(small, tmp_path / "p")
    return shutil.copytree(whole, tmp_path / "m"), tmp_path / "p"


def planned(pack_dir: Path, ram: int = 2**30, **options: Any) -> PackedPrepared:
    """As by ``offload.load`` in a process that is warm already."""
    chosen = Options(ram=ram, context=32, overhead_bytes=0, **options)
    pack_ = PackedModel.open(pack_dir)
    return plan_packed(pack_, read_config(pack_dir), chosen, Warm(baseline_rss=0))


def load(pack_dir: Path, ram: int = 2**30, **options: Any) -> Any:
    return planned(pack_dir, ram, **options).open()


def least(pack_dir: Path) -> int:
    """The smallest budget, in bytes, as the error for a smaller one says it."""
    with pytest.raises(PlanError) as error:
        load(pack_dir, ram=1)
    return int(str(error.value).split("at least ")[1].split(" bytes")[0])


def with_packed_values(directory: Path, pack_dir: Path) -> Any:
    """The stock float32 model with the values that the pack holds."""
    model = AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, experts_implementation="eager"
    ).eval()
    opened, blocks = open_pack(pack_dir)
    state = model.state_dict()
    with torch.no_grad():
        for name, located in opened.tensors.items():
            value = value_of(located.part, blocks[located.block.name])
            state[name].copy_(torch.from_numpy(value.copy()).view(state[name].shape))
        found = {
            "state": {k: v.detach().numpy() for k, v in state.items()},
            "modules": dict(model.named_modules()),
        }
        for name, group in opened.experts.items():
            for part in group.parts:
                for e, block in enumerate(group.blocks):
                    value = value_of(part, blocks[block])
                    expert_of(found, name, part.name, e)[...] = value  # a view of the state
    return model


@pytest.mark.sampled(2)
@pytest.mark.parametrize("family", RUNS)
@pytest.mark.parametrize("quant", ["q8", "none"])
def test_logits_are_those_of_the_packed_values(family: str, quant: str, tmp_path: Path) -> None:
    directory, pack_dir = packed(family, tmp_path, quant)
    reference = with_packed_values(directory, pack_dir)
    model = load(pack_dir)
    try:
        with torch.no_grad():
            ours = model(IDS).logits
            theirs = reference(IDS).logits
            # Against the logits' spread. float32 weights meet float32 activations; with q8 the
            # activations are rounded, which now and then sends a token to another expert.
            error = (ours - theirs) / theirs.std()
            if quant == "none":
                assert error.abs().max() < 1e-3
            else:
                assert error.square().mean().sqrt() < 0.2
            step = model(IDS[:, :1], past_key_values=model(IDS, use_cache=True).past_key_values)
            assert torch.isfinite(step.logits).all()
    finally:
        model.offload.close()


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "deepseek_v3", "llama", "gemma"])
def test_the_budget_changes_no_bit(family: str, tmp_path: Path) -> None:
    _, pack_dir = packed(family, tmp_path, "q4")
    said, hits = [], []
    for ram in (least(pack_dir), 2**30):
        model = load(pack_dir, ram)
        try:
            with torch.no_grad():
                logits = model(IDS).logits
                tokens = model.generate(IDS, max_new_tokens=12, do_sample=False, pad_token_id=0)
            said.append((logits, tokens))
            hits.append(model.offload.stats()["misses"])
            assert not model.offload.executor.held()
        finally:
            model.offload.close()
    assert torch.equal(said[0][0], said[1][0])
    assert torch.equal(said[0][1], said[1][1])
    if family not in ("llama", "gemma"):
        assert hits[0] > hits[1] == 0


def test_guesses_and_policies_change_no_bit(tmp_path: Path) -> None:
    _, pack_dir = packed("qwen3_moe", tmp_path, "q8")
    said = []
    for options in ({}, {"guess": False}, {"expert_policy": "lru"}, {"expert_policy": "mrs"}):
        model = load(pack_dir, least(pack_dir) + 40960, **options)
        try:
            said.append(model.generate(IDS, max_new_tokens=16, do_sample=False, pad_token_id=0))
        finally:
            model.offload.close()
    assert all(torch.equal(said[0], other) for other in said[1:])


def test_tokens_go_in_together_or_one_by_one(tmp_path: Path) -> None:
    """Each token's experts are computed as they would be alone."""
    _, pack_dir = packed("qwen3_moe", tmp_path, "q8")
    model = load(pack_dir)
    try:
        experts = model.model.layers[0].mlp.experts
        hidden = torch.randn(5, model.config.hidden_size)
        index = torch.stack([torch.randperm(experts.num_experts)[:2] for _ in range(5)])
        weights = torch.rand(5, 2)
        with torch.no_grad():
            together = experts(hidden, index, weights)
            rows = [(hidden[i : i + 1], index[i : i + 1], weights[i : i + 1]) for i in range(5)]
            alone = torch.cat([experts(*row) for row in rows])
        assert torch.equal(together, alone)
    finally:
        model.offload.close()


LEAN = ["qwen3_moe", "mixtral", "olmoe", "qwen2_moe", "gpt_oss", "llama"]


@pytest.mark.parametrize("family", LEAN)
def test_lean_steps_are_the_layers_own(family: str, tmp_path: Path) -> None:
    """The stock path decodes on a cache of transformers' own, the kernels on theirs."""
    _, pack_dir = packed(family, tmp_path, "none")
    model = load(pack_dir)
    try:
        assert not any("transformers' own layers" in note for note in model.offload.notes)
        kw = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
        kw |= {"output_logits": True, "return_dict_in_generate": True}
        stock = model.generate(IDS, past_key_values=DynamicCache(config=model.config), **kw)
        lean = model.generate(IDS, **kw)
        assert isinstance(lean.past_key_values, LeanCache)
        assert torch.equal(stock.sequences, lean.sequences)
        for a, b in zip(stock.logits, lean.logits, strict=True):
            assert (a - b).abs().max() < 1e-3 * a.std()
    finally:
        model.offload.close()


def is_lean(model: Any) -> bool:
    """Whether a ``LeanForward`` is in front of the model's own."""
    forward = getattr(model.forward, "_torchdynamo_orig_callable", model.forward)
    return isinstance(inspect.getclosurevars(forward).nonlocals.get("self"), LeanForward)


@pytest.mark.parametrize("family", LEAN)
def test_one_token_skips_the_models_own_forward(family: str, tmp_path: Path) -> None:
    """And has the same bits as through it, which a hook on the decoder brings back."""
    _, pack_dir = packed(family, tmp_path, "q8")
    model = load(pack_dir)
    try:
        assert is_lean(model)
        kw = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
        kw |= {"output_logits": True, "return_dict_in_generate": True}
        calls: list[int] = []
        lean = model.generate(IDS, **kw)
        hook = model.base_model.register_forward_hook(lambda *_: calls.append(1))
        own = model.generate(IDS, **kw)
        hook.remove()
        assert len(calls) == 8, "a hook on the decoder was passed over"
        assert torch.equal(lean.sequences, own.sequences)
        assert all(torch.equal(a, b) for a, b in zip(lean.logits, own.logits, strict=True))
        cache = model.offload.new_cache()
        with torch.no_grad():
            model(IDS, past_key_values=cache)
            one = IDS[:, :1]
            out = model(input_ids=one, past_key_values=cache, output_hidden_states=True)
        assert len(out.hidden_states) == len(model.base_model.layers) + 1
    finally:
        model.offload.close()


def test_what_is_done_around_the_layers_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A decoder that also scales its embedding keeps its own forward, and its values."""
    _, pack_dir = packed("llama", tmp_path, "q8")
    stock = LlamaModel.forward

    def scaled(self: Any, input_ids: Any = None, **kwargs: Any) -> Any:
        kwargs["inputs_embeds"] = 3 * self.embed_tokens(input_ids)
        return stock(self, **kwargs)

    monkeypatch.setattr(LlamaModel, "forward", scaled)
    model = load(pack_dir)
    try:
        assert not is_lean(model)
        lean = model.generate(IDS, max_new_tokens=6, do_sample=False, pad_token_id=0)
        kw: dict[str, Any] = {"past_key_values": DynamicCache(config=model.config)}
        own = model.generate(IDS, max_new_tokens=6, do_sample=False, pad_token_id=0, **kw)
        assert torch.equal(lean, own)
    finally:
        model.offload.close()


def test_a_table_in_memory_is_not_read(tmp_path: Path) -> None:
    _, pack_dir = packed("qwen3_moe", tmp_path, "q8")
    reads, said = [], []
    for ram in (least(pack_dir), 2**30):
        model = load(pack_dir, ram)
        try:
            said.append(model.generate(IDS, max_new_tokens=8, do_sample=False, pad_token_id=0))
            reads.append(model.offload.executor.stats.row_reads)
        finally:
            model.offload.close()
        with pytest.raises(ClosedError), torch.no_grad():
            model(IDS)  # the memory of the table is gone
        with pytest.raises(OffloadError, match="before the model is closed"), torch.no_grad():
            model(inputs_embeds=torch.zeros(1, 3, model.config.hidden_size))
    assert torch.equal(*said)
    assert reads[0] > reads[1] == 0


def test_lean_streams_layers_too(tmp_path: Path) -> None:
    """Weights that are somewhere else at each step give the same bits."""
    _, pack_dir = packed("llama", tmp_path, "q8")
    said = []
    for ram in (least(pack_dir), 2**30):
        model = load(pack_dir, ram)
        streams = any(
            b not in model.offload.plan.tiers[Tier.RAM].pinned for b in model.offload.plan.blocks
        )
        assert streams == (ram < 2**30)
        try:
            said.append(model.generate(IDS, max_new_tokens=16, do_sample=False, pad_token_id=0))
        finally:
            model.offload.close()
    assert torch.equal(*said)


def test_what_one_cache_cannot_do_runs_as_it_is(tmp_path: Path) -> None:
    _, pack_dir = packed("qwen3_moe", tmp_path, "none")
    model = load(pack_dir)
    try:
        kw: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
        kw["return_dict_in_generate"] = True
        alone = model.generate(IDS, **kw).sequences
        pair = model.generate(IDS.repeat(2, 1), **kw)
        beams = model.generate(IDS, num_beams=2, **kw)
        long = model.generate(IDS, **{**kw, "max_new_tokens": 40})
        for out in (pair, beams, long):
            assert not isinstance(out.past_key_values, LeanCache)
        assert torch.equal(pair.sequences[0], alone[0])
        assert torch.equal(long.sequences[0, : alone.shape[1]], alone[0])
        padded = torch.cat([torch.zeros(1, 3, dtype=torch.int64), IDS], dim=1)
        mask = (torch.arange(padded.shape[1]) >= 3).long()[None]
        left = model.generate(padded, attention_mask=mask, **kw).sequences
        assert torch.equal(left[0, 3:], alone[0])
    finally:
        model.offload.close()


def test_a_cache_is_reused_and_cropped(tmp_path: Path) -> None:
    _, pack_dir = packed("qwen3_moe", tmp_path, "none")
    model = load(pack_dir)
    try:
        kw: dict[str, Any] = {"do_sample": False, "pad_token_id": 0}
        whole = model.generate(IDS, max_new_tokens=12, **kw)
        cache = model.offload.new_cache()
        some = model.generate(IDS, max_new_tokens=8, past_key_values=cache, **kw)
        cache.crop(-3)
        assert cache.get_seq_length() == some.shape[1] - 1 - 3
        kept = some[:, : cache.get_seq_length() + 1]
        again = model.generate(kept, max_new_tokens=7, past_key_values=cache, **kw)
        assert torch.equal(again, whole)
        model.offload.new_cache()
        with pytest.raises(OffloadError, match="later generation"):
            model(IDS[:, :1], past_key_values=cache)
        with pytest.raises(OffloadError, match=r"assistant_early_exit.*load it twice"):
            model.generate(IDS, max_new_tokens=4, assistant_early_exit=1, **kw)
        twin = load(pack_dir)
        try:
            got = model.generate(IDS, max_new_tokens=12, assistant_model=twin, **kw)
        finally:
            twin.offload.close()
        assert torch.equal(got, whole)
        assert torch.equal(model.generate(IDS, max_new_tokens=12, **kw), whole)
    finally:
        model.offload.close()


def test_experts_without_a_gate_are_refused(tmp_path: Path) -> None:
    _, pack_dir = packed("nemotron_h", tmp_path, "q8")
    with pytest.raises(UnsupportedModelError, match="gate"):
        load(pack_dir)


def test_packed_weights_are_not_unwrapped(tmp_path: Path) -> None:
    """Said before anything is done: the model runs on."""
    _, small = packed("qwen3_moe", tmp_path, "q4")
    with closing_model(load(small)) as model, torch.no_grad():
        want = model(IDS).logits
        with pytest.raises(OffloadError, match="packed model cannot be unwrapped"):
            offload.unwrap(model)
        for refused in (
            lambda: model.save_pretrained(tmp_path / "saved"),
            model.half,
            lambda: model.load_state_dict(model.state_dict()),
            model.get_input_embeddings().weight.sum,
        ):
            with pytest.raises(OffloadError) as error:
                refused()
            says = str(error.value)
            assert "checkpoint" in says
            assert "offload.unwrap" not in says or "packed model: load the checkpoint" in says
        assert torch.equal(model(IDS).logits, want)


def test_packed_weights_are_not_moved_and_not_compiled(tmp_path: Path) -> None:
    """Bytes have no dtype: the model's is that of what it computes in. torch's compiler would trace
    another compiler's kernels, to no end."""
    from torch._dynamo.testing import CompileCounter

    _, small = packed("qwen3_moe", tmp_path, "q4")
    torch._dynamo.reset()
    counter = CompileCounter()
    with closing_model(load(small)) as model, torch.no_grad():
        want = model(IDS).logits
        for module in (model, model.model, model.model.layers[0]):
            with pytest.raises(OffloadError, match=r"stays on cpu and in torch\.float32"):
                module.half()
            assert module.float() is module
        compiled = torch.compile(model, backend=counter)
        assert torch.equal(compiled(IDS).logits, want)
        told = compiled.generate(IDS, max_new_tokens=4, do_sample=False)
        assert torch.equal(told, model.generate(IDS, max_new_tokens=4, do_sample=False))
    assert counter.frame_count == 0


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_packed_weights_are_not_traced(tmp_path: Path) -> None:
    """A trace had no kernels in it: what came out was what lay in the result's memory."""
    _, pack_dir = packed("llama", tmp_path, "q8")
    with closing_model(load(pack_dir)) as model, torch.no_grad():
        with pytest.raises(OffloadError, match="cannot be traced or exported"):
            torch.jit.trace(model.model.layers[0].mlp, torch.randn(1, 3, 64), check_trace=False)
        assert torch.isfinite(model(IDS).logits).all()


@contextmanager
def closing_model(model: Any) -> Iterator[Any]:
    try:
        yield model
    finally:
        model.offload.close()


@pytest.mark.parametrize(
    ("options", "says"),
    [({"dtype": "bfloat16"}, "float32"), ({"gpu": "1GiB", "device": "cpu"}, "contradict")],
)
def test_options_that_cannot_take_effect(
    options: dict[str, Any], says: str, tmp_path: Path
) -> None:
    _, pack_dir = packed("llama", tmp_path, "q8")
    with pytest.raises(OffloadError, match=says):
        offload.load(pack_dir, ram="1GiB", **options)


def test_quant_packs_once_into_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    directory, pack_dir = packed("qwen3_moe", tmp_path, "q8")
    tokens = []
    for path, quant in ((directory, "q8"), (directory, "q8"), (pack_dir, None)):
        model = offload.load(path, quant=quant, ram="1GiB", context=32)
        try:
            tokens.append(model.generate(IDS, max_new_tokens=4, do_sample=False, pad_token_id=0))
        finally:
            model.offload.close()
    assert torch.equal(tokens[0], tokens[1])
    assert torch.equal(tokens[0], tokens[2])
    assert len(list((tmp_path / "cache" / "offload" / "packs").iterdir())) == 1
    with pytest.raises(OffloadError, match="packed as q8 already"):
        offload.load(pack_dir, quant="q4")


def test_a_flipped_byte_is_named(tmp_path: Path) -> None:
    _, pack_dir = packed("qwen3_moe", tmp_path, "q8")
    bundle = pack_dir / "bundle-00001.bin"
    data = bytearray(bundle.read_bytes())
    opened, _ = open_pack(pack_dir)
    group = next(iter(opened.experts.values()))
    block = next(b for b in opened.manifest.blocks if b.name == group.blocks[0])
    data[block.offset + 100] ^= 1
    bundle.write_bytes(data)
    with pytest.raises(OffloadError, match="damaged"):
        load(pack_dir)
    assert bundle.stat().st_size == len(data)


def test_opening_does_not_teach_another_order(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The head runs twice before the first token: to see that a token may go without the model's
    own forward. Weights are read ahead in the planned order all the same."""
    _, pack_dir = packed("llama", tmp_path, "q4")
    with caplog.at_level("INFO"):
        model = load(pack_dir, least(pack_dir))
        try:
            plan, streams = model.offload.plan, model.offload.executor._residency._streams
            assert len(plan.trace) > 2
            for _ in range(2):
                assert [s.unit for s in streams.trace.steps] == [s.unit for s in plan.trace]
                model.generate(IDS, max_new_tokens=4, do_sample=False, pad_token_id=0)
        finally:
            model.offload.close()
    assert "single tokens go through the model's own forward" not in caplog.text
    assert "the order of use changed" not in caplog.text
