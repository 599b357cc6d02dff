"""A conversation with a model: what is read, what fits the context, and what each turn took."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from offload.cli import console, decode, prompt
from offload.cli.chat_cache import KeptCache
from offload.cli.chat_history import Conversation, Exchange, Overflow
from offload.cli.signals import signals_wait
from offload.cli.template import template_ids
from offload.cli.text import TextDecoder
from offload.errors import OffloadError

ANSWER_ROOM = 256
"""Tokens of the context that an answer should find free, at most a quarter of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """What holds for the whole conversation. Token counts.

    ``context``: of prompt and answer together; memory is set aside for so many.
    ``template``: settings that the chat template reads.
    ``new_tokens``: of one answer at most; None: as many as the context takes.
    """

    directory: Path
    config: Any
    tokenizer: Any
    template: Mapping[str, Any]
    context: int
    new_tokens: int | None
    stops: tuple[str, ...]
    ignore_eos: bool
    overflow: Overflow

    @property
    def room(self) -> int:
        """Tokens that an answer should find free."""
        return max(1, min(self.new_tokens or ANSWER_ROOM, self.context // 4))

    def encode(self, conversation: Conversation) -> list[int]:
        """What the model reads before it answers.

        Raises:
            OffloadError: the template refuses the messages, or a token is not the model's.
        """
        way_out = "'offload generate' takes plain text"
        if conversation.system is not None:
            way_out = "it may not know system prompts: try without"
        ids = template_ids(
            conversation.visible(),
            self.tokenizer,
            self.directory,
            way_out=way_out,
            settings=self.template,
        )
        if not ids:
            raise OffloadError("the chat template makes no tokens of this; write some more text")
        prompt.check_ids(ids, self.config)
        return ids

    def check(self, conversation: Conversation) -> None:
        """Refuse a conversation that no message could follow.

        Raises:
            OffloadError: the template refuses it, or the system prompt fills the context.
        """
        least = len(self.encode(Conversation(conversation.system, [Exchange("?")])))
        if least >= self.context:
            raise OffloadError(
                f"the system prompt and the shortest message are {least} tokens, the context "
                f"takes {self.context}; shorten it or raise --context"
            )
        if conversation.exchanges:
            exchanges = [*conversation.exchanges, Exchange("?")]
            self.encode(Conversation(conversation.system, exchanges))


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One answer. ``forgotten``: exchanges that were dropped for it."""

    run: decode.Run
    forgotten: int

    @property
    def read_tokens(self) -> int:
        """Tokens of the prompt that were not in the cache."""
        return self.run.prompt_tokens - self.run.reused_tokens

    @property
    def context_tokens(self) -> int:
        """Tokens of the conversation after it."""
        return self.run.prompt_tokens + len(self.run.token_ids)


class Talk:
    """Answers messages one after the other, and remembers what was said and what it took."""

    def __init__(
        self,
        model: Any,
        terms: Terms,
        conversation: Conversation,
        *,
        cache: KeptCache | None,
        show: Callable[[str], None],
    ) -> None:
        """
        Args:
            model: opened by ``offload``; its ``generation_config`` says how tokens are chosen.
            cache: kept from turn to turn; None: every turn reads the whole conversation.
            show: gets the answer, piece by piece.
        """
        self.terms = terms
        self.conversation = conversation
        self.turns: list[Turn] = []
        self._model = model
        self._cache = cache
        self._show = show

    def ask(self, text: str) -> Turn:
        """Answer a message. A message without any answer leaves no trace in the conversation.

        Raises:
            OffloadError: it does not fit, or a read failed.
            Interrupted: by a signal; the answer so far is in the conversation.
        """
        said = self.conversation
        forgotten = said.forgotten
        said.ask(text)
        try:
            ids = self._fit()
            turn = self._answer(ids, said.forgotten - forgotten)
        finally:
            if said.exchanges[-1].answer is None:
                said.exchanges.pop()
                said.forgotten = forgotten
        return turn

    def retry(self) -> Turn:
        """Answer the last message once more, in place of its answer; which stays if none comes.

        Raises:
            OffloadError: nothing was said yet; and as ``ask``.
            Interrupted: by a signal.
        """
        said = self.conversation
        if not said.exchanges:
            raise OffloadError("there is no message to answer again")
        old = said.exchanges.pop()
        count, forgotten = len(said.exchanges), said.forgotten
        try:
            return self.ask(old.user)
        finally:
            if len(said.exchanges) == count:
                said.exchanges.append(old)
                said.forgotten = forgotten

    def _fit(self) -> list[int]:
        """The prompt's tokens, after dropping what the context cannot take."""
        terms, said = self.terms, self.conversation
        ids = terms.encode(said)
        before, old = len(ids), said.forgotten
        last = len(said.exchanges) - 1
        if before + terms.room <= terms.context:
            return ids
        if terms.overflow is Overflow.STOP and old < last:
            raise OffloadError(
                f"the conversation is {before} tokens; with {terms.room} for the answer it is "
                f"{before + terms.room - terms.context} over the context of {terms.context}; "
                f"/undo, /reset, a larger --context or --overflow drop go on"
            )
        # Down to half, not just under the limit: every drop changes the beginning, so that all
        # that remains is read again, and dropping one exchange would do that on every turn. The
        # exchange before this message stays as long as it fits: it is what was just spoken of.
        while said.forgotten < last and (
            len(ids) + terms.room > terms.context
            or (len(ids) > terms.context // 2 and said.forgotten < last - 1)
        ):
            said.forgotten += 1
            ids = terms.encode(said)
        if len(ids) >= terms.context:
            raise OffloadError(
                f"the message does not fit: {len(ids)} tokens, system prompt included, and the "
                f"context takes {terms.context}; shorten it by {len(ids) - terms.context + 1} or "
                f"raise --context"
            )
        if (dropped := said.forgotten - old) > 0:
            console.note(
                f"the conversation outgrew the context of {terms.context} tokens: the oldest "
                f"{dropped} of {last - old} exchanges {'is' if dropped == 1 else 'are'} forgotten, "
                f"{before} tokens became {len(ids)}",
                "context",
            )
        return ids

    def _answer(self, ids: list[int], forgotten: int) -> Turn:
        terms = self.terms
        room = terms.context - len(ids)
        runs: list[decode.Run] = []
        with signals_wait():
            held = None if self._cache is None else self._cache.begin(ids)
            unread = len(ids) - (0 if held is None else held.get_seq_length())
            try:
                with console.waiting(f"reading {unread} tokens") as first_text:

                    def show(text: str) -> None:
                        first_text()  # the spinner goes before the first letter comes
                        self._show(text)

                    decode.generate(
                        self._model,
                        ids,
                        max_new_tokens=min(room, terms.new_tokens or room),
                        ignore_eos=terms.ignore_eos,
                        decoder=TextDecoder(terms.tokenizer),
                        stops=terms.stops,
                        show=show,
                        on_end=runs.append,
                        cache=held,
                    )
            finally:
                for run in runs:
                    self._keep(ids, Turn(run=run, forgotten=forgotten))
        return self.turns[-1]

    def _keep(self, ids: list[int], turn: Turn) -> None:
        """Write down what a run left, however it ended."""
        run, cache = turn.run, self._cache
        stopped = run.finished in ("interrupted", "failed")
        self.turns.append(turn)
        if run.text or not stopped:
            self.conversation.exchanges[-1].answer = run.text
        if cache is None:
            return
        if not stopped:
            cache.end([*ids, *run.token_ids[:-1]])  # the last token was chosen, and not read
        elif run.finished == "interrupted":
            cache.broken([*ids, *run.token_ids])
        else:
            cache.clear()
