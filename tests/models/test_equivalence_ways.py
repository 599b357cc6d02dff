"""The same bits in every way a model can be used: sampled, searched, batched, assisted, cast.

Each way runs on the smallest budget, on the CPU and on the simulated accelerator, and is compared
with unmodified transformers doing the same.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from equivalence import (
    Golden,
    budgets,
    check_logits,
    golden,
    greedy,
    opened,
    options,
    prompt,
    reference,
)
from families import tiny_config, write

from offload.blocks import Tier
from offload.models.load import prepare

pytestmark = pytest.mark.usefixtures("cut_small")

Checkpoint = Callable[..., Golden]


@pytest.fixture(params=["cpu", "sim"])
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def smallest(directory: Path, device: str, **kwargs: Any) -> Any:
    """Prepared with as little memory as possible; surely something streams."""
    least = budgets(directory, device, **kwargs)["minimum"]
    prepared = prepare(directory, options(device, **{**kwargs, **least}))
    assert prepared.plan.streamed_bytes_per_pass > 0
    return prepared


def _left_padded(model: Any) -> Any:
    ids_BL = prompt(rows=3)
    mask_BL = torch.ones_like(ids_BL)
    for row, pad in enumerate((0, 3, 6)):
        ids_BL[row, :pad] = 0
        mask_BL[row, :pad] = 0
    return greedy(model, ids_BL, attention_mask=mask_BL)


def _sampled(model: Any) -> Any:
    torch.manual_seed(7)
    return greedy(model, prompt(rows=2), do_sample=True, top_k=20, temperature=1.3)


WAYS: dict[str, Callable[[Any], Any]] = {
    "sampled": _sampled,
    "beams": lambda m: greedy(m, prompt(), num_beams=3, num_return_sequences=2),
    "left-padded": _left_padded,
    "prompt-lookup": lambda m: greedy(
        m, prompt(length=3).repeat(1, 4), prompt_lookup_num_tokens=3, max_new_tokens=8
    ),
    "chunked-prefill": lambda m: greedy(m, prompt(length=13), prefill_chunk_size=4),
    "no-cache": lambda m: greedy(m, prompt(), use_cache=False),
    "static-cache": lambda m: greedy(m, prompt(), cache_implementation="static"),
}


def _generations() -> list[Any]:
    """(family, way, device): every way with every family and on both devices, but not all of them
    together: the other half is for the sweep."""
    return [
        pytest.param(family, way, device, marks=[pytest.mark.sweep] * ((i + j + k) % 2))
        for i, family in enumerate(["qwen3", "gpt_oss", "qwen3_moe"])
        for j, way in enumerate(WAYS)
        for k, device in enumerate(["cpu", "sim"])
    ]


@pytest.mark.parametrize(("family", "way", "device"), _generations())
def test_generation(checkpoint: Checkpoint, family: str, way: str, device: str) -> None:
    directory = checkpoint(family).directory
    want = WAYS[way](reference(directory, torch.bfloat16))
    with opened(smallest(directory, device, batch=3)) as model:
        got = WAYS[way](model)
    assert torch.equal(got.sequences, want.sequences)
    assert len(got.logits) == len(want.logits)
    assert all(torch.equal(g, w) for g, w in zip(got.logits, want.logits, strict=True))


def test_assisted_decoding_with_a_resident_draft(checkpoint: Checkpoint, device: str) -> None:
    directory = checkpoint("qwen3_moe").directory
    draft = reference(checkpoint("qwen3").directory, torch.bfloat16)
    want = greedy(reference(directory, torch.bfloat16), prompt(), assistant_model=draft)
    with opened(smallest(directory, device)) as model:
        got = greedy(model, prompt(), assistant_model=draft)
    assert torch.equal(got.sequences, want.sequences)
    assert all(torch.equal(g, w) for g, w in zip(got.logits, want.logits, strict=True))


def test_a_streamed_draft_helps_a_streamed_model(checkpoint: Checkpoint) -> None:
    """Two executors in one process do not disturb each other."""
    want = checkpoint("qwen3_moe")
    with (
        opened(smallest(checkpoint("qwen3").directory, "sim")) as draft,
        opened(smallest(want.directory, "sim")) as model,
    ):
        got = greedy(model, want.ids_BL, assistant_model=draft)
    assert torch.equal(got.sequences, want.sequences)


def test_a_streamer_gets_every_token_in_order(checkpoint: Checkpoint, device: str) -> None:
    from transformers.generation.streamers import BaseStreamer

    class Collect(BaseStreamer):
        def __init__(self) -> None:
            self.tokens: list[int] = []
            self.ended = 0

        def put(self, value: torch.Tensor) -> None:
            self.tokens += value.flatten().tolist()

        def end(self) -> None:
            self.ended += 1

    want = checkpoint("olmoe")
    assert want.sequences is not None
    collect = Collect()
    with opened(smallest(want.directory, device)) as model:
        greedy(model, want.ids_BL, streamer=collect)
    assert collect.tokens == want.sequences[0].tolist()
    assert collect.ended == 1


@pytest.mark.sampled(2)
@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "gpt2", "mamba"])
def test_float32(checkpoint: Checkpoint, family: str, device: str) -> None:
    want = checkpoint(family, torch.float32)
    with opened(smallest(want.directory, device)) as model:
        check_logits(model, want)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "gpt_oss", "phi3"])
@pytest.mark.parametrize(
    ("stored", "computed"),
    [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)],
    ids=["fp32-as-bf16", "bf16-as-fp32"],
)
def test_cast(
    checkpoint: Checkpoint,
    tmp_path: Path,
    family: str,
    stored: torch.dtype,
    computed: torch.dtype,
    device: str,
) -> None:
    """What is not the file's own bytes is converted once, to a private pack without a name."""
    want = checkpoint(family, stored, load_dtype=computed)
    prepared = smallest(want.directory, device, dtype=computed, disk=tmp_path)
    assert prepared.recipes.convert
    with opened(prepared) as model:
        check_logits(model, want)
        assert list(tmp_path.iterdir()) == [], "the pack has a name"


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_sharded_checkpoint(checkpoint: Checkpoint, family: str, device: str) -> None:
    want = checkpoint(family, max_shard_size="40KB")
    assert len(list(want.directory.glob("*.safetensors"))) > 3
    with opened(smallest(want.directory, device)) as model:
        check_logits(model, want)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", ["qwen3", "gemma2", "opt"])
