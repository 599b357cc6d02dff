"""From messages or text to the tokens that the model reads."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from offload.cli import prompt
from offload.cli.template import check_settings, template_ids
from offload.errors import OffloadError
from offload.serve.problems import Problem, far_too_long, too_long

CHARACTERS_PER_TOKEN = 32
"""More than any real text has; a context's worth of it is the largest body that makes sense."""
LEAST_BODY = 2**18

PIECE_CHARACTERS = 2**14
"""A tokenizer needs some 200 bytes for a token while it encodes: 200 MiB were seen for a body of
one MiB. Longer text is counted in pieces of so many characters first, 3 MiB at a time."""


def body_limit(context: int) -> int:
    """Bytes of a request that could still fit the context."""
    return max(LEAST_BODY, context * CHARACTERS_PER_TOKEN)


class Prompts:
    """Encodes on a thread of its own: a long document takes longer than others should wait.

    One thread, because a tokenizer that is used by two at once may refuse ("Already borrowed");
    the engine's thread only decodes, which changes nothing in it.
    """

    def __init__(
        self,
        tokenizer: Any | None,
        *,
        directory: Path,
        config: Any,
        context: int,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        """
        Args:
            context: tokens of prompt and answer together.
            settings: of the chat template, where a request has no other.
        """
        self._settings = dict(settings or {})
        self.context = context
        self._tokenizer = tokenizer
        self._directory = directory
        self._config = config
        self._thread = ThreadPoolExecutor(1, "offload-prompts")
        if tokenizer is not None:
            tokenizer("?")  # sets padding and truncation aside, once, before there are threads

    async def of_messages(
        self, messages: Sequence[dict[str, str]], settings: Mapping[str, Any] | None = None
    ) -> tuple[int, ...]:
        """
        Args:
            settings: of this request, for the chat template.

        Raises:
            Problem: the chat template is missing, refuses them, or reads no such setting.
        """

        def encode() -> list[int]:
            try:
                check_settings(settings or {}, self._tokenizer, self._directory, flag="")
            except OffloadError as error:
                raise Problem(400, str(error), param="chat_template_kwargs") from error
            self._refuse_far_too_long("\n".join(m["content"] for m in messages), "messages")
            if not getattr(self._tokenizer, "chat_template", None):
                raise OffloadError(
                    "this model has no chat template: nothing says how it tells messages apart; "
                    "/v1/completions continues plain text"
                )
            return template_ids(
                messages,
                self._tokenizer,
                self._directory,
                way_out="it may not know such a role",
                settings={**self._settings, **(settings or {})},
            )

        return await self._run(encode, "messages")

    async def of_prompt(self, given: str | tuple[int, ...]) -> tuple[int, ...]:
        """Raises Problem: text without a tokenizer, or an id that is not the model's."""

        def encode() -> list[int]:
            if isinstance(given, str):
                self._refuse_far_too_long(given, "prompt")
            asked = prompt.Asked(text=given) if isinstance(given, str) else prompt.Asked(ids=given)
            return prompt.encode(asked, self._tokenizer, raw=True, directory=self._directory)

        return await self._run(encode, "prompt")

    def fit(
        self, ids: Sequence[int], new_tokens: int | None, default: int | None, *, param: str
    ) -> int:
        """Tokens to generate at most.

        Args:
            new_tokens: asked for; None: ``default``, or as many as the context takes.
            param: where the prompt stands in the request.

        Raises:
            Problem: they do not fit the context.
        """
        room = self.context - len(ids)
        if room < (new_tokens or 1):
            raise too_long(len(ids), new_tokens, self.context, param)
        return new_tokens or min(default or room, room)

    def close(self) -> None:
        self._thread.shutdown(cancel_futures=True)

    def _refuse_far_too_long(self, text: str, param: str) -> None:
        """Refuse text of more than two contexts before it is encoded as one.

        Two, because pieces may have some tokens more than the whole.

        Raises:
            Problem: it has more.
        """
        if self._tokenizer is None or len(text) <= PIECE_CHARACTERS:
            return
        tokens = 0
        for start in range(0, len(text), PIECE_CHARACTERS):
            tokens += len(self._tokenizer(text[start : start + PIECE_CHARACTERS])["input_ids"])
            if tokens > 2 * self.context:
                raise far_too_long(self.context, param)

    async def _run(self, encode: Callable[[], list[int]], param: str) -> tuple[int, ...]:
        def checked() -> tuple[int, ...]:
            ids = encode()
            if not ids:
                raise OffloadError("this makes no tokens; write some more text")
            prompt.check_ids(ids, self._config)
            return tuple(ids)

        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, checked)
        except OffloadError as error:
            raise Problem(400, str(error), param=param) from error
