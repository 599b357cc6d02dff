"""Conversations through the tokenizer's chat template, with what the assistant says marked.

Templates that mark it themselves (``{% generation %}``) are asked. Of the others the conversation
is rendered as often as it has assistant's messages: up to each one, with the header that invites
the assistant to speak, and up to its end. Both must be beginnings of the whole rendering; between
them lies what is to be learnt, the mark that ends the turn included. Some templates render the
last message unlike earlier ones (they drop old thoughts); there the mark that ends a turn is taken
from behind the message's last line where it comes last, and must follow that line in the whole,
too. Where none of that holds, a row is bad: a guess would teach the model the user's lines.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from offload.errors import DataError
from offload.train.data.bad_rows import BadRow
from offload.train.data.calls import Calls
from offload.train.data.continuing import Continued
from offload.train.data.shapes import Chat, Message, learnt, sound

_MARKS = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")


class ChatEncoder:
    """Conversations to token ids and flags."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._calls = Calls()
        self._continued = Continued(self._plain)
        self._special = set(tokenizer.all_special_ids) | set(tokenizer.added_tokens_decoder)

    def encode(self, chat: Chat) -> tuple[list[int], list[bool]]:
        """Token ids, and which of them are to be learnt.

        If the template ends the last assistant's message with no special token, and the tokenizer
        has an end of sequence token, that is appended: else nothing would teach the model to stop.

        Raises:
            BadRow: the template refuses the messages, or what the assistant says cannot be found.
            DataError: there is no template, or it is none.
        """
        template = self._template(chat)
        chat = replace(
            chat,
            messages=self._calls.fitted(chat.messages, template, lambda m: self._render(m, chat)),
        )
        self._check_shown(chat)
        # A template's own marks know nothing of weights.
        all_of_them = all(m.get("weight", 1) for m in chat.messages)
        marked = bool(_MARKS.search(template)) and all_of_them
        ids, learn = self._marked(chat, template) if marked else self._located(chat)
        if not any(learn):
            raise BadRow("has nothing to learn: the template shows no assistant's words")
        return self._closed(chat, ids, learn)

    def _check_shown(self, chat: Chat) -> None:
        """Raise BadRow if of a message that has no content, but calls say, the template shows
        neither: what is left of it is its end."""
        whole: str | None = None
        for i, message in enumerate(chat.messages[chat.first :], chat.first):
            if not learnt(message) or message["content"].strip():
                continue
            whole = self._render(chat.messages, chat) if whole is None else whole
            bare = {"role": message["role"], "content": message["content"]}
            try:
                without = self._render((*chat.messages[:i], bare, *chat.messages[i + 1 :]), chat)
            except BadRow:
                continue  # the template asks for what is left out: it looks at it
            if without == whole:
                more = ", ".join(sorted(k for k in message.keys() - bare.keys() if message[k]))
                raise BadRow(
                    f"the assistant's message {i} has no content, and the chat template shows "
                    f"nothing of its {more}: the model would learn to say nothing; give a template "
                    'that does (chat_template.jinja), or "weight": 0 in it'
                )

    def _template(self, chat: Chat) -> str:
        try:
            return str(self._tokenizer.get_chat_template(None, chat.tools))
        except (ValueError, AttributeError) as e:
            raise DataError(
                "rows with messages need a chat template, and the tokenizer has none: add "
                "chat_template.jinja to the model, or give prompt and completion"
            ) from e

    def _render(self, messages: tuple[Message, ...], chat: Chat, *, invite: bool = False) -> str:
        apply = partial(
            self._tokenizer.apply_chat_template, list(messages), tools=chat.tools, tokenize=False,
            add_generation_prompt=invite,
        )  # fmt: skip
        # Names, roles, calls, tools: what a template shows of them nobody has looked at before.
        return sound(str(self._judged(apply)), "what the chat template shows of it")

    @staticmethod
    def _judged(render: Callable[[], Any]) -> Any:
        """What ``render`` gives; its errors are of the template or of the row."""
        try:
            return render()
        except ImportError as e:
            raise DataError(f"rows with messages cannot be read: {e}") from e
        except Exception as e:  # a template is a program: it fails in its own ways
            if type(e).__name__ == "TemplateSyntaxError":  # of jinja2, which transformers imports
                raise DataError(f"the tokenizer's chat template is broken: {e}") from e
            raise BadRow(f"the chat template refuses it: {type(e).__name__}: {e}") from e

    def _marked(self, chat: Chat, template: str) -> tuple[list[int], list[bool]]:
        whole, spans = self._with_marks(chat, template)
        if chat.first:
            given = self._render(chat.messages[: chat.first], chat)
            if not whole.startswith(given):
                raise BadRow("the chat template renders the prompt differently before a completion")
            spans = [(max(begin, len(given)), end) for begin, end in spans if end > len(given)]
        return self._tokenised(whole, spans, touching=True)

    def _with_marks(self, chat: Chat, template: str) -> tuple[str, list[tuple[int, int]]]:
        """The rendering, and which characters of it the template marks.

        Not as transformers make a mask of them: that asks which token a marked part's last
        character is in, is given the first one of several (an emoji's), and leaves the others out;
        and where a tokenizer drops a part's first character it leaves out all parts that follow."""
        from transformers.utils.chat_template_utils import render_jinja_template

        def render() -> tuple[list[str], list[list[tuple[int, int]]]]:
            made: Any = render_jinja_template(
                conversations=[list(chat.messages)], tools=chat.tools, chat_template=template,
                return_assistant_tokens_mask=True, **self._tokenizer.special_tokens_map,
            )  # fmt: skip
            return made  # type: ignore[no-any-return]

        texts, marks = self._judged(render)
        return sound(texts[0], "what the chat template shows of it"), sorted(marks[0])

    def _located(self, chat: Chat) -> tuple[list[int], list[bool]]:
        whole = self._render(chat.messages, chat)
        spans: list[tuple[int, int]] = []
        for i in range(chat.first, len(chat.messages)):
            if learnt(chat.messages[i]):
                begin = self._begin(chat, i, whole)
                spans.append((begin, self._end(chat, i, whole, begin)))
        return self._tokenised(whole, spans)

    def _begin(self, chat: Chat, i: int, whole: str) -> int:
        """Where message ``i`` begins: after the header of its turn."""
        # An assistant's message right after another has no invitation in between.
        for invite in (True, False):
            try:
                before = self._render(chat.messages[:i], chat, invite=invite) if i else ""
            except BadRow:
                continue  # some templates refuse a conversation that begins or ends so
            if whole.startswith(before):
                return len(before)
        raise BadRow(
            f"the chat template renders what comes before message {i} differently once it is there"
        )

    def _end(self, chat: Chat, i: int, whole: str, begin: int) -> int:
        """Where message ``i`` ends, the mark of its end included."""
        if i + 1 == len(chat.messages):
            return len(whole)
        up_to = self._render(chat.messages[: i + 1], chat)
        if len(up_to) >= begin and whole.startswith(up_to):
            return len(up_to)
        # The content's last line, not all of it: templates edit thoughts, not ends of answers.
        said = str(chat.messages[i]["content"]).strip()
        tail = said.splitlines()[-1].strip() if said else ""
        if tail and tail in up_to:
            closing = up_to[up_to.rindex(tail) + len(tail) :]
            at = whole.find(closing, begin)
            if closing and closing not in said and whole[begin : max(begin, at)].endswith(tail):
                return at + len(closing)
        raise BadRow(f"the chat template renders message {i} differently once another follows it")

    def _plain(self, text: str) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    def _tokenised(
        self, text: str, spans: list[tuple[int, int]], *, touching: bool = False
    ) -> tuple[list[int], list[bool]]:
        """Ids of ``text``, and which begin within one of the spans (characters, ascending), or with
        ``touching`` have some of it."""
        if not self._tokenizer.is_fast:
            return self._in_parts(text, spans)
        found = self._tokenizer(
            text, add_special_tokens=False, verbose=False, return_offsets_mapping=True
        )
        learn, at = [], 0
        for begin, end in found["offset_mapping"]:
            while at < len(spans) and begin >= spans[at][1]:
                at += 1
            last = max(begin, end - 1) if touching else begin
            learn.append(at < len(spans) and last >= spans[at][0])
        return list(found["input_ids"]), learn

    def _in_parts(self, text: str, spans: list[tuple[int, int]]) -> tuple[list[int], list[bool]]:
        """As ``_tokenised`` where a tokenizer does not say which characters a token is: tokens end
        where spans do."""
        ids: list[int] = []
        learn: list[bool] = []
        at = 0
        for begin, end in [*spans, (len(text), len(text))]:
            for part, flag in ((text[at:begin], False), (text[begin:end], True)):
                fresh = (self._continued if ids else self._plain)(part) if part else []
                ids += fresh
                learn += [flag] * len(fresh)
            at = end
        return ids, learn

    def _closed(
        self, chat: Chat, ids: list[int], learn: list[bool]
    ) -> tuple[list[int], list[bool]]:
        eos = self._tokenizer.eos_token_id
        if eos is None or not learnt(chat.messages[-1]):
            return ids, learn
        last = len(ids)
        while last and not self._tokenizer.decode(ids[last - 1 : last]).strip():
            last -= 1  # templates end a turn with a mark and a newline
        if last and ids[last - 1] in self._special:
            return ids, learn
        return [*ids, eos], [*learn, True]
