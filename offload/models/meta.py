"""Build a model's structure without its weights, exactly as transformers would.

The model is made on the meta device, its small non-persistent buffers (rotary frequencies, ...)
and whatever no checkpoint holds are initialised for real, weights stay without storage.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from offload.errors import CheckpointError, OffloadError, UnsupportedModelError
from offload.io.pack_manifest import JOURNAL, MANIFEST, again
from offload.io.safetensors import ADAPTER, CheckpointIndex, adapter_hint, gguf_hint
from offload.io.whole_file import expanded
from offload.models.sources import CheckpointMap, SourceMap

logger = logging.getLogger(__name__)

MOST_SHARED_LAYERS = 1024
"""Layers may share tensors; beyond so many a checkpoint has at least a tensor for each."""
_SETTINGS = frozenset({".json", ".jinja", ".model", ".txt"})
"""Suffixes of what a model directory has besides weights that decides what a model does."""


def resolve(path: str | Path) -> Path:
    """The directory of a checkpoint: ``path`` itself, or a hub id in the local cache.

    Raises:
        OffloadError: neither exists. Nothing is ever downloaded here.
    """
    directory = expanded(Path(path))
    try:
        if directory.is_dir():
            os.stat(os.path.join(directory, "."))  # a closed folder is a directory, too
            return directory
        there = directory.exists()
    except OSError as e:
        raise OffloadError(
            f"cannot read {path!s:.500}: {e.strerror}; give a directory that can be read"
        ) from e
    if there:
        raise OffloadError(f"{path} is a file; give the directory that holds config.json")
    text = str(path)
    if text.startswith((".", "/", "~")) or text.count("/") > 1:
        raise OffloadError(f"there is no directory {path}")
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(text, local_files_only=True))
    except Exception as error:
        raise OffloadError(
            f"there is no directory {path}, and no model of that name in the local hub cache; "
            f"download it first (hf download {text})"
        ) from error


def _pack_hint(directory: Path) -> str:
    """The way out where a pack's own config.json is what is wrong; empty of any other directory."""
    if not (directory / MANIFEST).is_file():
        return ""
    return f"; put that of its source in its place, or {again(directory)}"


def _check_links(directory: Path) -> None:
    """The hub's cache keeps a model as links: one that leads nowhere is a file that has not come,
    and must not pass for one that the model does not have, or it runs with other settings."""
    for file in sorted(directory.glob("*")):
        if file.suffix in _SETTINGS and os.path.islink(file) and not os.path.exists(file):
            raise CheckpointError(
                f"{file} is a link to {os.readlink(file)}, which is not there; download the model "
                "again"
            )


def read_config(directory: Path) -> Any:
    """The transformers config of a checkpoint directory.

    Raises:
        CheckpointError: config.json is missing or malformed.
        UnsupportedModelError: remote code, a quantisation that is not supported, an unknown family.
    """
    _check_links(directory)
    file = directory / "config.json"
    if file.exists() and not file.is_file():  # to open a pipe would wait for a writer
        raise CheckpointError(f"{file} is no file; put the model's config.json in its place")
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        if (directory / JOURNAL).exists():
            raise CheckpointError(
                f"{directory} is a packed model that is not finished: give 'offload pack' the same "
                f"source and directory again, and it goes on where it was"
            ) from None
        if hint := _pack_hint(directory):
            raise CheckpointError(
                f"{directory} is a packed model without config.json{hint}"
            ) from None
        raise CheckpointError(
            f"{directory} has no config.json: not a model directory"
            f"{adapter_hint(directory) or gguf_hint(directory)}"
        ) from None
    except (ValueError, OSError, RecursionError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}{_pack_hint(directory)}") from error
    if not isinstance(raw, dict):
        raise CheckpointError(f"{file} is not a JSON object{_pack_hint(directory)}")
    if quantised := raw.get("quantization_config"):
        method = (
            quantised.get("quant_method", "unknown") if isinstance(quantised, dict) else "unknown"
        )
        raise UnsupportedModelError(
            f"{directory.name} is quantised with {method!r}, which is not supported; use the "
            f"unquantised checkpoint of the same model"
        )
    from transformers import AutoConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    kind = raw.get("model_type")
    if raw.get("auto_map") and kind not in CONFIG_MAPPING:
        raise UnsupportedModelError(
            f"{directory.name} needs code from its own directory (auto_map), which is never run; "
            f"use a family that transformers ships"
        )
    try:
        config = AutoConfig.from_pretrained(directory, trust_remote_code=False)
    except Exception as error:
        # The first line may be a heading of the second, which says what is wrong.
        message = " ".join(str(error).strip().splitlines()[:2])
        raise UnsupportedModelError(
            f"transformers cannot make a config of {file} (model_type {kind!r}): "
            f"{message or type(error).__name__}"
        ) from error
    config = _of_its_class(config)
    layers = getattr(config.get_text_config(), "num_hidden_layers", None)
    if isinstance(layers, int) and layers < 1:
        raise CheckpointError(f"{file} says num_hidden_layers {layers}: a model has 1 or more")
    _check_experts(config.get_text_config(), file)
    return config


