"""Whether an embedding's rows can be read one by one."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import nn

logger = logging.getLogger(__name__)


class _LookUpOnly(torch.Tensor):
    """A table without data: may be looked up, as ``absent.RowTable`` can, and nothing else."""

    @staticmethod
    def __new__(cls, shape: tuple[int, ...], dtype: torch.dtype) -> _LookUpOnly:
        make: Any = torch.Tensor._make_wrapper_subclass  # type: ignore[attr-defined]
        tensor: _LookUpOnly = make(cls, shape, dtype=dtype, device="meta")
        return tensor

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is not torch.ops.aten.embedding.default:
            raise NotImplementedError(func)
        table, ids = args[0], args[1]
        return torch.empty((*ids.shape, table.shape[1]), dtype=table.dtype, device="meta")


def rows_readable(module: nn.Module) -> bool:
    """Whether an embedding's forward only looks rows up, whatever it does with them then.

    Tried, not guessed from its class: many scale the rows (Gemma) or treat some ids apart.
    """
    if not isinstance(module, nn.Embedding) or module.max_norm is not None:
        return False
    if type(module).forward is nn.Embedding.forward:
        return True
    table = module.weight
    module._parameters["weight"] = _LookUpOnly(tuple(table.shape), table.dtype)  # type: ignore[assignment]
    try:
        with torch.no_grad():
            out = module(torch.empty((1, 3), dtype=torch.int64, device="meta"))
        return isinstance(out, torch.Tensor) and tuple(out.shape) == (1, 3, table.shape[1])
    except Exception as error:  # noqa: BLE001  any failure means: not this way
        logger.info("%s is not read by row: %s", type(module).__name__, error)
        return False
    finally:
        module._parameters["weight"] = table  # type: ignore[assignment]
