"""Tables for people: what can be cut, what cannot and why, and what a cut gave."""

from __future__ import annotations

from rich.table import Table

from sapwood.capture.trace import Trace
from sapwood.pipeline.prune import Pruned
from sapwood.types import Plan


def groups_table(trace: Trace, plan: Plan | None = None) -> Table:
    """The groups in the order of the model; with a plan, how many channels each keeps."""
    table = Table(title="Channels that can be cut", title_justify="left")
    table.add_column("group")
    table.add_column("channels", justify="right")
    if plan is not None:
        table.add_column("kept", justify="right")
    table.add_column("params each", justify="right")
    table.add_column("FLOPs each", justify="right")
    table.add_column("weights touched", justify="right")
    table.add_column("removal is")
    for group in trace.groups:
        kept = [str(len(plan.groups.get(group.name, range(group.width))))] if plan is not None else []
        table.add_row(
            group.name,
            str(group.width),
            *kept,
            f"{group.params_per_channel:,}",
            f"{group.flops_per_channel:,}",
            str(len(group.sites)),
            "exact" if group.exact else "approximate",
        )
    return table


def frozen_table(trace: Trace) -> Table:
    """What may not be cut, and why."""
    table = Table(title="Channels that stay, and why", title_justify="left")
    table.add_column("where")
    table.add_column("channels", justify="right")
    table.add_column("reason", overflow="fold")
    for frozen in trace.frozen:
        name, dim = frozen.sites[0]
        more = f" and {len(frozen.sites) - 1} more" if len(frozen.sites) > 1 else ""
        table.add_row(f"{name}, dim {dim}{more}", str(frozen.channels), frozen.reason)
    return table


def result_table(done: Pruned) -> Table:
    """Dense against cut, and what the check found."""
    table = Table(title="Result", title_justify="left")
    for column in ("", "dense", "cut", "left"):
        table.add_column(column, justify="right" if column else "left")
    names = {"channels": "channels", "params": "parameters", "flops": "FLOPs (2 x multiply-accumulates)"}
    for kind, label in names.items():
        before, after = done.plan.achieved[f"dense_{kind}"], done.plan.achieved[kind]
        table.add_row(label, f"{before:,}", f"{after:,}", f"{after / before:.1%}")
    table.caption = f"Check against the masked reference: {done.check.status}, error {done.check.max_error:.1e}"
    table.caption_justify = "left"
    return table
