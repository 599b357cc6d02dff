"""Files and rows: every shape that is read, every way a row can be wrong."""

from __future__ import annotations

import gzip
import importlib
import json
from pathlib import Path
from typing import Any

import pytest
from data_support import EOS, examples, opened, tokenizer, write_lines

from offload.errors import DataError
from offload.train.data import json_rows as json_rows_module
from offload.train.data import plain_text, tables
from offload.train.data.bad_rows import BadRow
from offload.train.data.json_rows import json_rows
from offload.train.data.plain_text import text_chunks
from offload.train.data.shapes import Chat, Completion, Text, shape_of
from offload.train.data.sources import Source


def rows_of(path: Path) -> list[tuple[int, Any]]:
    return [(line, value) for line, value, _ in json_rows(path)]


def test_lines_with_everything_that_editors_leave(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_bytes(b'\xef\xbb\xbf{"text": "a"}\r\n\r\n  \n{"text": "\xc3\xa9\\u0000"}\n\n\n')
    assert rows_of(file) == [(1, {"text": "a"}), (4, {"text": "é\0"})]


@pytest.mark.parametrize("chunk", [1, 3, 1 << 20])
def test_a_list_is_read_element_by_element(
    tmp_path: Path, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(json_rows_module, "_CHUNK_BYTES", chunk)
    want = [{"text": "[é]" * 9}, {"text": "b\n", "n": [1, {"x": "]"}]}, 7]
    file = tmp_path / "a.json"
    file.write_text(json.dumps(want, indent=1, ensure_ascii=False), encoding="utf-8")
    found = rows_of(file)
    assert [value for _, value in found[:2]] == want[:2]
    assert isinstance(found[2][1], BadRow)
    lines = file.read_text(encoding="utf-8").splitlines()
    assert [lines[line - 1].strip()[0] for line, _ in found] == ["{", "{", "7"]


def test_an_empty_list_has_no_rows(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    file.write_text(" [ ] \n")
    assert rows_of(file) == []


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ('[{"text": "a"}\n{"text": "b"}]', 2),
        ('[{"text": "a"},\n{"text": ]', 2),
        ('[{"text": "a"}', 1),
        ("[]\n{}", 2),
    ],
)
def test_a_broken_list_is_an_error_with_its_line(tmp_path: Path, text: str, line: int) -> None:
    file = tmp_path / "a.json"
    file.write_text(text)
    with pytest.raises(DataError, match=rf"^a\.json:{line}: "):
        rows_of(file)


@pytest.mark.parametrize(
    ("line", "found"),
    [
        (b"{text: 1}", r"is no JSON: .* at character 2, in '\{text: 1\}'"),
        (b"\0\0\0\0", "is no JSON"),
        (b'{"text": "a', r"is no JSON: Invalid control character at character \d+, in"),
        (b"{", "is no JSON: its object goes on in the next line; jq -c . joins them"),
        (b"\xff\xfe", "is not UTF-8: byte 0xff at position 1"),
        (b"[1]", "is a list, not an object"),
        (b"null", "is null, not an object"),
        (b"3", "is a number, not an object"),
        (b"[" * 100_000, "is no JSON that can be read"),
        (b"{}", r"has no text, prompt and completion, or messages; its keys are \(none\)"),
        (b'{"Text": "a", "id": 1}', "its keys are 'Text', 'id'"),
        (b'{"text": null}', "text is null"),
        (b'{"text": 5}', "text is a number, not a string"),
        (b'{"text": " \\n"}', "text is empty"),
        (b'{"text": "\\ud800"}', "text has half a surrogate pair at character 1"),
        (b'{"prompt": "a"}', "has prompt but no completion; its keys are 'prompt'"),
        (b'{"completion": "a"}', "has completion but no prompt"),
        (b'{"prompt": {}, "completion": "a"}', "prompt is an object, not a string or a list"),
        (b'{"prompt": "a", "completion": ""}', "completion is empty"),
        (b'{"prompt": [], "completion": "a"}', "prompt is empty"),
        (b'{"messages": "a"}', "messages is a string, not a list of messages"),
        (b'{"messages": []}', "messages is empty"),
        (b'{"messages": ["a"]}', r"messages\[0\] is a string, not an object"),
        (b'{"messages": [{"content": "a"}]}', r"messages\[0\] has no role; its keys are 'content'"),
        (b'{"messages": [{"role": "assistant"}]}', r"messages\[0\] \(assistant\) has no content"),
        (b'{"messages": [{"role": "assistant", "content": 5}]}', "content is a number"),
        (b'{"messages": [{"role": "user", "content": [{"type": "image"}]}]}', "'image'; only text"),
        (b'{"messages": [{"role": "user", "content": "a"}]}', "no assistant's message .* user"),
        (b'{"conversations": [{"from": "me", "value": "a"}]}', "is from 'me'; known are human"),
        (b'{"conversations": [{"from": ["gpt"], "value": "a"}]}', r"is from \['gpt'\]; known are"),
        (
            b'{"prompt": [{"role": "user", "content": "a"}],'
            b' "completion": [{"role": "assistant", "content": " "}]}',
            "assistant's message 1 is empty",
        ),
        (b'{"text": "a", "messages": [1]}', "has text and also messages: which one"),
        (b'{"text": "a b", "id": 1, "text": "c d"}', "has 'text' twice: which one is meant"),
        (
            b'{"messages": [{"role": "user", "content": "a", "content": "b"}]}',
            r"messages\[0\] has 'content' twice",
        ),
    ],
)  # fmt: skip
def test_a_bad_line_is_named_and_can_be_skipped(tmp_path: Path, line: bytes, found: str) -> None:
    good = b'{"text": "the king and the queen"}\n'
    file = tmp_path / "a.jsonl"
    file.write_bytes(good + b"\n" + line + b"\n" + good)
    with pytest.raises(DataError, match=rf"^a\.jsonl:3: .*{found}.*; --skip-bad-rows"):
        opened(file, tmp_path)
    data, notes = opened(file, tmp_path, skip_bad_rows=True)
    with data:
        assert data.train.examples == 2
    assert len(notes) == 1
    assert notes[0].startswith("a.jsonl: 1 bad row skipped; the first: a.jsonl:3: ")


def test_keys_twice_that_nobody_reads(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text('{"text": "the king", "id": 1, "id": {"a": 1, "a": 2}}\n')
    opened(file, tmp_path)[0].close()


def test_nothing_is_an_error(tmp_path: Path) -> None:
    for name, text in (("a.jsonl", ""), ("b.json", "[]"), ("c.txt", " \n\n"), ("d.jsonl", "\n")):
        (tmp_path / name).write_text(text)
        with pytest.raises(DataError, match=f"{name} has nothing to learn from$"):
            opened(tmp_path / name, tmp_path)
    (tmp_path / "e.jsonl").write_text("x\ny\n")
    with pytest.raises(DataError, match=r"all 2 rows are bad; the first: e\.jsonl:1: is no JSON"):
        opened(tmp_path / "e.jsonl", tmp_path, skip_bad_rows=True)


def test_paths_that_are_no_data(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("text\n")
    (tmp_path / "u.jsonl").write_text('{"text": "a"}', encoding="utf-16")
    (tmp_path / "l.txt").write_bytes("é".encode("latin-1"))
    (tmp_path / "w.txt").write_text("every byte is sound UTF-8", encoding="utf-16-le")
    (tmp_path / "z.jsonl").write_bytes(gzip.compress(b'{"text": "a"}\n'))
    (tmp_path / "z.jsonl.gz").write_bytes(gzip.compress(b'{"text": "a"}\n'))
    (tmp_path / "empty").mkdir()
    for name, message in (
        ("none.jsonl", "there is no"),
        ("a.csv", r"cannot tell what is in a \.csv file; --data takes \.jsonl"),
        ("u.jsonl", "is UTF-16"),
        ("l.txt", "is not UTF-8 text"),
        ("w.txt", "is no text: byte 2 is zero; if it is UTF-16, convert it"),
        ("z.jsonl", r"is compressed \(gzip\): unpack it first \(gunzip -k\)$"),
        ("z.jsonl.gz", "is compressed, and --data takes plain files: unpack it first"),
        ("empty", r"has no file of \.jsonl"),
    ):
        with pytest.raises(DataError, match=message):
            opened(tmp_path / name, tmp_path)


def test_shapes() -> None:
    user, bot = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
    assert shape_of({"text": "a", "prompt": "b", "id": 3}) == Text("a")
    assert shape_of({"prompt": "", "completion": "b", "text": None}) == Completion("", "b")
    assert shape_of({"messages": [user, bot]}) == Chat((user, bot), 0, None)
    assert shape_of({"prompt": [user], "completion": [bot]}) == Chat((user, bot), 1, None)
    sharegpt = [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]
    assert shape_of({"conversations": sharegpt}) == Chat((user, bot), 0, None)
    parts = {"role": "user", "content": [{"type": "text", "text": "q"}], "name": None}
    assert shape_of({"messages": [parts, bot]}) == Chat((user, bot), 0, None)


def test_plain_text_is_one_document(tmp_path: Path) -> None:
    tok = tokenizer()
    text = "To be, or not to be.\n\n\nThat is the question: é\n" * 7
    file = tmp_path / "a.txt"
    file.write_bytes(b"\xef\xbb\xbf" + text.replace("\n", "\r\n").encode())
    data, _ = opened(file, tmp_path, packing=False, eval_share=0.0)
    ids = [*tok(text, add_special_tokens=False)["input_ids"], EOS]
    with data:
        found = sorted(examples(data.train), key=lambda e: ids.index(e[0][0]))
        assert data.train.examples == -(-(len(ids) - 1) // 15)
        assert sum(sum(x != -100 for x in e[1]) for e in found) == len(ids) - 1
        wanted = [tuple(ids[i : i + 16]) for i in range(0, len(ids) - 1, 15)]
        assert sorted(e[0] for e in found) == sorted(wanted)


def test_plain_text_in_chunks_is_the_same_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "".join(f"line {i} é with words\n" + "\n" * (i % 3) for i in range(200))
    file = tmp_path / "a.txt"
    file.write_text(text, encoding="utf-8")
    whole, _ = opened(file, tmp_path)
    monkeypatch.setattr(plain_text, "CHUNK_CHARACTERS", 100)
    chunks = list(text_chunks(file))
    assert "".join(chunk.text for _, chunk, _ in chunks) == text
    assert [chunk.last for _, chunk, _ in chunks] == [False] * (len(chunks) - 1) + [True]
    assert len(chunks) > 20
    for line, chunk, _ in chunks[:-1]:
        assert text.splitlines()[line - 1] == chunk.text.splitlines()[0]
    parts, _ = opened(file, tmp_path)
    with whole, parts:
        assert parts.fingerprint == whole.fingerprint


def test_an_endless_line_is_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plain_text, "CHUNK_CHARACTERS", 10)
    monkeypatch.setattr(plain_text, "_MAX_CHUNK", 40)
    file = tmp_path / "a.txt"
    for text in ("x" * 500, "word " * 100):
        file.write_text(text)
        chunks = [chunk.text for _, chunk, _ in text_chunks(file)]
        assert "".join(chunks) == text
        assert max(map(len, chunks)) <= 50


def test_tables_give_the_same_tokens_as_lines(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    rows = [
        {"messages": [{"role": "user", "content": f"q {i}"}, {"role": "assistant", "content": "a",
         **({"name": "n"} if i % 2 else {})}], "id": i}
        for i in range(150)
    ]  # fmt: skip
    table = arrow.Table.from_pylist(rows)
    parquet.write_table(table, tmp_path / "a.parquet", row_group_size=40)
    saved = tmp_path / "saved" / "train"
    saved.mkdir(parents=True)
    (tmp_path / "saved" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    with arrow.ipc.new_stream(str(saved / "data-0.arrow"), table.schema) as stream:
        stream.write_table(table, max_chunksize=70)
    (saved / "state.json").write_text('{"_data_files": [{"filename": "data-0.arrow"}]}')
    (saved / "dataset_info.json").write_text("{}")
    lines = write_lines(tmp_path / "a.jsonl", rows)
    found, told = [], []
    for path in (lines, tmp_path / "a.parquet", tmp_path / "saved", saved):
        data, notes = opened(path, tmp_path)
        told += notes
        with data:
            found.append(data.fingerprint)
    assert [note.partition(": ")[2][:19] for note in told] == ["left out are test: "]
    assert len(set(found)) == 1
    data, _ = opened(tmp_path / "a.parquet", tmp_path, packing=False)
    with data:
        assert data.train.micro_batch(0, 0).rows[0].startswith("a.parquet: row ")


def test_tables_do_not_give_a_row_the_fields_of_others(tmp_path: Path) -> None:
    """All objects of a column have the fields of all, null where a row has none: shown by a
    template, a model would learn to give every argument of every tool."""
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    rows: list[dict[str, Any]] = [
        {
            "messages": [
                {"role": "user", "content": f"{name}?"},
                {
                    "role": "assistant", "content": "",
                    "tool_calls": [{"function": {"name": name, "arguments": {of: "x"}}}],
                },
            ],
            "tools": [{"name": name, "parameters": {of: {"type": "string"}}}],
        }
        for name, of in (("weather", "city"), ("time", "zone"))
    ]  # fmt: skip
    template = (
        "{{ tools | tojson }}{% for m in messages %}{{ m.role + ':' + m.content }}"
        "{% for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %}.{% endfor %}"
        "{% if add_generation_prompt %}assistant:{% endif %}"
    )
    table = arrow.Table.from_pylist(rows)
    parquet.write_table(table, tmp_path / "a.parquet")
    with arrow.ipc.new_stream(str(tmp_path / "a.arrow"), table.schema) as stream:
        stream.write_table(table)
    found = []
    write_lines(tmp_path / "a.jsonl", rows)
    for path in (tmp_path / f"a.{suffix}" for suffix in ("jsonl", "parquet", "arrow")):
        data, _ = opened(path, tmp_path, tokenizer(template), seq_len=256)
        with data:
            found.append(data.fingerprint)
    assert len(set(found)) == 1


def test_what_datasets_saves(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    rows = [{"prompt": f"p {i}", "completion": f"c {i}"} for i in range(30)]
    datasets.Dataset.from_list(rows).select(range(3, 30)).save_to_disk(
        str(tmp_path / "d"), num_shards=2
    )
    data, _ = opened(tmp_path / "d", tmp_path)
    want, _ = opened(write_lines(tmp_path / "a.jsonl", rows[3:]), tmp_path)
    with data, want:
        assert data.fingerprint == want.fingerprint


def test_bad_tables(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(arrow.table({"a": [1], "b": ["x"]}), tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"a\.parquet: has the columns a, b; wanted are text"):
        opened(tmp_path / "a.parquet", tmp_path)
    (tmp_path / "b.parquet").write_bytes(b"PAR1 nonsense")
    with pytest.raises(DataError, match=r"b\.parquet: is no sound Parquet file"):
        opened(tmp_path / "b.parquet", tmp_path)
    (tmp_path / "c.arrow").write_bytes(b"\xff\xff\xff\xff nonsense")
    with pytest.raises(DataError, match=r"c\.arrow: is no sound Arrow stream"):
        opened(tmp_path / "c.arrow", tmp_path)
    parquet.write_table(arrow.table({"text": ["a b c", None, "d e"]}), tmp_path / "d.parquet")
    with pytest.raises(DataError, match=r"d\.parquet: row 2: text is null"):
        opened(tmp_path / "d.parquet", tmp_path)
    twice = arrow.table([["a b c"], ["d e f"]], names=["text", "text"])
    parquet.write_table(twice, tmp_path / "e.parquet")
    with pytest.raises(DataError, match=r"e\.parquet: has the column text twice: keep one"):
        opened(tmp_path / "e.parquet", tmp_path)
    bytes_ = arrow.array([b"a b c", b"d\xff", b"e f"]).view(arrow.string())
    parquet.write_table(arrow.table({"text": bytes_}), tmp_path / "f.parquet")
    found = r"f\.parquet: row 2: has text that is not UTF-8: byte 0xff at position 2"
    with pytest.raises(DataError, match=found):
        opened(tmp_path / "f.parquet", tmp_path)
    data, notes = opened(tmp_path / "f.parquet", tmp_path, skip_bad_rows=True)
    with data:
        assert data.train.examples == 2
        assert notes == [f"f.parquet: 1 bad row skipped; the first: {found}".replace("\\", "")]


def test_without_pyarrow_the_message_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = importlib.import_module

    def missing(name: str, package: str | None = None) -> Any:
        if name.partition(".")[0] == "pyarrow":
            raise ImportError(name)
        return real(name, package)

    monkeypatch.setattr(tables.importlib, "import_module", missing)
    (tmp_path / "a.parquet").write_bytes(b"")
    with pytest.raises(DataError, match=r"needs pyarrow: pip install 'offload\[data\]'"):
        opened(tmp_path / "a.parquet", tmp_path)


def test_a_directory_of_files_is_read_in_the_order_of_names(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    write_lines(folder / "b.jsonl", [{"text": "second file"}])
    write_lines(folder / "a.jsonl", [{"text": "first file"}, {"text": "also the first"}])
    (folder / "info.json").write_text("{}")
    (folder / "README.md").write_text("x")
    source = Source(folder)
    found = [(source.place(r.file, r.line), r.done) for r in source.rows()]
    assert [place for place, _ in found] == ["a.jsonl:1", "a.jsonl:2", "b.jsonl:1"]
    assert found[-1][1] == source.nbytes
    data, _ = opened(folder, tmp_path, seq_len=64)
    with data:
        assert data.train.micro_batch(0, 0).rows == ("a.jsonl:1", "a.jsonl:2", "b.jsonl:1")


def test_a_directory_with_files_that_are_not_to_be_learnt(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    for name in ("train-0.jsonl", "train-1.jsonl", "test-0.jsonl", "valid.jsonl", ".train-0.jsonl"):
        write_lines(folder / name, [{"text": f"file {name}"}])
    (folder / "README.txt").write_text("about the data")
    (folder / "LICENSE.txt").write_text("nobody may")
    source = Source(folder)
    assert [f.name for f in source.files] == ["train-0.jsonl", "train-1.jsonl"]
    data, notes = opened(folder, tmp_path, seq_len=64)
    data.close()
    (note,) = notes
    assert "left out are LICENSE.txt, README.txt, test-0.jsonl, valid.jsonl:" in note
    # Where nothing is called train, no name says what is held out.
    for file in folder.glob("train-*"):
        file.unlink()
    assert [f.name for f in Source(folder).files] == ["test-0.jsonl", "valid.jsonl"]


def test_evaluation_on_the_training_data_is_told(tmp_path: Path) -> None:
    lines = write_lines(tmp_path / "a.jsonl", [{"text": "the king and the queen"}])
    data, notes = opened(lines, tmp_path, eval_data=lines)
    data.close()
    assert notes == ["--eval-data reads the files of --data again: nothing is held out"]
