"""``sapwood staircase``: latency against width on this machine, with the cliffs marked."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from sapwood.cli.common import following, on_device, parse_fractions, parse_rounding, show, subject, working
from sapwood.pipeline.models import FORMS
from sapwood.pipeline.staircase import staircase as measure_stairs
from sapwood.reporting.stairs import stairs_table, stairs_words
from sapwood.storage.atomic import write_text
from sapwood.version import __version__


def staircase(
    model: Annotated[str, typer.Argument(metavar="MODEL", help=f"{FORMS}, or the path of a bundle.")],
    batch: Annotated[int | None, typer.Option(help="The batch size; that of --input.")] = None,
    shares: Annotated[str, typer.Option(help="Shares of the channels to keep.")] = "0.9,0.8,0.7,0.6,0.5,0.4,0.3,0.2",
    round_to: Annotated[str | None, typer.Option(help="Keep multiples of this, or auto.")] = None,
    inputs: Annotated[list[str] | None, typer.Option("--input", help="A shape, 1x3x224x224 or 1x16:int64.")] = None,
    dense: Annotated[str | None, typer.Option("--model", help="The dense model of a bundle that names none.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; cuda where there is one.")] = None,
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16 or float16; bfloat16 on a GPU.")] = None,
    backend: Annotated[str, typer.Option(help="auto, eager, graph, compile, onnxruntime or openvino.")] = "auto",
    seconds: Annotated[float, typer.Option(help="How long each width is measured.")] = 2.0,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Write the result as JSON to this file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Measure latency against width: the same share of every group cut, from little to much."""
    chosen, step = parse_fractions(shares, "--shares"), parse_rounding(round_to)
    with working(f"Building {model} ..."):
        meant = on_device(subject(model, inputs, dense), device, dtype, batch)
    with following(as_json) as tell:
        found = measure_stairs(meant.model, meant.inputs, backend, chosen, step, seconds, tell)
    result = {"sapwood": __version__, **found.to_dict(), "summary": stairs_words(found)}
    if out is not None:
        write_text(out, json.dumps(result, indent=1, default=str) + "\n")
    wrote = [f"Wrote {out}."] if out is not None else []
    show(result, as_json, stairs_table(found), *stairs_words(found), *wrote)
