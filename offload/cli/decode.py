"""Generate with a streamed model: show text as it comes, and measure.

One callable does both: transformers 5.23 asks its stopping criteria before it hands a token to a
streamer, so what a streamer finds out (a stop string) would end the run one token late.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from offload.cli.signals import Interrupted, raise_received
from offload.cli.text import Decoder, StoppedText
from offload.errors import OffloadError
from offload.generation.tap import TokenTap
from offload.kv.named import CACHE
from offload.models.sampling import FiniteLogits, own_stops

if TYPE_CHECKING:
    from offload.kv.prefix_cache import Reuse

Snapshot = dict[str, Any]
"""What ``model.offload.stats()`` returns."""


@dataclass(kw_only=True)
class Run:
    """What happened. Times in seconds; ``at_*`` are the counters at that moment."""

    prompt_tokens: int
    reused_tokens: int = 0
    """Of them: held by the KV cache already, so that only the others were read."""
    reuse: Reuse | None = None
    """What the prompt cache gave; None: there is none, or it was not asked."""
    at_start: Snapshot
    at_first: Snapshot | None = None
    at_end: Snapshot
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    ttft_s: float | None = None
    """From the call to the first token: the whole prompt is read in it."""
    decode_s: float = 0.0
    """From the first token to the last."""
    finished: str = "length"
    """Why it ended: length, eos, stop, interrupted or failed."""

    @property
    def prefill_tok_s(self) -> float | None:
        """Of the tokens that were computed; None if there were none."""
        read = self.prompt_tokens - self.reused_tokens
        return read / self.ttft_s if self.ttft_s and read else None

    @property
    def decode_steps(self) -> int:
        """Passes after the first token."""
        return max(0, len(self.token_ids) - 1)

    @property
    def decode_tok_s(self) -> float | None:
        """From the second token on; None if there is none."""
        return self.decode_steps / self.decode_s if self.decode_steps and self.decode_s else None

    def during_run(self, key: str) -> float:
        """Growth of a counter while generating."""
        return float(self.at_end[key] - self.at_start[key])

    def during_decode(self, key: str) -> float:
        """Growth of a counter after the first token; the prompt does not count."""
        return 0.0 if self.at_first is None else float(self.at_end[key] - self.at_first[key])


class Tap(TokenTap):
    """A stopping criterion that passes each new token on, and stops at a stop string."""

    is_ours = True

    def __init__(
        self,
        run: Run,
        snapshot: Callable[[], Snapshot],
        decoder: Decoder,
        stops: Sequence[str],
        show: Callable[[str], None],
    ) -> None:
        super().__init__()
        self._run = run
        self._snapshot = snapshot
        self._text = StoppedText(decoder, stops)
        self._show = show
        self._began = time.perf_counter()
        self._first = 0.0

    def take(self, token: int) -> bool:
        now, run = time.perf_counter(), self._run
        if not run.token_ids:
            self._first = now
            run.ttft_s = now - self._began
            run.at_first = self._snapshot()
        run.decode_s = now - self._first
        run.token_ids.append(token)
        self._pass(self._text.push(token))
        raise_received()
        return self.hit

    def finish(self) -> None:
        """Show what was held back."""
        self._pass(self._text.finish())

    @property
    def hit(self) -> bool:
        """A stop string has been met."""
        return self._text.hit

    def _pass(self, text: str) -> None:
        if text:
            self._run.text += text
            self._show(text)


def generate(
    model: Any,
    prompt_ids: Sequence[int],
    *,
    max_new_tokens: int,
    ignore_eos: bool,
    decoder: Decoder,
    stops: Sequence[str],
    show: Callable[[str], None],
    on_end: Callable[[Run], None],
    cache: Any = None,
    settings: Any = None,
) -> Run:
    """Generate from one prompt with ``model.generation_config`` as it is.

    Args:
        model: opened by ``offload``; anything with ``offload.stats()``.
        show: gets each piece of text when it is certain.
        on_end: gets the run in any case, before an exception goes on.
        cache: a transformers ``Cache`` that holds the first tokens of the prompt already, fewer
            than all of them, and will hold all but the last new token; None: a fresh one.
        settings: a ``GenerationConfig`` in place of the model's, for one of several runs at once.

    Raises:
        OffloadError: e.g. a read failed in the middle.
        Interrupted: by a signal.
    """
    from transformers import LogitsProcessorList, StoppingCriteriaList

    more: dict[str, Any] = {}
    if settings is None:
        settings = model.generation_config
    else:
        more["generation_config"] = settings
    settings.max_new_tokens, settings.max_length = max_new_tokens, None
    settings.return_dict_in_generate = False
    if ignore_eos:
        # Not None, which generate() fills in from the checkpoint again.
        settings.eos_token_id = []
    if settings.pad_token_id is None:
        settings.pad_token_id = 0  # one sequence: nothing is padded, but its absence is warned of
    ends = settings.eos_token_id
    eos = set(ends) if isinstance(ends, list) else {ends}
    start = model.offload.stats()
    run = Run(prompt_tokens=len(prompt_ids), at_start=start, at_end=start, finished="failed")
    if cache is not None:
        run.reused_tokens = cache.get_seq_length()
        more[CACHE] = cache
    kept, own = settings.stop_strings, own_stops(settings) if decoder.is_text else ()
    tap = Tap(run, model.offload.stats, decoder, [*stops, *own], show)
    ids = torch.tensor([list(prompt_ids)], dtype=torch.int64)
    settings.stop_strings = None  # transformers needs a tokenizer for them
    try:
        # An OffloadError is raised inside of forward; nothing between here and there eats it.
        model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            logits_processor=LogitsProcessorList([FiniteLogits()]),
            stopping_criteria=StoppingCriteriaList([tap]),
            **more,
        )
        run.at_end = model.offload.stats()
        take_reuse(run, model)
        last = run.token_ids[-1] if run.token_ids else None
        run.finished = "stop" if tap.hit else "eos" if last in eos else "length"
        tap.finish()
    except Interrupted:
        run.finished = "interrupted"
        raise
    finally:
        settings.stop_strings = kept  # of the next turn, too
        if run.finished in ("failed", "interrupted"):
            run.at_end = model.offload.stats()
            take_reuse(run, model)
        on_end(run)
    return run


def take_reuse(run: Run, model: Any) -> None:
    """Write down what the prompt cache gave to the last generation."""
    prompts = getattr(model.offload, "prompts", None)
    if prompts is not None and prompts.last is not None:
        run.reuse = prompts.last
        run.reused_tokens = prompts.last.tokens


def check_can_generate(model_class: Any, name: str) -> None:
    """Refuse a model that only encodes.

    Raises:
        OffloadError: the class has no language model head.
    """
    able = getattr(model_class, "can_generate", None)
    if able is None or not able():
        raise OffloadError(
            f"{name} is a {model_class.__name__}, which cannot generate text; use a checkpoint "
            f"with a language model head"
        )
