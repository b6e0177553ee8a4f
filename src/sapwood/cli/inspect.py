"""``sapwood inspect``: what can be cut, what it would save, and what is frozen and why."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from rich.console import RenderableType

from sapwood.capture.run import is_meta, tensors_in
from sapwood.capture.trace import Trace, trace
from sapwood.cli.common import Subject, show, subject, working
from sapwood.masking.report import Sparsity, sparsity
from sapwood.pipeline.models import FORMS
from sapwood.reporting import frozen_table
from sapwood.reporting.inspection import Saving, savings, savings_table, sparsity_table, totals_table


def inspect(
    model: Annotated[str, typer.Argument(metavar="MODEL", help=f"{FORMS}, or the path of a bundle.")],
    inputs: Annotated[list[str] | None, typer.Option("--input", help="A shape, 1x3x224x224 or 1x16:int64.")] = None,
    dense: Annotated[str | None, typer.Option("--model", help="The dense model of a bundle that names none.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Show which channels go together, what a cut of each group would save, and what is frozen and why."""
    with working(f"Looking at {model} ..."):
        meant = subject(model, inputs, dense, empty=True)
        seen = trace(meant.model, meant.inputs)
        halves = savings(seen)
        zeros = None if is_meta(meant.model) else sparsity(meant.model)
    result = summary(model, meant, seen, halves, zeros)
    parts: list[RenderableType] = [savings_table(seen, halves), frozen_table(seen)]
    parts += [sparsity_table(zeros)] if zeros is not None and zeros.zeros else []
    parts += [totals_table(result["totals"])]
    parts += [f"Counted for inputs of {' and '.join('x'.join(map(str, shape)) for shape in result['inputs'])}."]
    parts += [f"Note: {note}." for note in seen.notes]
    show(result, as_json, *parts)


def summary(name: str, meant: Subject, seen: Trace, halves: list[Saving], zeros: Sparsity | None) -> dict[str, Any]:
    """All that is shown, as plain data."""
    return {
        "model": name,
        "inputs": [list(t.shape) for t in tensors_in(meant.inputs)],
        "totals": {"channels": sum(seen.dense), "params": seen.params, "flops": seen.flops},
        "groups": [_group(saving, seen) for saving in halves],
        "frozen": [
            {"sites": [list(s) for s in f.sites], "channels": f.channels, "reason": f.reason} for f in seen.frozen
        ],
        "sparsity": None if zeros is None else {"zeros": zeros.zeros, "weights": zeros.weights, "total": zeros.total},
        "notes": list(seen.notes),
    }


def _group(saving: Saving, seen: Trace) -> dict[str, Any]:
    group = saving.group
    return {
        "name": group.name,
        "channels": group.width,
        "sites": [list(s) for s in group.sites],
        "params_per_channel": group.params_per_channel,
        "flops_per_channel": group.flops_per_channel,
        "removal": "exact" if group.exact else "approximate",
        "half": {
            "kept": saving.kept,
            "params_saved": saving.params,
            "params_saved_share": saving.params / seen.params if seen.params else 0.0,
            "flops_saved": saving.flops,
            "flops_saved_share": saving.flops / seen.flops if seen.flops else 0.0,
            "along_with": list(saving.along),
        },
    }
