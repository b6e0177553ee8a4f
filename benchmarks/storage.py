"""Size and loading speed of a 90% sparse model's bundle against plain safetensors.

    python -m benchmarks.storage [--out FILE]

Both load the same weights into the same freshly built model, taking turns; files are in the page cache.
"plain" is ``model.load_state_dict(load_file(path))``; "bundle" is ``sw.load(path, model)``, digests verified.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from safetensors.torch import load_file, save_file
from torch import nn

import sapwood as sw

ROUNDS = 9


def build() -> nn.Module:
    return nn.Sequential(*[nn.Linear(2048, 2048) for _ in range(12)])


def sparse(model: nn.Module, zeros: float) -> nn.Module:
    with torch.no_grad():
        for layer in model:
            layer.weight[torch.rand_like(layer.weight) < zeros] = 0
    return model


def seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def measure(zeros: float, folder: Path) -> dict[str, object]:
    torch.manual_seed(0)
    model = sparse(build(), zeros) if zeros else build()
    plan = sw.make_plan(model, torch.randn(1, 2048), sw.Budget(channels=1.0))
    sw.save(folder / "bundle", model, plan)
    save_file(model.state_dict(), folder / "plain.safetensors")
    target = build()
    turns: dict[str, list[float]] = {"plain": [], "bundle": []}
    for _ in range(ROUNDS):
        turns["plain"].append(seconds(lambda: target.load_state_dict(load_file(folder / "plain.safetensors"))))
        turns["bundle"].append(seconds(lambda: sw.load(folder / "bundle", target)))
    loaded = sw.load(folder / "bundle", target).state_dict()
    assert all(torch.equal(loaded[n], t) for n, t in model.state_dict().items())
    sizes = (folder / "bundle" / "model.safetensors").stat().st_size, (folder / "plain.safetensors").stat().st_size
    plain, bundle = (statistics.median(turns[k]) for k in ("plain", "bundle"))
    return {
        "zeros": zeros,
        "size_ratio": sizes[0] / sizes[1],
        "plain_s": plain,
        "bundle_s": bundle,
        "speed_ratio": plain / bundle,
        "turns": turns,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", default="benchmarks/results/storage.json")
    options = parser.parse_args()
    rows = []
    for zeros in (0.0, 0.5, 0.9):
        with tempfile.TemporaryDirectory() as folder:
            rows.append(measure(zeros, Path(folder)))
    about = {
        "date": datetime.date.today().isoformat(),
        "torch": torch.__version__,
        "cpu_threads": torch.get_num_threads(),
        "command": "python -m benchmarks.storage",
    }
    Path(options.out).write_text(json.dumps({"environment": about, "rows": rows}, indent=1))
    table = Table(title="A bundle of 50M float32 parameters against plain safetensors")
    for column in ("zeros", "file size", "plain load ms", "bundle load ms", "speed of plain"):
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(
            f"{row['zeros']:.0%}",
            f"{row['size_ratio']:.3f} x",
            f"{1000 * row['plain_s']:.0f}",
            f"{1000 * row['bundle_s']:.0f}",
            f"{row['speed_ratio']:.2f} x",
        )
    Console().print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
