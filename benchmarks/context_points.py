"""One point of ``context.py`` in a process of its own, so that its memory is its own, too.

    python benchmarks/context_points.py KIND JSON   (context.py calls it; prints a JSON object)

The context of a speed point is written, not computed: random keys and values through the cache's
own road into blocks (``extend``), which spills them as a prompt's would be. What a token costs does
not depend on their values. ``check`` and ``prompt`` read true prompts.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

FILL_TOKENS = 2048
"""Written at a time."""


def random_ids(count: int, vocabulary: int) -> list[int]:
    """The same in every run."""
    import torch

    draw = torch.Generator().manual_seed(0)
    return [int(i) for i in torch.randint(3, vocabulary, (count,), generator=draw)]


def noise(config: Any, dtype: Any) -> list[tuple[Any, Any]]:
    """Some pairs of keys and values ``[1, H, FILL_TOKENS, D]`` to write in turn."""
    import torch

    draw = torch.Generator().manual_seed(0)
    heads = config.num_key_value_heads
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    shape = (1, heads, FILL_TOKENS, dim)

    def one() -> Any:
        return torch.randn(shape, generator=draw).to(dtype)

    return [(one(), one()) for _ in range(4)]


def fill(config: Any, tokens: int, dtype: Any, extend: Callable[[int, Any, Any], None]) -> None:
    """Give every layer ``tokens`` random tokens, layer by layer as a prompt in one pass does."""
    pairs = noise(config, dtype)
    for layer in range(config.num_hidden_layers):
        for i, start in enumerate(range(0, tokens, FILL_TOKENS)):
            count = min(FILL_TOKENS, tokens - start)
            keys, values = pairs[(i + layer) % len(pairs)]
            extend(layer, keys[:, :, :count], values[:, :, :count])


def decode(model: Any, cache: Any, args: dict[str, Any], counters: Callable[[], Any]) -> Any:
    """Seconds and resident bytes of each token behind the context; counters before and after."""
    import torch

    from offload.runtime.rss import current_rss

    ids, took, rss = torch.tensor([[7]]), [], []
    with torch.no_grad():
        for step in range(args["warm"] + args["steps"]):
            if step == args["warm"]:
                before = counters()
            began = time.perf_counter()
            logits = model(input_ids=ids, past_key_values=cache, logits_to_keep=1).logits
            ids = logits[:, -1:].argmax(-1)
            took.append(time.perf_counter() - began)
            rss.append(current_rss())
    return took[args["warm"] :], rss[args["warm"] :], before, counters()


def ours(args: dict[str, Any]) -> dict[str, Any]:
    """This runtime within its budget."""
    import torch

    import offload

    tokens, steps = args["context"], args["warm"] + args["steps"]
    model = offload.load(
        args["model"], ram=args["ram"], kv=args["kv"], kv_ram=args["kv_ram"], context=tokens,
        prompt_tokens=64, disk=args["disk"], **args["options"],
    )  # fmt: skip
    try:
        cache = model.offload.new_cache()
        began = time.perf_counter()
        fill(
            model.config, tokens - steps, torch.float32,
            lambda layer, k, v: cache.layers[layer].extend(k, v),
        )  # fmt: skip
        fill_s = time.perf_counter() - began
        took, rss, before, after = decode(model, cache, args, model.offload.stats)
        plan = model.offload.plan
        return {
            "step_s": took,
            "rss_bytes": rss,
            "peak_above_process_bytes": after["peak_rss_bytes"] - after["baseline_rss_bytes"],
            "baseline_rss_bytes": after["baseline_rss_bytes"],
            "fill_s": fill_s,
            "cache": type(cache).__name__,
            **of_blocks(before["kv"], after["kv"], args["steps"]),
            "weight_read_bytes": (after["disk_read_bytes"] - before["disk_read_bytes"])
            / args["steps"],
            "plan_bound_s": plan.bound_pass_s,
            "plan_predicted_s": plan.predicted_pass_s.mid if plan.predicted_pass_s else None,
        }
    finally:
        model.offload.close()


def of_blocks(before: Any, after: Any, steps: int) -> dict[str, Any]:
    """What is known of keys and values in blocks, per token; nothing of the decode kernels' own."""
    if after is None:
        return {"kv_read_bytes": 0.0}
    return {
        "kv_ram_bytes": after["ram_bytes"],
        "block_bytes": after["slot_bytes"],
        "blocks_in_ram": after["blocks_in_ram"],
        "blocks_on_disk": after["blocks_on_disk"],
        "kv_read_bytes": (after["read_bytes"] - before["read_bytes"]) / steps,
        "kv_stall_s": (after["stall_s"] - before["stall_s"]) / steps,
        "kv_late": (after["late"] - before["late"]) / steps,
    }