def _of_its_class(config: Any) -> Any:
    """The text part of a config with several, if the class of the model takes that alone.

    As the auto classes have it: of Qwen 3.5 or Llama 4 ``architectures`` may name the causal LM or
    nothing, and ``config.json`` is that of the model with images.
    """
    text = getattr(config, "sub_configs", {}).get("text_config")
    try:
        cls: Any = model_class(config)
    except UnsupportedModelError:
        return config  # said where a model is built
    if text is None or cls.config_class is not text:
        return config
    part = config.get_text_config()
    if not getattr(part, "architectures", None):
        part.architectures = config.architectures
        try:
            model_class(part)
        except UnsupportedModelError:  # no mapping knows mllama's text config by itself
            part.architectures = [cls.__name__]
    return part


def _check_experts(config: Any, file: Path) -> None:
    """Of a MoE: a token cannot go to more experts than there are."""
    used = getattr(config, "num_experts_per_tok", None)
    for name in ("num_experts", "num_local_experts", "n_routed_experts"):
        count = getattr(config, name, None)
        if type(used) is int and type(count) is int and count > 0 and not 0 <= used <= count:
            raise CheckpointError(
                f"{file} says num_experts_per_tok {used} of {name} {count}: not between 0 and all"
            )


def model_class(config: Any) -> type:
    """The class that the config names in ``architectures``, else the causal LM of its family."""
    import transformers

    for name in getattr(config, "architectures", None) or ():
        found: Any = getattr(transformers, name, None) if isinstance(name, str) else None
        if isinstance(found, type) and issubclass(found, transformers.PreTrainedModel):
            return found
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_MAPPING

    for mapping in (MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_MAPPING):
        with contextlib.suppress(KeyError):
            found = mapping[type(config)]
            return found[0] if isinstance(found, tuple) else found
    raise UnsupportedModelError(
        f"transformers has no model class for model_type {config.model_type!r}"
    )


def pick_dtype(dtype: str | torch.dtype | None, config: Any, index: CheckpointIndex) -> torch.dtype:
    """The compute dtype: as asked for, else the config's, else the checkpoint's, which transformers
    takes from the index or from the first float of the first file, by name."""
    if isinstance(dtype, torch.dtype):
        chosen: Any = dtype
    elif dtype is None or dtype == "auto":
        chosen = getattr(config, "dtype", None)
        if chosen is None:
            named = sorted(index.tensors.items(), key=lambda item: (item[1][0], item[0]))
            floats = (t.dtype for _, (_, t) in named if t.dtype.startswith(("float", "bfloat")))
            chosen = index.said_dtype or next((d for d in floats if "float8" not in d), "float32")
    else:
        aliases = {"bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32"}
        chosen = aliases.get(dtype, dtype)
    if isinstance(chosen, str):
        chosen = getattr(torch, chosen, None)
    if chosen not in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
        asked = dtype is not None and dtype != "auto"
        said = f"dtype {dtype!r}" if asked else f"dtype {config.dtype!s} of config.json"
        raise OffloadError(
            f"{said} is not one of bfloat16, float16, float32, float64"
            + ("" if asked else "; give one to compute in (--dtype)")
        )
    return chosen


@dataclass(slots=True)
class MetaModel:
    """A model without weights and the map to its checkpoint."""

    model: Any
    index: CheckpointIndex
    mapping: CheckpointMap
    dtype: torch.dtype
    directory: Path


def build(path: str | Path, dtype: str | torch.dtype | None = None) -> MetaModel:
    """Open a checkpoint and build its model on the meta device. Reads headers only.

    Raises:
        CheckpointError: damaged or incomplete files, or weights that the config does not expect.
        UnsupportedModelError: see ``read_config``; or an adapter beside the weights.
    """
    directory = resolve(path)
    config, index = read_config(directory), CheckpointIndex.open(directory)
    if (directory / ADAPTER).exists():  # transformers loads it on top of the weights
        raise UnsupportedModelError(
            f"{directory} has weights of a model and {ADAPTER}, an adapter of PEFT on top of them, "
            f"which is not supported: merge it into the weights (PEFT's merge_and_unload() and "
            f"then save_pretrained()); or, to run them without, move {ADAPTER} away"
        )
    return assemble(config, index, dtype)


