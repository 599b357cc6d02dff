"""``--kv q8|q4`` of a pack whose layers the decode kernels compute."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
from test_lean_bf16 import generate, loaded, packed

from offload.batch.conductor import Conductor
from offload.cli.chat_cache import KeptCache
from offload.cpu_ops.block_layout import PART
from offload.models.lean_cache import LeanCache

__all__ = ["packed"]

CONTEXT = 3 * PART
IDS = torch.randint(3, 2000, (1, 2 * PART + 30), generator=torch.Generator().manual_seed(4))
FAR = {"q8": 0.03, "q4": 0.15}
"""By what part of the largest logit they may differ from those over float32."""


def test_near_what_is_not_rounded(packed: Path) -> None:
    with loaded(packed, context=CONTEXT) as model:
        want = generate(model, IDS)
        nbytes = model.offload.new_cache().store.nbytes
        reserved = model.offload.plan.reserves
        assert model.offload.stats()["kv"] is None
    scale = max(float(logits.abs().max()) for logits in want.logits)
    for kind, far in FAR.items():
        with loaded(packed, context=CONTEXT, kv=kind) as model:
            got = generate(model, IDS)
            assert model.offload.lean.program is not None
            cache = model.offload.new_cache()
            assert isinstance(cache, LeanCache)
            tails = nbytes * PART // CONTEXT
            assert cache.store.nbytes - tails < 0.3 * nbytes
            (tier,) = reserved
            kept = model.offload.plan.reserves[tier]["KV cache"]
            assert cache.store.nbytes <= kept < reserved[tier]["KV cache"]
            bits = {"q8": "8 bits", "q4": "4 bits"}[kind]
            assert any(f"{bits}, which is lossy" in n for n in model.offload.notes)
            figures = model.offload.stats()["kv"]
            assert figures["kind"] == kind
            assert 0 < figures["attention_error"] < 0.5
            # Passes of a long prompt, of drafts, and the model's own layers behind a hook.
            again = generate(model, IDS, prefill_chunk_size=100)
            drafted = generate(model, IDS, prompt_lookup_num_tokens=3)
            layer = model.base_model.layers[0].self_attn
            hook = layer.register_forward_hook(lambda *_: None)
            hooked = generate(model, IDS)
            hook.remove()
        for found in (got, again, drafted, hooked):
            off = float((found.logits[0] - want.logits[0]).abs().max())
            assert 0 < off < far * scale


def test_what_was_not_measured_is_not_said(packed: Path) -> None:
    """Of a prompt that fills no part nothing is rounded, and later nobody has the right ones."""
    with loaded(packed, context=CONTEXT, kv="q8") as model:
        generate(model, IDS[:, : PART - 2])
        assert model.offload.stats()["kv"]["attention_error"] is None
        generate(model, IDS[:, : PART + 2])
        assert model.offload.stats()["kv"]["attention_error"] > 0


def test_turns_and_sequences(packed: Path) -> None:
    """A conversation's cache is gone on with, and what runs together is what runs alone."""
    with loaded(packed, context=CONTEXT, kv="q8", sequences=2) as model:
        first = generate(model, IDS[:, : PART + 40])
        kept = KeptCache(model.offload.new_cache)
        ids = first.sequences
        for more in (IDS[:, -20:], IDS[:, -40:-20]):
            ids = torch.cat([ids, more], 1)
            cache = kept.begin(ids[0].tolist())
            ids = generate(model, ids, past_key_values=cache).sequences
            kept.end(ids[0, :-1].tolist())
            assert cache.get_seq_length() == ids.shape[1] - 1
        model.offload.release_cache(cache)
        work = [partial(generate, model, IDS[:, :n]) for n in (PART - 4, PART + 3)]
        want = [one() for one in work]
        with Conductor(model) as conductor:
            running = [conductor.start(one) for one in work]
            conductor.run()
        assert [s.error for s in running] == [None] * 2
        for got, right in zip((s.result for s in running), want, strict=True):
            assert torch.equal(got.sequences, right.sequences)
            assert all(map(torch.equal, got.logits, right.logits))


def test_what_it_is_not_for(packed: Path) -> None:
    for more in ({"attention": "offload"}, {"kv_ram": "2MiB"}, {"kv_keep": 96}, {"batch": 2}):
        with loaded(packed, kv="q8", **more) as model:
            assert not isinstance(model.offload.new_cache(), LeanCache), more
    long: dict[str, Any] = {"context": 2**14, "prompt_tokens": IDS.shape[1], "kv": "q8"}
    with loaded(packed, **long, ram="64MiB") as model:
        assert model.offload.kv is None
        want = generate(model, IDS)
    with loaded(packed, **long, ram="18MiB") as model:
        assert any("private file" in note for note in model.offload.notes)
        assert model.offload.kv is not None
        got = generate(model, IDS)
    assert torch.equal(got.sequences[:, : IDS.shape[1] + 1], want.sequences[:, : IDS.shape[1] + 1])
