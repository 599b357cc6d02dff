"""What fast kernels cost in exactness, as ``fast_check`` finds it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelError:
    """What fast kernels cost.

    Attributes:
        error: of the fast kernels against torch in float32. All errors are the largest of the
            compared tokens': the largest difference between two logits over the largest logit.
        exact_error: of the exact kernels, torch in ``dtype``, against the same.
        difference: between the two kinds of kernels.
        same_choice: compared tokens for which both find the same next token the likeliest.
        tokens: that were compared.
        dtype: the checkpoint's.
        seconds: that it took to find out.
        read_bytes: from disk, on the way; the model's figures count them.
    """

    error: float
    exact_error: float
    difference: float
    same_choice: int
    tokens: int
    dtype: str
    seconds: float
    read_bytes: int

    def __str__(self) -> str:
        return (
            f"largest relative logit error {self.error:.1g} over {self.tokens} tokens against "
            f"torch in float32, where the exact ones in {self.dtype} have {self.exact_error:.1g}; "
            f"they differ by {self.difference:.1g}, the same choice {self.same_choice} times"
        )

    def to_json(self) -> dict[str, Any]:
        """As a dict that ``json`` can write."""
        return asdict(self)
