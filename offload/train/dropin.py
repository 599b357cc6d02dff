"""``offload.load(path, train=True)``: an ordinary model for loops that are not ours.

The model is transformers' own class; its units stream, its parameters are ``streamed``, its updates
are made by ``offload.AdamW``. ``model.offload`` is the ``Training`` here: states and where they
are, saving, closing.
"""

from __future__ import annotations

import atexit
import logging
import os
import secrets
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MethodType
from typing import Any, NoReturn, SupportsIndex

import torch
from torch import nn

from offload.errors import ClosedError, OffloadError
from offload.io.tile_store import check_directory, is_tile_store, stored_identity
from offload.io.whole_file import expanded
from offload.models.meta import MetaModel
from offload.models.streamed_forward import not_compiled
from offload.train.engine import Engine
from offload.train.foreign import ForeignLoop
from offload.train.layout import TrainLayout, lay_out
from offload.train.learnt_buffers import LearntBuffers
from offload.train.opening import EngineOptions, Placement, open_engine
from offload.train.optimizer import REFERENCE, refuse_others
from offload.train.output_tensors import OutputTensors, check_writable
from offload.train.saving import save_model
from offload.train.streamed import StreamedTensor
from offload.train.updates import Tiles

log = logging.getLogger(__name__)

Trains = bool | str | Callable[[str], bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class DropinOptions:
    """What ``open_trainable`` is asked for; see ``offload.load``."""

    train: Trains = True
    states: str = "fp32"
    grad_dtype: str | None = None
    seed: int = 0
    keep: int = 1
    """Commits that stay loadable."""
    resume: bool | int | str | Path = False


def choose_trained(model: nn.Module, train: Trains) -> None:
    """Set every parameter's ``requires_grad``. ``train``: True or "full": as the model's class has
    it, which is all but tables of sines and the like; "adapters": none of the checkpoint's (modules
    that are put on top train); a function of the name.

    Raises:
        OffloadError: another value.
    """
    chosen: Callable[[str], bool]
    if train is True or train == "full":
        chosen = {name: p.requires_grad for name, p in model.named_parameters()}.__getitem__
    elif train == "adapters":
        chosen = lambda _: False  # noqa: E731
    elif callable(train):
        chosen = train
    else:
        raise OffloadError(
            f"train={train!r}: give True (all weights), 'adapters' (none: for PEFT on top), or a "
            f"function from a parameter's name to whether it is trained"
        )
    some = False
    for name, param in model.named_parameters():
        param.requires_grad_(param.is_floating_point() and bool(chosen(name)))
        some |= param.requires_grad
    if not some and train != "adapters":
        raise OffloadError("nothing to train: train= says no to every parameter")


def check_place(directory: Path | None, resume: bool | int | str | Path) -> None:
    """Refuse to begin where states (or anything else) are, and to resume where there are none, or
    where another process trains. ``directory``: None: a private one.

    Raises:
        OffloadError: with what to give or to drop.
    """
    there = directory is not None and is_tile_store(directory)
    asked = resume is not False
    if asked and not there:
        where = f"{directory} holds no training states" if directory else "no disk= is given"
        raise OffloadError(
            f"resume: {where}; give disk= the directory of the run that is to go on, or drop "
            f"resume="
        )
    if there and not asked:
        raise OffloadError(
            f"{directory} holds the states of another run; continue it with resume=True, or give "
            f"another disk=, or delete it"
        )
    if directory is not None:
        check_directory(directory, resume=asked)


def open_trainable(
    meta: MetaModel, layout: TrainLayout, placement: Placement, options: DropinOptions,
    directory: Path | None,
    progress: Callable[[str, int, int], None] = lambda *_: None,
) -> Any:  # fmt: skip
    """Make ``meta.model``, laid out as ``layout`` by ``choose_trained``, stream and train.

    ``directory``: where its states live; None: a private directory that goes with the model.

    Raises:
        OffloadError: states of another model are there, or none to resume from; see
            ``open_engine``.
    """
    if layout.trained:
        check_writable(meta.mapping)
    private = directory is None
    if directory is None:
        from offload.models.recipes import spill_directory

        directory = Path(tempfile.mkdtemp(prefix="training-", dir=spill_directory(None)))
    try:
        return Training(meta, layout, placement, options, directory, private, progress).model
    except BaseException:
        if private:
            shutil.rmtree(directory, ignore_errors=True)
        raise


class Training:
    """``model.offload``. Close it (or use it in a ``with``) when the model is saved."""

    def __init__(
        self, meta: MetaModel, layout: TrainLayout, placement: Placement, options: DropinOptions,
        directory: Path, private: bool, progress: Callable[[str, int, int], None],
    ) -> None:  # fmt: skip
        """Not to be called; see ``open_trainable``."""
        self.model: Any = meta.model
        self.directory = directory
        self.placement = placement
        self.plan: Any = None
        """``plan.TrainPlan``, if it was made by ``offload.load``."""
        self._meta = meta
        self._private = private
        self._store: Any = None
        self._id = secrets.token_hex(8)
        self._commit = 0
        self._dirty = False
        self._saved = True
        self._closed = False
        trained = {
            alias
            for block in layout.trained
            for piece in block.pieces
            for alias in layout.params[piece.param].names
        }
        # Buffers, too: batch norm's statistics are learnt in forward.
        sources = meta.mapping.map.sources
        buffers = {name for name, _ in self.model.named_buffers(remove_duplicate=False)}
        self._buffers = {n for n in buffers & sources.keys() if sources[n].found is not None}
        trained |= self._buffers
        # Now, while the model is whole: it shows which parameters are tied.
        self._tensors = OutputTensors(
            meta.mapping, self._parameter, dtype=meta.dtype, trained=trained
        )
        self.engine: Engine = open_engine(
            meta, layout, placement,
            EngineOptions(
                states=options.states, grad_dtype=options.grad_dtype, seed=options.seed,
                directory=directory, progress=progress,
            ),
            self._tiles(meta, layout, options),
        )  # fmt: skip
        self.loop = ForeignLoop(self.engine)
        self.loop.owner = self
        self._learnt = LearntBuffers(self.model, self._buffers)
        self._resume()
        refuse_others()
        self._equip()
        self._process = os.getpid()
        atexit.register(self._at_exit)

    # -- the model ------------------------------------------------------------------------

    def _equip(self) -> None:
        model = self.model
        model.offload = self
        model.forward = not_compiled(model.forward)
        model.save_pretrained = MethodType(_save_pretrained, model)
        model.load_state_dict = MethodType(_load_state_dict, model)
        # Of the model itself: asked of what it holds, this comes when all weights are copied.
        model.__deepcopy__ = self.__deepcopy__
        for name in ("gradient_checkpointing_enable", "activation_checkpointing_enable"):
            if hasattr(model, name):
                setattr(model, name, MethodType(_already_checkpointed, model))

    # -- states ---------------------------------------------------------------------------

    def _tiles(self, meta: MetaModel, layout: TrainLayout, options: DropinOptions) -> Any:
        from offload.io.checksum import xxh3
        from offload.io.tile_store import TileStore
        from offload.train.identity import check_model, layout_fingerprint, model_identity

        if not layout.trained:
            return lambda *_: _NoTiles()
        check_place(self.directory, options.resume)
        there = is_tile_store(self.directory)
        identity = {
            **model_identity(meta),
            "layout": layout_fingerprint(layout),
            "states": options.states,
            "grad_dtype": options.grad_dtype or "of the weights",
            "seed": options.seed,
        }
        if there:
            check_model(stored_identity(self.directory), identity)
        commit = _commit_number(options.resume)

        def make(layout: TrainLayout, parts: Callable[[int], tuple[int, ...]], io: Any) -> Tiles:
            shapes = [parts(i) for i in range(len(layout.tiles))]
            if there:
                self._store = TileStore.open(
                    self.directory, io, shapes=shapes, identity=identity, keep=options.keep,
                    checksum=xxh3, commit=commit,
                )  # fmt: skip
            else:
                self.directory.mkdir(parents=True, exist_ok=True, mode=0o700)
                self._store = TileStore.create(
                    self.directory, shapes, io, identity=identity, keep=options.keep, checksum=xxh3
                )
            return self._store  # type: ignore[no-any-return]

        return make

    def _resume(self) -> None:
        facts = None if self._store is None else self._store.commit_meta
        if facts is None:
            return
        self.engine.steps.update(facts["param_steps"])
        self.loop.steps = int(facts["step"])
        self._learnt.restore(facts.get("buffers", {}))
        self._id, self._commit = str(facts["store"]), int(facts["number"])

    def drain(self) -> None:
        """Wait until every update is made and written."""
        self._check_open()
        self.engine.drain()

    def commit(self) -> int:
        """Make the state after the last step durable; returns the number of the commit.

        Raises:
            OffloadError: nothing is trained here. StoreError: the disk refused.
        """
        self._check_open()
        if self._store is None:
            raise OffloadError("nothing of this model is trained here, so there are no states")
        if self._dirty or not self._commit:
            self.engine.drain()
            self.engine.updater.write_resident()
            number = self._commit + 1
            self._store.commit(
                {
                    "step": self.loop.steps,
                    "param_steps": self.engine.steps,
                    "buffers": self._learnt.save(),
                    "store": self._id,
                    "number": number,
                }
            ).result()
            self._commit, self._dirty = number, False
            # A Trainer saves the weights first: a private commit takes nothing of that away.
            self._saved = self._saved or not self._private
            if self._private:
                log.warning(
                    "the states are in a private directory and go with this process; give disk= a "
                    "directory when loading to resume from them"
                )
        return self._commit

    def stepped(self) -> None:
        self._dirty, self._saved = True, False

    def reference(self) -> dict[str, Any]:
        """Where the states are: commits them if a step was taken since."""
        self._check_open()
        if self._dirty:
            self.commit()
        return {
            "store": self._id,
            "directory": str(self.directory),
            "commit": self._commit,
            "step": self.loop.steps,
        }

    def check_reference(self, reference: Mapping[str, Any]) -> None:
        """Raise OffloadError unless ``reference`` is to the states there are now."""
        commit, step = reference["commit"], reference["step"]
        if reference["store"] == self._id and not self._dirty and commit == self._commit:
            return
        if not step and not self.loop.steps:
            return  # nobody has any states yet
        now = f"the model is at step {self.loop.steps}" + (
            f" (commit {self._commit} in {self.directory})" if self._commit else ""
        )
        raise OffloadError(
            f"the optimizer's states to load are those of step {step} (commit {commit} in "
            f"{reference['directory']}), but {now}: load the model with "
            f"offload.load(..., disk={reference['directory']!r}, resume={commit})"
        )

    # -- the result -----------------------------------------------------------------------

    def _parameter(self, name: str, start: int, count: int) -> torch.Tensor:
        self._check_open()
        if name in self._buffers:
            return self.model.get_buffer(name).reshape(-1)[start : start + count].cpu()  # type: ignore[no-any-return]
        return self.engine.read_elements(name, start, count)

    def save(self, directory: str | os.PathLike[str], shard_bytes: int | None = None) -> None:
        """Write the model with its current weights into ``directory``, tensor by tensor: what
        ``save_pretrained`` does. Files of these names there are replaced when all is written."""
        self._check_open()
        with self._tensors as tensors:
            save_model(Path(directory), self._meta, tensors, shard_bytes)
        self._saved = True

    # -- the end --------------------------------------------------------------------------

    def __deepcopy__(self, memo: Any) -> Any:
        raise OffloadError(
            "a streamed model cannot be copied as a whole (for a model to compare with, say): load "
            "it a second time with offload.load(path), or train adapters, which can be switched off"
        )

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise OffloadError(
            "what streams a model cannot be pickled: write the weights with "
            "model.save_pretrained(directory), or pickle model.state_dict()"
        )

    def __enter__(self) -> Any:
        return self.model

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def closed(self) -> bool:
        return self._closed

    def close(self) -> None:
        """Make pending updates, end the threads, free the memory. Idempotent. The weights are gone
        from the model then; steps since the last save or commit are said in the log."""
        if self._closed:
            return
        self._closed = True
        atexit.unregister(self._at_exit)
        self._say_lost()
        try:
            if self._store is not None and not self._private and self.engine.shared.error is None:
                self.engine.drain()
        finally:
            self.engine.close()
            if self._private:
                shutil.rmtree(self.directory, ignore_errors=True)

    def _say_lost(self) -> None:
        if not self._saved:
            log.warning(
                "%d steps were taken and not all of them saved: call model.save_pretrained(...) or "
                "model.offload.commit() before the model is closed",
                self.loop.steps,
            )

    def _at_exit(self) -> None:
        """What is pending is lost, as nobody has saved it. Threads have to end all the same: one
        that is in torch's code when the interpreter goes ends the process with an abort."""
        if os.getpid() != self._process:
            return  # a fork's child: files and threads are the parent's
        self._closed = True
        self._say_lost()
        try:
            self.engine.close()
        except OffloadError as error:
            log.debug("at the end of the program: %s", error)
        if self._private:
            shutil.rmtree(self.directory, ignore_errors=True)

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("the model is closed")


class _NoTiles:
    """The store of a model nothing of which is trained."""

    def written(self, tile: int) -> bool:
        return False

    def has(self, tile: int, part: int) -> bool:
        return False

    def read_into(self, *_: Any) -> Any:
        raise OffloadError("nothing is trained: there are no states")

    write_from = read_into

    def close(self) -> None:
        """Nothing to close."""


def _commit_number(resume: bool | int | str | Path) -> int | None:
    """Of what ``resume=`` means; None: the newest."""
    if isinstance(resume, bool):
        return None
    if isinstance(resume, int):
        return resume
    file = expanded(Path(resume)) / "optimizer.pt"
    try:
        saved = torch.load(file, map_location="cpu", weights_only=True)
        return int(saved[REFERENCE]["commit"])
    except (OSError, KeyError, TypeError) as error:
        raise OffloadError(
            f"resume={str(resume)!r} is no checkpoint of a Trainer with offload.AdamW: {file} "
            f"{'cannot be read' if isinstance(error, OSError) else 'is of another optimizer'}"
        ) from error


# -- what replaces methods of the model ---------------------------------------------------------


def _save_pretrained(
    self: Any, save_directory: str | os.PathLike[str], *, state_dict: Any = None,
    max_shard_size: str | int | None = None, **others: Any,
) -> None:  # fmt: skip
    """transformers' ``save_pretrained``, written tensor by tensor from the streamed weights."""
    if others.get("push_to_hub"):
        raise OffloadError("save to a directory first, and upload that (hf upload)")
    if state_dict is not None and not all(
        isinstance(v, StreamedTensor) for v in state_dict.values()
    ):
        raise OffloadError("a streamed model saves its own weights; leave state_dict out")
    from offload.units import parse_bytes

    shard = None if max_shard_size is None else parse_bytes(max_shard_size)
    self.offload.save(save_directory, shard)


def _load_state_dict(
    self: Any, state_dict: Mapping[str, torch.Tensor], strict: bool = True, assign: bool = False
) -> Any:
    """Weights come from the checkpoint and the store, and cannot be put in; that those in
    ``state_dict`` are the model's own (as when a Trainer resumes) is checked, value by value.
    Buffers are in memory, and are loaded."""
    from torch.nn.modules.module import _IncompatibleKeys

    params = dict(self.named_parameters(remove_duplicate=False))
    buffers = dict(self.named_buffers(remove_duplicate=False))
    unknown = [name for name in state_dict if name not in params and name not in buffers]
    if strict and unknown:
        raise OffloadError(f"the model has no parameter {unknown[0]}")
    for name, value in state_dict.items():
        if name in buffers:
            if buffers[name].shape != value.shape:
                raise OffloadError(
                    f"{name} is {tuple(buffers[name].shape)}, not {tuple(value.shape)}"
                )
            with torch.no_grad():
                buffers[name].copy_(value)
        elif name in params and not torch.equal(params[name].detach().to(value.dtype), value):
            raise OffloadError(
                f"{name} differs from the weights to load, and streamed weights cannot be "
                f"replaced: load the model with resume= at the step these are from, or from their "
                f"directory"
            )
    return _IncompatibleKeys([], [])


def _already_checkpointed(self: Any, *_: Any, **__: Any) -> None:
    """Every unit is run again in backward anyway; checkpointing on top would run it a third
    time."""
    log.info("gradient checkpointing is built in; enabling it changes nothing")


__all__ = ["DropinOptions", "Training", "choose_trained", "lay_out", "open_trainable"]
