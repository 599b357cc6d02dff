"""Kinds of layers that a cache may have, in every transformers that we run on."""

from __future__ import annotations

import subprocess
import sys

import pytest
from transformers import LlamaConfig

from offload.kv import cache
from offload.models.toy import small_config

LESS = """
from transformers import LlamaConfig, cache_utils
if hasattr(cache_utils, "DummyLayer"):
    del cache_utils.DummyLayer
import offload.kv.prefix_layers as ours
from offload.models.toy import small_config
ours.check_config(small_config(LlamaConfig))
"""


def test_the_oldest_transformers_knows_fewer_kinds() -> None:
    """5.17 has no layer that caches nothing: whatever we import would be an error there."""
    done = subprocess.run(
        [sys.executable, "-c", LESS], capture_output=True, text=True, check=False
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]


def test_the_oldest_transformers_says_once_what_layers_are_made_with(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Otherwise activations are not measured there, but estimated."""
    config = small_config(LlamaConfig)
    monkeypatch.setattr(cache, "get_layer_types_and_kwargs", lambda _: (["full_attention"] * 2, {}))
    found = cache.layer_makers(config)
    assert [in_blocks for _, in_blocks in found] == [True, True]
    assert [type(make()) for make, _ in found] == [cache.DynamicLayer] * 2