def test_big_vocabulary(checkpoint: Checkpoint, family: str, tied: bool, device: str) -> None:
    """The head is sliced and the embedding read by row, tied or not."""
    want = checkpoint(family, overrides={"vocab_size": 1500, "tie_word_embeddings": tied})
    prepared = smallest(want.directory, device)
    assert prepared.cut.embedding is not None
    assert prepared.cut.head is not None
    assert len(prepared.cut.head.blocks) > 8
    with opened(prepared) as model:
        check_logits(model, want)
        assert model.offload.stats()["disk_read_bytes"] > 0
        assert model.offload.executor.stats.row_reads > 0


@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        ("llama", torch.bfloat16),
        ("qwen3_moe", torch.float16),
        ("qwen3_moe", torch.float32),
        pytest.param("llama", torch.float32, marks=pytest.mark.sweep),
        pytest.param("llama", torch.float16, marks=pytest.mark.sweep),
        pytest.param("qwen3_moe", torch.bfloat16, marks=pytest.mark.sweep),
    ],
)
def test_large_tensors_are_read_without_a_copy(
    checkpoint: Checkpoint, family: str, dtype: torch.dtype, device: str
) -> None:
    """They lie at any multiple of 8 bytes, as in the file, and give the resident model's bits."""
    sizes = {"hidden_size": 136, "intermediate_size": 376, "moe_intermediate_size": 264}
    if family == "llama":
        del sizes["moe_intermediate_size"]
    want = checkpoint(family, dtype, overrides=sizes)
    prepared = smallest(want.directory, device)
    phases = {t.offset % 64 for s in prepared.cut.blocks.values() for t in s.tensors}
    assert len(phases) > 1
    with opened(prepared) as model:
        check_logits(model, want)
        stats = model.offload.executor.stats
        if dtype != torch.float32 or family == "llama":
            # Only pages that tensors share, and vectors.
            assert 0 < stats.copied_bytes < stats.payload_read_bytes / 2
        assert stats.payload_read_bytes > 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_what_is_pinned_lies_on_cache_lines(
    checkpoint: Checkpoint, family: str, dtype: torch.dtype
) -> None:
    """It is read once, so a copy is cheap, and then multiplied with for every token."""
    want = checkpoint(family, dtype, overrides={"hidden_size": 136})
    prepared = prepare(want.directory, options("cpu"))
    plan, recipes = prepared.plan, prepared.recipes
    assert set(plan.tiers[Tier.RAM].pinned) == set(plan.blocks) == set(recipes.direct)
    for block, (spec, pieces) in recipes.direct.items():
        assert spec is plan.blocks[block] is prepared.cut.blocks[block]
        if dtype is torch.float32 and family == "llama":
            # Whose sums depend on where transformers' mapped file has it.
            starts = {p.dst: p.src for p in pieces}
            assert all((starts[t.offset] - t.offset) % 64 == 0 for t in spec.tensors)
    assert any(p.src % 64 for _, pieces in recipes.direct.values() for p in pieces)
    with opened(prepared) as model:
        if dtype is torch.bfloat16:
            for block in plan.blocks:
                for view in model.offload.executor.views(block).values():
                    assert view.data_ptr() % 64 == 0
        check_logits(model, want)


