"""Tokens to text, piece by piece: characters of several tokens, and stop strings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol


class Decoder(Protocol):
    """Turns tokens into printable pieces."""

    def push(self, token: int) -> str: ...

    def finish(self) -> str: ...

    @property
    def specials(self) -> Mapping[int, str]:
        """Tokens that no text shows, by id: what they are called."""
        ...

    @property
    def is_text(self) -> bool:
        """Whether its pieces are what the model says, so that stop strings may be found there."""
        ...


_FIRST_MARK, _MOST_MARKS = 0xD800, 0x400
"""High surrogates: text has none, and what is no UTF-8 on a command line comes as low ones."""


class TextDecoder:
    """Joined, its pieces are the tokenizer's decoding of all tokens at once.

    A token may hold part of a character, and what it decodes to may depend on the one before it
    (a leading space that tokenizers of the sentencepiece kind drop at the start). So a window is
    decoded with and without its last tokens, the difference is the new piece, and it is held back
    while it ends in the replacement character. (The method of text-generation-inference's
    ``decode_token``; transformers' own streamer waits for whole words instead.)
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._start = 0
        self._done = 0

    def push(self, token: int) -> str:
        """The text that ``token`` completes; often of one word, sometimes none."""
        self._ids.append(token)
        return self._piece(final=False)

    def finish(self) -> str:
        """What was held back: bytes that never became a character."""
        return self._piece(final=True)

    def _piece(self, *, final: bool) -> str:
        before = self._decode(self._ids[self._start : self._done])
        now = self._decode(self._ids[self._start :])
        if len(now) <= len(before) or (now.endswith("\ufffd") and not final):
            return ""
        self._start, self._done = self._done, len(self._ids)
        return now[len(before) :]

    def _decode(self, ids: list[int]) -> str:
        # Cleaning up spaces would change text that is printed already.
        text = self._tokenizer.decode(
            ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return str(text)

    @property
    def specials(self) -> Mapping[int, str]:
        """Special tokens by id."""
        known = getattr(self._tokenizer, "added_tokens_decoder", {})
        return {i: token.content for i, token in known.items() if token.special}

    @property
    def is_text(self) -> bool:
        return True


class IdDecoder:
    """Without a tokenizer: the ids themselves, as ``--prompt-ids`` takes them."""

    def __init__(self) -> None:
        self._any = False

    def push(self, token: int) -> str:
        piece = f",{token}" if self._any else str(token)
        self._any = True
        return piece

    def finish(self) -> str:
        return ""

    @property
    def specials(self) -> Mapping[int, str]:
        return {}

    @property
    def is_text(self) -> bool:
        return False


class StoppedText:
    """What tokens say, up to the first stop string.

    A special token is no part of the text, and may be a stop string or a part of one
    (``<|im_end|>``), as for transformers. In what the filter sees, a character that no decoder
    gives stands for it: half of a surrogate pair.
    """

    def __init__(self, decoder: Decoder, stops: Sequence[str]) -> None:
        self._decoder = decoder
        called = decoder.specials
        found = {i: s for i, s in called.items() if s and any(s in stop for stop in stops)}
        longest_first = sorted(found, key=lambda i: -len(found[i]))[:_MOST_MARKS]
        self._marks = {i: chr(_FIRST_MARK + at) for at, i in enumerate(longest_first)}
        marked = list(stops)
        for i, mark in self._marks.items():
            marked = [stop.replace(found[i], mark) for stop in marked]
        # What is special may be typed in ordinary letters, too.
        self._filter = StopFilter(list(dict.fromkeys([*stops, *marked])))
        self._hidden = {ord(mark): None for mark in self._marks.values()}

    @property
    def hit(self) -> bool:
        """A stop string has been met: nothing more comes."""
        return self._filter.hit

    def push(self, token: int) -> str:
        """The text that is certain with ``token``."""
        return self._shown(self._decoder.push(token) + self._marks.get(token, ""))

    def finish(self) -> str:
        """What was held back and turned out to be no stop string."""
        text = self._shown(self._decoder.finish())
        return text + self._filter.finish().translate(self._hidden)

    def _shown(self, text: str) -> str:
        return self._filter.push(text).translate(self._hidden)


class StopFilter:
    """Passes text on up to the first stop string, which it swallows.

    What could be the beginning of a stop string waits until it is known.
    """

    def __init__(self, stops: Sequence[str] = ()) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.hit = False
        """A stop string has been met: nothing more passes."""

    def push(self, text: str) -> str:
        """The part of the text so far that can be shown now."""
        if self.hit:
            return ""
        self._held += text
        found = [at for at in (self._held.find(stop) for stop in self._stops) if at >= 0]
        if found:
            self.hit = True
            text, self._held = self._held[: min(found)], ""
            return text
        shown = len(self._held) - self._maybe()
        text, self._held = self._held[:shown], self._held[shown:]
        return text

    def finish(self) -> str:
        """What was held back and turned out to be no stop string."""
        text, self._held = self._held, ""
        return text

    def _maybe(self) -> int:
        """Characters at the end that begin some stop string."""
        return max(
            (
                n
                for stop in self._stops
                for n in range(1, min(len(stop), len(self._held) + 1))
                if self._held.endswith(stop[:n])
            ),
            default=0,
        )
