"""What quantising costs on real text, and whether a GGUF says to us what it says to llama.cpp.

    python benchmarks/quality.py --llama-python VENV/bin/python

Text that ``examples/tiny_moe`` was never trained on, in windows of the length that it was trained
on: as a prompt (all tokens of a window at once) and, for some windows, token by token through
``generate`` as decoding does, each next token forced to be the text's. Against the checkpoint's own
weights in float32 (transformers): perplexity, mean KL divergence in nats per token, and how often
the most probable next token is the same.

GGUF files of the same weights are made by llama.cpp's quantiser and read by both (without
``--llama-python``: by the ``gguf`` package, and by us alone). A third reading, the file's exact
values in float32, tells what a runtime's own rounding adds, of activations above all.
"""

from __future__ import annotations

import argparse
import gc
import math
import os
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import tiny_gguf
from cache import MODEL, WINDOW, held_out_ids
from common import ROOT, facts, record, settings

Logits = npt.NDArray[np.float32]
Ids = npt.NDArray[np.int32]
END = 0

FILES: dict[str, tuple[int, int | None]] = {
    "F32": (0, None),
    "Q8_0": (7, None),
    "Q4_0": (2, None),
    "Q4_0, embedding Q8_0": (2, 8),
    "Q4_K_M": (15, None),
    "IQ4_NL": (25, None),
}
"""llama.cpp's number of a file type, and ggml's of the embedding's type if it is chosen."""
WITHOUT_PEER = {"F32": "F32", "Q8_0": "Q8_0", "Q4_0": "Q4_0"}
"""What the ``gguf`` package quantises to."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--llama-python", type=Path, help="an interpreter that has llama_cpp")
    parser.add_argument("--windows", type=int, default=160, help="of 192 tokens; 0: all there are")
    parser.add_argument("--decode", type=int, default=16, help="windows that are also decoded")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    import torch

    torch.set_num_threads(args.threads)
    ids, source = text(args.windows)
    version = peer_version(args)
    print(f"{len(ids)} windows of {source}; llama.cpp: {version}", flush=True)
    with tempfile.TemporaryDirectory(prefix="offload-quality-") as folder:
        os.environ["XDG_CACHE_HOME"] = folder  # packs are made anew, and not left behind
        work = Path(folder)
        reference = prompts(transformers_model(torch.float32), ids)
        result = {
            "benchmark": "quality",
            "facts": facts(),
            "settings": settings(args),
            "text": {"source": source, "windows": len(ids), "window": WINDOW},
            "llama_cpp": version,
            "reference": {"perplexity": perplexity(reference, ids)},
            "checkpoint": checkpoint_rows(args, ids, reference),
            "gguf": gguf_rows(args, ids, reference, work),
        }
    print(f"written to {record('quality', result, args.output)}")


def text(most: int) -> tuple[Ids, str]:
    """int32 [windows, WINDOW] and where they are from."""
    ids, source = held_out_ids(10**9)
    rows = np.array(ids[: len(ids) // WINDOW * WINDOW], np.int32).reshape(-1, WINDOW)
    return rows[: most or None], source


# Logits, float32 [windows, WINDOW, vocabulary]


def transformers_model(dtype: Any, values: dict[str, Any] | None = None) -> Any:
    """The resident model; with other values of its weights if they are given."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=dtype).eval()
    if values is not None:
        model.load_state_dict({k: torch.from_numpy(v.copy()) for k, v in values.items()})
    return model


def prompts(model: Any, ids: Ids) -> Logits:
    """Of whole windows, one at a time."""
    import torch

    out = np.empty((*ids.shape, model.config.vocab_size), np.float32)
    with torch.no_grad():
        for i, window in enumerate(ids):
            found = model(input_ids=torch.tensor(window[None], dtype=torch.int64), use_cache=False)
            out[i] = found.logits[0].float().numpy()
    return out


def decoded(model: Any, ids: Ids) -> Logits:
    """Of all tokens but the last, one at a time: ``generate`` made to say the text."""
    import torch

    out = []
    for window in torch.tensor(ids, dtype=torch.int64):
        found = model.generate(
            window[None, :1], attention_mask=torch.ones(1, 1, dtype=torch.int64),
            max_new_tokens=len(window) - 1, do_sample=False,
            logits_processor=[forcing(window)], output_logits=True, return_dict_in_generate=True,
        )  # fmt: skip
        out.append(torch.cat(found.logits).float().numpy())
    return np.stack(out)


