"""Rows of an embedding that stays on disk: read as ever, not written to."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from wrap_support import streamed, tiny

from offload.errors import OffloadError
from offload.models.absent import RowTable

pytestmark = pytest.mark.usefixtures("cut_small")


@pytest.mark.parametrize(
    "write",
    [
        lambda table: table.__setitem__(3, 0.0),
        lambda table: table.__setitem__(torch.tensor([3, 4]), 0.0),
        lambda table: table[3].mul_(0),
        lambda table: table[3, 2:5].zero_(),
        lambda table: table.data[3].copy_(torch.zeros(64)),
        lambda table: table.select(0, 3).data.fill_(1),
        lambda table: table[torch.tensor(3)].__iadd__(1),
        lambda table: torch.zeros(64, out=table[3]),
    ],
)
def test_a_row_of_a_table_on_disk_is_not_written_to(write: Any, tmp_path: Path) -> None:
    """With the table in memory it is the table's: here it is a copy, and all would be lost."""
    model = streamed(tiny("qwen3", vocab_size=1500, tie_word_embeddings=False), tmp_path)
    table = model.model.embed_tokens.weight
    with torch.no_grad(), pytest.raises(OffloadError, match="what is written to one would be lost"):
        write(table)
    model.offload.close()


def test_rows_of_a_table_on_disk_are_read_as_ever(tmp_path: Path) -> None:
    model = tiny("qwen3", vocab_size=1500, tie_word_embeddings=False)
    want = model.model.embed_tokens.weight.detach().clone()
    streamed(model, tmp_path)
    table = model.model.embed_tokens.weight
    assert isinstance(table, RowTable)
    with torch.no_grad():
        assert torch.equal(table[3], want[3])
        assert torch.equal(table[-1], want[-1])
        ids = torch.tensor([[-2, 5], [5, 0]])
        assert torch.equal(table[ids], want[ids])
        assert table[3].numpy().tolist() == want[3].tolist()
        assert torch.equal(copy.deepcopy(table[3]), want[3])
        assert type(table[3] * 2) is torch.Tensor
        table[3].clone().zero_()  # its own
        table[[3, 4]].zero_()  # a copy in the resident model, too
        assert torch.equal(table[[3, 4]], want[[3, 4]])
        assert torch.equal(torch.zeros(64).copy_(table[3]), want[3])
        with pytest.raises(IndexError):
            table[1500]
        with pytest.raises(IndexError):
            nn.functional.embedding(torch.tensor([-1]), table)
    model.offload.close()
