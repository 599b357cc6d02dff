"""The output file: whole lines, continued, never another's; and the input, checked line by line."""

from __future__ import annotations

import json
import resource
from pathlib import Path

import pytest

from offload.batch.answers import TIME, Answers, job_key, key_of, prompt_time
from offload.batch.generation import Sampling
from offload.batch.jobs import Defaults, read_jobs
from offload.errors import OffloadError

KEYS = [job_key("model", "settings", prompt) for prompt in "abc"]
A, B, C = KEYS


def line(index: int, key: str) -> bytes:
    return json.dumps({"index": index, "job": key}).encode() + b"\n"


def test_a_torn_line_is_cut_off_and_the_rest_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "out"
    with Answers(path, KEYS) as answers:
        answers.add(2, C, {"text": "zwei\nZeilen \udcff"})
        answers.add(0, A, {"text": ""})
    whole = path.read_bytes()
    for torn in (b"{", b'{"index": 1, "job": "b", "te', b'{"index": 1, "job": "b"}'):
        path.write_bytes(whole + torn)
        with Answers(path, KEYS) as answers:
            assert (answers.done, answers.torn) == ({0, 2}, len(torn))
        assert path.read_bytes() == whole
    first = json.loads(whole.splitlines()[0])
    assert first == {"index": 2, "job": C, "text": "zwei\nZeilen \udcff"}


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (line(0, B), "is the answer to another prompt"),
        (line(3, A), "is the answer to another prompt"),
        (line(0, job_key("other", "settings", "a")), "of another model"),
        (line(0, job_key("model", "other", "a")), "with other flags or settings"),
        (line(0, "a2b2206c96eb95f3"), "another version of offload.*finish it with that version"),
        (line(0, A) * 2, "again"),
        (b'{"index": 0, "job": 1}\n', "no output of this command"),
        (b"[" * 100_000 + b"\n", "no output of this command"),
        (b"something else\n", "no output of this command"),
        (b'{"index": 0}\n', "no output of this command"),
        (b"without an end", "no output of this command"),
        (b"[]\n", "no output of this command"),
    ],
)
def test_what_is_not_its_own_stays_as_it_is(tmp_path: Path, content: bytes, says: str) -> None:
    path = tmp_path / "out"
    path.write_bytes(content)
    with pytest.raises(OffloadError, match=says):
        Answers(path, KEYS)
    assert path.read_bytes() == content


def test_an_id_that_is_another_one_now_is_told_of(tmp_path: Path) -> None:
    """It decides no answer, but by it answers are found: those of exchanged ids were mixed up."""
    path = tmp_path / "out"
    with Answers(path, KEYS, ["a", None, 3]) as answers:
        answers.add(0, A, {"id": "a"})
        answers.add(1, B, {"id": None})
        answers.add(2, C, {"id": 3})
    whole = path.read_bytes()
    for ids, says in (
        (["b", None, 3], 'line 1 answers prompt 0 with the id "a", and --batch has "b"'),
        (["a", "b", 3], 'line 2 answers prompt 1 with the id null, and --batch has "b"'),
        (["a", None, "3"], 'line 3 answers prompt 2 with the id 3, and --batch has "3"'),
    ):
        with pytest.raises(OffloadError, match=says):
            Answers(path, KEYS, ids)
    assert path.read_bytes() == whole
    with Answers(path, KEYS, ["a", None, 3]) as answers:
        assert answers.done == {0, 1, 2}


def test_a_device_is_no_output() -> None:
    with pytest.raises(OffloadError, match="/dev/null is no file that can be continued"):
        Answers(Path("/dev/null"), KEYS)


def test_one_process_at_a_time(tmp_path: Path) -> None:
    with Answers(tmp_path / "out", KEYS), pytest.raises(OffloadError, match="another process"):
        Answers(tmp_path / "out", KEYS)
    Answers(tmp_path / "out", KEYS).close()


