"""Median and extremes, as numbers and in words."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import NamedTuple


class Spread(NamedTuple):
    """Median and extremes of a few repetitions."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(median(values), min(values), max(values))

    def __str__(self) -> str:
        return f"{short(self.median)} ({short(self.low)}..{short(self.high)})"


def short(value: float) -> str:
    """Three digits, and never an exponent."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def ratios(ours: Sequence[float], theirs: Sequence[float]) -> Spread:
    """Of values measured next to each other: the host drifts, so only neighbours compare."""
    return Spread.of([a / b for a, b in zip(ours, theirs, strict=True)])
