"""Cosines and sines of the rotary embedding for the token being computed."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from offload.errors import OffloadError


class Rope:
    """One kind of rotary embedding; all layers of that kind share it, so its table is computed
    once per token and takes two rows.

    ``inverse``: float32 [rotary / 2], radians per token (a model's ``inv_freq``); ``scale``: what
    cosines and sines are multiplied with (``attention_scaling``); ``pairs``: interleaved.

    Angles are float32 products as in Hugging Face's code; their cosines are computed in float64
    and rounded once.
    """

    def __init__(
        self, inverse: npt.NDArray[np.float32], scale: float = 1.0, *, pairs: bool = False
    ) -> None:
        """
        Raises:
            OffloadError: ``inverse`` is no vector of float32.
        """
        if inverse.ndim != 1 or inverse.dtype != np.float32:
            raise OffloadError(
                f"inverse frequencies are float32 [rotary / 2], got {inverse.dtype} "
                f"{list(inverse.shape)}"
            )
        self.rotary, self.pairs = 2 * len(inverse), pairs
        self._inverse, self._scale = inverse.copy(), np.float64(np.float32(scale))
        rows = len(inverse) * (2 if pairs else 1)
        self._table = np.zeros((2, max(rows, 1)), np.float32)
        start = int(self._table.__array_interface__["data"][0])
        self.cos, self.sin = start, start + self._table.strides[0]
        """Addresses; constant."""
        self._position: int | None = None
        self._many: tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]] | None = None

    def turn_to(self, position: int) -> None:
        """Make the table that of ``position``."""
        if position == self._position:
            return
        self._fill(self._table[:, None], np.array([position]))
        self._position = position

    def rows(self, positions_T: npt.NDArray[np.int64]) -> tuple[int, int, int]:
        """Addresses of the cosines and sines of several positions, and the bytes from one's to the
        next's; until other positions are asked for."""
        if self._many is None or not np.array_equal(self._many[0], positions_T):
            tables = np.empty((2, len(positions_T), self._table.shape[1]), np.float32)
            self._fill(tables, positions_T)
            self._many = positions_T.copy(), tables
        tables = self._many[1]
        start = int(tables.__array_interface__["data"][0])
        return start, start + tables.strides[0], tables.strides[1]

    def _fill(self, tables: npt.NDArray[np.float32], positions_T: npt.NDArray[np.int64]) -> None:
        """``tables`` [2, T, n]."""
        angles = (positions_T.astype(np.float32)[:, None] * self._inverse).astype(np.float64)
        cos, sin = np.cos(angles) * self._scale, np.sin(angles) * self._scale
        if self.pairs:
            tables[0, :, 0::2] = tables[0, :, 1::2] = cos
            tables[1, :, 0::2], tables[1, :, 1::2] = -sin, sin
        elif cos.size:
            tables[0], tables[1] = cos, sin
