"""Tokenizers from metadata: the same tokens as the tokenizer that the metadata came from."""

from __future__ import annotations

import io
import json
import re
import string
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, pre_tokenizers

from offload.errors import CheckpointError, UnsupportedModelError
from offload.io.gguf import GGUFFile, GGUFTensor, read_gguf
from offload.models.gguf_generation import generation_defaults
from offload.models.gguf_splits import SPLITS
from offload.models.gguf_tokenizer import (
    TokenType,
    chat_template,
    load_tokenizer,
)

HELDOUT = Path(__file__).parents[2] / "examples" / "tiny_moe" / "heldout.txt"

TEXTS = (
    "", " ", "Hello, world!", "  two  spaces\n\n\nlines\t\ttabs ", "naïve café – “quotes”",
    "12345 6", "you're we'LL", "日本語と中文", "🙂\u200d🙂 emoji", "x = {'a': [1, 2]}\r\n",
    "</s><s> <unk> <0x0A>",
)  # fmt: skip


def write(path: Path, arch: str = "llama", /, **keys: Any) -> GGUFFile:
    """A file of metadata: keys below ``tokenizer.ggml.`` (or full ones with a dot)."""
    writer = gguf.GGUFWriter(path, arch)
    writer.add_context_length(64)
    for key, value in keys.items():
        if value is not None:
            full = key if "." in key else f"tokenizer.ggml.{key}"
            if isinstance(value, bool):
                writer.add_bool(full, value)
            elif isinstance(value, int):
                writer.add_uint32(full, value)
            elif isinstance(value, float):
                writer.add_float32(full, value)
            elif isinstance(value, str | bytes):
                writer.add_string(full, value)
            else:
                writer.add_array(full, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return read_gguf(path)


# SentencePiece, against the library itself


@pytest.fixture(scope="module")
def sp() -> Any:
    import sentencepiece

    out = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(HELDOUT.read_text().splitlines()),
        model_writer=out,
        vocab_size=480,
        model_type="bpe",
        byte_fallback=True,
        character_coverage=0.99,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        user_defined_symbols=["<mark>"],
        minloglevel=2,
    )
    return sentencepiece.SentencePieceProcessor(model_proto=out.getvalue())


def sp_keys(sp: Any, **more: Any) -> dict[str, Any]:
    n = sp.get_piece_size()
    kinds = []
    for i in range(n):
        if sp.is_unknown(i):
            kinds.append(TokenType.UNKNOWN)
        elif sp.is_control(i):
            kinds.append(TokenType.CONTROL)
        elif sp.is_byte(i):
            kinds.append(TokenType.BYTE)
        elif sp.id_to_piece(i) == "<mark>":
            kinds.append(TokenType.USER_DEFINED)
        else:
            kinds.append(TokenType.NORMAL)
    keys = {
        "model": "llama",
        "tokens": [sp.id_to_piece(i) for i in range(n)],
        "scores": [float(np.float32(sp.get_score(i))) for i in range(n)],
        "token_type": [int(k) for k in kinds],
        "bos_token_id": sp.bos_id(),
        "eos_token_id": sp.eos_id(),
        "unknown_token_id": sp.unk_id(),
    }
    return keys | more


def test_sentencepiece_gives_its_tokens(tmp_path: Path, sp: Any) -> None:
    tokenizer = load_tokenizer(write(tmp_path / "f", **sp_keys(sp)))
    assert len(tokenizer) == sp.get_piece_size()
    for text in (*TEXTS[1:-1], HELDOUT.read_text()[:2000]):
        got = tokenizer(text, add_special_tokens=False).input_ids
        assert got == sp.encode(text), text
        assert tokenizer.decode(got) == text
    assert tokenizer("a").input_ids == [sp.bos_id(), *sp.encode("a")]
    assert tokenizer("", add_special_tokens=False).input_ids == []
    marked = tokenizer("<mark>", add_special_tokens=False).input_ids
    assert marked == [sp.piece_to_id("<mark>")]


def test_one_score_for_all(tmp_path: Path, sp: Any) -> None:
    """As files have it that were converted without the SentencePiece model: ids are in the order
    in which the merges were learned."""
    keys = sp_keys(sp)
    keys["scores"] = [-1000.0] * len(keys["scores"])
    tokenizer = load_tokenizer(write(tmp_path / "f", **keys))
    for text in (*TEXTS[1:-1], HELDOUT.read_text()[:2000]):
        assert tokenizer(text, add_special_tokens=False).input_ids == sp.encode(text), text


@pytest.fixture(scope="module")
def sp_tokenizer(tmp_path_factory: pytest.TempPathFactory, sp: Any) -> Any:
    return load_tokenizer(write(tmp_path_factory.mktemp("sp") / "f", **sp_keys(sp)))


