"""Experts of a layer in two regions of our kernel: all that are there times what goes in, and then
all times what comes out.

One by one, each expert is asked for, looked at, multiplied with, let go: 50 us of Python for each
of a token's, 300 us where several sequences bring rows, which is as long as its products take.
Together they are one run of those that are there already (a token's others are waited for behind
them, not before), their weights found by address, and every product is what
``cpu_ops.row_products`` gives each row by itself: torch's bits, where ``single_rows`` has found
them to be.

    k experts of a token, T tokens, U uses (token and expert), H hidden, I inner
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from functools import partial
from typing import cast

import numpy as np
import numpy.typing as npt
import torch

from offload.blocks import BlockSpec
from offload.models.experts import ExpertSession
from offload.models.single_rows import Blocks, block_of
from offload.runtime.road import Conducting

Addresses = npt.NDArray[np.int64]
Gate = Callable[[torch.Tensor], torch.Tensor]

ROW_BYTES = 32 << 10
"""Of what goes in, between and out of experts at once, for each token: half of what several
sequences have room for each (``offload.batch.joined_layers``)."""

_LINE = 64


class _Matrices:
    """One of the matrices of each expert [N, K]."""

    def __init__(self, name: str, specs: Sequence[BlockSpec], blocks: Blocks) -> None:
        """Raises ValueError: an expert has none of that name, or one that is unlike others."""
        own = [next((t for t in spec.tensors if t.name == name), None) for spec in specs]
        found = [t for t in own if t is not None]
        if len(found) < len(own) or len({(t.shape, t.dtype) for t in found}) != 1:
            raise ValueError(f"{name} is not alike in all experts")
        if len(found[0].shape) != 2 or found[0].dtype != "bfloat16":
            raise ValueError(f"{name} is {found[0].dtype} {list(found[0].shape)}")
        self.name, self._blocks = name, blocks
        self.rows, self.columns = found[0].shape
        self._offsets = np.array([t.offset for t in found], np.int64)
        self._known: dict[tuple[int, int], int | None] = {}

    def at(self, experts: Sequence[int], bases: Addresses) -> Addresses:
        """Addresses of those of some experts, whose blocks begin at ``bases``."""
        found: Addresses = bases + self._offsets[experts]
        return found

    def block(
        self, experts: Sequence[int], at: Addresses, view: Callable[[int, str], torch.Tensor]
    ) -> int | None:
        """How products with them are added up, all in the same way; None: that is not known.
        ``view``: an expert's matrix."""
        threads = torch.get_num_threads()
        found: set[int | None] = set()
        for phase in set((at % _LINE).tolist()):
            key = threads, phase
            if key not in self._known:
                expert = experts[(at % _LINE).tolist().index(phase)]
                self._known[key] = block_of(view(expert, self.name), None, self._blocks)
            found.add(self._known[key])
        return found.pop() if len(found) == 1 else None


class ExpertRows:
    """Those of one layer, without biases and not transposed."""

    def __init__(
        self,
        session: ExpertSession,
        specs: Sequence[BlockSpec],
        names: tuple[str, str],
        blocks: Blocks,
        most: int,
    ) -> None:
        """
        Args:
            specs: of each expert's block.
            names: of the tensors in them that a row is multiplied with first, and last.
            blocks: how products are added up, see ``single_rows.block_of``.
            most: experts that are held at once.

        Raises:
            ValueError: experts are not of two bfloat16 matrices each.
        """
        self._session, self._most = session, most
        self._up, self._down = (_Matrices(name, specs, blocks) for name in names)
        self._executor = session.executor
        self._places = self._executor.places(session.group.blocks)
        self._off = False

    @property
    def ready(self) -> bool:
        """Whether the caller may come: its layer runs, nobody records which expert is used when,
        and no other sequence asks for the same layer's one by one, as it does with a prompt."""
        executor = self._executor
        if self._off or executor.story is not None or not self._session.runs():
            return False
        road = executor.road()
        return road is executor or cast(Conducting, road).alone()

    def token(
        self, hidden_1H: torch.Tensor, named: Sequence[int], gate: Gate
    ) -> tuple[list[int], torch.Tensor] | None:
        """What some experts make of a token: [k, H] and whose each row is; None: it is not known
        to be what torch makes of it.

        Args:
            gate: what stands between the products, of rows [U, N]: each one's, as alone.
        """
        order, executor = sorted(named), self._executor
        # Those that are there first; a conductor goes by the order of the routing.
        if executor.road() is executor and not self._places[order].all():
            order = sorted(order, key=lambda e: not self._places[e])
        parts = []
        with closing(self._runs(order)) as runs:
            for some, bases in runs:
                part = self._multiply(hidden_1H, some, [1] * len(some), bases, gate)
                if part is None:
                    return None
                parts.append(part)
        return order, parts[0] if len(parts) == 1 else torch.cat(parts)

    def several(
        self, order: Sequence[int], counts: Sequence[int], tokens: int, gate: Gate
    ) -> Iterator[tuple[int, Callable[[torch.Tensor], torch.Tensor | None]]]:
        """Yields for the next experts of ``order`` how many rows they have together, and what makes
        [U, H] of those, [U, H], in their order; None as in ``token``.

        Args:
            counts: rows of each expert.
            tokens: of all.
            gate: as in ``token``.
        """
        row_bytes = 2 * (2 * self._up.columns + 2 * self._up.rows + 2 * self._down.rows)
        room = max(1, tokens * ROW_BYTES // row_bytes)
        number = dict(zip(order, counts, strict=True))
        with closing(self._runs(order)) as runs:
            for some, bases in runs:
                first = 0
                while first < len(some):
                    end, rows = first + 1, number[some[first]]
                    while end < len(some) and rows + number[some[end]] <= room:
                        rows += number[some[end]]
                        end += 1
                    mine, at = some[first:end], bases[first:end]
                    each = [number[e] for e in mine]
                    yield rows, partial(self._multiply, some=mine, counts=each, bases=at, gate=gate)
                    first = end

    def _runs(self, order: Sequence[int]) -> Generator[tuple[list[int], Addresses]]:
        return self._session.batches_of(order, self._most)

    def _multiply(
        self,
        x_UH: torch.Tensor,
        some: Sequence[int],
        counts: Sequence[int],
        bases: Addresses,
        gate: Gate,
    ) -> torch.Tensor | None:
        from offload.cpu_ops.row_products import multiply_groups

        up, down = self._up, self._down
        up_at, down_at = up.at(some, bases), down.at(some, bases)
        up_block = up.block(some, up_at, self._view)
        down_block = down.block(some, down_at, self._view)
        if up_block is None or down_block is None:
            self._off = True
            return None
        inner = gate(multiply_groups(x_UH, up_at, counts, up.rows, up_block))
        if inner.dtype != torch.bfloat16 or inner.shape[1] != down.columns:
            self._off = True
            return None
        return multiply_groups(inner.contiguous(), down_at, counts, down.rows, down_block)

    def _view(self, expert: int, name: str) -> torch.Tensor:
        found: torch.Tensor = self._executor.views(self._session.group.blocks[expert])[name]
        return found


__all__ = ["ExpertRows"]
