"""A subset of torchvision, as ``make zoo`` runs all of it."""

from __future__ import annotations

import importlib.util
import statistics

import pytest

from tests.zoo import torchvision_models as zoo
from tests.zoo.harness import Row, run_entry

pytestmark = pytest.mark.skipif(importlib.util.find_spec("torchvision") is None, reason="torchvision is not installed")
ROWS: dict[str, Row] = {}


@pytest.mark.parametrize("name", zoo.QUICK)
def test_quick_zoo(name: str) -> None:
    entry = next(e for e in zoo.everything() if e.name == name)
    row = ROWS[name] = run_entry(entry.name, entry.build, entry.inputs, count_flops=False)
    assert row.ok, row.problem or f"{row.status}, error {row.max_error}"
    assert row.left_whole == 0


def test_the_cut_is_a_real_one() -> None:
    if len(ROWS) < len(zoo.QUICK):
        pytest.skip("needs the rows of the whole quick zoo")
    assert statistics.median(r.body_left for r in ROWS.values()) <= 0.30
    assert max(r.body_left for r in ROWS.values()) <= 0.70
