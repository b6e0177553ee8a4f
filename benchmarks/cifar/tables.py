"""Markdown tables from the events of all runs: python -m benchmarks.cifar --tables."""

from __future__ import annotations

import contextlib
import json
import math
import statistics
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.cifar.plans import CHOICES
from benchmarks.cifar.recipes import POINTS

Events = dict[str, list[dict[str, Any]]]


def ended(events: str) -> dict[str, Any] | None:
    """The event with which a run ended, where it did."""
    for line in reversed(events.splitlines()):
        with contextlib.suppress(ValueError):  # a line may be cut off by a kill
            event: dict[str, Any] = json.loads(line)
            if event.get("event") == "done":
                return event
    return None


def finished(path: Path) -> dict[str, Any] | None:
    return ended(path.read_text()) if path.exists() else None


def read(folder: Path, split: str) -> Events:
    """The last event of each finished run, by name of its recipe."""
    found: Events = defaultdict(list)
    for path in sorted(folder.glob(f"*-{split}-*.jsonl")):
        if (event := finished(path)) is not None:
            found[event["name"]].append(event)
    return dict(found)


def spread(values: list[float], digits: int = 2) -> str:
    """Mean and standard deviation, then each value."""
    if len(values) == 1:
        return f"{values[0]:.{digits}f}"
    each = ", ".join(f"{v:.{digits}f}" for v in values)
    return f"{statistics.mean(values):.{digits}f} ± {statistics.stdev(values):.{digits}f} ({each})"


def table(events: Events, split: str) -> Iterator[str]:
    head = [f"{split} accuracy, last epoch", "epochs", "fewer MACs", "zeros", "seeds", "accuracy", "against the base"]
    head += ["asked", "cross entropy", "ms a step"]
    yield "| " + " | ".join(head) + " |"
    yield "|" + "---|" * len(head)
    for name, runs in events.items():
        if "accuracy" not in runs[0] or name.startswith("ablation-"):
            continue
        first = runs[0]
        point = POINTS.get(name.partition("_")[0])
        asked = f"{point.target}" if split == "test" and point is not None and point.target else ""
        lost = statistics.mean(r["accuracy"] - r["base"] for r in runs)
        steps = [r["ms_per_step"] for r in runs if "ms_per_step" in r]
        losses = [r["loss"] for r in runs if "loss" in r]
        cells = [
            name, f"{first['epochs']:g}", f"{first['fewer_macs']:.2f}", f"{first['sparsity']:.1%}", str(len(runs)),
            spread([r["accuracy"] for r in runs]), f"{lost:+.2f}", asked, spread(losses, 4) if losses else "",
            f"{statistics.mean(steps):.2f}" if steps else "",
        ]  # fmt: skip
        yield "| " + " | ".join(cells) + " |"


def ablation(events: Events) -> Iterator[str]:
    chosen = {n: r for n, r in events.items() if n.startswith("ablation-")}
    columns = [("finetune", "plain"), ("finetune", "distilled"), ("rewind", "plain"), ("rewind", "distilled")]
    rows = sorted({tuple(n.split("-")[1:4]) for n in chosen})
    if not rows:
        return
    yield "| point | score | allocation | " + " | ".join(", ".join(c) for c in columns) + " |"
    yield "|" + "---|" * (3 + len(columns))
    for row in rows:
        names = ["-".join(("ablation", *row, *c)) for c in columns]
        cells = [spread([r["accuracy"] for r in chosen[n]]) if n in chosen else "" for n in names]
        yield "| " + " | ".join((*row, *cells)) + " |"


DEFAULTS = ({"l1", "magnitude"}, {"global"}, {"rewind"}, {"plain"})
"""What each choice of the ablation is compared with."""


