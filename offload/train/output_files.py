"""What a model directory has besides weights: config, tokenizer, chat template, licence."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

from offload.errors import CheckpointError
from offload.io.pack_manifest import MANIFEST
from offload.train.output_target import MARKER

log = logging.getLogger(__name__)

CONFIG = "config.json"
_SUFFIXES = frozenset({".jinja", ".model", ".tiktoken", ".spm", ".bpe", ".vocab"})
_NAMES = (
    "tokenizer", "tokenization", "vocab", "merges", "special_tokens", "added_tokens", "spiece",
    "sentencepiece", "tekken", "dict", "entity_vocab", "normalizer", "emoji", "bpe.codes",
    "chat_template", "generation_config", "preprocessor_config", "processor_config",
    "video_preprocessor", "image_processor", "feature_extractor", "config_sentence_transformers",
    "sentence_bert_config",
)  # fmt: skip
"""How files that tokenizers and processors of transformers read, in .json or .txt, begin: a folder
has other such files, of losses, data or logs, that are nobody else's business."""
_LEGAL = ("license", "licence", "notice", "use_policy", "copying")
_NOT = frozenset({CONFIG, MARKER, MANIFEST, "adapter_config.json"})
_TEMPLATES = "additional_chat_templates"
_LARGEST = 256 * 2**20
"""The largest tokenizers have some 40 MiB; a text file beyond this is data somebody left there."""


def companions(source: Path) -> dict[str, Path]:
    """The small files of ``source`` that its fine-tuned model needs too, by relative name.

    Tokenizer, chat templates, generation config, processor configs, licence. Not weights and their
    indices, not code (nothing here runs it), not README.md: it describes another model.

    Raises:
        CheckpointError: the directory cannot be read.
    """
    found: dict[str, Path] = {}
    try:
        for file in sorted([*source.iterdir(), *source.glob(f"{_TEMPLATES}/*.jinja")]):
            if _belongs(file):
                found[str(file.relative_to(source))] = file
    except OSError as e:
        raise CheckpointError(f"cannot read {e.filename or source}: {e.strerror}") from e
    return found


def _belongs(file: Path) -> bool:
    name = file.name
    if name in _NOT or name.startswith(".") or name.endswith(".index.json"):
        return False
    legal = name.lower().startswith(_LEGAL) and file.suffix.lower() in ("", ".txt", ".md")
    named = file.suffix in (".json", ".txt") and name.startswith(_NAMES)
    if not (legal or named or file.suffix in _SUFFIXES) or not file.is_file():
        return False
    if file.stat().st_size > _LARGEST:
        log.warning("%s is not copied: it has more than %d bytes", file, _LARGEST)
        return False
    return True


def updated_config(source: Path, dtype: str | None) -> bytes:
    """``config.json`` of ``source`` that says ``dtype`` (torch's name); None: as it is.

    Nested configs that named the same dtype as the whole follow; those with one of their own keep
    it. ``auto_map`` goes: the code it points at is not copied, and the model is one that
    transformers has itself.

    Raises:
        CheckpointError: there is no config, or it is no JSON object.
    """
    file = source / CONFIG
    try:
        config: Any = json.loads(file.read_bytes())
    except FileNotFoundError:
        raise CheckpointError(f"{source} has no {CONFIG}: not a model directory") from None
    except (OSError, ValueError, RecursionError) as e:
        raise CheckpointError(f"{file} cannot be read: {e}") from e
    if not isinstance(config, dict):
        raise CheckpointError(f"{file} is not a JSON object")
    config.pop("auto_map", None)
    if dtype is not None:
        before = config.get("dtype", config.get("torch_dtype"))
        if "torch_dtype" in config:
            config["torch_dtype"] = dtype
        if "dtype" in config or "torch_dtype" not in config:
            config["dtype"] = dtype
        for part in config.values():
            if isinstance(part, dict):
                for key in ("dtype", "torch_dtype"):
                    if key in part and part[key] == before:
                        part[key] = dtype
    return (json.dumps(config, indent=2, ensure_ascii=False) + "\n").encode()
