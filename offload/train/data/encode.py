"""Rows to tokens, each with the flag that says whether it is to be predicted.

Every text and every completion begins with what the tokenizer puts before a text (a beginning of
sequence token, or nothing) and ends with the end of sequence token; neither comes twice. Special
tokens that are written out in a text are read as such.

A text longer than ``seq_len`` becomes several examples, which overlap by one token: so every token
but the document's first is predicted exactly once. Of a completion or a conversation the end is
cut off; without a token left to predict it is a bad row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from offload.errors import DataError
from offload.train.data.bad_rows import BadRow
from offload.train.data.chat import ChatEncoder
from offload.train.data.continuing import Continued
from offload.train.data.shapes import Chat, Completion, Shape, Text
from offload.train.data.store import LABEL

Words = npt.NDArray[np.uint32]


@dataclass(frozen=True, slots=True)
class Encoded:
    """A row's examples: [tokens] each, ``LABEL`` set where a token is to be predicted."""

    pieces: tuple[Words, ...]
    cut: bool = False
    """The end did not fit and is lost."""


class Encoder:
    """A tokenizer and the length of a sequence.

    Args:
        tokenizer: of transformers, fast or slow.
        seq_len: tokens of an example at most; at least 2.
    """

    def __init__(self, tokenizer: Any, seq_len: int) -> None:
        self._tokenizer = tokenizer
        self._chat = ChatEncoder(tokenizer)
        self._continued = Continued(lambda text: self._ids([text])[0])
        self.seq_len = seq_len
        self.eos: int | None = tokenizer.eos_token_id
        self.before: list[int] = self._before()

    def _before(self) -> list[int]:
        """What the tokenizer puts before a text."""
        bare = self._ids(["a"])[0]
        whole = list(self._tokenizer("a", verbose=False)["input_ids"])
        for at in range(len(whole) - len(bare) + 1):
            if whole[at : at + len(bare)] == bare:
                return whole[:at]
        return []

    def _ids(self, texts: Sequence[str]) -> list[list[int]]:
        if not texts:
            return []
        found = self._tokenizer(
            list(texts),
            add_special_tokens=False,
            verbose=False,
            return_attention_mask=False,
            return_token_type_ids=False,
        )
        ids: list[list[int]] = found["input_ids"]
        return ids

    def encode(self, shapes: Sequence[Shape]) -> list[Encoded | BadRow]:
        """Encode rows, all their texts in one call: a fast tokenizer has threads for that.

        Raises:
            DataError: a conversation, and the tokenizer has no chat template.
        """
        texts: list[str] = []
        for shape in shapes:
            match shape:
                case Text(text):
                    texts.append(text)
                case Completion(prompt, completion):
                    texts += [prompt, prompt + completion]
        ids = iter(self._ids(texts))
        result: list[Encoded | BadRow] = []
        for shape in shapes:
            try:
                match shape:
                    case Text():
                        result.append(self._text(next(ids)))
                    case Completion():
                        result.append(self._completion(shape, *(next(ids) for _ in range(2))))
                    case Chat():
                        result.append(self._cut(*self._chat.encode(shape)))
            except BadRow as bad:
                result.append(bad)
        return result

    def _text(self, ids: list[int]) -> Encoded:
        ids = self._begun(self._ended(ids))
        if len(ids) < 2:
            raise BadRow("is a single token: nothing to predict")
        return Encoded(tuple(pieces(np.array(ids, dtype=np.uint32), self.seq_len)))

    def _completion(self, row: Completion, prompt: list[int], both: list[int]) -> Encoded:
        # Together if that leaves the prompt's tokens alone, else apart: as the model will meet it,
        # the prompt is tokenised before there is a completion.
        if both[: len(prompt)] == prompt and len(both) > len(prompt):
            completion = both[len(prompt) :]
        else:
            completion = self._continued(row.completion)
        prompt, completion = self._begun(prompt), self._ended(completion)
        return self._cut(prompt + completion, [False] * len(prompt) + [True] * len(completion))

    def _cut(self, ids: list[int], learn: list[bool]) -> Encoded:
        words = np.array(ids[: self.seq_len], dtype=np.uint32)
        flags = np.array(learn[: self.seq_len], dtype=bool)
        flags[:1] = False  # nothing comes before it to predict it from
        if not flags.any():
            if not any(learn[1:]):
                raise BadRow("has no token to learn")
            raise BadRow(
                f"has no token to learn within --seq-len {self.seq_len}: "
                f"{learn.index(True)} tokens come before the first one"
            )
        words[flags] |= LABEL
        return Encoded((words,), cut=len(ids) > self.seq_len)

    def _begun(self, ids: list[int]) -> list[int]:
        n = len(self.before)
        return ids if ids[:n] == self.before else self.before + ids

    def _ended(self, ids: list[int]) -> list[int]:
        return ids if self.eos is None or ids[-1:] == [self.eos] else [*ids, self.eos]


class StreamEncoder:
    """One document that comes in chunks: cut into examples as soon as they are full."""

    def __init__(self, encoder: Encoder) -> None:
        self._encoder = encoder
        self._held: list[int] | None = None

    def encode(self, text: str, last: bool) -> Encoded | BadRow:
        """The examples that this chunk completes; after the last chunk the next document begins."""
        encoder = self._encoder
        ids = encoder._ids([text])[0]
        held = encoder._begun(ids) if self._held is None else self._held + ids
        if last:
            held, self._held = encoder._ended(held), None
            if len(held) < 2:
                return BadRow("is a single token: nothing to predict")
            return Encoded(tuple(pieces(np.array(held, dtype=np.uint32), encoder.seq_len)))
        # Whole examples only, and never all: their last token begins the next one.
        stride = encoder.seq_len - 1
        whole = max(0, (len(held) - 2) // stride)
        self._held = held[whole * stride :]
        if not whole:
            return Encoded(())
        words = np.array(held[: whole * stride + 1], dtype=np.uint32)
        return Encoded(tuple(pieces(words, encoder.seq_len)))


def pieces(ids: Words, seq_len: int) -> list[Words]:
    """Cut at least two ids into examples of at most ``seq_len``, one token shared by neighbours."""
    cut: list[Words] = []
    for begin in range(0, len(ids) - 1, seq_len - 1):
        piece = ids[begin : begin + seq_len].copy()
        piece[1:] |= LABEL
        cut.append(piece)
    return cut


def check_ids(max_token: int, vocab_size: int | None) -> None:
    """Refuse ids that the model has no row for.

    Raises:
        DataError: the tokenizer is another model's.
    """
    if vocab_size is not None and max_token >= vocab_size:
        raise DataError(
            f"the tokenizer gives token {max_token}, the model has {vocab_size} "
            "embeddings: they do not belong together"
        )