def assemble(
    config: Any, index: CheckpointIndex, dtype: str | torch.dtype | None = None
) -> MetaModel:
    """The model of ``config`` on the meta device, its weights found in ``index``.

    Raises:
        CheckpointError: weights are missing, or of other shapes than the config says.
        UnsupportedModelError: transformers cannot build the model.
    """
    layers = getattr(config.get_text_config(), "num_hidden_layers", None)
    if isinstance(layers, int) and layers > max(MOST_SHARED_LAYERS, len(index.tensors)):
        # Before they are built: a million of them take minutes.
        raise CheckpointError(
            f"{index.directory.name}: config.json says num_hidden_layers {layers}, the checkpoint "
            f"has {len(index.tensors)} tensors; they are of different models, or the download is "
            f"incomplete"
        )
    model, chosen = instantiate(config, pick_dtype(dtype, config, index))
    mapping = CheckpointMap(model, index)
    _check(model, mapping.map, index.directory)
    _tie(model, mapping.map)
    _check_kind(model, index.directory)
    return MetaModel(model, index, mapping, chosen, index.directory)


def _check_kind(model: Any, directory: Path) -> None:
    """What a config may say and no code of the family can do, and fails in the middle of a pass."""
    config = model.config
    accepted = inspect.signature(type(model).forward).parameters
    asked = getattr(config, "is_encoder_decoder", False) and model.can_generate()
    if asked and "decoder_input_ids" not in accepted:
        raise CheckpointError(
            f"{directory.name}: config.json says is_encoder_decoder true, and "
            f"{type(model).__name__} has no encoder; set it to false"
        )
    text = config.get_text_config(decoder=True)
    kinds = getattr(text, "layer_types", None)
    try:
        window = getattr(text, "sliding_window", None)
    except RuntimeError:  # each layer has its own, and transformers names none for all
        window = None
    slides = kinds is None or any("sliding" in str(kind) for kind in kinds)
    if type(window) is int and window < 1 and slides:
        raise CheckpointError(
            f"{directory.name}: config.json says sliding_window {window}: a token sees 1 or more; "
            f"set it to null if it sees all"
        )


def instantiate(config: Any, dtype: torch.dtype) -> tuple[Any, torch.dtype]:
    """A model on the meta device, in the contexts that ``from_pretrained`` builds it in."""
    import copy

    from transformers.utils import ContextManagers

    cls: Any = model_class(config)
    config = copy.deepcopy(config)
    config._experts_implementation = "eager"
    for sub in getattr(config, "sub_configs", {}) or {}:
        part = getattr(config, sub, None)
        if part is not None:
            part._experts_implementation = "eager"
    config.dtype = dtype
    # With tuples models do not get through their own code, and generate() asks for the other.
    config.return_dict = True
    try:
        with ContextManagers(cls.get_init_context(dtype, False, False, None)):
            model = cls(config)
    except Exception as error:  # whatever a family's code makes of a config's values
        raise UnsupportedModelError(
            f"transformers cannot build {cls.__name__} from this config: "
            f"{type(error).__name__}: {error}"
        ) from error
    with contextlib.suppress(ImportError):
        from transformers.modeling_utils import patch_output_recorders

        patch_output_recorders(model)
    _keep_in_fp32(model, dtype)
    model.eval()
    return model, dtype


def _keep_in_fp32(model: Any, dtype: torch.dtype) -> None:
    """Parameters that transformers loads in fp32 whatever the dtype of the rest."""
    plan = model._get_dtype_plan(dtype)
    if not plan:
        return
    from transformers.core_model_loading import build_glob_alternation

    pattern, group_of, _ = build_glob_alternation(list(plan))
    for name, tensor in list(model.named_parameters()) + list(model.named_buffers()):
        found = pattern.search(name)
        if found is not None and tensor.is_floating_point():
            tensor.data = tensor.data.to(plan[group_of[str(found.lastgroup)]])


def _check(model: Any, mapping: SourceMap, directory: Path) -> None:
    """Compare the checkpoint with the model its config describes."""
    import re

    if mapping.mismatched:
        raise CheckpointError(
            f"{directory.name}: {len(mapping.mismatched)} tensors do not fit the config, first: "
            f"{mapping.mismatched[0]}; config.json and the weights are of different models"
        )
    tied = set(getattr(model, "all_tied_weights_keys", {}))
    ignorable = getattr(model, "_keys_to_ignore_on_load_missing", None) or ()
    lost = [
        k for k in mapping.missing if k not in tied and not any(re.search(p, k) for p in ignorable)
    ]
    sources = set(getattr(model, "all_tied_weights_keys", {}).values())
    lost = [k for k in lost if k not in sources or not _tied_is_there(model, k, mapping)]
    if lost:
        raise CheckpointError(
            f"{directory.name}: {len(lost)} of the model's {len(model.state_dict())} tensors are "
            f"not in the checkpoint, first: {lost[0]}; {_other_name(lost[0], mapping.unexpected)}"
            f"{_guessed_class(model)}config.json and the weights are of different models, or the "
            f"download is incomplete"
        )
    note_unused(
        directory.name,
        model,
        [n for n in mapping.unexpected if not any(re.search(p, n) for p in _passed_over(model))],
    )


