"""``sapwood sensitivity``: which groups of a run's model bear a cut, and how much of one."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from sapwood.cli.common import following, parse_fractions, show
from sapwood.pipeline.sensitivity import run_sensitivity
from sapwood.reporting.sensitivity import sensitivity_table, sensitivity_words


def sensitivity(
    folder: Annotated[Path, typer.Argument(metavar="RUN_FOLDER", help="A run that has been trained.")],
    shares: Annotated[str, typer.Option(help="Shares of a group's channels to remove.")] = "0.1,0.25,0.5,0.75,0.9",
    batches: Annotated[int, typer.Option(help="How many batches of the validation data are looked at.")] = 4,
    seed: Annotated[int | None, typer.Option(help="Which seed's model; the last one.")] = None,
    anew: Annotated[bool, typer.Option("--anew", help="Start over; what is there is replaced.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Cut a part of one group at a time and see what accuracy is left. Stopped, it goes on when called again."""
    chosen = parse_fractions(shares, "--shares")
    try:
        with following(as_json) as tell:
            found = run_sensitivity(folder, batches, chosen, seed, anew, tell)
    except KeyboardInterrupt:
        same = [str(folder), "--shares", shares, "--batches", str(batches)]
        same += ["--seed", str(seed)] if seed is not None else []
        print(f"\nsapwood: stopped. Go on with: sapwood sensitivity {shlex.join(same)}", file=sys.stderr)
        raise typer.Exit(130) from None
    show(
        {**found, "folder": str(folder)},
        as_json,
        sensitivity_table(found),
        *sensitivity_words(found),
        f"It is in {folder}: sensitivity.json. Show it with: sapwood report {folder}",
    )
