"""Rows to tokens: what is learnt, where a text ends, what does not fit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from data_support import EOS, examples, opened, tokenizer, write_lines

from offload.errors import DataError
from offload.train.data import encode
from offload.train.data.bad_rows import BadRow
from offload.train.data.encode import Encoder, pieces
from offload.train.data.shapes import Chat, Completion, Text, shape_of
from offload.train.data.store import LABEL

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MARKED = (
    "{% for m in messages %}[{{ m['role'] }}]{% if m['role'] == 'assistant' %}"
    "{% generation %}{{ m['content'] }};{% endgeneration %}{% else %}{{ m['content'] }};"
    "{% endif %}{% endfor %}"
)
# The last answer shows a thought, earlier ones do not: as templates of reasoning models have it.
THINKING = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['role'] == 'assistant' and loop.last %}<think>\n\n</think>\n\n{% endif %}"
    "{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Nothing of an earlier rendering stays once a message follows.
REVERSED = "{% for m in messages | reverse %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"
TURNS = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "the king?"},
    {"role": "assistant", "content": "the queen"},
    {"role": "user", "content": "the queen"},
    {"role": "assistant", "content": "a héro 🎭"},
]


def chatml(template: str) -> Any:
    found = tokenizer(template)
    found.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    return found


def one(tok: Any, shape: Any, seq_len: int = 512) -> tuple[str, str]:
    """(whole text, learnt text) of a row of one example."""
    (found,) = Encoder(tok, seq_len).encode([shape])
    if isinstance(found, Exception):
        raise found
    (words,) = found.pieces
    return (
        tok.decode((words & ~LABEL).tolist()),
        tok.decode((words[(words & LABEL) != 0] & ~LABEL).tolist()),
    )


def chat(turns: list[dict[str, Any]], first: int = 0) -> Chat:
    return Chat(tuple(turns), first, None)


def test_texts_and_completions_end_once() -> None:
    tok = tokenizer()
    eos = tok.eos_token
    assert one(tok, Text("a b"))[0] == "a b" + eos
    assert one(tok, Text("a b" + eos))[0] == "a b" + eos
    assert one(tok, Completion("q:", " yes")) == (f"q: yes{eos}", f" yes{eos}")
    assert one(tok, Completion("q:", " yes" + eos)) == (f"q: yes{eos}", f" yes{eos}")
    assert one(tok, Completion("", "yes"))[0] == "yes" + eos


def test_what_the_tokenizer_begins_with_comes_once() -> None:
    from tokenizers.processors import TemplateProcessing

    tok = tokenizer()
    tok.add_special_tokens({"bos_token": "<s>"})
    bos = tok.bos_token_id
    tok.backend_tokenizer.post_processor = TemplateProcessing(
        single="<s> $A <|endoftext|>", special_tokens=[("<s>", bos), ("<|endoftext|>", EOS)]
    )
    encoder = Encoder(tok, 64)
    assert encoder.before == [bos]
    for text in ("king", "<s>king"):
        (found,) = encoder.encode([Text(text)])
        assert isinstance(found, encode.Encoded)
        ids = (found.pieces[0] & ~LABEL).tolist()
        assert ids[0] == bos
        assert ids.count(bos) == ids.count(EOS) == 1
    whole, learns = one(tok, Completion("q:", " yes"))
    assert whole == "<s>q: yes<|endoftext|>"
    assert learns == " yes<|endoftext|>"


def test_a_prompt_keeps_the_tokens_it_has_alone() -> None:
    tok = tokenizer()
    for prompt, completion in (("the k", "ing and"), ("the ", " king"), ("é", "è")):
        alone = tok(prompt, add_special_tokens=False)["input_ids"]
        (found,) = Encoder(tok, 64).encode([Completion(prompt, completion)])
        assert isinstance(found, encode.Encoded)
        words = found.pieces[0]
        assert (words & ~LABEL).tolist()[: len(alone)] == alone
        assert not (words[: len(alone)] & LABEL).any()
        assert tok.decode((words[len(alone) :] & ~LABEL).tolist()) == completion + tok.eos_token


def puts_blanks() -> Any:
    """As SentencePiece: a blank is a part of the word behind it, and every text has one before."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = ["<eos>", *"abcdefghijklmnopqrstuvwxyz:;\n▁", "no", "▁no"]
    raw = Tokenizer(models.BPE({x: i for i, x in enumerate(letters)}, [("n", "o"), ("▁", "no")]))
    raw.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    raw.decoder = decoders.Metaspace(prepend_scheme="always")
    return PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<eos>")


