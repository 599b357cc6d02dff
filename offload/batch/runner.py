"""A batch from its first sequence to its last: who waits takes the place of who has ended."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from offload.batch.conductor import Conductor
from offload.batch.generation import Generation, OnToken, Sampling, generate, settings_apart
from offload.batch.sequence import Sequence
from offload.errors import ClosedError, StoreError, WatchdogError


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One prompt, ready to run.

    Attributes:
        index: of the prompt in the input.
        seed: of its random numbers; None for greedy decoding.
    """

    index: int
    ids: tuple[int, ...]
    max_new_tokens: int
    sampling: Sampling
    seed: int | None
    ignore_eos: bool = False


@dataclass(slots=True)
class Tally:
    """What has happened so far. Times in seconds.

    Attributes:
        failed: by index: why a prompt has no answer.
        most: sequences at the same time.
    """

    total: int
    done: int = 0
    prompt_tokens: int = 0
    new_tokens: int = 0
    passes: int = 0
    forwards: int = 0
    most: int = 0
    seconds: float = 0.0
    failed: dict[int, Exception] = field(default_factory=dict)

    @property
    def tok_s(self) -> float | None:
        """New tokens per second, from the first prompt on."""
        return self.new_tokens / self.seconds if self.seconds and self.new_tokens else None

    @property
    def eta_s(self) -> float | None:
        """Until the last one ends, if those to come are like those that have ended."""
        if not self.done:
            return None
        return self.seconds / self.done * (self.total - self.done)


def run_batch(
    model: Any,
    tasks: Iterable[Task],
    *,
    sequences: int,
    pass_rows: int | None,
    tap: Callable[[Task], OnToken],
    on_answer: Callable[[Task, Generation], None],
    on_step: Callable[[Tally], None] | None = None,
) -> Tally:
    """Run all tasks, ``sequences`` at a time, in order.

    Args:
        tap: makes what gets a task's tokens as they come.
        on_answer: called when a task has ended. What it raises ends the batch.
        on_step: called often; may raise to interrupt.

    Returns:
        With tasks in ``failed`` that raised; the others are not touched by that. After an error of
        the disk that weights come from, no new ones are begun.
    """
    waiting = deque(tasks)
    alone = model.offload.prompts is not None
    reading: set[int] = set()  # tasks without a token
    tally = Tally(len(waiting))
    began = time.perf_counter()
    with settings_apart(model) as settings, Conductor(model, most_rows=pass_rows) as conductor:

        def begin() -> None:
            task = waiting.popleft()
            reading.add(task.index)
            count = 0
            on_token = tap(task)

            def counted(token: int) -> bool:
                nonlocal count
                reading.discard(task.index)
                count += 1
                tally.new_tokens += 1
                return on_token(token)

            def work() -> Generation:
                return generate(
                    model,
                    task.ids,
                    max_new_tokens=task.max_new_tokens,
                    sampling=task.sampling,
                    ignore_eos=task.ignore_eos,
                    on_token=counted,
                    settings=settings,
                )

            def end(sequence: Sequence) -> None:
                reading.discard(task.index)
                if sequence.error is None:
                    on_answer(task, sequence.result)
                    tally.done += 1  # what was not taken is no answer
                    tally.prompt_tokens += len(task.ids)
                elif isinstance(sequence.error, Exception):
                    tally.new_tokens -= count
                    tally.failed[task.index] = sequence.error
                    if isinstance(sequence.error, (StoreError, WatchdogError, ClosedError)):
                        waiting.clear()

            conductor.start(work, seed=task.seed, on_end=end)

        while True:
            # With a prompt cache one prompt after the other: what is read from the disk and what is
            # recorded share a few buffers, which a waiting sequence would keep from others.
            while waiting and len(conductor) < sequences and not (alone and reading):
                begin()
            tally.most = max(tally.most, len(conductor))
            more = conductor.step()
            tally.passes = conductor.counters.passes
            tally.forwards = conductor.counters.forwards
            tally.seconds = time.perf_counter() - began
            if on_step is not None:
                on_step(tally)
            if not more and not waiting:
                return tally


__all__ = ["Tally", "Task", "run_batch"]
