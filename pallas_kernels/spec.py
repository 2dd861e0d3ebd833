"""Frozen static choices of the ops. A new value compiles a new program."""

from dataclasses import dataclass


@dataclass(frozen=True)
class AttentionSpec:
    """How logits are made from q . k.

    `scale` multiplies q . k; then, if `soft_cap` is given, `soft_cap * tanh(logit / soft_cap)`.
    With `window` a query at position p sees positions over `p - window`, itself included.
    """

    scale: float
    window: int | None = None
    soft_cap: float | None = None
