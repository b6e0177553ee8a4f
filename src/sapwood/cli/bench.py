"""``sapwood bench``: which form of a pruned product or model pays on this machine."""

from __future__ import annotations

import contextlib
import json
import re
from pathlib import Path
from typing import Annotated, Any

import typer

from sapwood.cli.common import following, harmless, new_folder, page_beside, parse_fractions, show, subject, working
from sapwood.errors import explain
from sapwood.measurement.points import Bench, chosen_device
from sapwood.pipeline.bench import bench_matmul, bench_model
from sapwood.pipeline.models import FORMS
from sapwood.reporting.page import PAGE
from sapwood.reporting.sources import BENCH
from sapwood.reporting.speed import note_words, row_words, skipped_words, speed_table, summary_words
from sapwood.storage.atomic import write_text
from sapwood.version import __version__


def bench(
    model: Annotated[
        str | None, typer.Argument(metavar="[MODEL]", help=f"{FORMS}, or the path of a bundle.", show_default=False)
    ] = None,
    matmul: Annotated[str | None, typer.Option(help="Instead of a model, weights of ROWSxCOLS: 14336x4096.")] = None,
    batch: Annotated[str | None, typer.Option(help="Batch sizes; 1,16,256, or 1,8 for a model.")] = None,
    sparsity: Annotated[str, typer.Option(help="Fractions of zeros.")] = "0.5,0.9",
    channels: Annotated[float | None, typer.Option(help="The channels that a cut model keeps; 0.5.")] = None,
    inputs: Annotated[list[str] | None, typer.Option("--input", help="A shape, 1x3x224x224 or 1x16:int64.")] = None,
    dense: Annotated[str | None, typer.Option("--model", help="The dense model of a bundle that names none.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; cuda where there is one.")] = None,
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16 or float16; bfloat16 on a GPU.")] = None,
    backend: Annotated[
        str | None, typer.Option(help="eager or graph; for a model also compile, onnxruntime, openvino.")
    ] = None,
    seconds: Annotated[float, typer.Option(help="How long each point is measured.")] = 1.0,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Write the result as JSON to this file.")] = None,
    page: Annotated[
        bool,
        typer.Option("--report/--no-report", help="Write a page beside the JSON; into runs/bench-TIME by default."),
    ] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Measure which form of zeros pays here: dense, zeros, CSR, BSR, 2:4 and cut, taking turns."""
    if (model is None) == (matmul is None):
        got = "both" if model else "neither"
        raise explain("a model, or --matmul ROWSxCOLS", got, "For example: sapwood bench --matmul 4096x4096", "bench")
    if matmul is not None and (inputs or dense or channels is not None):
        raise explain("--matmul alone", "--input, --model or --channels with it", "Those are for a model.", "bench")
    if out is not None and page and out.suffix == ".html":
        raise explain("a file for JSON, such as bench.json", str(out), "The page is written beside it.", "--out")
    shape = parse_matmul(matmul) if matmul is not None else None
    batches = parse_batches(batch or ("1,16,256" if shape else "1,8"))
    options: dict[str, Any] = {"device": device, "dtype": dtype, "backend": backend, "seconds": seconds}
    shares = parse_fractions(sparsity, "--sparsity")
    chosen_device(device)  # what is not there is said before anything is loaded
    meant = None
    if model is not None:
        with working(f"Building {model} ..."):
            meant = subject(model, inputs, dense)
    with following(as_json) as options["tell"]:
        if meant is not None:
            kept = 0.5 if channels is None else channels
            found = bench_model(meant.model, meant.inputs, batches, shares, kept, **options, name=str(model))
        else:
            assert shape is not None
            found = bench_matmul(*shape, batches, shares, **options)
    result = summary(found)
    folder = new_folder("bench")
    file = out or (folder / BENCH if page else None)
    wrote: list[str] = []
    shown = (out.with_suffix(".html") if out else folder / PAGE) if page else None
    with contextlib.nullcontext() if out else harmless():  # unasked it is a gift, and takes no result with it
        wrote += [] if file is None else _write(file, result, shown)
    show(
        result,
        as_json,
        speed_table(found),
        *summary_words(found),
        "",
        *skipped_words(found),
        *note_words(found),
        *wrote,
    )


def _write(file: Path, result: dict[str, Any], page: Path | None) -> list[str]:
    """The JSON, the page beside it, and words about both."""
    write_text(file, json.dumps(result, indent=1, default=str) + "\n")
    shown = page_beside(page, file) if page is not None else None
    return [f"Wrote {file}."] + ([f"A page to look at or to send: {shown}"] if shown else [])


def summary(found: Bench) -> dict[str, Any]:
    """All that is shown, as plain data."""
    told = found.to_dict()
    for point, entry in zip(found.points, told["points"], strict=True):
        for row, line in zip(point.rows, entry["rows"], strict=True):
            line["verdict"] = row_words(row, point.sparsity, found)
    return {"sapwood": __version__, **told, "summary": summary_words(found), "skipped": skipped_words(found)}


def parse_matmul(text: str) -> tuple[int, int]:
    """``14336x4096``: rows (outputs) and columns (inputs) of the weights."""
    parts = re.fullmatch(r"(\d{1,7})x(\d{1,7})", text.strip())
    if parts is None:
        raise explain("ROWSxCOLS such as 14336x4096", repr(text), "Mend it.", "--matmul")
    return int(parts[1]), int(parts[2])


def parse_batches(text: str) -> list[int]:
    """``1,16,256``, each once."""
    parts = [p.strip() for p in text.split(",")]
    if not all(re.fullmatch(r"\d{1,7}", p) and int(p) for p in parts):
        raise explain("positive whole numbers such as 1,16,256", repr(text), "Mend it.", "--batch")
    return list(dict.fromkeys(int(p) for p in parts))