def test_a_full_disk_leaves_whole_lines(tmp_path: Path) -> None:
    """A limit of the file's size ends a write in the middle, as a full disk does."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    with Answers(tmp_path / "out", KEYS) as answers:
        answers.add(0, A, {"text": "short"})
        whole = (tmp_path / "out").read_bytes()
        resource.setrlimit(resource.RLIMIT_FSIZE, (len(whole) + 10, before[1]))
        try:
            with pytest.raises(OffloadError, match="too large; what is there is whole"):
                answers.add(1, B, {"text": "long" * 100})
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        assert (tmp_path / "out").read_bytes() == whole
        answers.add(1, B, {})
        assert answers.done == {0, 1}


def test_an_output_that_is_removed_is_told_of(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    with Answers(path, ["a", "b", "c"]) as answers:
        answers.add(0, "a", {})
        moved = path.rename(tmp_path / "moved.jsonl")  # which keeps what comes
        answers.add(1, "b", {})
        moved.unlink()
        with pytest.raises(OffloadError, match="was removed while answers were written"):
            answers.add(2, "c", {})


def test_the_hash_is_of_all_that_counts() -> None:
    assert key_of([1, {"b": 1, "a": 2}]) == key_of([1, {"a": 2, "b": 1}])
    assert len({key_of(x) for x in ([1], [2], ["1"], [1.0], [[1]], None)}) == 6


def test_lines_get_defaults_for_what_they_leave_out(tmp_path: Path) -> None:
    path = tmp_path / "in"
    path.write_text(
        '{"prompt": "a"}\n\n  \n'
        '{"messages": [{"role": "user", "content": ""}], "id": 7, "temperature": 0}\n'
        '{"prompt": "b", "temperature": 1, "seed": 0, "top_k": 2, "stop": "x", "max_new_tokens": 3}'
    )
    general = Sampling(temperature=0.5, top_p=0.9, min_p=0.1)
    defaults = Defaults(sampling=general, max_new_tokens=5, stops=("s",))
    one, two, three = read_jobs(path, defaults)
    assert (one.index, one.line, one.sampling, one.stops) == (0, 1, general, ("s",))
    assert (two.index, two.line, two.id, two.sampling.temperature) == (1, 4, 7, 0.0)
    assert three.sampling == Sampling(temperature=1.0, top_k=2, top_p=0.9, min_p=0.1)
    assert (three.seed, three.stops, three.max_new_tokens) == (0, ("x",), 3)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{}", "either prompt or messages"),
        ('{"prompt": "a", "messages": [{"role": "user", "content": "b"}]}', "either prompt or"),
        ('{"prompt": ""}', "prompt is empty"),
        ('{"prompt": 5}', "should be text"),
        ('{"prompt": "a", "promt": 1}', "unknown field 'promt'"),
        ('{"prompt": "a", "prompt": "b"}', "there twice"),
        ('{"prompt": "a", "seed": 1}', "cannot take effect"),
        ('{"prompt": "a", "temperature": true}', "temperature is true"),
        ('{"prompt": "a", "temperature": NaN}', "temperature is NaN"),
        ('{"prompt": "a", "temperature": 1, "top_p": 0}', "keeps no token"),
        ('{"prompt": "a", "max_new_tokens": 0}', "1 or more"),
        ('{"prompt": "a", "max_new_tokens": 1.5}', "whole number"),
        ('{"prompt": "a", "stop": [""]}', "stop is empty"),
        ('{"prompt": "a", "id": {}}', "id is"),
        ('{"prompt": "a", "id": "p"}', "line 1, too"),
        ('{"messages": []}', "messages is empty"),
        ('{"messages": [{"role": "user"}]}', "a message is"),
        ('["a"]', "not a JSON object"),
        ("{", "not JSON"),
        ('{"prompt": "a", "seed": ' + "1" * 5000 + "}", "not JSON that can be read"),
        ("\udcff", "not UTF-8"),
        ('{"prompt": "\\ud83d"}', "half of a surrogate pair"),
        ('{"prompt": "a", "stop": "\\udfff"}', "half of a surrogate pair"),
        ('{"messages": [{"role": "user", "content": "\\ud800"}]}', "half of a surrogate pair"),
    ],
)
def test_a_wrong_line_is_named_before_any_work(tmp_path: Path, line: str, says: str) -> None:
    path = tmp_path / "in.jsonl"
    good = '{"prompt": "a", "id": "p"}\n'
    path.write_bytes(good.encode() + line.encode("utf-8", "surrogateescape"))
    with pytest.raises(OffloadError, match=f"in.jsonl line 2: .*{says}"):
        read_jobs(path, Defaults())


def test_a_mark_of_the_encoding_and_other_ends_of_lines_are_no_content(tmp_path: Path) -> None:
    path = tmp_path / "in"
    path.write_bytes(b'\xef\xbb\xbf{"prompt": "a"}\r\n\r\n{"prompt": "b"}\r\n')
    jobs = read_jobs(path, Defaults())
    assert [(job.prompt, job.line) for job in jobs] == [("a", 1), ("b", 3)]


def test_the_time_that_prompts_were_written_at(tmp_path: Path) -> None:
    path = tmp_path / "out"
    assert prompt_time(path) is None
    for content in (b"", b"text\n", b"[]\n", b"[" * 100_000 + b"\n", line(0, A)):
        path.write_bytes(content)
        assert prompt_time(path) is None
    for time in ("2026-02-03T04:05:06", "tomorrow", 5):
        path.write_text(json.dumps({TIME: time}) + "\n")
        found = prompt_time(path)
        assert (found and found.isoformat()) == (time if time == "2026-02-03T04:05:06" else None)


def test_no_prompts_and_no_file(tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("\n")
    with pytest.raises(OffloadError, match="no prompts"):
        read_jobs(tmp_path / "empty", Defaults())
    with pytest.raises(OffloadError, match="No such file"):
        read_jobs(tmp_path / "none", Defaults())