@pytest.mark.parametrize("family", ["qwen2", "gpt2", "phi", "starcoder2"])
def test_biases(checkpoint: Checkpoint, family: str, device: str) -> None:
    want = checkpoint(family)
    with opened(smallest(want.directory, device)) as model:
        assert any(name.endswith("bias") for name, _ in model.named_parameters())
        check_logits(model, want)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("seed", range(12))
def test_interleavings(checkpoint: Checkpoint, seed: int) -> None:
    """Copies take other times at every seed; the results and the order of uses hold."""
    want = checkpoint("qwen3_moe" if seed % 2 else "llama")
    with opened(smallest(want.directory, "sim", seed=seed)) as model:
        check_logits(model, want)


def test_two_prompts_after_each_other(checkpoint: Checkpoint, device: str) -> None:
    """Nothing of the first run is left in the second."""
    want = checkpoint("gpt_oss")
    with opened(smallest(want.directory, device)) as model:
        greedy(model, prompt(length=17, seed=5))
        check_logits(model, want)
        check_logits(model, want)


@pytest.mark.parametrize("family", ["lara_mini", "sarvam_moe"])
def test_float32_weights_that_transformers_cuts_from_fused_ones(
    checkpoint: Checkpoint, family: str
) -> None:
    """A projection that is a view of a fused one starts where the file has its part of that."""
    from transformers import CONFIG_MAPPING

    if family not in CONFIG_MAPPING:
        pytest.skip(f"this transformers has no {family}")
    want = checkpoint(family, torch.float32)
    with opened(prepare(want.directory, options("cpu"))) as model:
        check_logits(model, want)


@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "mamba"])
def test_wrap_and_unwrap_of_a_mapped_float32_model(checkpoint: Checkpoint, family: str) -> None:
    """In float32 the bits depend on where a tensor starts within 16 bytes, and what transformers
    loads starts wherever the file has it."""
    import offload

    want = checkpoint(family, torch.float32)
    model = reference(want.directory, torch.float32)
    phases = {n: p.data_ptr() % 64 for n, p in model.named_parameters()}
    offload.wrap(model, ram="400KiB")
    assert model.offload.plan.streamed_bytes_per_pass > 0
    check_logits(model, want)
    offload.unwrap(model)
    assert {n: p.data_ptr() % 64 for n, p in model.named_parameters()} == phases
    check_logits(model, want)


# -- other kinds of models ------------------------------------------------------------------


def _written(tmp_path: Path, family: str, auto: Any, **overrides: Any) -> Path:
    config = tiny_config(family, **overrides)
    return write(family, tmp_path / family, config=config, auto=auto)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("family", ["bert", "albert", "roberta", "distilbert", "modernbert"])