def test_a_completion_goes_on_from_its_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokenised apart it has no blank of its own before it."""
    tok = puts_blanks()
    assert one(tok, Completion("yes: ", "no: no")) == ("yes: no: no<eos>", "no: no<eos>")
    (found,) = Encoder(tok, 64).encode([Completion("yes: ", "no")])
    assert not isinstance(found, BadRow)
    assert tok.convert_ids_to_tokens((found.pieces[0] & ~LABEL)[-3:].tolist()) == [
        "▁", "no", "<eos>"
    ]  # fmt: skip
    assert one(tok, Completion("yes:", " no")) == ("yes: no<eos>", "no<eos>")
    # So are the parts of a conversation for a tokenizer that cannot say where its tokens lie.
    tok.chat_template = MARKED.replace("[{{", "a:{{").replace("}}]", "}}:")
    monkeypatch.setattr(type(tok), "is_fast", property(lambda _: False))
    turns = [{"role": "user", "content": "yes"}, {"role": "assistant", "content": "no"}]
    assert one(tok, chat(turns)) == ("a:user:yes;a:assistant:no;<eos>", "no;<eos>")


def test_without_an_end_token_nothing_is_terminated(tmp_path: Path) -> None:
    tok = tokenizer(eos_token=None, pad_token=None)
    assert one(tok, Text("a b")) == ("a b", tok.decode(tok("a b")["input_ids"][1:]))
    rows = [
        {"prompt": "q", "completion": "the king and the queen"},
        {"prompt": "q", "completion": "a"},
    ]
    file = write_lines(tmp_path / "a.jsonl", rows)
    data, notes = opened(file, tmp_path, tok, packing=False, batch_size=2)
    with data:
        batch = data.train.micro_batch(0, 0)
        assert batch.attention_mask is not None
        assert (batch.input_ids[batch.attention_mask == 0] == 0).all()
        assert (batch.labels[batch.attention_mask == 0] == -100).all()
    assert notes == [
        "the tokenizer has no end of sequence token: texts and completions are not terminated"
    ]


def test_a_long_text_is_cut_into_pieces_that_predict_every_token_once(tmp_path: Path) -> None:
    tok = tokenizer()
    text = "the king and the queen of the land " * 20
    ids = [*tok(text)["input_ids"], EOS]
    for seq_len in (2, 7, len(ids) - 1, len(ids), len(ids) + 1):
        (found,) = Encoder(tok, seq_len).encode([Text(text)])
        assert isinstance(found, encode.Encoded)
        assert not found.cut
        assert all(2 <= len(p) <= seq_len for p in found.pieces)
        labels = [int(w & ~LABEL) for p in found.pieces for w in p if w & LABEL]
        assert labels == ids[1:]
    data, notes = opened(write_lines(tmp_path / "a.jsonl", [{"text": text}]), tmp_path)
    with data:
        assert data.train.examples == -(-(len(ids) - 1) // 15)
    assert notes == []


def test_pieces_share_one_token() -> None:
    import numpy as np

    found = [(p & ~LABEL).tolist() for p in pieces(np.arange(8, dtype=np.uint32), 4)]
    assert found == [[0, 1, 2, 3], [3, 4, 5, 6], [6, 7]]


def test_completions_lose_the_end_and_it_is_told(tmp_path: Path) -> None:
    rows = [
        {"prompt": "q", "completion": "a"},
        {"prompt": "q", "completion": "the king and the queen " * 9},
        {"prompt": "the king and the queen " * 9, "completion": "a"},
    ]
    file = write_lines(tmp_path / "a.jsonl", rows)
    with pytest.raises(DataError, match=r"^a\.jsonl:3: has no token to learn within --seq-len 16"):
        opened(file, tmp_path)
    data, notes = opened(file, tmp_path, skip_bad_rows=True)
    with data:
        lengths = sorted(len(ids) for ids, _ in examples(data.train))
        assert lengths[1] == 16
    assert notes[1] == (
        "a.jsonl: 1 row is longer than 16 tokens and lost the end; the first: a.jsonl:2; "
        "raise --seq-len to keep them whole"
    )


@pytest.mark.parametrize("fast", [True, False])
def test_only_the_assistants_words_are_learnt(fast: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    tok = chatml(CHATML)
    if not fast:
        monkeypatch.setattr(type(tok), "is_fast", property(lambda _: False))
    whole, learns = one(tok, chat(TURNS))
    assert whole == tok.apply_chat_template(TURNS, tokenize=False)
    assert learns == "the queen<|im_end|>\na héro 🎭<|im_end|>\n"
    # Of a conversation given as prompt and completion only the latter.
    assert one(tok, chat(TURNS, 4))[1] == "a héro 🎭<|im_end|>\n"
    # The user has the last word: nothing is appended.
    assert one(tok, chat(TURNS[:4])) == (
        tok.apply_chat_template(TURNS[:4], tokenize=False), "the queen<|im_end|>\n"
    )  # fmt: skip


@pytest.mark.parametrize("template", [CHATML, MARKED])
def test_an_answer_of_weight_0_is_not_learnt(template: str) -> None:
    """OpenAI's format."""
    turns = [*TURNS[:2], {**TURNS[2], "weight": 0}, *TURNS[3:4], {**TURNS[4], "weight": 1}]
    row = shape_of({"messages": turns})
    whole, learns = one(chatml(template), row)
    plain, everything = one(chatml(template), shape_of({"messages": TURNS}))
    assert whole == plain
    assert "the queen" in everything
    assert "the queen" not in learns
    assert "a héro 🎭" in learns
    for weight, message in ((0, "no assistant's message to learn"), (0.5, "has weight 0.5")):
        bad = [{**m, "weight": weight} for m in TURNS]
        with pytest.raises(BadRow, match=message):
            shape_of({"messages": bad})


