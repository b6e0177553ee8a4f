"""What each factor of a plan of experiments is worth, by least squares.

python -m benchmarks.cifar.factors [FILE] tells it of the first plan, factors.txt: rows are high (1) or low (-1) for
each factor, then accuracy and cross entropy.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

NAMES = ("lr", "weight_decay", "mixup", "features", "temperature", "fade", "share")
ROW = re.compile(r"^\[([-1, ]+)\] \(([\d.]+), ([\d.]+)\)$", re.MULTILINE)


def effects(rows: Sequence[Sequence[int]], seen: Sequence[Sequence[float]]) -> tuple[np.ndarray, np.ndarray]:
    """High against low, a row for each factor, of everything that was seen; and the standard errors, nan where there
    are no more runs than factors take. Rows are 1 and -1; every factor is at both equally often."""
    plan, values = np.array([[1, *row] for row in rows], dtype=float), np.array(seen, dtype=float)
    found = np.linalg.lstsq(plan, values, rcond=None)[0]
    spare = len(plan) - plan.shape[1]
    left = ((values - plan @ found) ** 2).sum(axis=0) / spare if spare else np.full(values.shape[1], np.nan)
    each = np.diag(np.linalg.inv(plan.T @ plan))[1]
    return 2 * found[1:], 2 * np.sqrt(left * each)


def read(text: str) -> tuple[list[list[int]], list[list[float]]]:
    found = ROW.findall(text)
    return [[int(x) for x in levels.split(",")] for levels, _, _ in found], [[float(a), float(b)] for _, a, b in found]


if __name__ == "__main__":
    from benchmarks.cifar.work import KEPT

    path = Path(sys.argv[1]) if len(sys.argv) > 1 else KEPT / "first-base" / "factors.txt"
    worth, error = effects(*read(path.read_text()))
    for name, (points, entropy) in zip(NAMES, worth, strict=True):
        print(f"{name:13s} {points:+.3f}  {entropy:+.5f}")
    print(f"standard error {error[0]:.3f}, {error[1]:.5f}")