def test_encoder(tmp_path: Path, family: str, device: str) -> None:
    """Albert's layers share their parameters: 8 layers, 4 sets of weights."""
    from transformers import AutoModel

    shared = {"num_hidden_layers": 8, "num_hidden_groups": 4} if family == "albert" else {}
    directory = _written(tmp_path, family, AutoModel, **shared)
    want = reference(directory, torch.bfloat16)
    ids_BL = prompt(rows=2)
    with torch.no_grad():
        want_BLD = want(ids_BL).last_hidden_state
        with opened(smallest(directory, device, batch=2)) as model:
            for _ in range(2):
                assert torch.equal(model(ids_BL).last_hidden_state, want_BLD)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("family", ["t5", "bart", "mbart", "marian"])
def test_encoder_decoder(tmp_path: Path, family: str, device: str) -> None:
    """An encoder that runs once and a decoder that goes round alone."""
    from transformers import AutoModelForSeq2SeqLM

    directory = _written(tmp_path, family, AutoModelForSeq2SeqLM, decoder_start_token_id=0)
    want = greedy(reference(directory, torch.bfloat16), prompt(), max_new_tokens=8)
    with opened(smallest(directory, device)) as model:
        for _ in range(2):
            got = greedy(model, prompt(), max_new_tokens=8)
            assert torch.equal(got.sequences, want.sequences)
            assert all(torch.equal(g, w) for g, w in zip(got.logits, want.logits, strict=True))


@pytest.mark.parametrize("family", ["vit", "dinov2", "convnext", "clip_vision_model"])
def test_vision(tmp_path: Path, family: str, device: str) -> None:
    from transformers import AutoModel

    sizes = (
        {"image_size": 32, "patch_size": 8}
        if family != "convnext"
        else {"hidden_sizes": [16, 32, 64, 64], "depths": [1, 1, 2, 1]}
    )
    directory = _written(tmp_path, family, AutoModel, **sizes)
    generator = torch.Generator().manual_seed(3)
    pixels_BCHW = torch.randn((2, 3, 32, 32), generator=generator).to(torch.bfloat16)
    want = reference(directory, torch.bfloat16)
    with torch.no_grad():
        want_BLD = want(pixels_BCHW).last_hidden_state
        with opened(smallest(directory, device, batch=2)) as model:
            assert torch.equal(model(pixels_BCHW).last_hidden_state, want_BLD)


# -- tied weights ---------------------------------------------------------------------------


def test_tied_in_the_config_but_not_in_the_file(tmp_path: Path, device: str) -> None:
    """transformers keeps both when both are there and differ; so must we."""
    from safetensors.torch import load_file, save_file

    directory = write("qwen3", tmp_path, config=tiny_config("qwen3", tie_word_embeddings=True))
    file = directory / "model.safetensors"
    tensors = load_file(file)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].flip(0).contiguous()
    save_file(tensors, file, metadata={"format": "pt"})
    want = golden(directory)
    for budget in ("all", "half", "minimum"):
        found = budgets(directory, device)[budget]
        with opened(prepare(directory, options(device, **found))) as model:
            check_logits(model, want)


def test_tied_and_only_under_the_other_name(tmp_path: Path, device: str) -> None:
    """A checkpoint that has the head's name for the weight that both share."""
    from safetensors.torch import load_file, save_file

    directory = write("qwen3", tmp_path, config=tiny_config("qwen3", tie_word_embeddings=True))
    file = directory / "model.safetensors"
    tensors = load_file(file)
    tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")
    save_file(tensors, file, metadata={"format": "pt"})
    want = golden(directory)
    with opened(smallest(directory, device)) as model:
        check_logits(model, want)


def test_minimum_is_the_minimum(checkpoint: Checkpoint, device: str) -> None:
    """One page less and the plan says so, in bytes."""
    from offload.errors import PlanError

    directory = checkpoint("llama").directory
    least = budgets(directory, device)["minimum"]
    top = Tier.DEVICE if device == "sim" else Tier.RAM
    name = "gpu" if device == "sim" else "ram"
    exact = prepare(directory, options(device, **least)).minimum[top]
    with opened(prepare(directory, options(device, **{**least, name: exact}))):
        pass
    with pytest.raises(PlanError, match="bytes"):
        prepare(directory, options(device, **{**least, name: exact - 4096}))
