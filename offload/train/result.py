"""What a run leaves: the model, the adapter, or both, written from an engine's current weights."""

from __future__ import annotations

import math
import os
import secrets
from dataclasses import replace
from pathlib import Path

import torch

from offload.errors import OffloadError
from offload.models.meta import MetaModel
from offload.models.naming import model_name
from offload.train.engine import Engine
from offload.train.layout import TrainLayout
from offload.train.lora import Adapters
from offload.train.lora_output import MergedValues, write_adapter
from offload.train.merging import HeldReader
from offload.train.options import TrainOptions
from offload.train.output import write_model
from offload.train.output_tensors import OutputTensors
from offload.train.packed_base import PackedBase
from offload.train.reports import Listener


def adapter_directory(options: TrainOptions) -> Path:
    """Where a LoRA run's adapter is written: the output, or beside it if that is the merged
    model."""
    output = options.output.expanduser()
    return output.parent / f"{output.name}.adapter" if options.merge else output


def last_output(options: TrainOptions) -> Path:
    """Where the last step's weights go if the output holds the best ones."""
    output = options.output.expanduser()
    return output.parent / f"{output.name}.last"


class Result:
    """Writes a run's output. To be made while the model is whole: it shows what is tied then."""

    def __init__(
        self, meta: MetaModel, layout: TrainLayout, options: TrainOptions,
        adapters: Adapters | None, base: PackedBase | None = None,
    ) -> None:  # fmt: skip
        self._meta = meta
        self._layout = layout
        self._options = options
        self._adapters = adapters
        self._base = base
        self._engine: Engine | None = None
        self._reader: HeldReader | None = None
        self._merging: MergedValues | None = None
        self._tensors: OutputTensors | None = None
        if adapters is None:
            trained = {
                alias
                for block in layout.trained
                for piece in block.pieces
                for alias in layout.params[piece.param].names
            }
            self._tensors = OutputTensors(
                meta.mapping, self._parameter, dtype=meta.dtype, trained=trained
            )
        elif options.merge:
            # Of a pack there are no files to copy the rest from.
            whole = base is not None and not base.of_checkpoint
            self._tensors = OutputTensors(
                meta.mapping, self._merged, dtype=meta.dtype,
                trained=meta.mapping.map.sources.keys() if whole
                else {t.weight for t in adapters.targets},
            )  # fmt: skip

    def _parameter(self, name: str, start: int, count: int) -> torch.Tensor:
        if self._engine is None:
            raise OffloadError("the run is not open")
        return self._engine.read_elements(name, start, count)

    def _merged(self, name: str, start: int, count: int) -> torch.Tensor:
        if self._engine is None or self._adapters is None:
            raise OffloadError("the run is not open")
        if self._merging is None:
            values = self._adapters.values(self._engine)
            self._merging = self._adapters.merged_values(self._base_values, values)
        return self._merging(name, start, count)

    def _base_values(self, name: str, start: int, count: int) -> torch.Tensor:
        """Of what adapters are merged into: the checkpoint's own bits where that is at hand."""
        if self._base is not None and self._base.of_checkpoint and self._tensors is not None:
            return self._tensors.source(name, start, count)
        if self._reader is None:
            raise OffloadError("the run is not open")
        return self._reader(name, start, count)

    @property
    def merged_onto(self) -> str | None:
        """LoRA on a packed base: what the adapters are merged into, in words; None for any other
        run."""
        if self._base is None or not self._options.merge:
            return None
        if self._base.of_checkpoint:
            return f"the weights of {model_name(self._meta.directory)}, not quantised"
        return f"the pack's values in {str(self._meta.dtype).removeprefix('torch.')}"

    @property
    def nbytes(self) -> int:
        """Of what is written, but for its small files."""
        if self._tensors is None:
            return 4 * self._layout.elements
        sizes: list[int] = [
            math.prod(shape) * getattr(torch, dtype).itemsize
            for _, dtype, shape in self._tensors.tensors
        ]
        return sum(sizes)

    def _base_name(self) -> str | Path:
        """What the adapter belongs to: the name on the hub if the model was given by it, which is
        the same on every machine; else where it is."""
        if not os.path.exists(Path(self._options.model).expanduser()):
            return self._options.model
        return self._meta.directory.resolve() if self._base is None else self._base.source

    def write(self, engine: Engine, output: Path, listener: Listener) -> str:
        """Write the engine's weights to ``output``, and an adapter beside it if that is the merged
        model; returns the path.

        Raises:
            OffloadError, StoreError: as of ``write_model`` and ``write_adapter``.
        """
        self._engine, self._merging = engine, None
        run_id = secrets.token_hex(8)
        if self._adapters is not None:
            values = self._adapters.values(engine)
            write_adapter(
                adapter_directory(replace(self._options, output=output)), self._meta.model,
                self._adapters.pairs(values),
                self._adapters.options(self._base_name()),
                run_id=run_id, source=self._meta.directory,
            )  # fmt: skip
        if self._tensors is not None:
            with self._tensors as tensors, HeldReader(engine) as self._reader:
                write_model(
                    output, self._meta.directory, tensors.tensors, tensors.read,
                    run_id=run_id, dtype=str(self._meta.dtype).removeprefix("torch."),
                    progress=lambda done, total: listener.phase("write", done, total),
                )  # fmt: skip
        return str(output)


__all__ = ["Result", "adapter_directory", "last_output"]
