"""A tokenizer from a GGUF file's metadata.

transformers has a converter of its own (``from_pretrained(..., gguf_file=...)``). It is not used
because it takes fewer architectures than its tokenizers could serve, and because a kind of split
it does not know is passed over in silence, which gives other tokens than the model was trained on.
"""

from __future__ import annotations

import logging
from enum import IntEnum
from typing import Any

from offload.io.gguf import GGUFFile
from offload.models.gguf_metadata import Metadata
from offload.models.gguf_splits import BY_ARCHITECTURE, SPLITS
from offload.units import brief

log = logging.getLogger(__name__)

_PREFIX = "tokenizer.ggml."
_TEMPLATE = "tokenizer.chat_template"
_SPACE = "\u2581"  # how SentencePiece writes a space


class TokenType(IntEnum):
    """llama.cpp's ``llama_token_type``."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


def load_tokenizer(gguf: GGUFFile) -> Any:
    """A ``PreTrainedTokenizerFast`` with the file's vocabulary, special tokens and chat template.

    Raises:
        CheckpointError: a key is missing or malformed, tokens contradict each other.
        UnsupportedModelError: a kind of tokenizer or of splitting that we do not know.
    """
    return Vocabulary(gguf).build()


class Vocabulary:
    """The checked metadata of a tokenizer: ``tokens`` by id, their ``ids`` and ``types``."""

    def __init__(self, gguf: GGUFFile) -> None:
        self.meta = Metadata(gguf)
        self.all = gguf.metadata
        self.model = self._text("model")
        self.tokens = self._tokens()
        self.ids = {token: i for i, token in enumerate(self.tokens)}
        if len(self.ids) != len(self.tokens):
            twice = next(t for i, t in enumerate(self.tokens) if self.ids[t] != i)
            first = self.tokens.index(twice)
            self.meta.fail(f"token {twice!r} is both {first} and {self.ids[twice]}")
        rows = gguf.tensors.get("token_embd.weight")
        if rows is not None and rows.shape and rows.shape[0] < len(self.tokens):
            self.meta.fail(
                f"it has {len(self.tokens)} tokens, and embeddings for {rows.shape[0]} of them"
            )
        self.types = self._list("token_type", int) or [int(TokenType.NORMAL)] * len(self.tokens)

    def _text(self, key: str) -> str:
        value = self.all.get(_PREFIX + key)
        if not isinstance(value, str):
            self.meta.fail(
                f"the metadata key {_PREFIX}{key} is {'missing' if value is None else 'no text'}"
            )
        return value

    def _list(self, key: str, *kinds: type) -> list[Any] | None:
        """One value per token."""
        value = self.all.get(_PREFIX + key)
        if value is None:
            return None
        if not isinstance(value, list) or any(type(v) not in kinds for v in value):
            self.meta.fail(f"{_PREFIX}{key} is not a list of {kinds[0].__name__}")
        if len(value) < len(self.tokens):
            self.meta.fail(f"{_PREFIX}{key} has {len(value)} values for {len(self.tokens)} tokens")
        return value

    def _tokens(self) -> list[str]:
        value = self.all.get(_PREFIX + "tokens")
        if not isinstance(value, list) or not all(isinstance(t, str) for t in value) or not value:
            self.meta.fail(f"the metadata key {_PREFIX}tokens is missing, or no list of texts")
        # Tokens that are no text cannot come of any; as in llama.cpp their places are kept.
        return [t if t and _is_text(t) else f"[EMPTY_{i}]" for i, t in enumerate(value)]

    def _flag(self, key: str, default: bool) -> bool:
        value = self.all.get(_PREFIX + key, default)
        if type(value) is not bool:
            self.meta.fail(f"{_PREFIX}{key} is {brief(value, 40)}, not true or false")
        return value

    def special(self, key: str) -> int | None:
        value = self.all.get(f"{_PREFIX}{key}_token_id")
        if value is None or value == 2**32 - 1:  # llama.cpp's "none", as some converters write it
            return None
        if type(value) is not int or not 0 <= value < len(self.tokens):
            self.meta.fail(
                f"{_PREFIX}{key}_token_id is {brief(value, 40)}, "
                f"there are {len(self.tokens)} tokens"
            )
        return value

    def build(self) -> Any:
        from transformers import PreTrainedTokenizerFast

        if self.model == "gpt2":
            tokenizer, adds_bos = self._byte_level()
        elif self.model == "llama":
            tokenizer, adds_bos = self._sentencepiece()
        else:
            self.meta.refuse(
                f"a tokenizer of the kind {brief(self.model)} ({_PREFIX}model) is not supported; "
                "supported are gpt2 (byte-level BPE) and llama (SentencePiece BPE)"
            )
        self._add_tokens(tokenizer)
        self._add_ends(tokenizer, adds_bos)
        names = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
        named = {
            f"{field}_token": self.tokens[i]
            for field, key in names.items()
            if (i := self.special(key)) is not None
        }
        make: Any = PreTrainedTokenizerFast  # untyped
        return make(
            tokenizer_object=tokenizer,
            clean_up_tokenization_spaces=False,
            model_max_length=self.meta.integer("context_length"),
            chat_template=chat_template(self.meta.gguf),
            **named,
        )

    def _byte_level(self) -> tuple[Any, bool]:
        from tokenizers import Regex, Tokenizer, decoders, pre_tokenizers
        from tokenizers.models import BPE

        kind = self.all.get(_PREFIX + "pre") or BY_ARCHITECTURE.get(self.meta.arch)
        if kind is None:
            self.meta.fail(
                f"the metadata key {_PREFIX}pre is missing: how to split text is unknown; convert "
                "the model again"
            )
        split = SPLITS.get(kind) if isinstance(kind, str) else None
        if split is None:
            self.meta.refuse(
                f"splitting text as {brief(kind)} ({_PREFIX}pre) is not supported; supported are "
                f"{', '.join(sorted(SPLITS))}"
            )
        model = self._bpe(BPE, self._merges(), ignore_merges=split.ignore_merges)
        tokenizer = Tokenizer(model)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                *(pre_tokenizers.Split(Regex(p), "isolated") for p in split.patterns),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
        tokenizer.decoder = decoders.ByteLevel()
        return tokenizer, split.adds_bos

    def _merges(self) -> list[tuple[str, str]]:
        value = self.all.get(_PREFIX + "merges")
        if not isinstance(value, list):
            self.meta.fail(f"the metadata key {_PREFIX}merges is missing, or no list")
        merges = []
        for i, merge in enumerate(value):
            at = merge.find(" ", 1) if isinstance(merge, str) else -1
            if at < 0 or not _is_text(merge):
                self.meta.fail(f"{_PREFIX}merges: number {i} is {brief(merge)}, not two tokens")
            merges.append((merge[:at], merge[at + 1 :]))
        return merges

    def _sentencepiece(self) -> tuple[Any, bool]:
        from tokenizers import Tokenizer, decoders, normalizers
        from tokenizers.models import BPE

        unknown = self.special("unknown")
        if unknown is None and TokenType.UNKNOWN in self.types:
            unknown = self.types.index(TokenType.UNKNOWN)
        model = self._bpe(
            BPE,
            self._scored_merges(),
            unk_token=None if unknown is None else self.tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
        tokenizer = Tokenizer(model)
        prefix = self._flag("add_space_prefix", True)
        space = normalizers.Replace(" ", _SPACE)
        tokenizer.normalizer = (
            normalizers.Sequence([normalizers.Prepend(_SPACE), space]) if prefix else space
        )
        steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
        tokenizer.decoder = decoders.Sequence(
            [*steps, decoders.Strip(" ", 1, 0)] if prefix else steps
        )
        return tokenizer, True

    def _scored_merges(self) -> list[tuple[str, str]]:
        """SentencePiece joins the neighbours whose joint token has the best score; as merges: all
        pairs that make a token, best token first. Files of 2023 and 2024 that were converted from a
        fast tokenizer have one score for all tokens: those were learned in the order of their ids.
        """
        scores = self._list("scores", float, int)
        if scores is None:
            self.meta.fail(f"the metadata key {_PREFIX}scores is missing")
        if self.meta.arch.startswith("gemma"):
            # Gemma's scores do not follow the order its merges were learned in; its ids do.
            scores = [-i for i in range(len(self.tokens))]
        normal = {token: i for token, i in self.ids.items() if self.types[i] == TokenType.NORMAL}
        found = []
        for token, i in normal.items():
            for at in range(1, len(token)):
                left, right = token[:at], token[at:]
                if left in normal and right in normal:
                    found.append((-scores[i], i, normal[left], normal[right], left, right))
        found.sort()
        return [(left, right) for *_, left, right in found]

    def _bpe(self, kind: Any, merges: list[tuple[str, str]], **how: Any) -> Any:
        try:
            return kind(self.ids, merges, **how)
        except Exception as error:  # noqa: BLE001 - the library raises bare Exception
            self.meta.fail(f"its vocabulary and merges do not fit: {error}")

    def _add_tokens(self, tokenizer: Any) -> None:
        """Tokens that are found in the text before anything else."""
        from tokenizers import AddedToken

        whole = (TokenType.CONTROL, TokenType.USER_DEFINED, TokenType.UNKNOWN)
        special = {self.special(k) for k in ("bos", "eos", "unknown", "padding", "eot", "eom")}
        added = [
            AddedToken(token, normalized=False, special=kind != TokenType.USER_DEFINED)
            for i, (token, kind) in enumerate(zip(self.tokens, self.types, strict=False))
            if kind in whole or (i in special and kind != TokenType.NORMAL)
        ]
        tokenizer.add_tokens(added)
        if tokenizer.get_vocab_size() != len(self.tokens):
            self.meta.fail(
                f"its {len(self.tokens)} tokens make a vocabulary of {tokenizer.get_vocab_size()}"
            )

    def _add_ends(self, tokenizer: Any, adds_bos: bool) -> None:
        """BOS and EOS around every text, where the file wants them."""
        from tokenizers.processors import TemplateProcessing

        ends = []
        for key, wanted in (("bos", adds_bos), ("eos", False)):
            if not self._flag(f"add_{key}_token", wanted):
                continue
            i = self.special(key)
            if i is None:
                if f"{_PREFIX}add_{key}_token" in self.all:
                    self.meta.fail(f"{_PREFIX}add_{key}_token is true, {key}_token_id is missing")
                continue
            ends.append((key, self.tokens[i], i))
        first = [token for key, token, _ in ends if key == "bos"]
        last = [token for key, token, _ in ends if key == "eos"]
        if ends:
            tokenizer.post_processor = TemplateProcessing(
                single=[*first, "$A", *last],
                pair=[*first, "$A", *last, *(f"{t}:1" for t in first), "$B:1",
                      *(f"{t}:1" for t in last)],
                special_tokens=[(token, i) for _, token, i in ends],
            )  # fmt: skip


def _is_text(token: str) -> bool:
    return token.isascii() or not any("\ud800" <= c <= "\udfff" for c in token)


def chat_template(gguf: GGUFFile) -> str | dict[str, str] | None:
    """The template, or all of them by name where the file has several (``"default"`` first)."""
    found = {
        key.removeprefix(_TEMPLATE + "."): value
        for key, value in gguf.metadata.items()
        if key.startswith(_TEMPLATE + ".") and isinstance(value, str)
    }
    default = gguf.metadata.get(_TEMPLATE)
    if default is not None and not isinstance(default, str):
        Metadata(gguf).fail(f"{_TEMPLATE} is {brief(default, 40)}, not text")
    for text in (default or "", *found.values()):
        if not _is_text(text):
            Metadata(gguf).fail(f"{_TEMPLATE} is not UTF-8 text; the file is damaged")
    if not found:
        return default
    return ({"default": default} if default is not None else {}) | found
