"""``kernels="fast"``: what is compared, against what, and that nothing is left behind."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import offload
from offload.cpu_ops import entries
from offload.errors import OffloadError
from offload.io.routing_file import RoutingReader
from offload.models import fast_check
from offload.models.choose import model_directory
from offload.models.load import prepare
from offload.models.options import Options

TINY = Path(__file__).parents[2] / "examples" / "tiny_moe"
IDS = torch.arange(7, 19)[None]


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "packs"))


@pytest.fixture
def fast() -> Any:
    model = offload.load(TINY, kernels="fast", ram="256MiB", context=64)
    yield model
    model.offload.close()


def test_the_error_is_measured_and_small(fast: Any, caplog: pytest.LogCaptureFixture) -> None:
    found = fast.offload.kernel_error
    assert 0 < found.error < 1e-4  # float32 sums in another order
    assert 1e-4 < found.exact_error < 0.05  # bfloat16 is what it is
    assert found.difference < 0.05
    assert (found.tokens, found.same_choice, found.dtype) == (4, 4, "bfloat16")
    with torch.no_grad():
        again = fast.generate(IDS, max_new_tokens=4, do_sample=False)
    assert again.shape == (1, 16)


def test_what_it_is_compared_with_is_the_reference(fast: Any, tmp_path: Path) -> None:
    options = Options(ram=2**28, context=64, kernels="fast")
    prepared = prepare(model_directory(TINY, kernels="fast"), options)
    model = prepared.open()
    before = {name: p.dtype for name, p in model.named_parameters()}
    reference = AutoModelForCausalLM.from_pretrained(
        TINY, dtype=torch.bfloat16, experts_implementation="eager"
    ).eval()
    with torch.no_grad():
        want = reference(IDS).logits.float()
        with fast_check._torch_products(prepared, torch.bfloat16):
            got = model(IDS, use_cache=False).logits.float()
        ours = model(IDS, use_cache=False).logits.float()
    model.offload.close()
    scale = want.abs().max()
    assert (got - want).abs().max() <= 2e-3 * scale  # the loop over experts splits gate and up
    assert (ours - want).abs().max() > (got - want).abs().max()
    assert {name: p.dtype for name, p in model.named_parameters()} == before


def test_a_wrong_kernel_is_found_out(fast: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    real = fast_check._ours

    def wrong(*args: Any) -> torch.Tensor:
        return 1.5 * real(*args)

    monkeypatch.setattr(fast_check, "_ours", wrong)
    bad = offload.load(TINY, kernels="fast", ram="256MiB", context=64)
    bad.offload.close()
    assert bad.offload.kernel_error.error == pytest.approx(0.5, abs=0.01)


def test_the_check_is_not_recorded(tmp_path: Path) -> None:
    target = tmp_path / "routing"
    model = offload.load(TINY, kernels="fast", ram="256MiB", context=64, record_routing=target)
    assert model.offload.kernel_error is not None
    with torch.no_grad():
        model(IDS, use_cache=False)
    model.offload.close()
    tokens = [(record.layer, record.tokens) for record in RoutingReader(target)]
    assert tokens == [(layer, IDS.shape[1]) for layer in range(len(tokens))]


def test_only_the_kernels_that_were_named_are_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """All that a model runs on is ready before its first token."""
    options = Options(ram=2**28, context=64, kernels="fast")
    prepared = prepare(model_directory(TINY, kernels="fast"), options)

    def late(_body: Any, what: str) -> Any:
        raise AssertionError(f"{what} was not named ahead")

    monkeypatch.setattr(entries, "_compile", late)
    model = prepared.open()
    with torch.no_grad():
        model.generate(torch.arange(60)[None], max_new_tokens=3, do_sample=False)
    model.offload.close()


def test_fast_with_quantised_weights_says_nothing(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "offload.models.fast_check"):
        model = offload.load(TINY, kernels="fast", quant="q8", ram="256MiB", context=64)
    model.offload.close()
    assert model.offload.kernel_error is None
    assert not [r for r in caplog.records if r.name == "offload.models.fast_check"]


def test_what_cannot_take_effect() -> None:
    with pytest.raises(OffloadError, match="exact cannot take effect: quant q8"):
        offload.load(TINY, kernels="exact", quant="q8")
    with pytest.raises(OffloadError, match="not one of exact, fast"):
        offload.load(TINY, kernels="slow")
    packed = model_directory(TINY, kernels="fast")
    with pytest.raises(OffloadError, match="is packed"):
        model_directory(packed, kernels="exact")
    assert model_directory(packed, kernels="fast") == packed
    assert model_directory(TINY, kernels="exact") == TINY
    with pytest.raises(OffloadError, match="not packed"):
        prepare(TINY, Options(kernels="fast"))


def odd_heads(target: Path) -> Path:
    """A checkpoint whose heads and rows are no multiples of what kernels work in."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=99, hidden_size=72, intermediate_size=64, num_hidden_layers=2, head_dim=24,
        num_attention_heads=3, num_key_value_heads=1, max_position_embeddings=64,
        tie_word_embeddings=False,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(target)
    return target


def test_heads_that_our_attention_cannot_take(tmp_path: Path) -> None:
    """Nobody asked for it: fast kernels then leave attention to the model."""
    directory = odd_heads(tmp_path / "odd")
    model = offload.load(directory, kernels="fast", ram="256MiB", context=48)
    assert model.offload.kernel_error.error < 1e-4
    model.offload.close()
    with pytest.raises(OffloadError, match=r"multiples of 16 .* not 24.*without kv, kv_keep"):
        offload.load(directory, kernels="fast", attention="offload", ram="256MiB", context=48)


def test_weights_that_stay_as_they_are_are_named(tmp_path: Path) -> None:
    """Asked for 4 bits, and rows of 72 columns are no whole blocks of 32: never silently."""
    directory = model_directory(odd_heads(tmp_path / "odd"), "q4")
    notes = prepare(directory, Options(ram=2**28, context=48)).notes
    (note,) = [n for n in notes if "source precision" in n]
    assert note.endswith("72 columns are not a multiple of 32")
    whole = prepare(model_directory(TINY, "q4"), Options(ram=2**28, context=48)).notes
    assert not [n for n in whole if "source precision" in n]
