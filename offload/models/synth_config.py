"""Reading the configuration that a random checkpoint is made from, and refusing what cannot be."""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from offload.errors import CheckpointError, OffloadError, UnsupportedModelError
from offload.io.gguf_header import is_gguf

SYNTH_DTYPES = ("bfloat16", "float16", "float32")
MOST_LAYERS = 2048

# Files that make a tokenizer or a processor; copied when they lie beside the config.
TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "vocab.json", "merges.txt", "vocab.txt", "tokenizer.model", "spiece.model", "tekken.json",
    "sentencepiece.bpe.model", "chat_template.jinja", "chat_template.json",
    "preprocessor_config.json", "processor_config.json", "vocab.model", "sentencepiece.model",
    "spm.model", "spm_char.model", "source.spm", "target.spm", "bpe.codes", "normalizer.json",
    "dict.txt", "entity_vocab.json", "emoji.json", "prophetnet.tokenizer",
)  # fmt: skip

_TEMPLATES = "additional_chat_templates"


def small_files(folder: Path) -> list[str]:
    """The names of what a model directory has besides config.json and weights: settings of
    generation, the tokenizer, and chat templates with a name, which have a folder of their own."""
    names = ("generation_config.json", *TOKENIZER_FILES)
    templates = sorted(folder.glob(f"{_TEMPLATES}/*.jinja"))
    found = [name for name in names if (folder / name).is_file()]
    return found + [f"{_TEMPLATES}/{file.name}" for file in templates if file.is_file()]


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A checked configuration.

    ``config`` and ``model_class`` are transformers' objects, ``raw`` what goes into the new
    ``config.json`` (the user's own keys, with dtype, layer count and class filled in), ``folder``
    the directory whose tokenizer and generation settings are copied, or None.
    """

    config: Any
    model_class: Any
    raw: dict[str, Any]
    dtype: str
    layers: int | None
    folder: Path | None


def read_source(config_path: str | Path, *, dtype: str | None, layers: int | None) -> Source:
    """Read ``config_path``, a JSON file or a directory that holds ``config.json``.

    Raises:
        CheckpointError: there is no such file, or it is not a JSON object.
        UnsupportedModelError: the model type is unknown to the installed transformers, needs code
            from the checkpoint, is quantised, or its values are refused by the family's config.
        OffloadError: ``dtype`` or ``layers`` is not possible.
    """
    path = Path(config_path)
    file = path / "config.json" if path.is_dir() else path
    raw = _read_json(file)
    _check_supported(raw, file)
    raw_dtype = dtype or _stated_dtype(raw) or "bfloat16"
    if raw_dtype not in SYNTH_DTYPES:
        raise OffloadError(
            f"a random checkpoint can be written in {', '.join(SYNTH_DTYPES)}, not {raw_dtype!r}; "
            "choose one with dtype"
        )
    config = _parse(raw, file)
    if layers is not None:
        raw = _with_layers(raw, config, layers, file)
        config = _parse(raw, file)
    deep = getattr(_text_config(config), "num_hidden_layers", None)
    if isinstance(deep, int) and deep > MOST_LAYERS:  # each is built and planned: minutes, or days
        raise OffloadError(
            f"{file} says num_hidden_layers {deep!s:.40}, and at most {MOST_LAYERS} are planned; "
            "correct it"
        )
    for name in ("num_hidden_layers", "hidden_size"):  # transformers builds a model without either
        value = getattr(_text_config(config), name, None)
        if isinstance(value, int) and value < 1:
            raise CheckpointError(f"{file} says {name} {value}: a model has 1 or more; correct it")
    model_class = _model_class(raw, config, file)
    raw = {key: value for key, value in raw.items() if key not in ("torch_dtype", "auto_map")}
    for part in (raw, *(value for value in raw.values() if isinstance(value, dict))):
        if part is raw or "dtype" in part or "torch_dtype" in part:
            part.pop("torch_dtype", None)
            part["dtype"] = raw_dtype
    raw["architectures"] = [model_class.__name__]
    text = _text_config(config)
    return Source(
        # The text model alone of a composite family, as AutoModelForCausalLM would load it.
        config=text if model_class.config_class is type(text) else config,
        model_class=model_class,
        raw=raw,
        dtype=raw_dtype,
        layers=getattr(text, "num_hidden_layers", None),
        # A lone "llama-8b.json" among other files says nothing about its neighbours.
        folder=file.parent if file.name == "config.json" else None,
    )


def _read_json(file: Path) -> dict[str, Any]:
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
    except OSError as e:
        raise CheckpointError(
            f"cannot read the model config {file}: {e.strerror or e}; give a config.json or the "
            "directory that holds it"
        ) from e
    except (ValueError, RecursionError) as e:
        if is_gguf(file):
            raise CheckpointError(f"{file} is a GGUF file; give the model's config.json") from e
        raise CheckpointError(f"{file} is not valid JSON: {e}") from e
    if not isinstance(raw, dict):
        raise CheckpointError(f"{file} holds a JSON {type(raw).__name__}, not an object")
    return raw


def _check_supported(raw: dict[str, Any], file: Path) -> None:
    """Raise unless transformers itself knows the model type and the weights are plain."""
    from transformers import CONFIG_MAPPING

    model_type = raw.get("model_type")
    if not isinstance(model_type, str) or not model_type:
        raise UnsupportedModelError(
            f"{file} has no model_type: it is not a Hugging Face model config"
        )
    if model_type not in CONFIG_MAPPING:
        import transformers

        reason = (
            "it needs code from the checkpoint (auto_map), which is never run"
            if raw.get("auto_map")
            else "a newer transformers may know it"
        )
        raise UnsupportedModelError(
            f"transformers {transformers.__version__} has no model type {model_type!r} "
            f"({file}); {reason}"
        )
    for part in (raw, *(value for value in raw.values() if isinstance(value, dict))):
        quantization = part.get("quantization_config")
        if quantization:
            method = (
                quantization.get("quant_method", "unnamed")
                if isinstance(quantization, dict)
                else quantization
            )
            raise UnsupportedModelError(
                f"{file} describes quantised weights (quantization_config: {method}); random "
                "weights are written unquantised: remove that key from a copy of the config"
            )


def _parse(raw: dict[str, Any], file: Path) -> Any:
    """The config object, read by transformers' own reader from a private copy without auto_map.

    Through a file, because that reader decodes more than the keys of a family (infinities, old
    names); without auto_map, so that no version of it can ask for, or run, remote code.
    """
    from transformers import AutoConfig

    plain = {key: value for key, value in raw.items() if key != "auto_map"}
    with tempfile.TemporaryDirectory(prefix="offload-synth-") as folder:
        (Path(folder) / "config.json").write_text(json.dumps(plain), encoding="utf-8")
        try:
            return AutoConfig.from_pretrained(
                folder, trust_remote_code=False, local_files_only=True
            )
        except Exception as e:  # each family validates its config in its own way
            raise UnsupportedModelError(
                f"{file} is not a valid {raw['model_type']} config: {type(e).__name__}: {e}"
            ) from e


def _stated_dtype(raw: dict[str, Any]) -> str | None:
    text = raw.get("text_config")
    for part in (raw, text if isinstance(text, dict) else {}):
        for key in ("dtype", "torch_dtype"):
            value = part.get(key)
            if isinstance(value, str) and value != "auto":
                return value.removeprefix("torch.")
    return None


def _with_layers(raw: dict[str, Any], config: Any, layers: int, file: Path) -> dict[str, Any]:
    """``raw`` cut to its first ``layers`` layers, per-layer lists included."""
    text = _text_config(config)
    have = getattr(text, "num_hidden_layers", None)
    if not isinstance(have, int):
        raise UnsupportedModelError(f"{file}: {config.model_type} has no single count of layers")
    if not 1 <= layers <= have:
        raise OffloadError(f"layers must be between 1 and the model's {have}, got {layers}")
    key = (getattr(text, "attribute_map", None) or {}).get("num_hidden_layers", "num_hidden_layers")
    raw = json.loads(json.dumps(raw))
    part = raw if text is config else next(
        (raw[name] for name in ("text_config", "llm_config", "thinker_config")
         if isinstance(raw.get(name), dict)), None,
    )  # fmt: skip
    if part is None:
        raise UnsupportedModelError(
            f"{file}: the text model of {config.model_type} has no section of its own to cut; "
            "edit the layer count in a copy of the config"
        )
    for name, value in part.items():
        if isinstance(value, list) and len(value) == have:
            part[name] = value[:layers]
    part.pop("num_hidden_layers", None)
    part[key] = layers
    return raw


def _text_config(config: Any) -> Any:
    """The part that describes the decoder; the whole config where there is no single such part."""
    try:
        return config.get_text_config()
    except ValueError:  # two candidates, for instance a text encoder and an audio decoder
        return config


def _model_class(raw: dict[str, Any], config: Any, file: Path) -> Any:
    """The class the config names, else the family's causal LM, else its bare model."""
    import transformers
    from transformers import AutoModel, AutoModelForCausalLM, PreTrainedModel

    names = raw.get("architectures") or []
    for name in names if isinstance(names, list) else []:
        found = getattr(transformers, str(name), None)
        if isinstance(found, type) and issubclass(found, PreTrainedModel):
            return found
    for auto in (AutoModelForCausalLM, AutoModel):
        found = auto._model_mapping.get(type(config), None)
        if found is not None:
            return found[0] if isinstance(found, (tuple, list)) else found
    raise UnsupportedModelError(f"{file}: transformers has no model for {config.model_type!r}")
