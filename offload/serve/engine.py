"""The engine: takes requests from any thread, runs them on its own.

That thread alone touches the model. Each request is the model's own unmodified ``generate`` in a
``Sequence`` of the ``Conductor``, so that all running requests go through the model together and
its weights are read once per pass for all of them; who comes later joins at the next pass. A long
prompt is read in pieces on a fixed grid, one per pass: the answers being written go on meanwhile,
and what a request reads at once does not depend on who else is there.
"""

from __future__ import annotations

import copy
import dataclasses
import logging
import math
import secrets
import threading
import time
from collections.abc import Mapping
from typing import Any

from offload.batch.conductor import Conductor
from offload.batch.sequence import Cancelled, Sequence
from offload.cli import decode
from offload.cli.text import Decoder, IdDecoder, TextDecoder
from offload.errors import OffloadError
from offload.models.pieces import why_not_in_pieces
from offload.models.sampling import choose_alone, own_temperature, vocabulary_of
from offload.runtime.rss import current_rss
from offload.serve.counters import Counters
from offload.serve.events import Deliver, Ended, Failed, Piece, Request
from offload.serve.fair import FairQueue
from offload.serve.problems import Problem, busy, failed, stopping

logger = logging.getLogger(__name__)

PUBLISH_S = 0.2
"""The model's own figures are taken so often: what is asked for costs less than a pass."""
MOST_RETRY_S = 600


class Handle:
    """One request from its arrival to its end; everything in it belongs to the engine."""

    def __init__(self, request: Request, deliver: Deliver) -> None:
        self.request = request
        self.deliver = deliver
        self.arrived = time.perf_counter()
        self.started = 0.0
        self.last_token: float | None = None
        self.reused = 0
        self.sequence: Sequence | None = None
        self.run: decode.Run | None = None
        self.unwanted = False

    def abandon(self) -> None:
        """Nobody wants the answer any more, whether it has been started or is about to be."""
        self.unwanted = True
        if self.sequence is not None:
            self.sequence.cancel()


