"""Sorted indices as short text, "0-3,5,7-9": readable, compact, and countable before it is unfolded."""

from __future__ import annotations

import re
from collections.abc import Iterable

import numpy as np

from sapwood.errors import SapwoodError

_FORM = re.compile(r"\d{1,12}(-\d{1,12})?(,\d{1,12}(-\d{1,12})?)*")


def fold(indices: Iterable[int]) -> str:
    values = np.asarray(list(indices), dtype=np.int64)
    if not len(values):
        return ""
    breaks = np.flatnonzero(np.diff(values) != 1)
    starts, stops = values[np.r_[0, breaks + 1]], values[np.r_[breaks, len(values) - 1]]
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in zip(starts.tolist(), stops.tolist(), strict=True))


def _pairs(text: str, size: int, where: str) -> list[tuple[int, int]]:
    if not isinstance(text, str) or not _FORM.fullmatch(text):
        raise SapwoodError(f"{where}: expected indices such as '0-3,5'; got {str(text)[:40]!r}. The plan is damaged.")
    pairs, last = [], -1
    for part in text.split(","):
        start, _, stop = part.partition("-")
        a, b = int(start), int(stop or start)
        if a <= last or b < a or b >= size:
            raise SapwoodError(
                f"{where}: expected growing indices below {size}; got {part!r} after {last}. The plan is damaged."
            )
        pairs.append((a, b))
        last = b
    return pairs


def count(text: str, size: int, where: str) -> int:
    """How many indices a text names; refuses what is out of range or out of order."""
    return sum(b - a + 1 for a, b in _pairs(text, size, where))


def unfold(text: str, size: int, where: str) -> tuple[int, ...]:
    return tuple(i for a, b in _pairs(text, size, where) for i in range(a, b + 1))
