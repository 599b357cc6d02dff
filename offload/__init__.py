"""offload: run and train PyTorch models that are larger than memory.

Importing this package is cheap (no torch, no transformers): the command line must answer
``offload --help`` at once. The public functions are looked up lazily on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from offload.version import __version__

if TYPE_CHECKING:
    from offload.api import load, unwrap, wrap
    from offload.train.optimizer import AdamW, trainer_optimizer

__all__ = ["AdamW", "__version__", "load", "trainer_optimizer", "unwrap", "wrap"]


def __getattr__(name: str) -> Any:
    if name in ("load", "wrap", "unwrap"):
        from offload import api

        return getattr(api, name)
    if name in ("AdamW", "trainer_optimizer"):
        from offload.train import optimizer

        return getattr(optimizer, name)
    raise AttributeError(f"module 'offload' has no attribute {name!r}")
