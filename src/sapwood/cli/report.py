"""``sapwood report``: one page that shows what pruning gave, as a file or live."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from sapwood.cli.common import remark, show, working
from sapwood.errors import explain
from sapwood.reporting.page import PAGE, write_page
from sapwood.reporting.serve import Server


def report(
    sources: Annotated[
        list[Path],
        typer.Argument(metavar="RUN_FOLDER...", help="Run folders; also the JSON of bench, staircase, sensitivity."),
    ],
    out: Annotated[Path | None, typer.Option("--out", "-o", help="The file; report.html in the run's folder.")] = None,
    title: Annotated[str, typer.Option(help="What the page is called; the names of the runs.")] = "",
    serve: Annotated[bool, typer.Option("--serve", help="Show it live, on this machine only.")] = False,
    port: Annotated[int, typer.Option(help="With --serve: the port; any free one.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print what was written as JSON.")] = False,
) -> None:
    """Write a self-contained page that compares runs: accuracy, latency, size, and why."""
    if serve and (out or as_json):
        raise explain("--serve alone", "--out or --json with it", "Write the file in another call.", "report")
    if serve:
        _serve(Server(sources, port, title))
        return
    path = out or _default(sources)
    with working("Writing the page ..."):
        data = write_page(path, sources, title)
    size = path.stat().st_size
    result = {
        "path": str(path),
        "bytes": size,
        "verdicts": {c["title"]: c["verdict"] for c in data["cards"]},
        "sections": [s["id"] for s in data["sections"] if not s["missing"]],
    }
    verdicts = [f"{c['title']}: {c['verdict']}" for c in data["cards"]]
    show(result, as_json, *verdicts, f"Wrote {path} ({size / 1e6:.1f} MB). Open it in a browser, or send it.")


def _default(sources: list[Path]) -> Path:
    """Beside what it is about, where that is one thing."""
    if len(sources) > 1:
        return Path(PAGE)
    return sources[0] / PAGE if sources[0].is_dir() else sources[0].with_suffix(".html")


def _serve(server: Server) -> None:
    with server:
        try:
            print(f"Live at {server.url} (this machine only). Ctrl-C ends it.", flush=True)
            server.serve_forever(poll_interval=0.2)
        except KeyboardInterrupt:
            print(file=sys.stderr)
            remark("stopped.")
