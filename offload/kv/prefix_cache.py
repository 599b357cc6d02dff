"""Keys and values of prompts on disk, so that a prefix that was read before is not read again.

    prompts = PrefixCache(directory, facts, chunk=256, limit=2**33, group_bytes=2**20)
    reuse = prompts.restore(ids, cache)          # cache holds reuse.tokens of ids now
    for at in range(reuse.tokens, prompts.whole(len(ids)), prompts.group):
        with prompts.recording(ids, at, cache):
            for begin in range(at, at + prompts.group, prompts.chunk):  # as a rule once
                model(ids[begin : begin + chunk], past_key_values=cache)
    # then such passes over the rest, the last one of at least one token, and decoding

The rest may be stored, too, with the logits that its pass gave (``recording_end``): of a prompt
that comes again whole, nothing is left to compute (``restore_end``).

A prompt is always read on the same grid of ``chunk`` tokens, whether a group comes from the disk or
from passes, and the passes are the same to the bit: a product with other rows may round otherwise.
So with and without stored groups every later number is the same.

Where keys and values are rounded in blocks, a group ends where a block does, too, and then is
several passes: what is behind its last block would have to be stored unrounded.

Reading and writing run on one thread of its own, through two buffers of one group each; a group is
written while the next pass computes. What fails there costs speed and never the generation.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import queue
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import torch

from offload.errors import ClosedError, OffloadError, StoreError, UnsupportedModelError
from offload.kv import prefix_thread
from offload.kv.prefix_folder import STEP_NS, PrefixFolder, open_directory
from offload.kv.prefix_format import (
    DamagedGroupError,
    Group,
    end_name,
    finish,
    group_names,
    parse,
    root_of,
)
from offload.kv.prefix_layers import Restorer, cached_tokens, check_layers, recording
from offload.kv.prefix_slots import Slot, check_limit, room_in
from offload.kv.prefix_stats import PrefixStats, Reuse
from offload.kv.prefix_thread import HungError, PrefixThread
from offload.units import format_bytes

log = logging.getLogger(__name__)

SLOTS = 2
"""Buffers: one is filled while the other is on its way."""

LOGITS = "logits"
"""The part of a prompt's end that is no layer's; it is kept with the first."""


class PrefixCache:
    """Groups of a model's keys and values in a directory. For one computing thread at a time; any
    number of processes may share the directory."""

    def __init__(
        self,
        directory: str | Path,
        facts: Mapping[str, Any],
        *,
        chunk: int,
        limit: int,
        group_bytes: int,
        grain: int = 1,
        say: Callable[[str], None] = log.warning,
    ) -> None:
        """
        Args:
            directory: made if it is not there.
            facts: everything that changes a number of the model's: two models, settings or machines
                that may differ in one bit must differ here.
            chunk: tokens of a pass, at least 2; the grid that every prompt is read on.
            limit: bytes of all groups in the directory.
            group_bytes: that a group is expected to have; two of them are held in RAM.
            grain: tokens that are rounded together: groups end on a multiple of it as well.
            say: gets one sentence for people when something is wrong with the cache.

        Raises:
            OffloadError: the directory cannot be used, or the limit is below one group.
        """
        check_limit(chunk, limit, group_bytes, math.lcm(chunk, grain))
        self.chunk, self.limit, self.group_bytes = chunk, limit, group_bytes
        self.grain, self.group = grain, math.lcm(chunk, grain)
        """Tokens of a group: hits end on a multiple of it."""
        self.root = root_of({**facts, "chunk": chunk, "grain": grain})
        self.stats = PrefixStats()
        self.last = Reuse()
        """Of the last ``restore``."""
        self._folder = PrefixFolder(open_directory(directory), self.root, limit)
        self._say = say
        self._writes = True
        self._prompt = 0
        self._full = -1
        """The prompt of which no more is stored, as there is no room for it."""
        self._said: set[str] = set()
        self._closed = False
        self._slots: queue.SimpleQueue[Slot] = queue.SimpleQueue()
        for _ in range(SLOTS):
            self._slots.put(Slot(group_bytes))
        self._thread = PrefixThread()
        self._written: dict[str, Future[None]] = {}
        """By name: on their way to the disk."""
        self._used_ns = 0
        self._mine: set[str] = set()

    def whole(self, tokens: int) -> int:
        """Of a prompt of so many tokens, those in groups: a multiple of ``group``, less than all,
        since a model has to be asked with at least one."""
        return (tokens - 1) // self.group * self.group if tokens else 0

    def stored(self, ids: Sequence[int]) -> int:
        """Tokens that ``restore`` would find now, without reading them."""
        names = group_names(self.root, ids, self.group, self.whole(len(ids)))
        for i, name in enumerate(names):
            if not self._folder.holds(name):
                return i * self.group
        return len(names) * self.group

    def restore(self, ids: Sequence[int], cache: Any) -> Reuse:
        """Fill ``cache`` with the longest stored prefix of ``ids``, at least one token less than
        all of them.

        Args:
            ids: of a whole prompt, one sequence.
            cache: empty, or holding the first tokens of ``ids``, a multiple of ``group``, as passes
                on the grid left them.

        Returns: what was found; ``cache`` holds ``tokens`` tokens.

        Raises:
            UnsupportedModelError: the cache is of a kind that cannot be brought back exactly, or
                holds something that is not on the grid.
            ClosedError: it is closed.
        """
        self._check_open()
        check_layers(cache)
        kept = cached_tokens(cache)
        if kept % self.group or kept > self.whole(len(ids)):
            raise UnsupportedModelError(f"it holds {kept} tokens, which is not on the grid")
        began = time.perf_counter()
        names = group_names(self.root, ids, self.group, self.whole(len(ids)))
        self._begin_use(names)
        self._arrive(names)
        first = kept // self.group
        with torch.no_grad():
            found, damaged, read, compute_s = self._restore(ids, names, first, cache)
        took = time.perf_counter() - began
        reuse = Reuse(
            tokens=kept + found * self.group,
            kept=kept,
            read_bytes=read,
            read_s=took,
            saved_s=max(0.0, compute_s - took) if found else 0.0,
            damaged=damaged,
        )
        self.last = reuse
        self.stats.found(reuse.tokens, read, took, reuse.saved_s)
        return reuse

    def restore_end(self, ids: Sequence[int], cache: Any) -> torch.Tensor | None:
        """What is behind the last group of ``ids``, if this very prompt was read before.

        Args:
            ids: as given to ``restore``.
            cache: holding the ``whole`` tokens of ``ids``.

        Returns: logits ``[1, 1, V]`` of the last token, in the dtype that the model gave them;
            ``cache`` holds all of ``ids`` then. None: nothing was found, and nothing was changed.

        Raises:
            ClosedError: it is closed.
        """
        self._check_open()
        began = time.perf_counter()
        at = self.whole(len(ids))
        name = self._end_name(ids)
        self._arrive([name])
        if not self._folder.holds(name) or (slot := self._take()) is None:
            return None
        future = self._thread.submit(self._read, slot, ids, name, at // self.group)
        try:
            slot, group = self._wait(future)
        except DamagedGroupError as error:
            self._lost(error)
            return None
        except HungError as error:
            self._give_up(str(error))
            return None
        try:
            if group is None:
                return None
            parts = slot.parts(group)
            if LOGITS not in parts.get(0, {}):
                raise DamagedGroupError("it has no logits")
            logits = parts[0][LOGITS].clone()
            restorer = Restorer(cache, len(ids) - at)
            restorer.add(parts, len(ids) - at)
            restorer.finish()
            read = slot.filled
        except DamagedGroupError as error:
            self._folder.drop(name)
            self._lost(error)
            return None
        finally:
            self._slots.put(slot)
        self._folder.touch(name, self._end_used_ns(at))
        took = time.perf_counter() - began
        saved = max(0.0, group.compute_s - took)
        before = self.last
        self.last = dataclasses.replace(
            before,
            tokens=len(ids),
            read_bytes=before.read_bytes + read,
            read_s=before.read_s + took,
            saved_s=before.saved_s + saved,
        )
        self.stats.found(len(ids) - at, read, took, saved)
        return logits

    def _lost(self, error: DamagedGroupError) -> None:
        self.stats.damaged_groups += 1
        self._say(f"the prompt cache is damaged, and this part is computed again: {error}")

    def _end_name(self, ids: Sequence[int]) -> str:
        at = self.whole(len(ids))
        names = group_names(self.root, ids, self.group, at)
        return end_name(names[-1] if names else self.root, ids[at:])

    def _end_used_ns(self, at: int) -> int:
        """It goes before the groups that it is of no use without."""
        return self._used_ns - at // self.group * STEP_NS

    def _restore(
        self, ids: Sequence[int], names: Sequence[str], first: int, cache: Any
    ) -> tuple[int, int, int, float]:
        """Groups restored, damaged, bytes read, and seconds that their passes took."""
        stop = first
        while stop < len(names) and self._folder.holds(names[stop]):
            stop += 1
        restorer = Restorer(cache, (stop - first) * self.group)
        found = damaged = read = 0
        compute_s = 0.0
        ahead: list[Future[tuple[Slot, Group | None]]] = []
        try:
            for i in range(first, stop):
                # The next one is read while this one is copied.
                for j in range(i + len(ahead), min(i + SLOTS, stop)):
                    if (slot := self._take()) is None:
                        break
                    ahead.append(self._thread.submit(self._read, slot, ids, names[j], j))
                if not ahead:
                    break
                slot, group = self._wait(ahead.pop(0))
                try:
                    if group is None:
                        break
                    try:
                        restorer.add(slot.parts(group), self.group)
                    except DamagedGroupError as error:
                        self._folder.drop(names[i])
                        raise DamagedGroupError(f"{names[i]}: {error}") from error
                    read += slot.filled
                    compute_s += group.compute_s
                    found += 1
                finally:
                    self._slots.put(slot)
        except DamagedGroupError as error:
            damaged += 1
            self._lost(error)
        except HungError as error:
            self._give_up(str(error))
        finally:
            for future in ahead:
                future.add_done_callback(self._return)
        restorer.finish()
        for i, name in enumerate(names[: first + found]):
            self._folder.touch(name, self._used_ns - i * STEP_NS)
        return found, damaged, read, compute_s

    def _read(
        self, slot: Slot, ids: Sequence[int], name: str, index: int
    ) -> tuple[Slot, Group | None]:
        """On the thread: a group, checked; None: it is not there any more. The slot comes back in
        any case: with an error, in the queue."""
        at = index * self.group
        tokens = ids[at : at + self.group]
        try:
            try:
                area = self._folder.read(name, room_in(slot, self.group_bytes))
                if area is None:
                    return slot, None
                group = parse(area, root=self.root, name=name, start=at, tokens=tokens)
                slot.filled = area.nbytes
                return slot, group
            except DamagedGroupError as error:
                self._folder.drop(name)
                raise DamagedGroupError(
                    f"tokens {at} to {at + len(tokens)} in {self._folder.path}: {error}"
                ) from error
            except StoreError as error:
                # A read error is not a deletion: another day it may be readable.
                raise DamagedGroupError(str(error)) from error
        except BaseException:
            self._slots.put(slot)
            raise

    def _return(self, future: Future[tuple[Slot, Group | None]]) -> None:
        if not future.cancelled() and future.exception() is None:
            self._slots.put(future.result()[0])

    @contextlib.contextmanager
    def recording(self, ids: Sequence[int], start: int, cache: Any) -> Iterator[None]:
        """Around exactly the passes, of ``chunk`` tokens each, over ``ids[start : start + group]``
        with ``cache``, which holds ``ids[:start]``: what they leave is stored behind the caller's
        back.

        A cache that cannot be recorded ends storing with one sentence; a full disk or a full limit
        does until the next prompt. The passes are none the worse.
        """
        self._check_open()
        end = start + self.group
        if start % self.group or end > len(ids):
            raise ValueError(f"tokens {start} to {end} of {len(ids)} are not on the grid")
        name = group_names(self.root, ids, self.group, end)[-1]
        with self._recording(name, ids, start, end, cache, self.chunk):
            yield

    @contextlib.contextmanager
    def recording_end(
        self, ids: Sequence[int], cache: Any
    ) -> Iterator[Callable[[torch.Tensor], None]]:
        """As ``recording``, around the one pass over what is behind the last group of ``ids``. The
        logits after the last token, ``[1, 1, V]``, are to be given to what it yields.

        Only with a ``grain`` of 1: what is behind the last block is not rounded yet.
        """
        self._check_open()
        start, end = self.whole(len(ids)), len(ids)
        with self._recording(self._end_name(ids), ids, start, end, cache, end - start) as slot:
            yield (lambda logits: None) if slot is None else partial(slot.put, 0, LOGITS)
            if slot is not None and not any(piece.part == LOGITS for piece in slot.pieces):
                raise UnsupportedModelError("its passes give no logits")

    @contextlib.contextmanager
    def _recording(
        self, name: str, ids: Sequence[int], start: int, end: int, cache: Any, chunk: int
    ) -> Iterator[Slot | None]:
        """Around passes over ``ids[start:end]``, of ``chunk`` tokens each; yields where they are
        put, None: nowhere."""
        slot = None
        if self._writes and self._full != self._prompt and not self._folder.holds(name):
            self._mine.add(name)
            slot = self._take()
        if slot is None:
            yield None
            return
        slot.clear()
        began = time.perf_counter()
        try:
            with recording(cache, end - start, slot.put, chunk):
                yield slot
        except UnsupportedModelError as error:
            self._slots.put(slot)
            self._give_up(f"this model's prompts cannot be stored: {error}")
            return
        except BaseException:
            self._slots.put(slot)
            raise
        group = Group(
            root=self.root,
            name=name,
            start=start,
            tokens=tuple(int(t) for t in ids[start:end]),
            pieces=tuple(slot.pieces),
            compute_s=time.perf_counter() - began,
        )
        used_ns = self._end_used_ns(start)
        self._written = {n: f for n, f in self._written.items() if not f.done()}
        self._written[name] = self._thread.submit(self._write, slot, group, used_ns, self._prompt)

    def _write(self, slot: Slot, group: Group, used_ns: int, prompt: int) -> None:
        """On the thread. Never raises: nobody waits for it."""
        try:
            if not self._writes or self._full == prompt:
                return
            nbytes = finish(group, slot.room(group.payload_bytes, len(group.pieces), self.group))
            if not self._folder.make_room(nbytes, self._mine):
                self._no_room(
                    prompt,
                    "limit",
                    f"--prompt-cache-limit {format_bytes(self.limit)} takes only a part of this "
                    f"prompt: tokens from {group.start} on are not stored",
                )
                return
            self._folder.publish(group.name, slot.memory.view()[:nbytes], used_ns)
            self.stats.written_groups += 1
            self.stats.written_bytes += nbytes
        except (OffloadError, OSError) as error:
            self._no_room(prompt, "disk", f"a prompt is not in the prompt cache: {error}")
        finally:
            self._slots.put(slot)

    def _no_room(self, prompt: int, kind: str, why: str) -> None:
        """Store no more of a prompt: the next one may be shorter, and a disk may have been cleared,
        which a server lives to see. Say why, once for each kind of reason."""
        self._full = prompt
        if kind not in self._said:
            self._said.add(kind)
            self._say(f"{why} (said once)")

    def _give_up(self, why: str) -> None:
        """Store nothing more; say why, once."""
        if self._writes:
            self._writes = False
            self._say(why)

    def _begin_use(self, names: Sequence[str]) -> None:
        """These groups are in use from now on, and the last to go."""
        self._prompt += 1
        self._used_ns = max(self._used_ns + STEP_NS, time.time_ns())
        self._mine = set(names)

    def _arrive(self, names: Sequence[str]) -> None:
        """Wait for those that are still being written: a write is sooner done than the passes."""
        for name in names:
            if (future := self._written.get(name)) is None or self._thread.hangs:
                continue
            try:
                self._thread.wait(future)
            except HungError as error:
                self._give_up(str(error))

    def _take(self) -> Slot | None:
        """A buffer that nothing uses; None: the disk hangs."""
        if self._thread.hangs:
            return None
        try:
            return self._slots.get(timeout=prefix_thread.WAIT_S)
        except queue.Empty:
            self._give_up(str(self._thread.too_late()))
            return None

    def _wait(self, future: Future[tuple[Slot, Group | None]]) -> tuple[Slot, Group | None]:
        try:
            return self._thread.wait(future)
        except HungError:
            future.add_done_callback(self._return)
            raise

    def flush(self) -> None:
        """Wait until everything recorded is on the disk, or was given up: also by a disk that
        hangs, which is said."""
        self._arrive(list(self._written))
        self._written = {name: f for name, f in self._written.items() if not f.done()}

    def to_json(self) -> dict[str, Any]:
        """Figures since it was opened."""
        return {"chunk": self.chunk, "group": self.group, **dataclasses.asdict(self.stats)}

    def close(self) -> None:
        """Finish writing, unless the disk hangs, which is said; free thread, memory and folder.
        Idempotent."""
        if self._closed:
            return
        self._closed = True
        with contextlib.ExitStack() as stack:  # whatever becomes of the writes
            stack.callback(self._folder.close)
            stack.callback(self._free)
            stack.callback(self._thread.close)
            self.flush()

    def _free(self) -> None:
        """The buffers; one that a hung disk still has stays."""
        with contextlib.suppress(queue.Empty):
            while True:
                self._slots.get_nowait().memory.close()

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("the prompt cache is closed")
