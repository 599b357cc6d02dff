"""Cross-entropy of a language-model head without its logits.

A vocabulary of 128k makes the logits of 2,048 tokens half a gigabyte in bfloat16 and one more for
the softmax. Here they exist only one slice of the vocabulary and one chunk of tokens at a time:

1. Over the slices in order: logits of the slice, and for every token the running maximum and sum
   of exponentials (online softmax: Milakov and Gimelshein, "Online normalizer calculation for
   softmax", 2018) and its label's logit. This gives the loss.
2. Over the slices in reverse (the last one is still in memory): the logits again, from them
   ``p = softmax - onehot``, then the slice's own gradient ``p^T h``, which leaves at once, and its
   share ``p W`` of the hidden state's gradient.

Weights are asked for twice, products cost 8 V H N flops (6 if the head is frozen), two of them for
logits computed twice. The elementwise part is torch's own passes over blocks that fit second-level
caches: 1.2 ns per logit on two cores where the products take 41 ns (H = 2048), so a fused kernel of
our own would win 2 % at most.

Only tokens with a label take part. Products are in the dtype of the hidden state, everything
between them in float32 (in float64 for float64). Chunks follow from the shapes alone, never from a
budget, so the same shapes and slices give the same bits. In float32 BLAS may sum in another order
with another number of threads: fix ``torch.set_num_threads`` for bits there.
"""

# N tokens with a label, H width of the hidden state, V vocabulary, s rows of one slice

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from offload.train.head_weights import (
    IGNORE,
    PLAIN,
    HeadWeights,
    ResidentHead,
    SliceGradient,
    Transform,
    check,
    shift_labels,
    wide_dtype,
)

__all__ = [
    "IGNORE",
    "HeadWeights",
    "ResidentHead",
    "Transform",
    "evaluate",
    "head_loss",
    "shift_labels",
    "token_chunk",
    "workspace_bytes",
]

CHUNK_LOGITS = 2**23
"""Logits alive at once, about: 16 MiB in bfloat16. With 4,096 rows a slice that is 2,048 tokens,
enough for products at full rate (512 are: 405 of 430 GFLOP/s where this was chosen)."""

BLOCK_LOGITS = 2**19
"""Logits of one elementwise step: 2 MiB of float32, in the second-level caches of two cores."""


