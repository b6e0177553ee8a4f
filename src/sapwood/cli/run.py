"""``sapwood run``: a recipe from start to end, in a folder that can be gone on with."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from sapwood.cli.common import new_folder, page_beside, show
from sapwood.errors import explain
from sapwood.pipeline.log import Report
from sapwood.pipeline.recipe import read_recipe
from sapwood.pipeline.run import resume_run, start_run
from sapwood.reporting.page import PAGE
from sapwood.reporting.runs import claim, curve_table, run_table, wanted

MEASURING = "measuring latency, layers and widths"


def run(
    recipe: Annotated[str | None, typer.Argument(help="A recipe file, or a name from `sapwood recipes`.")] = None,
    changes: Annotated[list[str] | None, typer.Option("--set", help="Change a key: train.epochs=3.")] = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="The run folder; runs/NAME-TIME by default.")] = None,
    resume: Annotated[Path | None, typer.Option(help="Go on with the run in this folder.")] = None,
    page: Annotated[bool, typer.Option("--report/--no-report", help="Write report.html into the folder.")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print the results as JSON.")] = False,
) -> None:
    """Train, prune, recover and measure as a recipe says."""
    if (recipe is None) == (resume is None):
        got = "both" if recipe else "neither"
        raise explain("a recipe, or --resume FOLDER", got, "For example: sapwood run digits-sparse", "run")
    if resume is not None and (changes or out):
        raise explain("--resume alone", "--set or --out with it", "A run goes on as it was begun.", "run")
    folder = resume or out
    if recipe is not None:
        chosen = read_recipe(recipe, changes or ())
        folder = folder or new_folder(chosen.name)
    assert folder is not None
    quiet = as_json or not sys.stderr.isatty()
    try:
        with _bars(quiet) as bars:
            report = _follow(bars, Console(stderr=True), quiet)
            results = start_run(chosen, folder, report) if recipe is not None else resume_run(folder, report)
    except KeyboardInterrupt:
        print(f"\nsapwood: stopped. Go on with: sapwood run --resume {folder}", file=sys.stderr)
        raise typer.Exit(130) from None
    shown = page_beside(folder / PAGE, folder) if page else None
    _show(results, folder, shown, as_json)


def _bars(quiet: bool) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed}/{task.total} steps"))
    console = Console(stderr=True)
    return Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=console, disable=quiet)


def _follow(bars: Progress, console: Console, quiet: bool) -> Report:
    """Bars for the steps; a line for what is known."""
    tasks: dict[str, Any] = {}

    def report(event: dict[str, Any]) -> None:
        kind = event["event"]
        if kind == "step":
            name = f"seed {event['seed']}, {'training' if event['stage'] == 'train' else 'recovery'}"
            if name not in tasks:
                tasks[name] = bars.add_task(name, total=event["total"])
            bars.update(tasks[name], completed=event["step"])
        elif kind == "planning":
            name = f"seed {event['seed']}, {event['what']}"
            if name not in tasks:
                tasks[name] = bars.add_task(name, total=event["of"])
            bars.update(tasks[name], completed=event["done"], total=event["of"])
        elif kind in ("measure", "done"):
            if MEASURING not in tasks:
                tasks[MEASURING] = bars.add_task(MEASURING, total=1)
            bars.update(tasks[MEASURING], completed=int(kind == "done"))
        elif kind == "trained" and not quiet:
            bars.console.print(f"seed {event['seed']}: dense {100 * event['dense']['test']:.1f}% on test data")
        elif kind == "point" and not quiet and event["test"] is not None:
            after = f"{event['share']:.0%} of the original epochs"
            bars.console.print(f"seed {event['seed']}: {100 * event['test']:.1f}% after {after}")

    return report


def _show(results: dict[str, Any], folder: Path, page: Path | None, as_json: bool) -> None:
    summary, measured = results["summary"], results["measured"]
    names = [wanted(s["prune"]) for s in results["seeds"][0]["steps"]]
    curves = {n: s["curve"] for n, s in zip(names, summary["steps"], strict=True)}
    words = []
    for name, step in zip(names, summary["steps"], strict=True):
        became = claim(summary["dense"]["mean"], step["after_pruning"]["mean"], step["recovered"]["mean"])
        words.append(f"{name}: accuracy {became}.")
    for name, step in zip(names, results["seeds"][0]["steps"], strict=True):
        if "planned" in step:
            found = step["planned"]
            words.append(
                f"{name}: planned for {found['latency_ms']:.2f} ms, before it {found['dense_latency_ms']:.2f} ms; "
                f"{found['as']}. Run it so: sw.deploy(model, batch)."
            )
    times, sizes = measured["latency_ms"], measured["file_bytes"]
    words.append(
        f"Latency ({measured['on']}): dense {times['dense']['median']:.2f} ms, "
        f"pruned {times['pruned']['median']:.2f} ms, {measured['speedup']:.2f} times the speed. "
        f"File: {sizes['dense']:,} -> {sizes['pruned']:,} bytes."
    )
    words.append(
        f"Everything is in {folder}: results.json, events.jsonl, recipe.yaml, a bundle per seed (seed-*/pruned)."
    )
    if page is not None:
        words.append(f"A page to look at or to send: {page}")
    curve = curve_table(curves, summary["dense"]["mean"], summary["seeds"])
    show({**results, "folder": str(folder)}, as_json, run_table(results), curve, *words)
