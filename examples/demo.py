"""Stream a real model with less RAM than half of its weights, and check every token.

Run it with ``make demo``. It calls the command line as a user would, then runs the same model
resident in plain transformers and compares.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

MODEL = Path(__file__).resolve().parent / "tiny_moe"
PROMPT = "The function returns"
TOKENS = 60


def main() -> int:
    weights = sum(f.stat().st_size for f in MODEL.glob("*.safetensors"))
    budget = int(weights * 0.499)
    print(f"model: {MODEL.name}, {weights / 2**20:.1f} MiB of weights")
    share = budget / weights
    print(f"RAM budget: {budget / 2**20:.1f} MiB, {share:.0%} of the weights\n", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        command = [
            sys.executable, "-m", "offload", "generate", "-m", str(MODEL), "--raw",
            "-p", PROMPT, "-n", str(TOKENS), "--ignore-eos", "--ram", str(budget),
            "--json", str(result),
        ]  # fmt: skip
        code = subprocess.run(command, check=False).returncode
        if code != 0:
            return code
        streamed = json.loads(result.read_text())["token_ids"]
    print("\nthe same tokens from the resident model, by plain transformers: ", end="", flush=True)
    resident = generate_resident()
    same = streamed == resident
    print(f"{len(resident)} of {len(resident)} equal" if same else "DIFFERENT")
    return 0 if same else 1


def generate_resident() -> list[int]:
    """The new token ids of unmodified transformers with all weights in memory."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    model = AutoModelForCausalLM.from_pretrained(MODEL, experts_implementation="eager")
    ids = tokenizer(PROMPT, return_tensors="pt")["input_ids"]
    mask = torch.ones_like(ids)
    out = model.generate(
        ids,
        attention_mask=mask,
        max_new_tokens=TOKENS,
        min_new_tokens=TOKENS,
        do_sample=False,
    )
    return out[0, ids.shape[1] :].tolist()


if __name__ == "__main__":
    sys.exit(main())