def test_templates_that_mark_the_assistant_are_asked() -> None:
    tok = tokenizer(MARKED)
    eos = tok.eos_token
    whole, learns = one(tok, chat(TURNS))
    assert whole == tok.apply_chat_template(TURNS, tokenize=False) + eos
    assert learns == "the queen;a héro 🎭;" + eos
    assert one(tok, chat(TURNS, 4))[1] == "a héro 🎭;" + eos


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("mark", ["{% generation %}", "{%+ generation -%}"])
def test_marked_words_end_with_their_last_token(
    fast: bool, mark: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An emoji is several tokens, of which transformers' mask has the first."""
    tok = tokenizer(
        "{% for m in messages %}{{ m['role'] }}: {% if m['role'] == 'assistant' %}" + mark
        + "{{ m['content'] }}{% endgeneration %}{% else %}{{ m['content'] }}{% endif %};"
        "{% endfor %}"
    )  # fmt: skip
    if not fast:
        monkeypatch.setattr(type(tok), "is_fast", property(lambda _: False))
    turns = [*TURNS[:2], {"role": "assistant", "content": "the 🎭"}, *TURNS[3:]]
    whole, learns = one(tok, chat(turns))
    assert whole == tok.apply_chat_template(turns, tokenize=False) + tok.eos_token
    assert learns.replace(" ", "") == "the🎭ahéro🎭" + tok.eos_token
    # A token that begins before the mark and ends behind it is learnt, too.
    assert learns.startswith(" the" if fast else "the")


def test_a_template_without_an_end_gets_one() -> None:
    tok = tokenizer()  # joins the messages by newlines
    whole, learns = one(tok, chat(TURNS[1:3]))
    assert whole == "the king?\nthe queen" + tok.eos_token
    assert learns in ("the queen" + tok.eos_token, "\nthe queen" + tok.eos_token)


def test_templates_that_drop_old_thoughts() -> None:
    tok = chatml(THINKING)
    whole, learns = one(tok, chat(TURNS))
    assert whole == tok.apply_chat_template(TURNS, tokenize=False)
    assert learns == (
        "the queen<|im_end|>\n<think>\n\n</think>\n\na héro 🎭<|im_end|>\n"
    )  # fmt: skip


def test_thoughts_of_earlier_answers_are_not_learnt() -> None:
    stripping = THINKING.replace("{{ m['content'] }}", "{{ m['content'].split('</think>')[-1] }}")
    turns = [
        *TURNS[1:2],
        {"role": "assistant", "content": "<think>hm</think>the\nqueen"},
        *TURNS[3:],
    ]
    for template in (THINKING, stripping):
        tok = chatml(template)
        whole, learns = one(tok, chat(turns))
        assert whole == tok.apply_chat_template(turns, tokenize=False)
        kept = "<think>hm</think>" if template is THINKING else ""
        assert learns.startswith(kept + "the\nqueen<|im_end|>\n<think>")


def test_what_cannot_be_found_is_a_bad_row(tmp_path: Path) -> None:
    file = write_lines(tmp_path / "a.jsonl", [{"messages": TURNS}])
    refusing = "{{ raise_exception('no system role') }}"
    silent = "{% for m in messages if m['role'] == 'user' %}{{ m['content'] }}{% endfor %}"
    for template, message in (
        (REVERSED, r"renders what comes before message 2 differently once it is there"),
        (refusing, "the chat template refuses it: TemplateError: no system role"),
        (silent, "has nothing to learn: the template shows no assistant's words"),
    ):
        with pytest.raises(DataError, match=r"^a\.jsonl:1: .*" + message):
            opened(file, tmp_path, tokenizer(template), seq_len=256)


@pytest.mark.parametrize("template", [CHATML, MARKED])
def test_half_a_character_anywhere(template: str, tmp_path: Path) -> None:
    """A tokenizer's own error came through."""
    shows = template.replace("{{ m['content'] }}", "{{ m['content'] }}{{ m['name'] }}")
    turns = [{"role": r, "content": "a", "name": "\ud83d"} for r in ("user", "assistant")]
    file = write_lines(tmp_path / "a.jsonl", [{"messages": turns}])
    with pytest.raises(DataError, match=r"a\.jsonl:1: what the .* half a surrogate pair at char"):
        opened(file, tmp_path, chatml(shows))


def test_no_template_at_all_is_no_fault_of_the_row(tmp_path: Path) -> None:
    file = write_lines(tmp_path / "a.jsonl", [{"messages": TURNS}])
    tok = tokenizer()
    tok.chat_template = None
    with pytest.raises(DataError, match="need a chat template, and the tokenizer has none"):
        opened(file, tmp_path, tok, skip_bad_rows=True)
    tok.chat_template = "{% for m in messages %}{{ m.role"
    with pytest.raises(DataError, match="the tokenizer's chat template is broken: "):
        opened(file, tmp_path, tok, skip_bad_rows=True)


def test_tools_reach_the_template() -> None:
    tok = tokenizer("{% if tools %}{{ tools[0]['name'] }}:{% endif %}" + CHATML)
    turns = tuple(TURNS[1:3])
    whole, _ = one(tok, Chat(turns, 0, [{"name": "look"}]))
    assert whole.startswith("look:<|im_start|>user")
    # As tables have them.
    same = shape_of({"messages": list(turns), "tools": '[{"name": "look"}]'})
    assert one(tok, same)[0] == whole
    for text, message in (
        ("[{", "tools is no JSON"),
        ("[" * 100_000, "tools is no JSON"),
        ("{}", "tools is an object"),
    ):
        with pytest.raises(BadRow, match=message):
            shape_of({"messages": list(turns), "tools": text})


_AS_JSON = "{{ c.function.arguments | tojson }}"
_CALLS = {
    "json": _AS_JSON,
    "either": "{% if c.function.arguments is string %}{{ c.function.arguments }}{% else %}"
    + _AS_JSON + "{% endif %}",
    "strings": "{{ '' + c.function.arguments }}",
    "as python has it": "{{ c.function.arguments }}",
    "items": "{{ c.function.name }}"
    "{% for k, v in c.function.arguments.items() %}{{ k }}={{ v }};{% endfor %}",
}  # fmt: skip


@pytest.mark.parametrize("template", _CALLS)
@pytest.mark.parametrize("arguments", [{"city": 'Par"is'}, {}], ids=["some", "none"])
def test_arguments_of_calls_are_never_json_in_json(template: str, arguments: Any) -> None:
    """OpenAI's format has them in a string, transformers' templates take objects."""
    tok = chatml(
        "{% for m in messages %}<|im_start|>{{ m.role + ':' + m.content }}"
        "{% for c in m.tool_calls or [] %}" + _CALLS[template] + "{% endfor %}<|im_end|>"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant:{% endif %}"
    )
    want = "w" + 'city=Par"is;' * bool(arguments) if template == "items" else json.dumps(arguments)
    for form in (arguments, json.dumps(arguments)):
        call = {"type": "function", "function": {"name": "w", "arguments": form}}
        messages = [
            {"role": "user", "content": "q"},
            {"role": "assistant", "content": "", "tool_calls": [call]},
        ]
        assert one(tok, shape_of({"messages": messages}))[1] == f"{want}<|im_end|>"
        assert call["function"] == {"name": "w", "arguments": form}


def test_a_template_that_leaves_calls_out_is_asked_again() -> None:
    """Of a conversation whose calls it does not show nothing is known of others."""
    tok = chatml(
        "{% for m in messages %}<|im_start|>{{ m.role + ':' + m.content }}"
        "{% if not m.content %}{% for c in m.tool_calls or [] %}" + _AS_JSON + "{% endfor %}"
        "{% endif %}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant:{% endif %}"
    )
    encoder = Encoder(tok, 512)
    found = []
    for content in ("a", ""):
        call = {"function": {"name": "w", "arguments": '{"x": 1}'}}
        messages = [
            {"role": "user", "content": "q"},
            {"role": "assistant", "content": content, "tool_calls": [call]},
        ]
        (row,) = encoder.encode([shape_of({"messages": messages})])
        assert not isinstance(row, BadRow)
        (words,) = row.pieces
        found.append(tok.decode((words[(words & LABEL) != 0] & ~LABEL).tolist()))
    assert found == ["a<|im_end|>", '{"x": 1}<|im_end|>']


@pytest.mark.parametrize("weight", [1, 0])
def test_a_template_that_shows_no_calls(weight: int) -> None:
    """Of a message that is nothing else, its end would be learnt: to say nothing."""
    tok = chatml(
        "{% for m in messages %}<|im_start|>{{ m.role + ':' + m.content }}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant:{% endif %}"
    )
    call = {"function": {"name": "w", "arguments": '{"x": 1}'}}
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": None, "tool_calls": [call], "weight": weight},
        {"role": "tool", "content": "1"},
        {"role": "assistant", "content": "a"},
    ]
    (row,) = Encoder(tok, 512).encode([shape_of({"messages": messages})])
    if weight:
        assert isinstance(row, BadRow)
        assert "message 1 has no content" in str(row)
        assert "nothing of its tool_calls" in str(row)
    else:
        assert not isinstance(row, BadRow)


