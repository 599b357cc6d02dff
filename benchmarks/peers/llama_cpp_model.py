"""A model in llama.cpp, for the scripts beside this one."""

from __future__ import annotations

import ctypes
from typing import Any

import llama_cpp as api

_SILENT = api.llama_log_callback(lambda *_: None)
"""llama.cpp calls it as long as the process lives."""


def opened(path: str, *, mmap_only: bool) -> Any:
    """The model in a GGUF file, and nothing said about it. ``mmap_only``: no repacked copy of the
    weights."""
    api.llama_log_set(_SILENT, ctypes.c_void_p(0))
    api.llama_backend_init()
    chosen = api.llama_model_default_params()
    chosen.use_extra_bufts = not mmap_only
    model = api.llama_model_load_from_file(path.encode(), chosen)
    if not model:
        raise SystemExit(f"llama.cpp does not open {path}")
    return model
