"""The ``sapwood`` command."""

from __future__ import annotations

import sys

import typer

from sapwood.cli.bench import bench
from sapwood.cli.cut import cut
from sapwood.cli.demo import demo
from sapwood.cli.export import export
from sapwood.cli.inspect import inspect
from sapwood.cli.mask import mask
from sapwood.cli.plan import plan
from sapwood.cli.recipes import recipes
from sapwood.cli.report import report
from sapwood.cli.run import run
from sapwood.cli.sensitivity import sensitivity
from sapwood.cli.staircase import staircase
from sapwood.errors import SapwoodError
from sapwood.version import __version__

app = typer.Typer(help="Prunes PyTorch models and proves what was gained.", no_args_is_help=True, add_completion=False)
app.command()(demo)
app.command()(run)
app.command()(recipes)
app.command()(inspect)
app.command()(plan)
app.command()(cut)
app.command()(mask)
app.command()(export)
app.command()(bench)
app.command()(staircase)
app.command()(sensitivity)
app.command()(report)


@app.callback(invoke_without_command=True)
def about(version: bool = typer.Option(False, "--version", help="Print the version.")) -> None:
    """Prunes PyTorch models and proves what was gained."""
    if version:
        print(__version__)
        raise typer.Exit


def main() -> None:
    """Run; what a user can mend is one clear line and exit code 2."""
    try:
        app()
    except SapwoodError as error:
        print(f"sapwood: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
