"""What a cut of each group would save, and tables of it; tables of plans and of masks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.table import Table

from sapwood.capture.trace import Trace
from sapwood.masking.report import Sparsity
from sapwood.planning.counts import settle, units_of
from sapwood.types import Group

_LABELS = {"channels": "channels", "params": "parameters", "flops": "FLOPs (2 x multiply-accumulates)"}


@dataclass(frozen=True)
class Saving:
    """What is gained when one group keeps ``kept`` channels, and the groups ``along`` that must shrink with it."""

    group: Group
    kept: int
    params: int
    flops: int
    along: tuple[str, ...]


def savings(trace: Trace, share: float = 0.5) -> list[Saving]:
    """For each group by itself: keep this share of it, and count the model anew."""
    widths = np.array(trace.dense, dtype=float)
    found: dict[int, Saving] = {}
    for unit in units_of(trace.dense, [form for form, _ in trace.constraints]):
        index = list(unit.groups)
        steps, fixed = np.ones(len(index)), np.zeros(len(index), dtype=bool)
        for place, number in enumerate(index):
            targets = widths[index].copy()
            targets[place] *= share
            kept = list(trace.dense)
            for other, count in zip(index, settle(unit, targets, widths[index], steps, fixed), strict=True):
                kept[other] = int(count)
            found[number] = Saving(
                trace.groups[number],
                kept[number],
                trace.params - trace.costs.evaluate("params", kept),
                trace.flops - trace.costs.evaluate("flops", kept),
                tuple(trace.groups[g].name for g in index if g != number and kept[g] < trace.dense[g]),
            )
    return [found[number] for number in sorted(found)]


def savings_table(trace: Trace, halves: Sequence[Saving]) -> Table:
    """The groups in the order of the model, with what half of each is worth; narrow enough for any terminal."""
    title = "Channels that can be cut, and what half of each group would save"
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("group", overflow="fold")
    for column in ("width", "sites", "params\neach", "FLOPs\neach", "half saves\nparams", "half saves\nFLOPs"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("removal", no_wrap=True)
    for saving in halves:
        group = saving.group
        table.add_row(
            group.name + (" *" if saving.along else ""),
            f"{group.width:,}",
            str(len(group.sites)),
            short(group.params_per_channel),
            short(group.flops_per_channel),
            f"{short(saving.params)} {percent(saving.params, trace.params):>5}",
            f"{short(saving.flops)} {percent(saving.flops, trace.flops):>5}",
            "exact" if group.exact else "approximate",
        )
    if any(s.along for s in halves):
        table.caption = "* can only be cut along with others; what those save is counted in."
        table.caption_justify = "left"
    return table


def totals_table(totals: Mapping[str, int]) -> Table:
    """What the whole model has."""
    table = Table(title="The whole model", title_justify="left", show_header=False)
    for kind, label in _LABELS.items():
        table.add_row(label, f"{totals[kind]:,}")
    return table


def achieved_table(achieved: Mapping[str, Any]) -> Table:
    """Dense against what a plan leaves."""
    table = Table(title="What the plan leaves", title_justify="left")
    for column in ("", "dense", "kept", "left"):
        table.add_column(column, justify="right" if column else "left")
    for kind, label in _LABELS.items():
        before, after = achieved[f"dense_{kind}"], achieved[kind]
        table.add_row(label, f"{before:,}", f"{after:,}", percent(after, before))
    if "score_kept" in achieved:
        table.add_row("score", "", "", f"{achieved['score_kept']:.1%}")
    if "latency_ms" in achieved:
        before, after = achieved["dense_latency_ms"], achieved["latency_ms"]
        table.add_row("latency, measured (ms)", f"{before:.3g}", f"{after:.3g}", f"{1 / achieved['speed']:.1%}")
    return table


def sparsity_table(found: Sparsity, rows: int = 20) -> Table:
    """The largest layers and the sum of all."""
    table = Table(title="Zeros", title_justify="left", show_footer=True)
    largest = sorted(found.layers.items(), key=lambda entry: -entry[1].weights)
    rest = len(largest) - rows
    table.add_column("weight", footer="total", overflow="fold")
    table.add_column("pattern")
    table.add_column("weights", footer=f"{found.weights:,}", justify="right")
    table.add_column("zeros", footer=f"{found.zeros:,}", justify="right")
    table.add_column("share", footer=percent(found.zeros, found.weights), justify="right")
    for name, layer in largest[:rows]:
        share = percent(layer.zeros, layer.weights)
        table.add_row(name, layer.pattern, f"{layer.weights:,}", f"{layer.zeros:,}", share)
    if rest > 0:
        table.add_row(f"and {rest} smaller ones")
    return table


def short(number: int) -> str:
    """Three digits and a letter: 11.7M."""
    value, letters = float(number), iter("KMGTP")
    letter = ""
    while value >= 999.5 and (larger := next(letters, "")):
        value, letter = value / 1000, larger
    return f"{value:.3g}{letter}"


def percent(part: int, whole: int) -> str:
    return f"{part / whole:.1%}" if whole else "0.0%"
