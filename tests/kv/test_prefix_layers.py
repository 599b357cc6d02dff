"""Kinds of layers that a cache may have, in every transformers that we run on."""

from __future__ import annotations

import subprocess
import sys

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