def forcing(window: Any) -> Callable[[Any, Any], Any]:
    def process(ids: Any, scores: Any) -> Any:
        forced = scores.new_full(scores.shape, -math.inf)
        forced[:, window[ids.shape[1]]] = 0
        return forced

    return process


def ours(path: Path, quant: str | None, ids: Ids, decode: int) -> dict[str, Any]:
    """Logits of prompts and of decoding through the public interface, and bits per weight."""
    import offload
    from offload.models.choose import model_directory

    model = offload.load(path, quant=quant, ram="256MiB", context=WINDOW)
    try:
        found: dict[str, Any] = {"prompts": prompts(model, ids)}
        # A page's end would end the generation as well.
        whole = ids[(ids != END).all(axis=1)][:decode]
        found["decoded"], found["decoded_ids"] = decoded(model, whole), whole
    finally:
        model.offload.close()
    found["bits_per_weight"] = packed_bits(model_directory(path, quant))
    return found


def packed_bits(pack: Path) -> float:
    """Of all matrices of a pack together, those that stay in float included."""
    from offload.io.pack_manifest import read_manifest

    parts = [p for b in read_manifest(pack).blocks for p in b.parts if len(p.shape) > 1]
    return 8 * sum(p.nbytes for p in parts) / sum(math.prod(p.shape) for p in parts)


# Measures


def perplexity(logits: Logits, ids: Ids) -> float:
    """exp of the mean cross-entropy of each window's tokens but the first."""
    nats = 0.0
    for window, found in zip(ids, logits, strict=True):
        logp = log_softmax(found[: len(window) - 1])
        nats -= logp[np.arange(len(logp)), window[1:]].sum()
    return math.exp(nats / (ids.shape[0] * (ids.shape[1] - 1)))


def log_softmax(logits: Logits) -> npt.NDArray[np.float64]:
    shifted = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
    out: npt.NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return out


def compare(reference: Logits, other: Logits) -> dict[str, float]:
    """Next-token distributions at the same places; KL is of ``other`` from ``reference``."""
    kl, agree, largest = [], 0, 0.0
    for want, got in zip(reference, other, strict=True):
        want = want[: len(got)]
        p, q = log_softmax(want), log_softmax(got)
        kl.append((np.exp(p) * (p - q)).sum(axis=-1))
        agree += int((want.argmax(-1) == got.argmax(-1)).sum())
        largest = max(largest, float(np.abs(want - got).max()))
    each = np.concatenate(kl)
    return {
        "kl": float(each.mean()),
        "kl_p99": float(np.quantile(each, 0.99)),
        "argmax": agree / len(each),
        "max_logit_difference": largest,
    }


def row(logits: Logits, ids: Ids, reference: Logits) -> dict[str, float]:
    found, base = perplexity(logits, ids), perplexity(reference, ids)
    return {
        "perplexity": found,
        "perplexity_change": found / base - 1,
        **compare(reference, logits),
    }


def decoded_row(found: dict[str, Any], ids: Ids, reference: Logits) -> dict[str, float]:
    same = [int(np.flatnonzero((ids == w).all(axis=1))[0]) for w in found["decoded_ids"]]
    return row(found["decoded"], found["decoded_ids"], reference[same])


# Rows of the report


def checkpoint_rows(args: argparse.Namespace, ids: Ids, reference: Logits) -> dict[str, Any]:
    """The checkpoint as it is (bfloat16), and packed by us."""
    import torch

    logits = prompts(transformers_model(torch.bfloat16), ids)
    rows: dict[str, Any] = {
        "transformers bf16": {"bits_per_weight": 16.0, "prompt": row(logits, ids, reference)}
    }
    say("transformers bf16", rows["transformers bf16"])
    for quant in ("none", "q8", "q4"):
        found = ours(MODEL, quant, ids, args.decode)
        rows[quant] = {
            "bits_per_weight": found["bits_per_weight"],
            "prompt": row(found["prompts"], ids, reference),
            "decode": decoded_row(found, ids, reference),
        }
        say(f"offload {quant}", rows[quant])
    return rows


