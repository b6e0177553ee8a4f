"""Tables for runs and the demo: accuracy before, after and recovered; sizes; time; and words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.table import Table


def percent(figure: Mapping[str, float], seeds: int) -> str:
    """A mean in percent, with its spread where there are several seeds."""
    spread = f" ± {100 * figure['spread']:.1f}" if seeds > 1 else ""
    return f"{100 * figure['mean']:.1f}{spread}"


def run_table(results: Mapping[str, Any]) -> Table:
    """Accuracy and size of each step of a run."""
    summary, seeds = results["summary"], results["summary"]["seeds"]
    title = f"{results['name']}: accuracy on test data, %, {seeds} seed{'s' if seeds > 1 else ''}"
    table = Table(title=title, title_justify="left")
    for column in ("", "after pruning", "recovered", "parameters", "non-zeros", "FLOPs"):
        table.add_column(column, justify="right" if column else "left")
    first = results["seeds"][0]
    dense = first["dense"]
    table.add_row("dense", "", percent(summary["dense"], seeds), *(f"{dense[k]:,}" for k in _COUNTS))
    for index, step in enumerate(summary["steps"]):
        counted = first["steps"][index]
        table.add_row(
            wanted(counted["prune"]),
            percent(step["after_pruning"], seeds),
            percent(step["recovered"], seeds),
            *(f"{counted[k]:,}" for k in _COUNTS),
        )
    return table


_COUNTS = ("params", "nonzeros", "flops")


def curve_table(steps: Mapping[str, Mapping[str, Mapping[str, float]]], dense: float, seeds: int) -> Table:
    """Test accuracy after so much of the original epochs."""
    shares = list(dict.fromkeys(k for curve in steps.values() for k in curve))
    table = Table(title="Test accuracy, %, after so much of the original epochs", title_justify="left")
    table.add_column("")
    for share in shares:
        table.add_column(share, justify="right")
    table.add_column("against dense", justify="right")
    for name, curve in steps.items():
        last = 100 * (list(curve.values())[-1]["mean"] - dense)
        table.add_row(name, *(percent(curve[s], seeds) if s in curve else "" for s in shares), f"{last:+.1f}")
    return table


def wanted(prune: Mapping[str, Any]) -> str:
    """A step of pruning in few words."""
    for kind in ("channels", "params", "flops"):
        if kind in prune:
            value = prune[kind]
            return f"{value:.0%} of {kind} left" if value <= 1 else f"{value:,} {kind} left"
    if "latency" in prune:
        value = prune["latency"]
        return f"in {value}" if isinstance(value, str) else f"in {value:.0%} of the time"
    if prune.get("pattern", "unstructured") == "unstructured":
        return f"{prune['sparsity']:.0%} zeros"
    return str(prune["pattern"])


def claim(dense: float, after: float, recovered: float) -> str:
    """What became of: drops 5-15 points, back within 1-2 points after 10-20% of the epochs."""
    drop, left = 100 * (dense - after), 100 * (dense - recovered)
    fell = f"fell by {drop:.1f} points" if drop > 0.05 else "did not fall"
    usual = "less than" if drop < 5 else "more than" if drop > 15 else "as much as"
    back = "is back within 1 point" if left <= 1 else "is back within 2 points" if left <= 2 else "is NOT back within 2"
    where = "equal to dense" if abs(left) < 0.05 else f"{abs(left):.1f} {'below' if left > 0 else 'above'} dense"
    return f"{fell} ({usual} the usual 5-15) and after recovery {back} ({where})"