@settings(max_examples=200, deadline=None)
@given(text=st.text(string.ascii_lowercase + " .,'\n" + "éß日🙂", max_size=40))
def test_sentencepiece_on_any_text(sp: Any, sp_tokenizer: Any, text: str) -> None:
    got = sp_tokenizer(text, add_special_tokens=False).input_ids
    assert got == sp.encode(text)
    assert sp_tokenizer.decode(got) == text


def test_without_space_prefix(tmp_path: Path, sp: Any) -> None:
    keys = sp_keys(sp, add_space_prefix=False, add_bos_token=False, add_eos_token=True)
    tokenizer = load_tokenizer(write(tmp_path / "f", **keys))
    ids = tokenizer("the end", add_special_tokens=False).input_ids
    assert not tokenizer.convert_ids_to_tokens(ids)[0].startswith("\u2581")
    assert tokenizer.decode(ids) == "the end"
    assert tokenizer("the end").input_ids == [*ids, sp.eos_id()]


# Byte-level BPE


@pytest.fixture(scope="module")
def byte_level() -> dict[str, Any]:
    from tokenizers import Tokenizer, trainers
    from tokenizers.models import BPE

    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|endoftext|>", "<|im_end|>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator(HELDOUT.read_text().splitlines(), trainer)
    model = json.loads(tokenizer.to_str())["model"]
    tokens = sorted(model["vocab"], key=lambda t: model["vocab"][t])
    tokens.append("<think>")
    return {
        "model": "gpt2",
        "tokens": tokens,
        "token_type": [3, 3] + [1] * (len(tokens) - 3) + [4],
        "merges": [" ".join(m) for m in model["merges"]],
        "eos_token_id": 0,
    }


@pytest.mark.parametrize("pre", sorted(SPLITS))
def test_every_split_is_lossless(tmp_path: Path, byte_level: dict[str, Any], pre: str) -> None:
    tokenizer = load_tokenizer(write(tmp_path / "f", **byte_level, pre=pre))
    assert len(tokenizer) == len(byte_level["tokens"])
    for text in TEXTS:
        assert tokenizer.decode(tokenizer(text).input_ids) == text


SPLIT_TEXT = "I'm 12345 XMLParser's\n\n  日本123語 foo(bar)/ \r\n"
PIECES = {
    "qwen2": ["I", "'m", " ", "1", "2", "3", "4", "5", " XMLParser", "'s", "\n\n", " ", " 日本",
              "1", "2", "3", "語", " foo", "(bar", ")/", " \r\n"],
    "llama-bpe": ["I", "'m", " ", "123", "45", " XMLParser", "'s", "\n\n", " ", " 日本", "123",
                  "語", " foo", "(bar", ")/", " \r\n"],
    "gpt-4o": ["I'm", " ", "123", "45", " XMLParser's", "\n\n", " ", " 日本", "123", "語", " foo",
               "(bar", ")/", " \r\n"],
    "kimi-k2": ["I'm", " ", "123", "45", " XMLParser's", "\n\n", " ", " ", "日本", "123", "語",
                " foo", "(bar", ")/", " \r\n"],
    "deepseek-v3": ["I", "'m", " ", "123", "45", " XMLParser", "'s", "\n\n", "  ", "日本",
                    "123", "語", " foo", "(bar", ")/", " \r\n"],
    "deepseek-llm": ["I", "'", "m", " ", "1", "2", "3", "4", "5", " XMLParser", "'", "s", "\n",
                     "\n", "  ", "日本", "1", "2", "3", "語", " foo", "(", "bar", ")/", " ", "\r",
                     "\n"],
    "smollm": ["I", "'m", " ", "1", "2", "3", "4", "5", " XMLParser", "'s", "\n\n ", " 日本", "1",
               "2", "3", "語", " foo", "(", "bar", ")/", " \r\n"],
    "gpt-2": ["I", "'m", " 12345", " XMLParser", "'s", "\n\n ", " 日本", "123", "語", " foo", "(",
              "bar", ")/", " \r\n"],
}  # fmt: skip


@pytest.mark.parametrize("pre", PIECES)
def test_pieces(pre: str) -> None:
    splits = [pre_tokenizers.Split(Regex(p), "isolated") for p in SPLITS[pre].patterns]
    found = pre_tokenizers.Sequence(splits).pre_tokenize_str(SPLIT_TEXT)
    assert [piece for piece, _ in found] == PIECES[pre]


@pytest.mark.parametrize("pre", ["llama-bpe", "qwen2", "qwen35", "gpt-4o", "tekken"])
def test_patterns_are_those_of_transformers(pre: str) -> None:
    from transformers.integrations.gguf import gguf_tokenizer_mapping as theirs

    assert SPLITS[pre].patterns == (theirs.GGUF_PRE_TOKENIZER_SPLITS[pre],)


