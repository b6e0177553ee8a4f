"""Sensitivity as a table for the terminal, and in words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

HARMLESS = 0.01


def sensitivity_table(found: Mapping[str, Any]) -> Table:
    """A row per group in the order of the model, a column per share removed."""
    settings, shares = found["settings"], found["settings"]["shares"]
    title = f"Accuracy, %, when a share of one group is removed ({settings['examples']:,} validation examples)"
    table = Table(title=title, title_justify="left")
    table.add_column("group", overflow="fold")
    table.add_column("channels", justify="right")
    for share in shares:
        table.add_column(f"-{share:.0%}", justify="right")
    for name, cells in by_group(found["cells"]).items():
        told = {c["share"]: c for c in cells}
        table.add_row(name, str(cells[0]["width"]), *(_accuracy(told.get(s)) for s in shares))
    table.caption, table.caption_justify = f"The whole model: {100 * found['dense']:.1f}%.", "left"
    return table


def by_group(cells: Sequence[Mapping[str, Any]]) -> dict[str, list[Mapping[str, Any]]]:
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for cell in cells:
        groups.setdefault(cell["group"], []).append(cell)
    return groups


def _accuracy(cell: Mapping[str, Any] | None) -> str:
    if cell is None or cell["accuracy"] is None:
        return "-"
    return f"{100 * cell['accuracy']:.1f}"


def sensitivity_words(found: Mapping[str, Any]) -> list[str]:
    """Which group bears most, and which least, at about half."""
    shares = found["settings"]["shares"]
    share = min(shares, key=lambda s: abs(s - 0.5))
    cells = [c for c in found["cells"] if c["share"] == share and c["accuracy"] is not None]
    if len(cells) < 2:
        return []
    best, worst = max(cells, key=lambda c: c["accuracy"]), min(cells, key=lambda c: c["accuracy"])
    harmless = sum(c["accuracy"] >= found["dense"] - HARMLESS for c in cells)
    return [
        f"With {share:.0%} of one group removed, {best['group']} loses least ({100 * best['accuracy']:.1f}% left) and "
        f"{worst['group']} most ({100 * worst['accuracy']:.1f}%). "
        f"{harmless} of {len(cells)} groups lose at most a point. Nothing was trained after these cuts."
    ]