def token_chunk(tokens: int, widest: int) -> int:
    """Tokens with labels in one product, given the rows of the widest slice.

    Chunks of nearly equal length, a multiple of 64, and of ``CHUNK_LOGITS`` logits (at least 64
    tokens, at most 4,096).
    """
    most = min(4096, max(64, CHUNK_LOGITS // max(1, widest) // 64 * 64))
    chunks = max(1, -(-tokens // most))
    return max(1, min(tokens, -(-tokens // (chunks * 64)) * 64))


def workspace_bytes(
    tokens: int,
    width: int,
    slices: Sequence[tuple[int, int]],
    dtype: torch.dtype,
    *,
    frozen: bool = False,
    softcap: bool = False,
    grad_dtype: torch.dtype | None = None,
    gathered: bool = True,
) -> int:
    """Most bytes that ``head_loss`` holds besides its arguments, slices and results.

    ``tokens``: with labels (N). What it counts: the logits of a chunk; a float32 block (two with
    softcap) unless the dtype is wide already; the hidden state's gradient in float32 ``[N, H]``
    and a chunk's share of it; a slice's gradient, in float32, too, if there are several chunks;
    the labelled hidden states ``[N, H]`` unless every token has a label (``gathered=False``); a
    hundred bytes per token. The result ``[T, H]`` is not counted.
    """
    widest = max((b - a for a, b in slices), default=0)
    chunk, size, wide = token_chunk(tokens, widest), dtype.itemsize, wide_dtype(dtype).itemsize
    block = max(2, min(chunk, _block_rows(widest))) * widest * wide
    total = chunk * widest * size + 96 * tokens
    total += (block if size < wide else 2 * widest * wide) + (block if softcap else 0)
    total += tokens * width * (wide + gathered * size) + chunk * width * size
    if not frozen:
        out = grad_dtype or dtype
        summed = chunk < tokens or (out == wide_dtype(dtype) != dtype)
        total += widest * (width + 2) * (size + (wide if summed else 0))
        total += widest * (width + 2) * (0 if out in (dtype, wide_dtype(dtype)) else out.itemsize)
    return total


@torch.no_grad()
def evaluate(
    hidden: Tensor,
    labels: Tensor,
    head: HeadWeights,
    *,
    transform: Transform = PLAIN,
    ignore_index: int = IGNORE,
) -> Tensor:
    """The loss alone: see ``head_loss``. One pass over the slices."""
    return _Pass(hidden, labels, head, transform, ignore_index).loss()


@torch.no_grad()
def head_loss(
    hidden: Tensor,
    labels: Tensor,
    head: HeadWeights,
    *,
    scale: float,
    transform: Transform = PLAIN,
    frozen: bool = False,
    grad_dtype: torch.dtype | None = None,
    ignore_index: int = IGNORE,
) -> tuple[Tensor, Tensor]:
    """Loss of next-token labels, and its gradients.

    ``hidden`` ``[T, H]``: what enters the head, bfloat16, float16, float32 or float64.
    ``labels`` ``[T]``, int64: row t's own target (already shifted, see ``shift_labels``), or
    ``ignore_index``. ``scale``: what the gradients are multiplied by (1 / label tokens of the step,
    for a mean). ``frozen``: the head gets no gradient. ``grad_dtype``: of the head's gradients, by
    default the hidden state's.

    Micro-batches: concatenate their rows, so that weights move twice a step whatever their number.

    Returns the *sum* of the losses of all label tokens (float32 scalar, float64 for float64; not
    scaled) and the scaled gradient ``[T, H]`` in the hidden state's dtype, zero without a label.

    Raises:
        OffloadError: shapes do not fit, slices leave gaps, or a label is outside the vocabulary.
    """
    work = _Pass(hidden, labels, head, transform, ignore_index)
    loss = work.loss()
    return loss, work.gradients(scale, frozen, grad_dtype or hidden.dtype)


class _Pass:
    """The two passes over one set of tokens, and the buffers they share."""

    def __init__(
        self, hidden: Tensor, labels: Tensor, head: HeadWeights, transform: Transform, ignore: int
    ) -> None:
        self.head, self.transform = head, transform
        rows = check(hidden, labels, head, ignore)
        everyone = rows.numel() == hidden.shape[0]
        self.shape, self.rows = hidden.shape, None if everyone else rows
        self.hidden_NH = hidden if everyone else hidden[rows]
        self.labels_N = labels if everyone else labels[rows]
        self.tokens = rows.numel()
        self.widest = widest = max((b - a for a, b in head.slices), default=0)
        self.chunk, self.block = token_chunk(self.tokens, widest), _block_rows(widest)
        self.dtype, self.wide = hidden.dtype, wide_dtype(hidden.dtype)
        self.logits = hidden.new_empty(self.chunk * widest)
        # Two rows even for one token: torch sums a single row by threads, in another order.
        block = max(2, min(self.chunk, self.block)) * widest
        own = 2 * widest if self.dtype == self.wide else block
        self.scratch = hidden.new_empty(own, dtype=self.wide)
        self.slope = self.scratch.new_empty(block if transform.softcap is not None else 0)
        # Not -inf: a slice of padding tokens may hold nothing else, and -inf - -inf is NaN.
        self.least = torch.finfo(self.wide).min
        self.most_N = self.scratch.new_full((self.tokens,), self.least)
        self.sum_N = self.scratch.new_zeros(self.tokens)

    def loss(self) -> Tensor:
        """Pass 1: fills ``most_N`` and ``sum_N``, returns the sum of losses."""
        most_N, sum_N = self.most_N, self.sum_N
        label_N = torch.zeros_like(most_N)
        for i, (first, _) in enumerate(self.head.slices):
            with self.head.weight(i) as weight_sH:
                for start, logits in self._chunks(i, weight_sH):
                    for at, x in self._blocks(start, logits):
                        n = at.stop - at.start
                        inside, column = self._label_columns(at, first, x.shape[1])
                        found = x[:n].gather(1, column).squeeze(1)
                        label_N[at] = torch.where(inside, found, label_N[at])
                        top = x.amax(1).clamp_(min=self.least)
                        more = x.sub_(top.unsqueeze(1)).exp_().sum(1)[:n]
                        before, now = most_N[at], torch.maximum(most_N[at], top[:n])
                        kept = sum_N[at] * (before - now).exp_()
                        sum_N[at] = kept + more * (top[:n] - now).exp_()
                        most_N[at] = now
        # Not through log-sum-exp, which loses what a confident token's small loss is made of; in
        # float64, so that the order of summation is below what float32 shows.
        return ((most_N - label_N) + sum_N.log()).sum(dtype=torch.float64).to(self.wide)

    def gradients(self, scale: float, frozen: bool, grad_dtype: torch.dtype) -> Tensor:
        """Pass 2: the head's gradients go to the head, the hidden state's is returned."""
        width, scale = self.shape[1], scale * self.transform.factor
        d_hidden_NH = self.sum_N.new_zeros(self.tokens, width)
        part = self.hidden_NH.new_empty(self.chunk, width)
        grads: SliceGradient | None = None
        for i in reversed(range(len(self.head.slices))):
            first, end = self.head.slices[i]
            with self.head.weight(i) as weight_sH:
                if not frozen:
                    grads = grads or SliceGradient(
                        weight_sH, self.widest, width, self.chunk < self.tokens,
                        self.head.bias(i) is not None, grad_dtype,
                    )  # fmt: skip
                    grads.begin(end - first)
                for start, logits in self._chunks(i, weight_sH):
                    self._to_gradient(start, logits, first, scale, grads)
                    rows = slice(start, start + logits.shape[0])
                    # Shares are rounded to the compute dtype before float32 adds them: torch's
                    # products on the CPU write nothing wider than their operands.
                    d_hidden_NH[rows] += torch.mm(logits, weight_sH, out=part[: logits.shape[0]])
                    if grads is not None:
                        grads.add(logits, self.hidden_NH[rows])
            if grads is not None:
                self.head.gradient(i, *grads.result())
        if self.rows is None:
            return d_hidden_NH.to(self.dtype)
        result = self.hidden_NH.new_zeros(self.shape)
        return result.index_copy_(0, self.rows, self.hidden_NH.copy_(d_hidden_NH))  # our own copy

    def _to_gradient(
        self, start: int, logits: Tensor, first: int, scale: float, grads: SliceGradient | None
    ) -> None:
        """Logits become the loss's gradient with respect to the head's output, in place."""
        for at, x in self._blocks(start, logits, keep_slope=True):
            n = at.stop - at.start
            x = x[:n]
            x.sub_(self.most_N[at].unsqueeze(1)).exp_().mul_((scale / self.sum_N[at]).unsqueeze(1))
            inside, column = self._label_columns(at, first, x.shape[1])
            x.scatter_add_(1, column, inside.to(x.dtype).mul_(-scale).unsqueeze(1))
            if self.transform.softcap is not None:
                x.mul_(self.slope[: x.numel()].view_as(x))
            if grads is not None:
                grads.add_bias(x)
            target = logits[at.start - start : at.stop - start]
            if target.data_ptr() != x.data_ptr():
                target.copy_(x)

    def _chunks(self, i: int, weight_sH: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Logits ``[tokens, s]`` of slice ``i``, chunk by chunk, in one buffer."""
        bias = self.head.bias(i)
        for start in range(0, self.tokens, self.chunk):
            hidden = self.hidden_NH[start : start + self.chunk]
            shape = hidden.shape[0], weight_sH.shape[0]
            logits = self.logits[: shape[0] * shape[1]].view(shape)
            if bias is None:
                torch.mm(hidden, weight_sH.t(), out=logits)
            else:
                torch.addmm(bias, hidden, weight_sH.t(), out=logits)
            yield start, logits

    def _blocks(
        self, start: int, logits: Tensor, keep_slope: bool = False
    ) -> Iterator[tuple[slice, Tensor]]:
        """The tokens of a block and its logits after the model's transform, to be overwritten.

        A single token comes as two equal rows. ``keep_slope``: the softcap's derivative goes to
        ``slope``.
        """
        factor, softcap = self.transform.factor, self.transform.softcap
        for a in range(0, logits.shape[0], self.block):
            raw = logits[a : a + self.block]
            n = raw.shape[0]
            if raw.dtype == self.wide and n > 1:
                x = raw
            else:
                x = self.scratch[: max(2, n) * raw.shape[1]].view(max(2, n), -1).copy_(raw)
            if softcap is not None:
                x.mul_(factor / softcap).tanh_()
                if keep_slope:
                    slope = self.slope[: x.numel()].view_as(x)
                    torch.mul(x, x, out=slope).neg_().add_(1.0)
                x.mul_(softcap)
            elif factor != 1.0:
                x.mul_(factor)
            yield slice(start + a, start + a + n), x

    def _label_columns(self, at: slice, first: int, columns: int) -> tuple[Tensor, Tensor]:
        """Which tokens' labels are in the slice, and where (anywhere for the others)."""
        column = self.labels_N[at] - first
        inside = (column >= 0) & (column < columns)
        return inside, column.clamp_(0, columns - 1).unsqueeze(1)


def _block_rows(widest: int) -> int:
    return max(2, BLOCK_LOGITS // max(1, widest))
