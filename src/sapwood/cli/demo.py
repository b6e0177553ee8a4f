"""``sapwood demo``: train, prune, fine-tune and measure on handwritten digits, in under three minutes."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from sapwood.cli.common import harmless, new_folder, page_beside, show
from sapwood.errors import explain
from sapwood.pipeline.demo import BATCH, EPOCHS, FRACTION, Row, run_demo
from sapwood.pipeline.figures import environment
from sapwood.reporting.page import PAGE
from sapwood.reporting.runs import claim, curve_table, percent
from sapwood.storage.atomic import write_text
from sapwood.types import Tell


def demo(
    seeds: Annotated[int, typer.Option(help="How many seeds; mean and spread are told.")] = 3,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="The folder; runs/demo-TIME by default.")] = None,
    page: Annotated[bool, typer.Option("--report/--no-report", help="Write results.json and report.html.")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")] = False,
) -> None:
    """Train a small CNN on handwritten digits, prune it in three ways, fine-tune, measure, compare."""
    if seeds < 1:
        raise explain("at least one seed", repr(seeds), "The default is 3.", "--seeds")
    start = time.perf_counter()
    console = Console()
    where = torch.cuda.get_device_name() if torch.cuda.is_available() else f"{torch.get_num_threads()} CPU threads"
    if not as_json:
        console.print(
            f"A small CNN on scikit-learn's digits (8 x 8 pixels): {EPOCHS} epochs of training, then three ways of "
            f"pruning, each fine-tuned for {FRACTION:.0%} of those epochs. {seeds} seed{'s' * (seeds > 1)}, "
            f"{where}.",
            highlight=False,
        )
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), disable=as_json or not sys.stderr.isatty()) as bars:
        rows = run_demo(range(seeds), _follow(bars))
    results = _results(rows)
    shown: Path | None = None
    with contextlib.nullcontext() if out else harmless():
        shown = _write(out or new_folder("demo"), results) if page else None
    if as_json:
        brief = [{k: v for k, v in row.items() if k != "details"} for row in results["rows"]]
        show({"rows": brief, "environment": results["environment"], "report": shown}, True, "")
        return
    curves = curve_table({r.name: r.curve for r in rows[1:]}, rows[0].recovered["mean"], seeds)
    wrote = [f"A page to look at or to send: {shown}"] if shown else []
    took = f"Took {time.perf_counter() - start:.0f} s."
    show({}, False, _table(rows, seeds), curves, _words(rows), *wrote, took)


def _results(rows: list[Row]) -> dict[str, Any]:
    """All that is known, as plain data."""
    where = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return {
        "name": "demo",
        "about": "A small CNN on scikit-learn's handwritten digits, pruned in three ways",
        "epochs": EPOCHS,
        "on": f"{where.type}, eager, a batch of {BATCH}",
        "rows": [dataclasses.asdict(r) for r in rows],
        "environment": environment(where),
    }


def _write(folder: Path, results: dict[str, Any]) -> Path | None:
    write_text(folder / "results.json", json.dumps(results, indent=1) + "\n")
    return page_beside(folder / PAGE, folder)


def _follow(bars: Progress) -> Tell:
    tasks: dict[str, Any] = {}

    def tell(what: str, step: int, total: int) -> None:
        if what not in tasks:
            tasks[what] = bars.add_task(what, total=total)
        bars.update(tasks[what], completed=step, total=total)

    return tell


def _table(rows: list[Row], seeds: int) -> Table:
    title = "Accuracy on test data in %, mean ± spread over seeds; latency of 256 images, median ± spread"
    table = Table(title=title, title_justify="left")
    table.add_column("variant")
    for column in ("after\npruning", "recovered", "parameters", "non-zeros", "FLOPs\n(2 x MACs)", "file\nbytes"):
        table.add_column(column, justify="right")
    table.add_column("latency\nms", justify="right")
    table.add_column("speed", justify="right")
    for row in rows:
        table.add_row(
            row.name,
            percent(row.after_pruning, seeds) if row.after_pruning else "",
            percent(row.recovered, seeds) + ("" if row.after_pruning else " (trained)"),
            *(f"{row.counts[k]:,}" for k in ("params", "nonzeros", "flops")),
            f"{row.file_bytes:,}",
            f"{row.timing.median_ms:.2f} ± {row.timing.spread_ms:.2f}",
            f"{row.timing.speed:.2f} x",
        )
    return table


def _words(rows: list[Row]) -> str:
    """What paid here and what did not, from the figures."""
    dense = rows[0]
    lines = []
    for row in rows[1:]:
        what = claim(dense.recovered["mean"], row.after_pruning["mean"], row.recovered["mean"])
        lines.append(f"- {row.name}: accuracy {what}. {_speed(dense, row)}")
    return "What happened:\n" + "\n".join(lines)


def _speed(dense: Row, row: Row) -> str:
    """Whether the clock agrees, given how far medians scatter."""
    ratio, sure = row.timing.speed, row.timing.speed_low > 1.05
    smaller = f"the file is {row.file_bytes / dense.file_bytes:.2f} of the dense one"
    if row.counts["params"] == dense.counts["params"]:
        if sure:
            return f"It ran {ratio:.2f} times as fast here, and {smaller}."
        return f"The zeros paid in size ({smaller}), not in speed: a dense matrix product multiplies them all the same."
    flops = dense.counts["flops"] / row.counts["flops"]
    if sure:
        return f"It paid: {flops:.1f} times fewer FLOPs, {ratio:.2f} times the speed, and {smaller}."
    return f"{flops:.1f} times fewer FLOPs, but no clear gain in speed here ({ratio:.2f} times); {smaller}."
