"""``--kv bf16`` of a pack whose layers the decode kernels compute: theirs to keep, in bfloat16."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import offload
from offload.errors import OffloadError
from offload.models.lean_cache import LeanCache
from offload.models.pack_open import open_source
from offload.models.pack_run import pack

TINY = Path(__file__).parents[2] / "examples" / "tiny_moe"
CONTEXT, NEW = 160, 8
IDS = torch.randint(3, 2000, (1, 100), generator=torch.Generator().manual_seed(4))


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("lean") / "packed"
    with contextlib.closing(open_source(TINY)) as source:
        pack(source, found, quant="q8")
    return found


@contextmanager
def loaded(path: Path, **more: Any) -> Iterator[Any]:
    model = offload.load(path, **{"ram": "200MiB", "context": CONTEXT, **more})
    try:
        yield model
    finally:
        model.offload.close()


def generate(model: Any, ids: torch.Tensor = IDS, **how: Any) -> Any:
    return model.generate(
        ids, max_new_tokens=NEW, return_dict_in_generate=True, output_logits=True,
        **{"do_sample": False, "eos_token_id": None, "pad_token_id": 0, **how},
    )  # fmt: skip


def test_rounded_and_close(packed: Path) -> None:
    with loaded(packed) as model:
        want = generate(model)
        full = model.offload.new_cache()
    with loaded(packed, kv="bf16") as model:
        got = generate(model)
        cache = model.offload.new_cache()
        assert isinstance(cache, LeanCache)
        assert cache.store.nbytes * 2 == full.store.nbytes
        assert any("bfloat16, which is lossy" in n for n in model.offload.notes)
        with torch.no_grad():
            model(IDS, past_key_values=cache)
        for bad in (torch.ones(1, 1, 2, full.store.dim), torch.ones(1, full.store.heads, 2, 1)):
            with pytest.raises(OffloadError, match="must be"):
                cache.layers[0].extend(bad, bad)
        keys, values = cache.layers[0].stored(0, IDS.shape[1])
        assert cache.get_seq_length() == IDS.shape[1]
        assert keys.dtype == values.dtype == torch.bfloat16
        again = generate(model)
        assert torch.equal(again.sequences, got.sequences)
    scale = max(float(logits.abs().max()) for logits in want.logits)
    worst = max(
        float((a - b).abs().max())
        for a, b, same in zip(
            got.logits, want.logits, (got.sequences == want.sequences)[0, 100:], strict=True
        )
        if same
    )
    assert 0 < worst < 0.02 * scale


def test_what_it_is_not_for(packed: Path) -> None:
    mask = torch.ones_like(IDS)
    mask[0, :3] = 0
    with loaded(packed, kv="bf16") as model:
        for how in ({"num_beams": 2}, {"attention_mask": mask}):
            with pytest.raises(OffloadError, match="attention='offload'"):
                generate(model, **how)
        with pytest.raises(OffloadError, match="up to 160 tokens"):
            generate(model, IDS.repeat(1, 2))
    for more in ({"attention": "offload"}, {"kv_ram": "2MiB"}, {"kv_keep": 96}, {"batch": 2}):
        with loaded(packed, kv="bf16", **more) as model:
            assert not isinstance(model.offload.new_cache(), LeanCache), more
