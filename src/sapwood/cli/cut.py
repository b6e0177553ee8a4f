"""``sapwood cut``: a dense checkpoint and a plan give the pruned file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sapwood.cli.common import require_apart, show, size_of
from sapwood.storage.replay import cut_file


def cut(
    dense: Annotated[Path, typer.Argument(help="The dense checkpoint, a .safetensors file.")],
    plan: Annotated[Path, typer.Option(help="The plan.json that says what to keep.")],
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Where to write; a file or a folder.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Cut a dense checkpoint by a plan: the same bytes that saving the cut model gives."""
    target = out or dense.with_suffix(".pruned.safetensors")
    require_apart(dense, target)
    cut_file(plan, dense, target)
    before, after = size_of(dense), size_of(target)
    result = {"path": str(target), "bytes_before": before, "bytes_after": after}
    show(result, as_json, f"Wrote {target}: {after:,} bytes, {after / before:.1%} of the dense file.")
