"""How attention weighs keys: what all implementations of the kernels are told beside tensors."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Scoring:
    """Of one layer."""

    scale: float
    """Factor of the product of a query and a key."""
    window: int | None = None
    """Tokens that a query sees, itself included; None: all before it."""
    soft_cap: float | None = None
    """A score s becomes soft_cap * tanh(s / soft_cap), before the softmax; None: stays as it is."""