def _guessed_class(model: Any) -> str:
    """That the model's class is a guess, where the config names none."""
    if getattr(model.config, "architectures", None):
        return ""
    return (
        f"config.json names no class, and a {type(model).__name__} was made: if it is another one, "
        f'say so there ("architectures": ["..."]); else '
    )


def _passed_over(model: Any) -> set[str]:
    """Patterns of what published checkpoints have besides the model, as transformers knows them:
    layers that only predict ahead, buffers of older versions."""
    return {r"rotary_emb\.inv_freq", *(model._keys_to_ignore_on_load_unexpected or ())}


def note_unused(name: str, model: Any, unused: list[str]) -> None:
    """Warn of weights that no part of ``model`` asks for: it runs, but may not be the whole one."""
    if unused:
        logger.warning(
            "%s: %d tensors have no place in the %s that config.json describes, and are not used; "
            "the first is %s",
            name,
            len(unused),
            type(model).__name__,
            unused[0],
        )


def _other_name(lost: str, unexpected: list[str]) -> str:
    """What the checkpoint may mean by a tensor that the model lacks."""
    tail = lost.partition(".")[2] or lost
    same = next((name for name in unexpected if name.endswith("." + tail)), None)
    if same is None:
        return ""
    return (
        f"the checkpoint has {same}, which transformers does not take for it either (of a model "
        f"with several parts, config.json has to be the whole model's); "
    )


def _tied_is_there(model: Any, source: str, mapping: SourceMap) -> bool:
    keys = model.all_tied_weights_keys
    return any(s == source and t in mapping.sources for t, s in keys.items())


def _tie(model: Any, mapping: SourceMap) -> None:
    """Tie what the config ties; a tied weight that only exists under its other name is found."""
    missing = set(mapping.missing)
    model.tie_weights(missing_keys=missing, recompute_mapping=False)


def materialise_buffers(model: Any, mapping: CheckpointMap, read: Any) -> None:
    """Give every buffer, and every parameter that no checkpoint holds, real memory and values.

    ``read(name)`` returns a checkpoint tensor. Weights stay on meta.
    """
    sources = mapping.map.sources
    named = dict(model.named_parameters(remove_duplicate=False))
    for name, parameter in named.items():
        parameter._is_hf_initialized = name in sources or not parameter.is_meta
    have = {id(p) for n, p in named.items() if n in sources}
    persistent = set(model.state_dict())
    for name, buffer in list(model.named_buffers(remove_duplicate=False)):
        if name in sources:
            value = mapping.convert(name, read)
        elif buffer.is_meta:
            value = torch.empty_like(buffer, device="cpu")
        else:
            value = buffer
        value._is_hf_initialized = name in sources  # type: ignore[attr-defined]
        module, leaf = _owner(model, name)
        module.register_buffer(leaf, value, persistent=name in persistent)
    for name, parameter in named.items():
        if id(parameter) not in have and parameter.is_meta:
            module, leaf = _owner(model, name)
            fresh = torch.nn.Parameter(
                torch.empty_like(parameter, device="cpu"), requires_grad=parameter.requires_grad
            )
            fresh._is_hf_initialized = False  # type: ignore[attr-defined]
            module._parameters[leaf] = fresh
        else:
            parameter._is_hf_initialized = True
    with torch.random.fork_rng(devices=[]):
        model.initialize_weights()


def place_rest(model: Any, device: torch.device) -> None:
    """Move what no block streams to ``device``: buffers, and parameters that no checkpoint holds.
    Weights on meta stay there. What modules share stays shared."""
    # The old one is kept as well: another tensor could get its identity.
    moved: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def move(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in moved:
            moved[id(tensor)] = tensor, tensor.to(device)
        return moved[id(tensor)][1]

    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and not buffer.is_meta:
                module._buffers[name] = move(buffer)
        for parameter in module._parameters.values():
            if parameter is not None and not parameter.is_meta and parameter.device != device:
                parameter.data = parameter.data.to(device)


def _owner(model: Any, name: str) -> tuple[Any, str]:
    parent, _, leaf = name.rpartition(".")
    return (model.get_submodule(parent) if parent else model), leaf
