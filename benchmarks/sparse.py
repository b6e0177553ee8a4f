"""Zeros that pay: packed weights against dense ones, over the linear layers of Llama-3-8B and 70B.

    python -m benchmarks.sparse [--part batch1|batches|cpu] [--out benchmarks/results/sparse.json]

batch1   one row of inputs, all shapes, 50 to 95% zeros; the geometric mean over the shapes
batches  1 to 64 rows: up to which batch the packed form pays
cpu      4096 x 4096 and 11008 x 4096 in float32 and bfloat16 on this machine's cores, beside CSR

Every point: dense and packed take turns in one run; on a GPU as CUDA graphs, over as many copies of the weights as
fill the cache twice, so that none comes from it. Outputs are checked against a dense product with the same zeros.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

import sapwood as sw
from sapwood.pipeline.bench import bench_matmul

LLAMA_8B = ((4096, 4096), (1024, 4096), (14336, 4096), (4096, 14336))
LLAMA_70B = ((8192, 8192), (1024, 8192), (28672, 8192), (8192, 28672))
ZEROS = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95)


def rows_of(found: Any) -> list[dict[str, Any]]:
    """One entry for each point and form, with what was reached."""
    made = []
    for point in found.points:
        dense = next((r for r in point.rows if r.form == "dense"), None)
        for row in point.rows:
            if dense is None or row is dense:
                continue
            bound = dense.cost.moved_bytes / row.cost.moved_bytes
            made.append(
                {
                    "shape": f"{found.what['rows']}x{found.what['cols']}",
                    "zeros": point.sparsity,
                    "batch": point.batch,
                    "form": row.form,
                    "us": 1000 * row.timing.median_ms,
                    "dense_us": 1000 * dense.timing.median_ms,
                    "speed": row.timing.speed,
                    "speed_interval": [row.timing.speed_low, row.timing.speed_high],
                    "bound": bound,
                    "of_bound": row.timing.speed / bound,
                    "tb_per_s": row.cost.moved_bytes / row.timing.median_ms / 1e9,
                    "dense_tb_per_s": dense.cost.moved_bytes / dense.timing.median_ms / 1e9,
                    "error": row.error,
                    "dense_error": dense.error,
                    "copies": row.copies,
                    "cold": row.cold,
                }
            )
        made += [
            {"zeros": point.sparsity, "batch": point.batch, "form": form, "skipped": why}
            for form, why in point.skipped.items()
        ]
    return made


def mean(values: list[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values)) if values else math.nan


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", default="batch1")
    parser.add_argument("--shapes", default="")
    parser.add_argument("--zeros", default=",".join(map(str, ZEROS)))
    parser.add_argument("--batch", default="")
    parser.add_argument("--dtype", default="")
    parser.add_argument("--seconds", type=float, default=0.15)
    parser.add_argument("--out", default="benchmarks/results/sparse.json")
    options = parser.parse_args()
    cpu = options.part == "cpu"
    shapes: tuple[tuple[int, int], ...] = ((4096, 4096), (11008, 4096)) if cpu else (*LLAMA_8B, *LLAMA_70B)
    if options.shapes:
        shapes = tuple((int(a), int(b)) for a, b in (s.split("x") for s in options.shapes.split(",")))
    batches = {"batch1": (1,), "batches": (1, 2, 4, 8, 16, 32, 64), "cpu": (1, 4, 16)}[options.part]
    if options.batch:
        batches = tuple(int(b) for b in options.batch.split(","))
    zeros = tuple(float(z) for z in options.zeros.split(","))
    console, rows, machine = Console(width=150), [], {}
    for dtype in options.dtype.split(",") if options.dtype else (["float32", "bfloat16"] if cpu else ["bfloat16"]):
        for shape in shapes:
            start = time.perf_counter()
            forms = ("dense", "CSR", "packed") if cpu else ("dense", "packed")
            found = bench_matmul(
                *shape, batches, zeros, "cpu" if cpu else "cuda", dtype, None, options.seconds, forms=forms
            )
            machine = dict(found.machine)
            rows += [{**r, "dtype": dtype} for r in rows_of(found)]
            console.print(f"{dtype} {shape[0]}x{shape[1]}: {time.perf_counter() - start:.1f} s")
    about = {"date": datetime.date.today().isoformat(), "sapwood": sw.__version__, **machine}
    path = Path(options.out)
    kept = json.loads(path.read_text()) if path.exists() else {}
    kept[options.part] = {"about": about, "rows": rows}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(kept, indent=1, default=str) + "\n")
    show(console, rows)


def show(console: Console, rows: list[dict[str, Any]]) -> None:
    measured = [r for r in rows if "speed" in r]
    for r in rows:
        if "skipped" in r:
            console.print(f"batch {r['batch']}, {r['zeros']:.0%}: {r['form']} skipped: {r['skipped']}")
    zeros = sorted({r["zeros"] for r in measured})
    groups = sorted({(r["dtype"], r["form"], r["shape"], r["batch"]) for r in measured})
    table = Table(title="speed against dense", title_justify="left")
    for column in ("dtype", "form", "shape", "batch", "dense us", *(f"{z:.0%}" for z in zeros)):
        table.add_column(column, justify="right")
    for group in groups:
        own = {r["zeros"]: r for r in measured if (r["dtype"], r["form"], r["shape"], r["batch"]) == group}
        first = next(iter(own.values()))
        cells = [f"{own[z]['speed']:.2f} ({own[z]['of_bound']:.0%})" if z in own else "" for z in zeros]
        table.add_row(*map(str, group), f"{first['dense_us']:.1f}", *cells)
    for kind in sorted({(r["dtype"], r["form"], r["batch"]) for r in measured}):
        own = [r for r in measured if (r["dtype"], r["form"], r["batch"]) == kind]
        cells = [f"{mean([r['speed'] for r in own if r['zeros'] == z]):.2f}" for z in zeros]
        table.add_row(kind[0], kind[1], "geometric mean", str(kind[2]), "", *cells)
    console.print(table)


if __name__ == "__main__":
    main()
