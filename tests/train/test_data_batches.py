"""Batches: who is in which, in what order, and that nothing depends on how one got there."""

from __future__ import annotations

import itertools
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from data_support import examples, opened, options, tokenizer, write_lines
from hypothesis import given
from hypothesis import strategies as st

from offload.errors import ClosedError, StoreError
from offload.train.data import IGNORED, open_data, spool
from offload.train.data.bins import fill_bins
from offload.train.data.permutation import Permutation
from offload.train.data.spool import Spool
from offload.train.data.store import LABEL, TokenStore

ROWS = [
    {
        "prompt": "a " + "the king " * (i % 4),
        "completion": f"number {i} " + "and the queen " * (i % 3),
    }
    for i in range(53)
]


@pytest.fixture
def lines(tmp_path: Path) -> Path:
    return write_lines(tmp_path / "a.jsonl", ROWS)


@given(st.integers(1, 5000), st.integers(-(2**70), 2**70), st.integers(-1, 10**6))
def test_a_permutation_is_one(n: int, seed: int, stream: int) -> None:
    permutation = Permutation(n, seed, stream)
    whole = permutation(np.arange(n))
    assert sorted(whole.tolist()) == list(range(n))
    assert permutation(n - 1) == whole[-1]


def test_permutations_differ_by_seed_and_stream_and_reach_every_order() -> None:
    wide = [tuple(Permutation(100, s, e)(np.arange(100))) for s in range(9) for e in range(9)]
    assert len(set(wide)) == 81
    # Every order of four about equally often: 24 orders, 4800 draws, mean 200.
    counts = Counter(tuple(Permutation(4, 1, e)(np.arange(4)).tolist()) for e in range(4800))
    assert len(counts) == 24
    assert 140 < min(counts.values()) < max(counts.values()) < 260


