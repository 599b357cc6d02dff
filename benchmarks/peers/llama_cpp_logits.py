"""llama.cpp's own quantiser and its logits, through the low-level calls of its Python bindings; run
by quality.py in the interpreter that has them.

    python llama_cpp_logits.py quantize SRC.gguf OUT.gguf --ftype 2 [--embedding 8]
    python llama_cpp_logits.py logits MODEL.gguf logits.npy --ids ids.npy

Ids are int32 ``[windows, tokens]``, logits float32 ``[windows, tokens, vocabulary]``; each window
starts with an empty cache.
"""

from __future__ import annotations

import argparse
import ctypes
from pathlib import Path

import llama_cpp as api
import numpy as np

FLOAT32, DISABLED = 0, 0


def quantize(args: argparse.Namespace) -> None:
    how = api.llama_model_quantize_default_params()
    how.ftype, how.nthread = args.ftype, args.threads
    if args.embedding is not None:
        how.token_embedding_type = args.embedding
    if api.llama_model_quantize(str(args.model).encode(), str(args.out).encode(), how):
        raise SystemExit("llama_model_quantize failed")


def logits(args: argparse.Namespace) -> None:
    ids = np.load(args.ids)
    model = api.llama_model_load_from_file(
        str(args.model).encode(), api.llama_model_default_params()
    )
    chosen = api.llama_context_default_params()
    chosen.n_ctx = chosen.n_batch = chosen.n_ubatch = ids.shape[1]
    chosen.n_threads = chosen.n_threads_batch = args.threads
    if args.float_cache:
        chosen.type_k = chosen.type_v = FLOAT32
        chosen.flash_attn_type = DISABLED
    context = api.llama_init_from_model(model, chosen)
    words = api.llama_vocab_n_tokens(api.llama_model_get_vocab(model))
    out = np.lib.format.open_memmap(args.out, "w+", np.float32, (*ids.shape, words))
    batch = api.llama_batch_init(ids.shape[1], 0, 1)
    batch.n_tokens = ids.shape[1]
    for at, window in enumerate(ids):
        api.llama_memory_clear(api.llama_get_memory(context), True)
        for i, token in enumerate(window):
            batch.token[i], batch.pos[i] = int(token), i
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, 0
            batch.logits[i] = True
        if api.llama_decode(context, batch):
            raise SystemExit("llama_decode failed")
        found = np.ctypeslib.as_array(api.llama_get_logits(context), (ids.shape[1], words))
        out[at] = found
    out.flush()
    api.llama_batch_free(batch)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["quantize", "logits"])
    parser.add_argument("model", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--ftype", type=int, help="llama.cpp's number of a file type")
    parser.add_argument("--embedding", type=int, help="ggml's number of the embedding's type")
    parser.add_argument("--ids", type=Path)
    parser.add_argument("--float-cache", action="store_true", help="float32 keys and values")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    silent = api.llama_log_callback(lambda *_: None)
    api.llama_log_set(silent, ctypes.c_void_p(0))
    api.llama_backend_init()
    (quantize if args.what == "quantize" else logits)(args)


if __name__ == "__main__":
    main()
