"""What each choice of the first plan in factors.txt is worth: python -m benchmarks.cifar.factors [FILE]

Rows are high (1) or low (-1) for each choice, then accuracy and cross entropy; effects are by least squares.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import numpy as np

from benchmarks.cifar.work import KEPT

NAMES = ("lr", "weight_decay", "mixup", "features", "temperature", "fade", "share")
ROW = re.compile(r"^\[([-1, ]+)\] \(([\d.]+), ([\d.]+)\)$", re.MULTILINE)


def effects(text: str) -> tuple[np.ndarray, np.ndarray]:
    """High against low, a row for each choice: points of accuracy and cross entropy; and their standard errors."""
    rows = [([1, *map(int, levels.split(","))], (float(a), float(b))) for levels, a, b in ROW.findall(text)]
    plan, seen = (np.array(part, dtype=float) for part in zip(*rows, strict=True))
    found = np.linalg.lstsq(plan, seen, rcond=None)[0]
    left = ((seen - plan @ found) ** 2).sum(axis=0) / (len(plan) - plan.shape[1])
    each = np.diag(np.linalg.inv(plan.T @ plan))[1]
    return 2 * found[1:], 2 * np.sqrt(left * each)


if __name__ == "__main__":
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else KEPT / "first-base" / "factors.txt"
    worth, error = effects(path.read_text())
    for name, (points, entropy) in zip(NAMES, worth, strict=True):
        print(f"{name:13s} {points:+.3f}  {entropy:+.5f}")
    print(f"standard error {error[0]:.3f}, {error[1]:.5f}")
