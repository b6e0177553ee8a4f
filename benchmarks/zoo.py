"""Halve the channels of every model of the zoo and write benchmarks/results/zoo.csv.

python -m benchmarks.zoo [--only TEXT] [--out FILE] [--device cpu|cuda]
"""

from __future__ import annotations

import argparse
import csv
import datetime
import platform
import statistics
import sys
import warnings
from pathlib import Path

import torch
from rich.progress import Progress

from tests.zoo.harness import Row, run_entry
from tests.zoo.torchvision_models import everything


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="run the models whose name contains this")
    parser.add_argument("--out", default="benchmarks/results/zoo.csv")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    entries = [e for e in everything() if options.only in e.name]
    rows: list[Row] = []
    with Progress() as progress:
        task = progress.add_task("zoo", total=len(entries))
        for entry in entries:
            progress.update(task, description=entry.name)
            row = run_entry(entry.name, entry.build, entry.inputs, device=options.device)
            rows.append(row)
            progress.console.print(
                f"{row.model:50} {row.status:12} error {row.max_error:.0e}  body left {row.body_left:.0%}  "
                f"trace {row.seconds_trace:.1f} s {row.problem}",
                highlight=False,
            )
            progress.advance(task)
    write(Path(options.out), rows, options.device)
    print(summary(rows))
    return 0 if all(r.ok for r in rows) else 1


def write(path: Path, rows: list[Row], device: str) -> None:
    where = torch.cuda.get_device_name() if device == "cuda" else f"{torch.get_num_threads()} CPU threads"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        when = datetime.date.today().isoformat()
        file.write(
            f"# {when}, torch {torch.__version__}, Python {platform.python_version()}, "
            f"{where}, python -m benchmarks.zoo --device {device}\n"
        )
        table = csv.DictWriter(file, fieldnames=list(rows[0].as_dict()))
        table.writeheader()
        table.writerows({k: round(v, 9) if isinstance(v, float) else v for k, v in r.as_dict().items()} for r in rows)


def summary(rows: list[Row]) -> str:
    good = [r for r in rows if r.ok]
    median = statistics.median(r.body_left for r in rows)
    little = sum(r.body_left > 0.7 for r in rows)
    return (
        f"{len(good)} of {len(rows)} models cut and checked; median of parameters left outside the "
        f"classifier {median:.1%}; {little} models lost less than 30%; "
        f"median seconds to trace {statistics.median(r.seconds_trace for r in rows):.2f}"
    )


if __name__ == "__main__":
    sys.exit(main())