class Engine:
    """Runs requests on ``model``, up to ``parallel`` at once, and queues what comes beyond.

    ``submit``, ``cancel``, ``stats`` and the rest may be called from any thread; they never wait
    for the model.
    """

    def __init__(
        self,
        model: Any,
        *,
        tokenizer: Any | None,
        parallel: int,
        max_queue: int,
        prefill_chunk: int,
        tiers: Mapping[str, Mapping[str, int]] | None = None,
    ) -> None:
        """
        Args:
            model: opened by ``offload``; the engine's own from now on.
            tokenizer: turns tokens into text; None: answers are lists of ids.
            parallel: requests that run at once; memory is set aside for so many.
            max_queue: requests that may wait beyond those.
            prefill_chunk: tokens of a prompt that are read in one pass, and of all prompts
                together: who comes first reads first. The grid of the prompt cache, if the model
                has one.
            tiers: bytes by tier and by what takes them, for ``stats``.

        Raises:
            OffloadError: the model is closed, or has another engine; its checkpoint's settings are
                nothing to sample by.
        """
        from transformers import GenerationConfig

        self._settings = copy.deepcopy(model.generation_config)
        choose_alone(self._settings)  # what would fail every request is said once, and now
        self._temperature = own_temperature(self._settings)
        self.counters = Counters()
        self._model = model
        self._tokenizer = tokenizer
        self._parallel = parallel
        self._conductor = Conductor(model, most_rows=prefill_chunk)
        self._tiers = {tier: dict(parts) for tier, parts in (tiers or {}).items()}
        self._prompts = model.offload.prompts
        if self._prompts is None and why_not_in_pieces(model) is None:
            self._settings.prefill_chunk_size = prefill_chunk
        # Every request brings settings of its own, and what it leaves out must not come back:
        # transformers fills what is None from the model's.
        blank: Any = GenerationConfig
        self._models_own, model.generation_config = model.generation_config, blank()
        self._changed = threading.Condition()
        self._queue: FairQueue[Handle] = FairQueue(max_queue)
        self._active: set[Handle] = set()
        self._open = True
        self._ending = False
        self._error: BaseException | None = None
        self._began = time.monotonic()
        self._published_at = -math.inf
        self._published: dict[str, Any] = model.offload.stats()
        self._thread = threading.Thread(target=self._serve, name="offload-engine", daemon=True)

    # -- from any thread --------------------------------------------------------------------

    @property
    def temperature(self) -> float:
        """Of a request that names none: the checkpoint's, 0 (greedy) if it does not sample."""
        return self._temperature

    @property
    def state(self) -> str:
        """``ok``, ``stopping`` or ``failed``."""
        if self._error is not None:
            return "failed"
        return "ok" if self._open else "stopping"

    @property
    def error(self) -> BaseException | None:
        """What ended the engine's thread before its time."""
        return self._error

    def start(self) -> None:
        self._thread.start()

    def check_open(self) -> None:
        """Raises Problem: nothing is taken now."""
        with self._changed:
            try:
                self._check_open()
            except Problem:
                self.counters.rejected += 1
                raise

    def submit(self, request: Request, deliver: Deliver) -> Handle:
        """Queue a request; it starts with the next pass that has room.

        Raises:
            Problem: the queue is full (429), or the engine is about to end (503).
        """
        handle = Handle(request, deliver)
        with self._changed:
            try:
                self._check_open()
            except Problem:
                self.counters.rejected += 1
                raise
            self._queue.push(request.client, handle)
            self.counters.received += 1
            self._changed.notify()
        return handle

    def cancel(self, handle: Handle) -> None:
        """Nobody waits for this answer any more; nothing happens if it has ended."""
        with self._changed:
            if self._queue.remove(handle.request.client, handle):
                self.counters.cancelled += 1
            else:
                handle.abandon()

    def drain(self) -> None:
        """Take nothing more; what waits is refused, what runs goes on."""
        with self._changed:
            self._open = False
            waiting = self._queue.clear()
            self.counters.failed += len(waiting)
        for handle in waiting:
            handle.deliver(Failed(stopping()))

    def abandon(self) -> None:
        """Cancel all that runs; whoever waits for it is told."""
        with self._changed:
            for handle in self._active:
                handle.abandon()

    def close(self) -> None:
        """Drain, abandon, and wait for the thread to end; the model is as it was. Idempotent."""
        self.drain()
        self.abandon()
        with self._changed:
            self._ending = True
            self._changed.notify()
        if self._thread.ident is not None:
            self._thread.join()
        self._conductor.close()  # if it never ran
        self._model.generation_config = self._models_own

    def stats(self) -> dict[str, Any]:
        """Figures for people and programs. Sizes in bytes, times in seconds."""
        with self._changed:
            counters, model = self.counters, self._published
            return {
                "state": self.state,
                "uptime_s": time.monotonic() - self._began,
                "requests": {
                    "received": counters.received,
                    "active": len(self._active),
                    "queued": len(self._queue),
                    "completed": counters.completed,
                    "cancelled": counters.cancelled,
                    "failed": counters.failed,
                    "rejected": counters.rejected,
                },
                "limits": {"parallel": self._parallel, "queue": self._queue.limit},
                "tokens": {
                    "prompt": counters.prompt_tokens,
                    "reused": counters.reused_tokens,
                    "generated": counters.new_tokens,
                },
                "speed": {
                    "generated_per_s": counters.new_speed.now(),
                    "prompt_per_s": counters.prompt_speed.now(),
                },
                "passes": counters.passes,
                "tiers": self._tiers,
                "weights": {
                    key: model.get(key)
                    for key in (
                        "hit_rate", "hits", "misses", "disk_read_bytes", "stall_s", "load_s",
                    )
                },
                "kv": model.get("kv"),
                "prompt_cache": model.get("prompt_cache"),
                "memory": {
                    "now_bytes": current_rss(),
                    "peak_bytes": model["peak_rss_bytes"],
                    "baseline_bytes": model["baseline_rss_bytes"],
                    "budget_bytes": model["ram_budget_bytes"],
                },
            }  # fmt: skip

    def _check_open(self) -> None:
        if self._error is not None:
            raise failed(f"the engine has ended: {self._error}")
        if not self._open:
            raise stopping()
        if self._queue.full:
            raise busy(len(self._queue), self._retry_s())

    def _retry_s(self) -> int:
        """When the next place in the queue may be free: a mean answer, shared by those that run."""
        counters = self.counters
        ended = max(1, counters.completed)
        mean_s = (counters.first_token_s.sum + counters.token_s.sum) / ended
        return min(MOST_RETRY_S, max(1, math.ceil(mean_s / self._parallel)))

    # -- on the engine's thread -------------------------------------------------------------

    def _serve(self) -> None:
        with self._conductor as conductor:
            try:
                while self._ready():
                    conductor.step()
                    self.counters.passes = conductor.counters.passes
                    self._publish()
            except BaseException as error:
                logger.exception("the engine failed")
                # Before the conductor ends what runs: it would tell another reason.
                self._fail(error)

    def _ready(self) -> bool:
        """Start what there is room for; wait while nothing runs. False: it is time to end."""
        with self._changed:
            while not (self._active or self._queue):
                if self._ending:
                    return False
                self._published_at = -math.inf  # what was counted last is not missed
                self._publish()
                self._changed.wait()
            starting = []
            while self._queue and self._has_room():
                handle = self._queue.pop()
                self._active.add(handle)
                starting.append(handle)
        for handle in starting:
            self._start(handle)
        return True

    def _has_room(self) -> bool:
        if self._prompts is not None and any(h.last_token is None for h in self._active):
            # One prompt after the other: what is read from the disk and what is recorded for it
            # share a few buffers, which a waiting sequence would keep from the one it waits for.
            return False
        return len(self._active) < self._parallel

    def _start(self, handle: Handle) -> None:
        handle.started = time.perf_counter()
        sampling = handle.request.sampling
        if sampling.temp > 0 and sampling.seed is None:
            sampling = dataclasses.replace(sampling, seed=secrets.randbits(32))

        def work() -> None:
            settings = copy.deepcopy(self._settings)
            sampling.apply(settings, vocabulary_of(self._model))
            self._generate(handle, settings)

        sequence = self._conductor.start(
            work, seed=sampling.seed, on_end=lambda sequence: self._ended(handle, sequence)
        )
        with self._changed:
            handle.sequence = sequence
            if handle.unwanted:
                sequence.cancel()

    def _generate(self, handle: Handle, settings: Any) -> None:
        request = handle.request
        plain: Decoder = IdDecoder() if self._tokenizer is None else TextDecoder(self._tokenizer)
        offload, cache = self._model.offload, None
        if self._prompts is not None:
            cache = self._prompts.new_cache()
        elif offload.make_cache is not None:  # of memory that is set aside, and to be given back
            cache = offload.new_cache()
        try:
            handle.run = decode.generate(
                self._model,
                request.prompt,
                max_new_tokens=request.new_tokens,
                ignore_eos=request.ignore_eos,
                decoder=_Counted(plain, lambda: self._count(handle)),
                stops=request.stops,
                show=lambda text: handle.deliver(Piece(text)),
                on_end=lambda _: None,
                cache=cache,
                settings=settings,
            )
        finally:
            if cache is not None:
                offload.release_cache(cache)

    def _count(self, handle: Handle) -> None:
        """A token has come."""
        now = time.perf_counter()
        if handle.last_token is None and self._prompts is not None and self._prompts.last:
            handle.reused = self._prompts.last.tokens
        read = len(handle.request.prompt) - handle.reused
        with self._changed:
            counters = self.counters
            if handle.last_token is None:
                counters.queue_s.observe(handle.started - handle.arrived)
                counters.first_token_s.observe(now - handle.started)
                counters.prompt_tokens += read
                counters.reused_tokens += handle.reused
                counters.prompt_speed.add(read)
            else:
                counters.token_s.observe(now - handle.last_token)
            counters.new_tokens += 1
            counters.new_speed.add(1)
            handle.last_token = now

    def _ended(self, handle: Handle, sequence: Sequence) -> None:
        run, error = handle.run, sequence.error
        with self._changed:
            if handle not in self._active:
                return  # the engine has failed, and said so
            self._active.discard(handle)
            if error is None:
                self.counters.completed += 1
            elif isinstance(error, Cancelled):
                self.counters.cancelled += 1
            else:
                self.counters.failed += 1
        if error is None and run is not None:
            handle.deliver(
                Ended(
                    finish="length" if run.finished == "length" else "stop",
                    prompt_tokens=run.prompt_tokens,
                    reused_tokens=handle.reused,
                    new_tokens=len(run.token_ids),
                    queue_s=handle.started - handle.arrived,
                    first_s=run.ttft_s or 0.0,
                    decode_s=run.decode_s,
                )
            )
        elif isinstance(error, Cancelled):
            handle.deliver(Failed(stopping()))  # a client that cancels does not listen
        else:
            if not isinstance(error, OffloadError):
                logger.error("a request failed", exc_info=error)
            handle.deliver(Failed(failed(f"{error}")))

    def _publish(self) -> None:
        if (now := time.monotonic()) - self._published_at >= PUBLISH_S:
            self._published_at, self._published = now, self._model.offload.stats()

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            self._error, self._open = error, False
            handles = [*self._active, *self._queue.clear()]
            self._active.clear()
            self.counters.failed += len(handles)
        for handle in handles:
            handle.deliver(Failed(failed(f"the engine has ended: {error}")))


class _Counted:
    """A decoder that also says that a token has come."""

    def __init__(self, inner: Decoder, on_token: Any) -> None:
        self._inner = inner
        self._on_token = on_token

    def push(self, token: int) -> str:
        self._on_token()
        return self._inner.push(token)

    def finish(self) -> str:
        return self._inner.finish()

    @property
    def specials(self) -> Mapping[int, str]:
        return self._inner.specials

    @property
    def is_text(self) -> bool:
        return self._inner.is_text
