"""Comparing lists of token ids."""

from __future__ import annotations

from collections.abc import Sequence as Seq


def common_prefix(a: Seq[int], b: Seq[int]) -> int:
    """Return how many leading tokens two texts share."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def first_difference(a: Seq[int], b: Seq[int]) -> int | None:
    """Return the place where two outputs first differ; None if they are equal."""
    same = common_prefix(a, b)
    return None if same == len(a) == len(b) else same
