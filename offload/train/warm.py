"""A toy of the family trained for a step: what the process weighs before the model is opened."""

from __future__ import annotations

import contextlib
import gc
import logging
import tempfile
from pathlib import Path
from typing import Any

import torch

from offload.io.checksum import xxh3
from offload.models.meta import build, model_class
from offload.models.toy import quiet, toy_config, two_layers
from offload.runtime.choice import make_device
from offload.runtime.device import Device
from offload.runtime.rss import current_rss
from offload.train.checks import check_device
from offload.train.device_plan import DevicePlacement, device_units, plan_device
from offload.train.engine import Engine, Group
from offload.train.layout import TrainLayout, lay_out
from offload.train.opening import EngineOptions, Placement, open_engine
from offload.train.options import TrainOptions
from offload.train.row_grads import lookup_tables
from offload.train.updates import Tiles

logger = logging.getLogger(__name__)


def warm_training(config: Any, dtype: torch.dtype, options: TrainOptions) -> int:
    """Train a toy: imports the family's code, starts torch's threads, compiles or loads the kernels
    that the run needs. Returns the resident set after it: the baseline of the budget, in bytes."""
    cls = model_class(config)
    for toy in (two_layers(config, cls, dtype), toy_config(config)):
        if toy is None:
            continue
        try:
            with contextlib.ExitStack() as stack:
                stack.enter_context(torch.random.fork_rng(devices=[]))
                device = None
                if (chosen := check_device(options)).kind == "cuda":  # its libraries weigh, too
                    device = stack.enter_context(contextlib.closing(make_device(chosen, None)))
                _train_toy(toy, cls, dtype, options, device)
            break
        except Exception as error:  # noqa: BLE001  a warm-up must never stop the real run
            logger.info("the toy of %s does not train: %s", type(config).__name__, error)
    gc.collect()
    return current_rss()


def _train_toy(
    toy: Any, cls: Any, dtype: torch.dtype, options: TrainOptions, device: Device | None
) -> None:
    model = cls._from_config(toy, dtype=dtype)
    with tempfile.TemporaryDirectory() as directory, quiet():
        model.save_pretrained(directory)
        del model
        meta = build(Path(directory), dtype)
        meta.model.train()
        layout = lay_out(meta.model)
        every = frozenset(range(len(layout.blocks)))
        total = sum(b.nbytes for b in layout.blocks)
        from offload.io.tile_store import TileStore

        def tiles(layout: Any, parts: Any, io: Any) -> Tiles:
            return TileStore.create(
                Path(directory) / "tiles", [parts(i) for i in range(len(layout.tiles))], io,
                identity={}, keep=1, checksum=xxh3,
            )  # fmt: skip

        engine = open_engine(
            meta, layout,
            Placement(
                weights_bytes=3 * total, pinned=frozenset(layout.rest),
                spilled=every - frozenset(layout.rest) if options.max_grad_norm else frozenset(),
                device=None if device is None else _all_there(layout),
            ),
            EngineOptions(
                states=options.states,
                grad_dtype="float32" if options.grad_accum > 1 else None,
                directory=Path(directory), device=device,
            ),
            tiles,
        )  # fmt: skip
        try:
            _step(engine)
        finally:
            engine.close()


def _all_there(layout: TrainLayout) -> DevicePlacement:
    units = device_units(layout, frozenset(lookup_tables(layout)))
    room = 4 << 20  # of a toy's arguments and results
    return plan_device(layout, 1 << 40, units, up=room, down=room, work=0)


def _step(engine: Engine) -> None:
    for _ in range(2):
        ids = torch.ones((1, 8), dtype=torch.int64)
        engine.begin_forward()
        engine.model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        engine.end_backward()
        engine.step(lambda _: Group(lr=1e-3, weight_decay=0.1), 1.0)
    engine.drain()
