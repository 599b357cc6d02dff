"""The reading side of the GGUF tests: entries to values, values to a model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import save_file

from offload.io.gguf import GGUFFile
from offload.models.gguf_names import GGUFEntry, Transform

Kind = gguf.GGMLQuantizationType


def dequantised(file: GGUFFile, entry: GGUFEntry) -> torch.Tensor:
    """The values of an entry in float32, by the reference's dequantisation, permuted and
    transformed as it says."""
    with open(file.files[entry.file], "rb") as f:
        f.seek(entry.offset)
        raw = np.frombuffer(f.read(entry.nbytes), np.uint8)
    kind = Kind[entry.type.upper()]
    if kind in (Kind.F32, Kind.F16):
        typed = raw.view(np.float32 if kind is Kind.F32 else np.float16)
    else:
        typed = raw.reshape(int(np.prod(entry.shape[:-1])), -1)
    value = torch.from_numpy(np.array(gguf.quants.dequantize(typed, kind), np.float32))
    value = value.reshape(entry.shape)
    if entry.row_permutation is not None:
        value = value[torch.tensor(entry.row_permutation)]
    if entry.transform is Transform.MINUS_ONE:
        value = value - 1
    elif entry.transform is Transform.TRANSPOSE:
        value = value.T
    return value.contiguous()


def state_dict(file: GGUFFile, entries: list[GGUFEntry]) -> dict[str, torch.Tensor]:
    """The published checkpoint that the entries describe; every element exactly once."""
    out: dict[str, torch.Tensor] = {}
    for entry in entries:
        whole = out.setdefault(entry.hf_name, torch.full(entry.hf_shape, torch.nan))
        part = whole[entry.hf_index] if entry.hf_index else whole
        assert part.isnan().all(), f"{entry.hf_name}{entry.hf_index} is there twice"
        value = dequantised(file, entry)
        part.copy_(value.reshape(part.shape) if not entry.hf_index else value)
    for name, value in out.items():
        assert not value.isnan().any(), f"{name} is not whole"
    return out


def load_model(
    directory: Path, file: GGUFFile, config: Any, entries: list[GGUFEntry]
) -> torch.nn.Module:
    """The model that transformers makes of the entries, in float32."""
    from transformers import AutoModelForCausalLM

    directory.mkdir()
    save_file(state_dict(file, entries), directory / "model.safetensors", {"format": "pt"})
    config.save_pretrained(directory)
    model, report = AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, output_loading_info=True, attn_implementation="eager"
    )
    problems = {k: v for k, v in report.items() if v and k != "error_msgs"}
    assert not problems, problems
    return model.eval()
