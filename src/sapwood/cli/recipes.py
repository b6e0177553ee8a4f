"""``sapwood recipes``: those that come with Sapwood."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from sapwood.cli.common import show
from sapwood.errors import explain
from sapwood.pipeline.recipe import SHIPPED, shipped


def recipes(
    name: Annotated[str | None, typer.Argument(help="Print this recipe, to start your own from.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the list as JSON.")] = False,
) -> None:
    """List the recipes that come with Sapwood, or print one."""
    found = shipped()
    if name is not None:
        if name not in found:
            raise explain(f"one of {', '.join(found)}", repr(name), "See `sapwood recipes`.", "recipes")
        text = (SHIPPED / f"{name}.yaml").read_text()
        show({"name": name, "recipe": text}, True, "") if as_json else print(text, end="")
        return
    if as_json:
        show(found, True, "")
        return
    table = Table("name", "about", title="Run one with: sapwood run NAME", title_justify="left")
    for key, about in found.items():
        table.add_row(key, about)
    Console().print(table)