def gguf_rows(args: argparse.Namespace, ids: Ids, reference: Logits, work: Path) -> dict[str, Any]:
    """GGUF files of the same weights: read by us, by llama.cpp, and exactly."""
    import torch

    np.save(work / "ids.npy", ids)
    source = tiny_gguf.write(MODEL, work / "source.gguf")
    rows = {}
    for number, name in enumerate(FILES if args.llama_python else WITHOUT_PEER):
        file = work / f"model-{number}.gguf"
        if args.llama_python:
            ftype, embedding = FILES[name]
            more = ["--embedding", str(embedding)] if embedding is not None else []
            peer(args, "quantize", source, file, "--ftype", str(ftype), *more)
        else:
            tiny_gguf.write(MODEL, file, WITHOUT_PEER[name])
        bits, types = tiny_gguf.bits_per_weight(file)
        exact = prompts(transformers_model(torch.float32, tiny_gguf.values(file)), ids)
        found = ours(file, None, ids, args.decode)
        rows[name] = {
            "bits_per_weight": bits,
            "types": types,
            "exact": {"prompt": row(exact, ids, reference)},
            "offload": {
                "prompt": row(found["prompts"], ids, reference),
                "decode": decoded_row(found, ids, reference),
                "to_exact": compare(exact, found["prompts"]),
            },
        }
        say(f"{name} exact", rows[name]["exact"])
        say(f"{name} offload", rows[name]["offload"])
        for cache in ("float16", "float32") if args.llama_python else ():
            more = ["--float-cache"] if cache == "float32" else []
            peer(args, "logits", file, work / "peer.npy", "--ids", str(work / "ids.npy"), *more)
            theirs = np.load(work / "peer.npy", mmap_mode="r")
            rows[name][f"llama.cpp, {cache} cache"] = mine = {
                "prompt": row(theirs, ids, reference),
                "to_exact": compare(exact, theirs),
                "offload_to_it": compare(theirs, found["prompts"]),
            }
            say(f"{name} llama.cpp, {cache} cache", mine)
            del theirs
        del exact, found
        gc.collect()
    return rows


def peer(args: argparse.Namespace, what: str, source: Path, target: Path, *more: str) -> None:
    script = ROOT / "benchmarks" / "peers" / "llama_cpp_logits.py"
    command = [
        str(args.llama_python), str(script), what, str(source), str(target),
        "--threads", str(args.threads), *more,
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"llama.cpp, {what} {target.name}: {done.stderr.strip()[-300:]}")


def peer_version(args: argparse.Namespace) -> str:
    """Which llama.cpp; if there is none, why, and the run goes on without it."""
    if args.llama_python is None:
        return "not measured: no interpreter with llama_cpp was given (--llama-python)"
    code = "import llama_cpp; print(llama_cpp.__version__)"
    try:
        done = subprocess.run(
            [str(args.llama_python), "-c", code], capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError) as e:
        args.llama_python = None
        return f"not measured: {getattr(e, 'stderr', None) or e}".strip()[-300:]
    return f"llama-cpp-python {done.stdout.strip()}"


def say(name: str, found: dict[str, Any]) -> None:
    """What a person reads."""
    bits = f"{found['bits_per_weight']:.2f} bits  " if "bits_per_weight" in found else ""
    parts = [
        f"{how}: ppl {r['perplexity']:.4f} ({r['perplexity_change']:+.3%}), KL {r['kl']:.5f}, "
        f"argmax {r['argmax']:.2%}"
        for how in ("prompt", "decode")
        if (r := found.get(how))
    ]
    parts += [
        f"{how.replace('_', ' ')}: argmax {r['argmax']:.2%}, KL {r['kl']:.6f}, "
        f"logits {r['max_logit_difference']:.3f}"
        for how in ("to_exact", "offload_to_it")
        if (r := found.get(how))
    ]
    print(f"{name}: {bits}" + "; ".join(parts), flush=True)


if __name__ == "__main__":
    main()