def resident_model(config_file: Path) -> Any:
    """transformers' own in bfloat16 with weights that are quickly made."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(config_file)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model = model.to_empty(device="cpu")
    some = torch.randn(1 << 20, generator=torch.Generator().manual_seed(0)).mul_(0.02)
    for parameter in model.parameters():
        flat = parameter.data.view(-1)
        for start in range(0, flat.numel(), some.numel()):
            part = flat[start : start + some.numel()]
            part.copy_(some[: part.numel()])
    rotary = model.model.rotary_emb
    rotary.inv_freq = type(rotary)(config=config).inv_freq
    model.tie_weights()
    return model.eval()


def dynamic(args: dict[str, Any]) -> dict[str, Any]:
    """transformers: ``DynamicCache`` and SDPA, everything in RAM."""
    from transformers import DynamicCache

    from offload.runtime.rss import current_rss

    import_rss = current_rss()
    model = resident_model(Path(args["model"]))
    cache, parts = DynamicCache(config=model.config), {}

    def extend(layer: int, keys: Any, values: Any) -> None:
        parts.setdefault(layer, []).append((keys, values))

    import torch

    tokens = args["context"] - args["warm"] - args["steps"]
    fill(model.config, tokens, model.dtype, extend)
    for layer, pairs in parts.items():
        cache.update(
            torch.cat([k for k, _ in pairs], 2), torch.cat([v for _, v in pairs], 2), layer
        )
    took, rss, _, _ = decode(model, cache, args, dict)
    return {"step_s": took, "rss_bytes": [n - import_rss for n in rss]}


def check(args: dict[str, Any]) -> dict[str, Any]:
    """A true prompt: the same tokens from blocks, most of them on disk, as from ``DynamicCache``;
    and with our attention the same bits wherever the blocks are."""
    import torch
    from transformers import DynamicCache

    import offload

    found: dict[str, Any] = {}
    ways = {
        "dynamic": {"attention": "exact"},
        "blocks": {"attention": "exact", "kv_ram": args["kv_ram"]},
        "in place": {"attention": "offload", "kv_ram": args["kv_ram"]},
        "in place, in RAM": {"attention": "offload"},
    }
    for name, how in ways.items():
        model = offload.load(
            args["model"], ram=args["ram"], prompt_tokens=args["chunk"],
            context=args["context"] + args["steps"], disk=args["disk"], **how,
        )  # fmt: skip
        try:
            ids = torch.tensor([random_ids(args["context"], model.config.vocab_size)])
            own = DynamicCache(config=model.config) if name == "dynamic" else None
            out = model.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=False, eos_token_id=None,
                max_new_tokens=args["steps"], prefill_chunk_size=args["chunk"],
                past_key_values=own or model.offload.new_cache(), output_logits=True,
                return_dict_in_generate=True,
            )  # fmt: skip
            kv = model.offload.stats()["kv"] if own is None else None
            found[name] = {
                "tokens": out.sequences[0, args["context"] :].tolist(),
                "logits": torch.cat(out.logits),
                "kv_read_bytes": kv["read_bytes"] if kv else 0,
            }
        finally:
            model.offload.close()
    first, here, there = (found[n]["logits"] for n in ("dynamic", "in place", "in place, in RAM"))
    return {
        "context": args["context"],
        "kv_read_bytes": found["blocks"]["kv_read_bytes"],
        "blocks_equal_dynamic": torch.equal(first, found["blocks"]["logits"]),
        "in_place_equal_anywhere": torch.equal(here, there),
        "in_place_tokens_equal_dynamic": found["in place"]["tokens"] == found["dynamic"]["tokens"],
        "in_place_largest_logit_difference": float((first - here).abs().max()),
        "largest_logit": float(first.abs().max()),
    }


def main() -> None:
    kind, args = sys.argv[1], json.loads(sys.argv[2])
    import torch

    torch.set_num_threads(args["threads"])
    with tempfile.TemporaryDirectory(dir=args["disk"]) as folder:
        args["folder"] = folder
        print(json.dumps({"ours": ours, "dynamic": dynamic, "check": check}[kind](args)))


if __name__ == "__main__":
    main()
