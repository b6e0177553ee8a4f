"""``sapwood plan``: decide what to keep, as a file that ``sapwood cut`` follows."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from sapwood.capture.trace import Trace, trace
from sapwood.cli.common import (
    Subject,
    fill,
    following,
    on_device,
    parse_budget,
    parse_rounding,
    parse_shares,
    remark,
    show,
    subject,
    working,
)
from sapwood.pipeline import make_plan
from sapwood.pipeline.models import FORMS
from sapwood.reporting import groups_table
from sapwood.reporting.inspection import achieved_table
from sapwood.storage.atomic import write_text
from sapwood.storage.bundle import describe
from sapwood.storage.examples import describe_inputs
from sapwood.surgery.cut import cut
from sapwood.types import Plan


def plan(
    model: Annotated[str, typer.Argument(metavar="MODEL", help=f"{FORMS}, or the path of a bundle.")],
    budget: Annotated[
        str,
        typer.Option(help="What may remain: flops=0.5, params=1000000, latency=0.5, latency=3.5ms, ..."),
    ],
    score: Annotated[str, typer.Option(help="What ranks channels: l1, l2, lamp, bn_scale or random.")] = "l1",
    allocate: Annotated[
        str | None, typer.Option(help="global (one ranking; the default) or uniform (the same share).")
    ] = None,
    share: Annotated[
        list[str] | None, typer.Option(help="layer1=0.8 keeps four fifths there of the share that others keep.")
    ] = None,
    ignore: Annotated[list[str] | None, typer.Option(help="A module or parameter to keep, or re:...")] = None,
    round_to: Annotated[str | None, typer.Option(help="Keep multiples of this, or auto.")] = None,
    device: Annotated[str | None, typer.Option(help="For latency: cpu or cuda; cuda where there is one.")] = None,
    dtype: Annotated[str | None, typer.Option(help="For latency: float32, bfloat16 or float16.")] = None,
    batch: Annotated[int | None, typer.Option(help="For latency: the batch size; that of --input.")] = None,
    backend: Annotated[str, typer.Option(help="For latency: auto, graph, compile, onnxruntime, ...")] = "auto",
    weights: Annotated[Path | None, typer.Option(help="A dense checkpoint to score, a .safetensors file.")] = None,
    inputs: Annotated[list[str] | None, typer.Option("--input", help="A shape, 1x3x224x224 or 1x16:int64.")] = None,
    dense: Annotated[str | None, typer.Option("--model", help="The dense model of a bundle that names none.")] = None,
    out: Annotated[Path, typer.Option("--out", "-o", help="Where to write the plan.")] = Path("plan.json"),
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Decide which channels stay within a budget and write the plan."""
    limit, step = parse_budget(budget), parse_rounding(round_to)
    shared = parse_shares(share, allocate)
    with working(f"Planning for {model} ..."):
        meant = subject(model, inputs, dense)
        if weights is not None:
            fill(meant.model, weights)
        elif meant.fresh:
            remark("no --weights were given, freshly initialised ones are scored.")
    measured = limit.kind == "latency" or step == "auto"
    given = {
        "--device": device,
        "--dtype": dtype,
        "--batch": batch,
        "--backend": backend if backend != "auto" else None,
    }
    unused = [name for name, value in given.items() if value is not None]
    if unused and not measured:
        remark(f"{', '.join(unused)}: nothing is measured for a budget of {limit.kind}, so this makes no difference.")
    with following(as_json or not measured) as tell:
        where = on_device(meant, device, dtype, batch) if measured else meant
        made = make_plan(
            where.model, where.inputs, limit, score, shared, ignore or (), step, backend=backend, tell=tell
        )
    with working(f"Planning for {model} ..."):
        write_plan(out, meant, made)
        seen = trace(meant.model, meant.inputs)
    file = weights or "dense.safetensors"
    show(
        summary(out, made, seen),
        as_json,
        groups_table(seen, made),
        achieved_table(made.achieved),
        *(f"Note: {note}." for note in made.notes),
        f"Wrote {out}. Next: sapwood cut {file} --plan {out}",
    )


def write_plan(path: Path, meant: Subject, made: Plan) -> None:
    """The plan.json that saving the cut model would write, but for the digests of its weights."""
    record = describe(cut(meant.model, made), made, about=meant.about, inputs=describe_inputs(meant.inputs))
    write_text(path, record.to_json(pretty=True))


def summary(path: Path, made: Plan, seen: Trace) -> dict[str, Any]:
    """All that is shown, as plain data."""
    return {
        "path": str(path),
        "budget": dict(made.budget),
        "achieved": dict(made.achieved),
        "exact": made.exact,
        "groups": {
            g.name: {"channels": g.width, "kept": len(made.groups.get(g.name, range(g.width)))} for g in seen.groups
        },
        "notes": list(made.notes),
    }
