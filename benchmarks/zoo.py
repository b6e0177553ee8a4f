"""Halve the channels of every model of the zoo and write benchmarks/results/zoo.csv.

python -m benchmarks.zoo [--section torchvision|timm|transformers] [--only TEXT] [--out FILE]
                         [--device cpu|cuda] [--jobs 2]
"""

from __future__ import annotations

import argparse
import concurrent.futures
import csv
import datetime
import logging
import multiprocessing
import os
import platform
import statistics
import sys
import warnings
from pathlib import Path

import torch
from rich.progress import Progress

from tests.zoo import SECTIONS, entry, names
from tests.zoo.harness import Row, run_entry

LEAST_LOST, MOST_LEFT, FEW = 0.30, 0.30, 0.05


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--section", default=",".join(SECTIONS))
    parser.add_argument("--only", default="", help="run the models whose name contains this")
    parser.add_argument("--out", default="benchmarks/results/zoo.csv")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--jobs", type=int, default=0, help="processes; as many as there are cores, one on a GPU")
    options = parser.parse_args()
    jobs = options.jobs or (1 if options.device == "cuda" else os.cpu_count() or 1)
    wanted = [(s, n) for s in options.section.split(",") for n in names(s) if options.only in n]
    rows: list[tuple[str, Row]] = []
    start = multiprocessing.get_context("spawn")
    with Progress() as progress, concurrent.futures.ProcessPoolExecutor(jobs, start, _quiet, (jobs,)) as pool:
        task = progress.add_task("zoo", total=len(wanted))
        running = {pool.submit(_run, s, n, options.device): s for s, n in wanted}
        for done in concurrent.futures.as_completed(running):
            row = done.result()
            rows.append((running[done], row))
            progress.console.print(
                f"{row.model:50} {row.status:12} error {row.max_error:.0e}  body left {row.body_left:.0%}  "
                f"trace {row.seconds_trace:.1f} s {row.problem}",
                highlight=False,
            )
            progress.update(task, description=row.model, advance=1)
    place = {n: i for i, (_, n) in enumerate(wanted)}
    rows.sort(key=lambda pair: place[pair[1].model])
    write(Path(options.out), [r for _, r in rows], options.device, jobs)
    good = True
    for section in options.section.split(","):
        own = [r for s, r in rows if s == section]
        if own:
            print(f"{section}: {summary(own)}")
            good = good and holds(own, whole=not options.only)
    return 0 if good else 1


def _quiet(jobs: int) -> None:
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    if jobs > 1:
        torch.set_num_threads(1)


def _run(section: str, name: str, device: str) -> Row:
    found = entry(section, name)
    return run_entry(found.name, found.build, found.inputs, device=device)


def write(path: Path, rows: list[Row], device: str, jobs: int) -> None:
    where = torch.cuda.get_device_name() if device == "cuda" else f"CPU, {jobs} processes"
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


def holds(rows: list[Row], whole: bool) -> bool:
    """None is broken; and the cuts of a section are real ones."""
    good = all(r.ok for r in rows)
    if whole:
        good = good and statistics.median(r.body_left for r in rows) <= MOST_LEFT
        good = good and sum(r.body_left > 1 - LEAST_LOST for r in rows) <= FEW * len(rows)
    return good


def summary(rows: list[Row]) -> str:
    good = [r for r in rows if r.ok]
    median = statistics.median(r.body_left for r in rows)
    little = sum(r.body_left > 1 - LEAST_LOST for r in rows)
    return (
        f"{len(good)} of {len(rows)} models cut and checked, largest error {max(r.max_error for r in rows):.1e}; "
        f"median of parameters left outside embeddings and classifier {median:.1%}; {little} lost less than 30%; "
        f"median seconds to trace {statistics.median(r.seconds_trace for r in rows):.2f}"
    )


if __name__ == "__main__":
    sys.exit(main())