def test_permutations_do_not_change_between_versions() -> None:
    """A checkpoint of today resumes on the same rows tomorrow."""
    assert Permutation(10, 7, 0)(np.arange(10)).tolist() == [2, 3, 8, 6, 5, 1, 7, 9, 4, 0]


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize(("batch_size", "grad_accum"), [(1, 1), (2, 3), (5, 1), (100, 2)])
def test_every_example_once_per_epoch(
    lines: Path, tmp_path: Path, packing: bool, batch_size: int, grad_accum: int
) -> None:
    data, _ = opened(
        lines, tmp_path, packing=packing, batch_size=batch_size, grad_accum=grad_accum, seq_len=64
    )
    with data:
        epochs = [examples(data.train, epoch=e) for e in range(3)]
        size = batch_size * grad_accum
        assert data.steps_per_epoch == -(-data.train.sequences // size)
        if not packing:
            assert data.train.sequences == len(ROWS)
        # The last step of an epoch is what is left.
        last = data.steps_per_epoch - 1
        batches = [data.train.micro_batch(last, i) for i in range(data.train.micro_batches(last))]
        assert sum(len(b.lengths) for b in batches) == data.train.sequences - last * size
        with pytest.raises(IndexError):
            data.train.micro_batch(last, len(batches))
        with pytest.raises(IndexError):
            data.train.micro_batch(-1, 0)
    texts = {tuple(sorted(epoch)) for epoch in epochs}
    assert len(texts) == 1
    assert len(set(epochs[0])) == len(epochs[0]) == len(ROWS)
    if batch_size < 100:
        assert epochs[0] != epochs[1] != epochs[2]


def test_any_step_alone_is_as_in_order(lines: Path, tmp_path: Path) -> None:
    one, _ = opened(lines, tmp_path, batch_size=2, grad_accum=2)
    two, _ = opened(lines, tmp_path, batch_size=2, grad_accum=2)
    other, _ = opened(lines, tmp_path, batch_size=2, grad_accum=2, seed=1)
    with one, two, other:
        for step in range(3 * one.steps_per_epoch):
            one.train.micro_batch(step, 0)
        torch.manual_seed(5)
        step = 2 * one.steps_per_epoch - 2
        a, b = one.train.micro_batch(step, 1), two.train.micro_batch(step, 1)
        assert a.rows == b.rows
        for name in ("input_ids", "labels", "position_ids"):
            assert torch.equal(getattr(a, name), getattr(b, name))
        assert other.train.micro_batch(step, 1).rows != a.rows
        assert other.fingerprint == one.fingerprint


@pytest.mark.parametrize("packing", [True, False])
def test_tensors(lines: Path, tmp_path: Path, packing: bool) -> None:
    tok = tokenizer()
    data, _ = opened(lines, tmp_path, packing=packing, batch_size=4, seq_len=61)
    with data:
        seen = 0
        for step in range(data.steps_per_epoch):
            batch = data.train.micro_batch(step, 0)
            width = batch.input_ids.shape[1]
            assert width == min(61, -(-max(batch.lengths) // 8) * 8)
            assert batch.input_ids.shape == batch.labels.shape == batch.position_ids.shape
            assert batch.input_ids.dtype == batch.labels.dtype == torch.int64
            labelled = batch.labels != IGNORED
            assert (batch.labels[labelled] == batch.input_ids[labelled]).all()
            assert not labelled[batch.position_ids == 0].any()
            # After the shift of the loss as many are left.
            assert int((batch.labels[:, 1:] != IGNORED).sum()) == batch.label_tokens > 0
            assert batch.tokens == sum(batch.lengths)
            for b, length in enumerate(batch.lengths):
                assert (batch.labels[b, length:] == IGNORED).all()
                assert (batch.input_ids[b, length:] == tok.pad_token_id).all()
                if not packing:
                    assert batch.position_ids[b].tolist() == list(range(width))
                    assert batch.attention_mask is not None
                    assert batch.attention_mask[b].tolist() == [1] * length + [0] * (width - length)
                elif length < width:
                    assert batch.position_ids[b, length:].tolist() == list(range(width - length))
            assert packing == (batch.attention_mask is None)
            assert all(place.startswith("a.jsonl:") for place in batch.rows)
            seen += batch.tokens
        assert seen == data.train.tokens
        found = {
            tok.decode([t for t in labels if t != IGNORED]) for _, labels in examples(data.train)
        }
    assert found == {row["completion"] + tok.eos_token for row in ROWS}


def test_rows_are_where_the_examples_came_from(lines: Path, tmp_path: Path) -> None:
    tok = tokenizer()
    data, _ = opened(lines, tmp_path, packing=False)
    with data:
        for step in range(data.steps_per_epoch):
            batch = data.train.micro_batch(step, 0)
            (place,) = batch.rows
            row = ROWS[int(place.removeprefix("a.jsonl:")) - 1]
            start = tok.decode(batch.input_ids[0, : batch.lengths[0]]).split("<|")[0]
            assert (row["prompt"] + row["completion"]).startswith(start)


@given(st.lists(st.integers(2, 40), min_size=1, max_size=700), st.integers(40, 90))
def test_bins_hold_everything_once_and_are_full(lengths: list[int], capacity: int) -> None:
    store = TokenStore(Path("/tmp"))
    for row, length in enumerate(lengths):
        store.add(np.full(length, 1 | LABEL, dtype=np.uint32), file=0, line=row + 1, row=row)
    store.seal()
    bins = fill_bins(store, Path("/tmp"), capacity=capacity, wanted=lambda rows: rows % 5 != 1)
    members = [bins[i] for i in range(len(bins))]
    assert sorted(itertools.chain(*members)) == [i for i in range(len(lengths)) if i % 5 != 1]
    totals = [sum(lengths[i] for i in m) for m in members]
    assert max(totals) <= capacity
    assert sum(totals) == bins.tokens
    # Best fit: no two bins are so empty that one would do (up to those the bound closed early).
    if len(members) <= 256:
        assert sum(total <= capacity // 2 for total in totals) <= 1
    store.close()
    bins.close()


def test_packing_wastes_little(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    store = TokenStore(tmp_path)
    lengths = np.minimum(1024, rng.lognormal(5, 1, 20_000).astype(int) + 2).tolist()
    for row, length in enumerate(lengths):
        store.add(np.ones(length, dtype=np.uint32), file=0, line=row + 1, row=row)
    store.seal()
    bins = fill_bins(store, tmp_path, capacity=1024, wanted=lambda rows: rows >= 0)
    assert len(store) == bins.examples == 20_000
    assert bins.tokens / (len(bins) * 1024) > 0.98


def test_the_split_is_by_row_exact_and_the_same_again(tmp_path: Path) -> None:
    rows = [{"text": f"row {i} " + "the king and the queen " * (i % 9)} for i in range(40)]
    file = write_lines(tmp_path / "a.jsonl", rows)
    found = []
    for seed in (0, 0, 3):
        data, _ = opened(file, tmp_path, eval_share=0.2, seed=seed, packing=False)
        with data:
            assert data.eval is not None
            held = [data.eval.micro_batch(s, 0).rows for s in range(data.eval.steps_per_epoch)]
            learnt = [data.train.micro_batch(s, 0).rows for s in range(data.steps_per_epoch)]
        held_out, kept = set(itertools.chain(*held)), set(itertools.chain(*learnt))
        assert len(held_out) == 8
        assert len(kept) == 32
        assert not held_out & kept
        assert held == sorted(held, key=lambda r: int(r[0].split(":")[1]))
        found.append(held)
    assert found[0] == found[1] != found[2]


def test_a_small_share_holds_out_one_row(tmp_path: Path) -> None:
    file = write_lines(tmp_path / "a.jsonl", [{"text": "the king"}, {"text": "the queen"}])
    data, _ = opened(file, tmp_path, eval_share=0.01)
    with data:
        assert data.eval is not None
        assert data.eval.examples == data.train.examples == 1


def test_a_file_of_its_own_for_evaluation(lines: Path, tmp_path: Path) -> None:
    held = write_lines(tmp_path / "b.jsonl", ROWS[:5])
    seen: list[tuple[int, int]] = []
    data = open_data(
        options(lines, eval_data=held, grad_accum=4, eval_share=0.5, seq_len=64, packing=False),
        tokenizer(),
        max_positions=None,
        cache=tmp_path,
        progress=lambda done, total: seen.append((done, total)),
    )
    with data:
        assert data.eval is not None
        assert data.train.examples == len(ROWS)
        places = [data.eval.micro_batch(s, 0).rows for s in range(data.eval.steps_per_epoch)]
        assert places == [(f"b.jsonl:{i}",) for i in range(1, 6)]
    total = lines.stat().st_size + held.stat().st_size
    assert seen[-1] == (total, total)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)


def test_the_fingerprint_sees_tokens_labels_and_boundaries(tmp_path: Path) -> None:
    def fingerprint(rows: list[dict[str, str]], **changes: float) -> str:
        data, _ = opened(write_lines(tmp_path / "a.jsonl", rows), tmp_path, **changes)
        with data:
            return data.fingerprint

    base = [{"prompt": "the king", "completion": " and the queen"}]
    prints = {
        fingerprint(base),
        fingerprint([{"prompt": "the king and", "completion": " the queen"}]),
        fingerprint([{"text": "the king and the queen"}]),
        fingerprint([{"text": "the king"}, {"text": " and the queen"}]),
        fingerprint(base * 2),
        fingerprint(base * 2, eval_share=0.5),
        fingerprint([{"text": "the king and the queen"}], seq_len=4),
    }
    assert len(prints) == 7
    assert fingerprint(base) == fingerprint([{**base[0], "id": "x"}])


def test_closed_data_says_so_and_leaves_nothing(lines: Path, tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    folder.mkdir()
    data, _ = opened(lines, folder)
    assert list(folder.iterdir()) == []
    data.close()
    data.close()
    with pytest.raises(ClosedError, match="the training data was closed"):
        data.train.micro_batch(0, 0)
    with pytest.raises(StoreError, match="cannot make a file in"):
        opened(lines, tmp_path / "nowhere")


def test_a_full_disk_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int, data: bytes) -> int:
        raise OSError(28, "No space left on device")

    found = Spool(tmp_path)
    found.append(b"abc")
    monkeypatch.setattr(spool.os, "write", full)
    with pytest.raises(StoreError, match="No space left on device; free some space"):
        found.seal()
    found.close()


def test_short_writes_and_reads_are_continued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, pread = spool.os.write, spool.os.pread
    monkeypatch.setattr(spool.os, "write", lambda fd, data: write(fd, bytes(data[:3])))
    monkeypatch.setattr(spool.os, "pread", lambda fd, n, at: pread(fd, min(n, 2), at))
    found = Spool(tmp_path)
    found.append(b"abcdefgh")
    found.seal()
    assert found.read(1, 6) == b"bcdefg"
    with pytest.raises(StoreError, match="end at byte 8, wanted 9"):
        found.read(6, 3)
    found.close()
