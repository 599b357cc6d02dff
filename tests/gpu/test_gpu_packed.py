"""Packed weights on a real card: its kernels against the formats' values, whole models against the
CPU's kernels. Without a card ``tests/gpu_ops`` runs the same source on the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from kernel_support import rounded, tolerance
from random_rows import random_rows

import offload
from offload.cpu_ops.codecs import decode_rows
from offload.cpu_ops.experts import expert_ffn, expert_layout
from offload.cpu_ops.formats import FORMATS, get_format
from offload.cpu_ops.functions import Glu
from offload.cpu_ops.packing import pack_rows
from offload.gpu_ops import experts as routed
from offload.gpu_ops import linear as dense
from offload.gpu_ops.launch import CupyLauncher
from offload.gpu_ops.records import Scratch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no card here"),
]


@pytest.fixture(scope="module")
def card() -> CupyLauncher:
    pytest.importorskip("cupy", exc_type=ImportError, reason="CuPy is not installed")
    return CupyLauncher(torch.device("cuda", torch.cuda.current_device()))


@pytest.mark.parametrize("name", FORMATS)
def test_products_and_values(card: CupyLauncher, name: str) -> None:
    fmt = get_format(name)
    columns = max(32, fmt.block) * 13
    gguf = random_rows(fmt, 37, columns)
    values = decode_rows(fmt, gguf)
    packed = torch.from_numpy(pack_rows(fmt, gguf, columns)).to(card.device)
    scratch = Scratch(dense.scratch_bytes(fmt, 37, columns, 64), card.device)
    x = torch.randn((64, columns), generator=torch.Generator().manual_seed(0))
    exact = rounded(fmt, x.numpy())
    want = exact @ values.T.astype(np.float64)
    bound = tolerance(fmt, values.astype(np.float64), exact)
    alone = []
    for tokens in (1, 5):
        out = torch.full((tokens, 37), -1.0, device=card.device)
        dense.linear(card, scratch, fmt, packed.data_ptr(), x[:tokens].to(card.device), out)
        assert (np.abs(out.cpu().numpy() - want[:tokens]) <= bound[:tokens]).all()
        alone.append(out[0])
    assert torch.equal(*alone)
    many = torch.empty((64, 37), device=card.device)
    dense.linear(card, scratch, fmt, packed.data_ptr(), x.to(card.device), many)
    plain = x.double().numpy() @ values.T.astype(np.float64)
    assert np.linalg.norm(many.cpu().numpy() - plain) < 6e-3 * np.linalg.norm(plain)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        got = torch.empty((37, columns), dtype=dtype, device=card.device)
        dense.dequantize(card, fmt, packed.data_ptr(), got)
        assert torch.equal(got.cpu(), torch.from_numpy(values).to(dtype))


@pytest.mark.parametrize(
    ("gate_up", "down", "glu", "biases"),
    [("q4_0", "q4_0", Glu.SILU, False), ("mxfp4", "mxfp4", Glu.CLAMPED, True)],
)
def test_experts_are_those_of_the_cpu(
    card: CupyLauncher, gate_up: str, down: str, glu: Glu, biases: bool
) -> None:
    layout = expert_layout(get_format(gate_up), get_format(down), 512, 256, biases=biases, glu=glu)
    rng = np.random.default_rng(0)
    bundles = np.zeros((6, layout.nbytes), np.uint8)
    for e, bundle in enumerate(bundles):
        for i, (fmt, rows, columns, at) in enumerate(
            (
                (layout.gate_up, 256, 512, layout.gate_offset),
                (layout.gate_up, 256, 512, layout.up_offset),
                (layout.down, 512, 256, layout.down_offset),
            )
        ):
            packed = pack_rows(fmt, random_rows(fmt, rows, columns, 10 * e + i, 0.01), columns)
            bundle[at : at + len(packed)] = packed
        for at, n in (
            (layout.gate_bias_offset, 256), (layout.up_bias_offset, 256),
            (layout.down_bias_offset, 512),
        ):  # fmt: skip
            if at >= 0:
                bias = rng.standard_normal(n).astype(np.float32)
                bundle[at : at + 4 * n] = bias.view(np.uint8)
    tokens = 5
    x = rng.standard_normal((tokens, 512)).astype(np.float32)
    index = np.stack([rng.permutation(6)[:2] for _ in range(tokens)])
    weights = rng.random((tokens, 2)).astype(np.float32)
    dense_weights = np.zeros((tokens, 6), np.float32)
    np.put_along_axis(dense_weights, index, weights, axis=1)
    bases = np.array([b.ctypes.data for b in bundles], np.int64)
    want = expert_ffn(layout, bases, x, dense_weights, np.empty_like(x))
    there = torch.from_numpy(bundles).to(card.device)
    out = torch.empty((tokens, 512), device=card.device)
    scratch = Scratch(routed.scratch_bytes(layout, tokens, 2), card.device)
    runs = []
    for _ in range(2):
        routed.expert_ffn(
            card, scratch, layout, list(range(6)), [there[e].data_ptr() for e in range(6)],
            torch.from_numpy(x).to(card.device), index, torch.from_numpy(weights).to(card.device),
            out,
        )  # fmt: skip
        runs.append(out.cpu())
    assert torch.equal(*runs)
    assert np.linalg.norm(runs[0].numpy() - want) < 1e-2 * np.linalg.norm(want)


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "llama"])
def test_a_packed_model_in_three_lines(card: CupyLauncher, family: str, tmp_path: Path) -> None:
    del card  # CuPy is there
    from test_packed_run import IDS, packed

    _, pack_dir = packed(family, tmp_path, "q8")
    said: list[Any] = []
    for budget in ({}, {"gpu": "1GiB"}):
        model = offload.load(pack_dir, ram="2GiB", context=32, **budget)
        with torch.no_grad():
            said.append(model(IDS).logits.cpu())
        out = model.generate(IDS, max_new_tokens=8, do_sample=False, pad_token_id=0)
        assert out.shape == (1, IDS.shape[1] + 8)
        stats = model.offload.stats()
        model.offload.close()
    assert out.device.type == "cuda"
    assert stats["h2d_bytes"] > 0
    # On an H100 gpt_oss was 0.072 of it apart: sums in another order choose another neighbour when
    # activations are quantised, and now and then another expert.
    assert (said[0] - said[1]).abs().max() < (0.15 if family == "gpt_oss" else 0.05) * said[0].std()
