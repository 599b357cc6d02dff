"""One sequence's tokens, chosen as transformers and torch choose them, in less time.

``loop`` stands for transformers' loop, ``scores`` for its logits processors, ``draw`` for torch's
draw. Each gives the same bits, or leaves the work to what it stands for.
"""
