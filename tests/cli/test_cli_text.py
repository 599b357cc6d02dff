"""Streaming text: multi-byte characters, spaces, stop strings."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from offload.cli.text import IdDecoder, StopFilter, StoppedText, TextDecoder


@pytest.fixture(scope="module")
def tokenizer(dense: Path) -> PreTrainedTokenizerFast:
    return AutoTokenizer.from_pretrained(dense)


def _spaced() -> PreTrainedTokenizerFast:
    """Like sentencepiece: words begin with a mark, and the first one's space is dropped."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    vocabulary = {"<unk>": 0, "▁a": 1, "▁word": 2, "s": 3, "<0xF0>": 4, "<0x9F>": 5}
    vocabulary |= {"<0xA6>": 6, "<0x80>": 7, "<end>": 8}
    raw = Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.Metaspace()
    raw.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1),
        ]
    )
    return PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<end>")


def _pieces(tokenizer: PreTrainedTokenizerFast, ids: list[int]) -> list[str]:
    decoder = TextDecoder(tokenizer)
    return [decoder.push(i) for i in ids] + [decoder.finish()]


@pytest.mark.parametrize(
    "text",
    ["the ring", "Straße größer", "数据从磁盘", "🦀🚀 𝔸ℂ 🧵", "a\n\n  b\t", "never seen: ≠∂żω"],
)
def test_pieces_join_to_the_text_and_no_character_is_split(
    tokenizer: PreTrainedTokenizerFast, text: str
) -> None:
    pieces = _pieces(tokenizer, tokenizer(text)["input_ids"])
    assert "".join(pieces) == text
    assert "\ufffd" not in "".join(pieces)
    assert pieces[-1] == ""


@pytest.mark.parametrize("seed", range(20))
def test_random_tokens_decode_as_all_at_once(tokenizer: PreTrainedTokenizerFast, seed: int) -> None:
    """Random ids are full of broken characters and special tokens."""
    ids = random.Random(seed).choices(range(len(tokenizer)), k=60)
    assert "".join(_pieces(tokenizer, ids)) == tokenizer.decode(ids, skip_special_tokens=True)


def test_an_unfinished_character_waits_and_is_shown_at_the_end(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    first, *_ = tokenizer("ż")["input_ids"]
    decoder = TextDecoder(tokenizer)
    assert decoder.push(first) == ""
    assert decoder.finish() == "\ufffd"


def test_the_space_dropped_at_the_start_is_kept_inside() -> None:
    spaced = _spaced()
    ids = [1, 2, 3, 8, 2, 4, 5, 6, 7, 1]
    pieces = _pieces(spaced, ids)
    assert (
        "".join(pieces)
        == spaced.decode(ids, skip_special_tokens=True)
        == "a words word🦀 a".replace("🦀", bytes([0xF0, 0x9F, 0xA6, 0x80]).decode())
    )
    assert pieces[1] == " word"


def test_ids_are_written_as_they_are_read() -> None:
    decoder = IdDecoder()
    assert (
        "".join([decoder.push(7), decoder.push(0), decoder.push(12), decoder.finish()]) == "7,0,12"
    )


@given(
    st.text("ab\n", max_size=40),
    st.lists(st.text("ab\n", min_size=1, max_size=4), max_size=3),
    st.randoms(use_true_random=False),
)
def test_a_filter_shows_what_comes_before_the_first_stop(
    text: str, stops: list[str], chance: random.Random
) -> None:
    """Any way of cutting the text into pieces shows the same."""
    found = [at for at in (text.find(stop) for stop in stops) if at >= 0]
    stop_filter, shown, at = StopFilter(stops), "", 0
    while at < len(text) and not stop_filter.hit:
        step = chance.randint(1, 5)
        shown += stop_filter.push(text[at : at + step])
        at += step
    shown += stop_filter.finish()
    assert stop_filter.hit == bool(found)
    # A piece may hold a later stop that began earlier than one that ended before: the shorter.
    ends = [(text.find(s) + len(s), text.find(s)) for s in stops if s in text]
    first_end = min((end for end, _ in ends), default=None)
    if first_end is None:
        assert shown == text
    else:
        assert text.startswith(shown)
        assert min(start for _, start in ends) <= len(shown) <= first_end
        assert not any(stop in shown for stop in stops)


def test_what_may_become_a_stop_waits() -> None:
    stop_filter = StopFilter(["<end>"])
    assert stop_filter.push("text <e") == "text "
    assert stop_filter.push("x") == "<ex"
    assert stop_filter.push("<end> more") == ""
    assert stop_filter.hit
    assert stop_filter.push("more") == ""
    assert stop_filter.finish() == ""


@pytest.mark.parametrize(
    ("stops", "shown", "hit"),
    [
        (["<end>"], "a words", True),
        (["s<end> wo"], "a word", True),
        (["never", "d<end>", "<end> word"], "a words", True),
        (["<end><end>"], "a words words", False),
        (["end>"], "a words words", False),
    ],
)
def test_special_tokens_stop_and_are_never_shown(stops: list[str], shown: str, hit: bool) -> None:
    text = StoppedText(TextDecoder(_spaced()), stops)
    pieces = []
    for token in [1, 2, 3, 8, 2, 3]:
        pieces.append(text.push(token))
        if text.hit:
            break
    pieces.append(text.finish())
    assert text.hit == hit
    assert "".join(pieces) == shown


def test_ids_have_no_special_tokens() -> None:
    text = StoppedText(IdDecoder(), ["<end>"])
    assert [text.push(8), text.push(1), text.finish()] == ["8", ",1", ""]