def test_byte_level_special_tokens(tmp_path: Path, byte_level: dict[str, Any]) -> None:
    keys = byte_level | {"bos_token_id": 1, "add_bos_token": True}
    tokenizer = load_tokenizer(write(tmp_path / "f", "qwen2", **keys))  # the split by architecture
    last = len(byte_level["tokens"]) - 1
    ids = tokenizer("a<think>b<|im_end|>").input_ids
    assert ids[0] == 1
    assert ids[2] == last
    assert ids[-1] == 1
    assert tokenizer.decode(ids, skip_special_tokens=True) == "a<think>b"
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|im_end|>", "<|endoftext|>")
    assert tokenizer.model_max_length == 64
    by_default = byte_level | {"bos_token_id": 1, "pre": "llama-bpe"}
    assert load_tokenizer(write(tmp_path / "g", **by_default))("").input_ids == [1]


def test_ignore_merges(tmp_path: Path, byte_level: dict[str, Any]) -> None:
    """Llama 3 takes a piece that is a token even where no merges lead to it."""
    keys = byte_level | {
        "tokens": [*byte_level["tokens"], "qzqz"],
        "token_type": [*byte_level["token_type"], 1],
    }
    new = len(keys["tokens"]) - 1
    whole = load_tokenizer(write(tmp_path / "f", **keys, pre="llama-bpe"))
    merged = load_tokenizer(write(tmp_path / "g", **keys, pre="qwen2"))
    assert whole("qzqz").input_ids == [new]
    assert len(merged("qzqz").input_ids) > 1


def test_tokens_that_are_no_text(tmp_path: Path, byte_level: dict[str, Any]) -> None:
    keys = byte_level | {
        "tokens": [*(t.encode() for t in byte_level["tokens"]), b"", b"\xff\xfe"],
        "token_type": [*byte_level["token_type"], 1, 5],
        "pre": "qwen2",
    }
    tokenizer = load_tokenizer(write(tmp_path / "f", **keys))
    assert len(tokenizer) == len(keys["tokens"])
    assert tokenizer.decode(tokenizer("abc").input_ids) == "abc"