def choices(events: Events) -> Iterator[str]:
    """What each choice of the ablation is worth against another one with everything else alike, pair by pair: in all
    runs, and in those that rewind the rate."""
    found: dict[str, dict[tuple[str, ...], float]] = defaultdict(dict)
    for name, runs in events.items():
        if name.startswith("ablation-"):
            _, point, *chosen = name.split("-")
            found[point][tuple(chosen)] = statistics.mean(r["accuracy"] for r in runs)
    for point, runs_of in sorted(found.items()):
        yield f"| {point}: choice | against | points, all runs | pairs | points, rewinding | pairs |"
        yield "|---|---|---|---|---|---|"
        for place, usual in enumerate(DEFAULTS):
            for choice in sorted({c[place] for c in runs_of} - usual):
                pairs = [
                    (v - other, "rewind" in (c[2], o[2]) and place != 2)
                    for c, v in runs_of.items()
                    for o, other in runs_of.items()
                    if c[place] == choice and o[place] in usual and _but(o, place) == _but(c, place)
                ]
                told = [apart([d for d, rewinds in pairs if rewinds or not only]) for only in (False, True)]
                yield f"| {choice} | {' or '.join(sorted(usual & {c[place] for c in runs_of}))} | {' | '.join(told)} |"
        yield ""


def apart(differences: list[float]) -> str:
    """The mean, its standard error, and of how many."""
    if not differences:
        return " | 0"
    mean, number = statistics.mean(differences), len(differences)
    error = f" ± {statistics.stdev(differences) / number**0.5:.2f}" if number > 1 else ""
    return f"{mean:+.2f}{error} | {number}"


def factors(events: Events) -> Iterator[str]:
    """What each factor of a plan of experiments is worth, where all its runs are there."""
    for way, choice in CHOICES.items():
        found = {levels: events[n][0] for levels in choice.plan if (n := f"try-{way}-{levels}") in events}
        if len(found) < len(choice.plan):
            continue
        columns, heads = [], []
        for what, unit, digits in (("accuracy", "points", 2), ("loss", "cross entropy", 4)):
            if all(what in run for run in found.values()):
                worth, error = choice.worth({levels: run[what] for levels, run in found.items()})
                columns.append([f"{gained:+.{digits}f}" for gained in worth.values()])
                heads.append(unit if math.isnan(error) else f"{unit}, standard error {error:.{digits}f}")
        yield f"| {way}: factor | first | second | second against first, {' | '.join(heads)} |"
        yield "|---" * (3 + len(heads)) + "|"
        for (name, (first, second)), *gained in zip(choice.factors.items(), *columns, strict=True):
            yield f"| {name} | {first} | {second} | {' | '.join(gained)} |"
        yield ""


def _but(chosen: tuple[str, ...], place: int) -> tuple[str, ...]:
    return (*chosen[:place], *chosen[place + 1 :])


def drops(events: Events) -> Iterator[str]:
    for name, runs in events.items():
        if "drop" in runs[0]:
            yield f"| {name}, right after pruning | accuracy |"
            yield "|---|---|"
            for what in runs[0]["drop"]:
                yield f"| {what} | {spread([r['drop'][what] for r in runs])} |"
            yield ""


def speeds(folder: Path) -> Iterator[str]:
    lines = [json.loads(t) for p in sorted(folder.glob("speed-*.jsonl")) for t in p.read_text().splitlines()]
    found = [e for e in lines if e["event"] == "speed"]
    if found:
        yield "| date | switches | beside | teacher | zeros held | ms a step | set up, s |"
        yield "|---|---|---|---|---|---|---|"
    for e in found:
        took = f"{e['ms_per_step']} | {e['set_up_s']}" if "ms_per_step" in e else f"{e['failed'][:80]} |"
        yield f"| {e['time'][:10]} | {e['switches']} | {e['beside']} | {e['teacher']} | {e['zeros']} | {took} |"


OLD = "Earlier runs on the validation split, from a base that was trained for 100 epochs only:"


def write(folder: Path) -> str:
    parts = []
    for place, split, told in (
        (folder, "test", ""),
        (folder, "validation", ""),
        (folder / "first-base", "validation", OLD),
    ):
        events = read(place, split)
        if events:
            parts += [told, "", *table(events, split), "", *drops(events), *ablation(events), ""]
            parts += [*choices(events), *factors(events)]
    text = "\n".join([*parts, *speeds(folder)]).strip() + "\n"
    (folder / "tables.md").write_text(text)
    return text
