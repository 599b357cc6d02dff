"""A GGUF file of random weights in the shape of a Llama config.json, for llama.cpp as a peer.

    python benchmarks/random_gguf.py benchmarks/configs/dense-1b-128k.json MODEL.gguf

Matrices are Q4_0 with random nibbles, norms ones; there is no vocabulary, only its size.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np

SCALE = 0.005
"""Of all blocks of 32 nibbles, which stand for -8 to 7."""


def write(config_file: Path, target: Path) -> None:
    """Write ``target``; the output matrix is tied to the embedding."""
    import gguf

    config = json.loads(config_file.read_text())
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    heads, key_heads = config["num_attention_heads"], config["num_key_value_heads"]
    dim = config.get("head_dim") or hidden // heads
    w = gguf.GGUFWriter(target, "llama")
    w.add_context_length(config["max_position_embeddings"])
    w.add_embedding_length(hidden)
    w.add_block_count(config["num_hidden_layers"])
    w.add_feed_forward_length(inner)
    w.add_head_count(heads)
    w.add_head_count_kv(key_heads)
    w.add_key_length(dim)
    w.add_value_length(dim)
    w.add_rope_dimension_count(dim)
    w.add_rope_freq_base(config["rope_theta"])
    w.add_layer_norm_rms_eps(config["rms_norm_eps"])
    w.add_vocab_size(config["vocab_size"])
    w.add_tokenizer_model("none")
    draw = np.random.default_rng(0)

    def matrix(name: str, rows: int, columns: int) -> None:
        blocks = draw.integers(0, 256, (rows, columns // 32, 18), np.uint8)
        blocks[..., :2] = np.array([SCALE], np.float16).view(np.uint8)
        w.add_tensor(
            f"{name}.weight", blocks.reshape(rows, -1), raw_dtype=gguf.GGMLQuantizationType.Q4_0
        )

    def norm(name: str) -> None:
        w.add_tensor(f"{name}.weight", np.ones(hidden, np.float32))

    matrix("token_embd", config["vocab_size"], hidden)
    norm("output_norm")
    for layer in range(config["num_hidden_layers"]):
        at = f"blk.{layer}"
        norm(f"{at}.attn_norm")
        norm(f"{at}.ffn_norm")
        matrix(f"{at}.attn_q", heads * dim, hidden)
        matrix(f"{at}.attn_k", key_heads * dim, hidden)
        matrix(f"{at}.attn_v", key_heads * dim, hidden)
        matrix(f"{at}.attn_output", hidden, heads * dim)
        matrix(f"{at}.ffn_gate", inner, hidden)
        matrix(f"{at}.ffn_up", inner, hidden)
        matrix(f"{at}.ffn_down", hidden, inner)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("config", type=Path, help="a Llama's config.json")
    parser.add_argument("target", type=Path, help="the file to write")
    args = parser.parse_args()
    write(args.config, args.target)
