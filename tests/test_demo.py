"""``sapwood demo``, as a person runs it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path


def demo(*args: str) -> str:
    command = [sys.executable, "-m", "sapwood.cli.main", "demo", *args]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_demo_tells_machines_what_happened() -> None:
    rows = {r["name"]: r for r in json.loads(demo("--seeds", "1", "--json"))["rows"]}
    dense, sparse, half = rows["dense"], rows["90% zeros"], rows["half the channels"]
    assert dense["recovered"]["mean"] > 0.95
    for row in (sparse, rows["2:4 zeros"], half):
        assert list(row["curve"]) == ["0%", "5%", "10%", "20%"]
        assert row["recovered"]["mean"] > dense["recovered"]["mean"] - 0.02
    assert sparse["counts"]["params"] == dense["counts"]["params"]
    assert sparse["counts"]["nonzeros"] < 0.11 * dense["counts"]["params"]
    assert half["counts"]["flops"] < 0.3 * dense["counts"]["flops"]
    assert sparse["file_bytes"] < 0.2 * dense["file_bytes"] and sparse["timing"]["rounds"] >= 15
    (page,) = Path(os.environ["SAPWOOD_RUNS"]).glob("demo-*/report.html")
    assert 1e6 < page.stat().st_size < 3e6


def test_a_wrong_number_of_seeds() -> None:
    command = [sys.executable, "-m", "sapwood.cli.main", "demo", "--seeds", "0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 2 and "at least one seed" in done.stderr and done.stderr.count("\n") == 1