def test_settings_that_cannot_be(tmp_path: Path) -> None:
    file = write_lines(tmp_path / "a.jsonl", [{"text": "a b c"}])
    with pytest.raises(DataError, match="--seq-len 1025 is longer than the model's 1024 positions"):
        opened(file, tmp_path, seq_len=1025)
    with pytest.raises(DataError, match="--seq-len 1: a sequence has at least 2"):
        opened(file, tmp_path, seq_len=1)
    with pytest.raises(DataError, match=r"--eval-share 1\.0: a share"):
        opened(file, tmp_path, eval_share=1.0)
    with pytest.raises(DataError, match="has one row: --eval-share needs two"):
        opened(file, tmp_path, eval_share=0.5)


def test_a_tokenizer_of_another_model(tmp_path: Path) -> None:
    from data_support import options

    from offload.train.data import open_data

    file = write_lines(tmp_path / "a.jsonl", [{"text": "the king"}])
    with pytest.raises(DataError, match="the model has 10 embeddings: they do not belong together"):
        open_data(options(file), tokenizer(), max_positions=None, vocab_size=10, cache=tmp_path)


def test_rows_are_encoded_the_same_alone_and_together() -> None:
    encoder = Encoder(tokenizer(), 64)
    shapes = [Text("the king"), Completion("q", "a"), chat(TURNS[1:3]), Text("the queen")]
    for shape, found in zip(shapes, encoder.encode(shapes), strict=True):
        (alone,) = encoder.encode([shape])
        assert isinstance(found, encode.Encoded)
        assert isinstance(alone, encode.Encoded)
        assert [p.tolist() for p in found.pieces] == [p.tolist() for p in alone.pieces]
