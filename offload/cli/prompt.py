"""From flags to prompt ids: text from a flag, a file or stdin, or ids as they are."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from offload.cli.flags import check_text
from offload.cli.template import some, template_ids
from offload.errors import CheckpointError, OffloadError
from offload.models.naming import model_name

# Without one of these transformers may still make a tokenizer, but an empty one.
VOCABULARIES = (
    "tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tekken.json",
    "sentencepiece.bpe.model", "vocab.model",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Asked:
    """What the user typed: text, or ids. Exactly one is there."""

    text: str | None = None
    ids: tuple[int, ...] | None = None


def read_prompt(prompt: str | None, file: Path | None, ids: str | None) -> Asked:
    """The prompt from whichever flag is given; without any, or with ``-p -``, from stdin.

    The last newline of a file or of stdin is not part of the prompt: ``echo`` and editors add it.

    Raises:
        OffloadError: several flags, none and nothing on stdin, or no readable text.
    """
    given = [
        name
        for name, value in (("-p", prompt), ("--prompt-file", file), ("--prompt-ids", ids))
        if value is not None
    ]
    if len(given) > 1:
        raise OffloadError(f"{' and '.join(given)} contradict each other; give one prompt")
    if ids is not None:
        return Asked(ids=parse_ids(ids))
    if file is not None:
        text = read_text(file, "--prompt-file")
    elif prompt is None and sys.stdin.isatty():
        raise OffloadError(
            "no prompt; give -p TEXT, --prompt-file FILE or --prompt-ids 1,2,3, or pipe one in"
        )
    elif prompt is None or prompt == "-":
        text = decode_text(sys.stdin.buffer.read(), "stdin")
    else:
        text = prompt
        check_text(text, "-p")
    if not text:
        where = given[0] if given and prompt != "-" else "stdin"
        raise OffloadError(f"the prompt from {where} is empty; give at least one character")
    return Asked(text=text)


def read_text(file: Path, flag: str) -> str:
    """A flag's UTF-8 file, without its last newline.

    Raises:
        OffloadError: it cannot be read, or is not UTF-8.
    """
    try:
        return decode_text(file.expanduser().read_bytes(), str(file))
    except OSError as error:
        raise OffloadError(f"{flag} {file}: {error.strerror}") from error


def decode_text(data: bytes, where: str) -> str:
    """UTF-8 text without its last newline, and without the mark that editors may put before it.

    Raises:
        OffloadError: it is not UTF-8; says where.
    """
    try:
        return data.decode("utf-8-sig").removesuffix("\n").removesuffix("\r")
    except UnicodeDecodeError as error:
        raise OffloadError(f"{where} is not UTF-8 text (byte {error.start})") from None


def parse_ids(text: str) -> tuple[int, ...]:
    """``"1,2,3"`` or ``"1 2 3"`` as ids.

    Raises:
        OffloadError: not a list of non-negative whole numbers.
    """
    words = [w for w in re.split(r"[,\s]+", text.strip().strip("[]")) if w]
    bad = next((w for w in words if not re.fullmatch(r"\d{1,10}", w)), None)
    if bad is not None or not words:
        raise OffloadError(
            f"--prompt-ids {text!r} is not a list of token ids such as 1,2,3"
            + (f": {bad!r}" if bad is not None else "")
        )
    return tuple(int(w) for w in words)


def load_tokenizer(directory: Path) -> Any | None:
    """The checkpoint's tokenizer, or None if it has none.

    Raises:
        CheckpointError: there is one, but it cannot be loaded.
    """
    if not any((directory / name).is_file() for name in VOCABULARIES):
        return None
    from transformers import AutoTokenizer

    try:
        os.fspath(directory.absolute()).encode()
    except UnicodeEncodeError:  # the tokenizers library opens files by names in UTF-8 only
        raise CheckpointError(
            f"the tokenizer of {model_name(directory)} cannot be loaded: the directory's path is "
            f"not UTF-8; rename it, or give --prompt-ids after moving the tokenizer's files away"
        ) from None
    try:
        return AutoTokenizer.from_pretrained(
            directory, local_files_only=True, trust_remote_code=False
        )
    except Exception as error:
        raise CheckpointError(
            f"the tokenizer of {model_name(directory)} cannot be loaded: {error}; give "
            f"--prompt-ids after moving its files away, or download them again"
        ) from error


def encode(
    asked: Asked,
    tokenizer: Any | None,
    *,
    raw: bool,
    directory: Path,
    settings: Mapping[str, Any] | None = None,
) -> list[int]:
    """Ids of the prompt; text goes through the chat template as a user's message unless ``raw``.

    Args:
        settings: for the template, e.g. ``enable_thinking``.

    Raises:
        OffloadError: text without a tokenizer, a template that fails, or nothing to start from.
    """
    if asked.ids is not None:
        return list(asked.ids)
    if tokenizer is None:
        raise OffloadError(
            f"{model_name(directory)} has no tokenizer; give the prompt as ids, e.g. "
            "--prompt-ids 1,2,3"
        )
    if raw or not getattr(tokenizer, "chat_template", None):
        ids = tokenizer(asked.text)["input_ids"]
    else:
        message = [{"role": "user", "content": str(asked.text)}]
        ids = template_ids(
            message,
            tokenizer,
            directory,
            way_out="use --raw to do without it",
            settings=settings,
        )
    return some(ids)


def check_ids(ids: Sequence[int], config: Any) -> None:
    """Refuse ids that the model has no embedding for.

    Raises:
        OffloadError: an id is not below the vocabulary's size.
    """
    vocabulary = getattr(config.get_text_config(), "vocab_size", None)
    worst = max(ids)
    if isinstance(vocabulary, int) and worst >= vocabulary:
        raise OffloadError(
            f"token id {worst} is not in the model's vocabulary: 0 to {vocabulary - 1}"
        )
