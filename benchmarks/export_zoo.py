"""Halve the quick zoo, export each model to ONNX (batch norms folded) and torch.export, compare outputs.

python -m benchmarks.export_zoo [--only TEXT] [--out FILE]
"""

from __future__ import annotations

import argparse
import csv
import datetime
import sys
import tempfile
import time
import warnings
from pathlib import Path

import onnxruntime
import torch
from rich.progress import Progress

import sapwood as sw
from sapwood.storage.export import export
from tests.zoo.harness import randomise
from tests.zoo.torchvision_models import QUICK, everything

COLUMNS = ("model", "format", "status", "max_error", "dynamic_batch", "folded", "megabytes", "seconds", "note")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="")
    parser.add_argument("--out", default="benchmarks/results/export_zoo.csv")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    entries = [e for e in everything() if e.name in QUICK and options.only in e.name]
    rows: list[dict[str, object]] = []
    with Progress() as progress, tempfile.TemporaryDirectory() as folder:
        task = progress.add_task("export", total=len(entries))
        for entry in entries:
            torch.manual_seed(0)
            inputs = entry.inputs()
            small = sw.prune(randomise(entry.build()), inputs, sw.Budget(channels=0.5), allocate="uniform").model
            for kind in ("onnx", "pt2"):
                progress.update(task, description=f"{entry.name} to {kind}")
                rows.append(_one(entry.name, small, inputs, Path(folder) / f"model.{kind}", kind))
                progress.console.print(*[rows[-1][c] for c in COLUMNS], highlight=False)
            progress.advance(task)
    with open(options.out, "w", newline="") as file:
        file.write(
            f"# {datetime.date.today().isoformat()}, torch {torch.__version__}, onnxruntime {onnxruntime.__version__}, "
            f"{torch.get_num_threads()} CPU threads, python -m benchmarks.export_zoo\n"
        )
        table = csv.DictWriter(file, fieldnames=COLUMNS)
        table.writeheader()
        table.writerows(rows)
    good = sum(r["status"] == "equal" for r in rows)
    free = sum(bool(r["dynamic_batch"]) for r in rows)
    print(f"{good} of {len(rows)} exports equal the eager output to 1e-4; {free} with a free batch size")
    return 0 if good == len(rows) else 1


def _one(name: str, small: torch.nn.Module, inputs: object, path: Path, kind: str) -> dict[str, object]:
    start = time.perf_counter()
    row: dict[str, object] = dict.fromkeys(COLUMNS, "")
    row |= {"model": name, "format": kind}
    try:
        done = export(small, inputs, path, kind, fold=kind == "onnx")
        row |= {"status": "equal", "max_error": f"{done.max_error:.2e}", "dynamic_batch": done.dynamic_batch}
        row |= {"folded": len(done.folded), "note": "; ".join(done.notes), "megabytes": path.stat().st_size // 10**6}
    except sw.SapwoodError as error:
        row |= {"status": "failed", "note": str(error)[:300]}
    return row | {"seconds": round(time.perf_counter() - start, 1)}


if __name__ == "__main__":
    sys.exit(main())