REFUSED: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "a long model": ({"model": "x" * 10**5}, UnsupportedModelError, "kind 'x{57}…' .*are gpt2"),
    "model": ({"model": "bert"}, UnsupportedModelError, "kind 'bert' .*supported are gpt2"),
    "no model": ({"model": None}, CheckpointError, "tokenizer.ggml.model is missing"),
    "pre": ({"pre": "grok-9"}, UnsupportedModelError, "splitting text as 'grok-9'.* chatglm-bpe"),
    "no pre": ({"pre": None}, CheckpointError, "tokenizer.ggml.pre is missing"),
    "no tokens": ({"tokens": None}, CheckpointError, "tokenizer.ggml.tokens is missing"),
    "no merges": ({"merges": None}, CheckpointError, "tokenizer.ggml.merges is missing"),
    "a merge that is no text": (
        {"merges": ["a b", b"\xff \xfe"]}, CheckpointError, r"number 1 is '\\udcff .*not two tokens"
    ),
    "a merge": ({"merges": ["ab"]}, CheckpointError, "number 0 is 'ab', not two tokens"),
    "stray merge": ({"merges": ["日 本"]}, CheckpointError, "vocabulary and merges do not fit"),
    "types": ({"token_type": [1, 1]}, CheckpointError, r"token_type has 2 values for \d+ tokens"),
    "eos": ({"eos_token_id": 9999}, CheckpointError, "eos_token_id is 9999, there are"),
    "bos": ({"add_bos_token": True}, CheckpointError, "add_bos_token is true, bos_token_id is"),
    "flag": ({"add_bos_token": 3}, CheckpointError, "add_bos_token is 3, not true or false"),
    "template": (
        {"tokenizer.chat_template": 5}, CheckpointError, "chat_template is 5, not text",
    ),
    "template of bytes": (
        {"tokenizer.chat_template": b"\xff"}, CheckpointError, "chat_template is not UTF-8 text",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_refused(tmp_path: Path, byte_level: dict[str, Any], what: str) -> None:
    keys, error, message = REFUSED[what]
    file = write(tmp_path / "f", **(byte_level | {"pre": "qwen2"} | keys))
    with pytest.raises(error, match=message):
        load_tokenizer(file)


def test_same_token_twice(tmp_path: Path, byte_level: dict[str, Any]) -> None:
    keys = byte_level | {"tokens": [*byte_level["tokens"][:-1], "a"]}
    with pytest.raises(CheckpointError, match=r"token 'a' is both \d+ and \d+"):
        load_tokenizer(write(tmp_path / "f", **keys, pre="qwen2"))


def test_more_tokens_than_embeddings(tmp_path: Path, byte_level: dict[str, Any]) -> None:
    file = write(tmp_path / "f", **byte_level, pre="qwen2")
    rows = GGUFTensor("token_embd.weight", "f32", (100, 8), 0, 3200)
    file = replace(file, tensors={rows.name: rows})
    with pytest.raises(CheckpointError, match=r"\d+ tokens, and embeddings for 100 of them"):
        load_tokenizer(file)


def test_missing_scores(tmp_path: Path, sp: Any) -> None:
    with pytest.raises(CheckpointError, match=re.escape("tokenizer.ggml.scores is missing")):
        load_tokenizer(write(tmp_path / "f", **sp_keys(sp, scores=None)))


# Chat templates and defaults


def test_chat_templates(tmp_path: Path, byte_level: dict[str, Any]) -> None:
    keys: dict[str, Any] = byte_level | {"pre": "qwen2"}
    assert chat_template(write(tmp_path / "a", **keys)) is None
    keys["tokenizer.chat_template"] = "{% for m in messages %}<{{ m.content }}>{% endfor %}"
    file = write(tmp_path / "b", **keys)
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
    tokenizer = load_tokenizer(file)
    assert tokenizer.apply_chat_template(messages, tokenize=False) == "<hi><ho>"
    keys["tokenizer.chat_template.tool_use"] = "tools"
    file = write(tmp_path / "c", **keys)
    assert list(chat_template(file) or ()) == ["default", "tool_use"]
    tokenizer = load_tokenizer(file)
    assert tokenizer.apply_chat_template(messages, tokenize=False) == "<hi><ho>"


def test_generation_defaults(tmp_path: Path, byte_level: dict[str, Any]) -> None:
    tokens = byte_level["tokens"]
    more: dict[str, Any] = {
        "general.sampling.temp": 0.7, "general.sampling.top_k": 20, "general.sampling.top_p": 0.95,
        "pre": "qwen2", "padding_token_id": 0, "eot_token_id": len(tokens) - 1,
    }  # fmt: skip
    got = generation_defaults(write(tmp_path / "a", **byte_level, **more))
    assert got == {
        "bos_token_id": None, "eos_token_id": [0, len(tokens) - 1, 1], "pad_token_id": 0,
        "temperature": 0.7, "top_k": 20, "top_p": 0.95, "do_sample": True,
    }  # fmt: skip
    from transformers import GenerationConfig

    assert GenerationConfig(**got).temperature == 0.7


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("temp", float("nan"), "temperature is nan, not a number"),
        ("temp", -1.0, "temperature is -1, which is too small"),
        ("penalty_repeat", 0.0, "repetition_penalty is 0, which is too small"),
        ("top_k", 2.5, "top_k is 2.5, not a whole number"),
    ],
)
def test_sampling_that_is_nothing(
    tmp_path: Path, byte_level: dict[str, Any], key: str, value: float, message: str
) -> None:
    more = {f"general.sampling.{key}": value}
    with pytest.raises(CheckpointError, match=message):
        generation_defaults(write(tmp_path / "a", **byte_level, **more))


def test_sampling_that_is_off(
    tmp_path: Path, byte_level: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """As llama.cpp says it; transformers takes no such numbers. What only it has is said."""
    more = {"top_k": -1.0, "top_p": 1.5, "min_p": -0.1, "mirostat": 0, "penalty_last_n": 64}

    def defaults(**keys: Any) -> dict[str, Any]:
        full = {f"general.sampling.{key}": value for key, value in (more | keys).items()}
        return generation_defaults(write(tmp_path / "a", **byte_level, **full))

    got = defaults()
    assert (got["top_k"], got["top_p"], got["min_p"]) == (0, 1, 0)
    assert not caplog.records
    defaults(mirostat=2, penalty_repeat=1.1)
    (record,) = caplog.records
    for key in ("mirostat", "penalty_last_n"):
        assert f"general.sampling.{key}" in record.getMessage()


def test_a_message_of_harmony_is_no_end(tmp_path: Path, byte_level: dict[str, Any]) -> None:
    names = ["<|end|>", "<|return|>", "<|call|>"]
    n = len(byte_level["tokens"])
    keys = byte_level | {
        "tokens": byte_level["tokens"] + names,
        "token_type": byte_level["token_type"] + [3] * 3,
    }
    got = generation_defaults(write(tmp_path / "a", **keys))
    assert sorted(got["eos_token_id"]) == [0, 1, n + 1, n + 2]
