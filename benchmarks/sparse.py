"""Zeros that pay: packed weights against dense ones, over the linear layers of Llama-3-8B and 70B.

    python -m benchmarks.sparse [--part batch1|batches|deployed|cpu] [--out benchmarks/results/sparse.json]

batch1    one row of inputs, all shapes, 50 to 95% zeros; the geometric mean over the shapes
batches   1 to 64 rows: up to which batch the packed form pays
deployed  stacks of layers, too large for any cache, as ``sw.deploy`` runs them: packed where that pays, else dense
cpu       4096 x 4096 and 11008 x 4096 in float32 and bfloat16 on this machine's cores, beside CSR

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

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

import sapwood as sw
from sapwood.measurement import take_turns
from sapwood.measurement.backends import prepare
from sapwood.measurement.machine import describe
from sapwood.pipeline.bench import bench_matmul

LLAMA_8B = ((4096, 4096), (1024, 4096), (14336, 4096), (4096, 14336))
LLAMA_70B = ((8192, 8192), (1024, 8192), (28672, 8192), (8192, 28672))
ZEROS = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95)
STACKS = ((4096, 4096), (1024, 4096), (14336, 4096), (8192, 8192))
TOO_LARGE = 240_000_000
"""Bytes of weights that no cache holds."""


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


def stack_of(rows: int, columns: int, zeros: float, device: torch.device, dtype: torch.dtype) -> nn.Module:
    """Layers of this shape and back, with random weights of which so many are zero."""
    bytes_ = 2 * rows * columns * dtype.itemsize
    layers = []
    for _ in range(max(1, -(-TOO_LARGE // bytes_)) if device.type == "cuda" else 1):
        for out, into in ((rows, columns), (columns, rows)):
            layer = nn.Linear(into, out, bias=False, device=device, dtype=dtype)
            weight = torch.randn(out, into, device=device) / (into * (1 - zeros)) ** 0.5
            layer.weight.data.copy_(weight.masked_fill_(torch.rand_like(weight) < zeros, 0))
            layers.append(layer)
    return nn.Sequential(*layers).eval()


def deployed(options: argparse.Namespace, shapes: tuple[tuple[int, int], ...], console: Console) -> None:
    """Dense (the same zeros, stored like any other number) and deployed take turns in one run."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype, backend = (torch.bfloat16, "graph") if device.type == "cuda" else (torch.float32, "eager")
    rows: list[dict[str, Any]] = []
    for shape in shapes:
        for zeros in (float(z) for z in options.zeros.split(",")):
            torch.manual_seed(0)
            model = stack_of(*shape, zeros, device, dtype)
            for batch in (int(b) for b in (options.batch or "1,2,4,8,16,32,64,256").split(",")):
                x = torch.randn(batch, shape[1], device=device, dtype=dtype)
                form = sw.deploy(model, x, backend, seconds=options.seconds)
                calls = {"dense": prepare(model, x, backend).call, "deployed": form.runner_for(((x,), {})).call}
                with torch.no_grad():
                    times = take_turns(calls, 2 * options.seconds, device=device)
                told = {"shape": "x".join(map(str, shape)), "zeros": zeros, "batch": batch, "layers": len(model)}
                told |= {"form": form.form, "notes": form.notes, "error": form.error}
                told |= {"dense_ms": times["dense"].median_ms, "ms": times["deployed"].median_ms}
                own = times["deployed"]
                told |= {"speed": own.speed, "speed_interval": [own.speed_low, own.speed_high]}
                rows.append(told)
                console.print(f"{told['shape']} {zeros:.0%} batch {batch}: {own.speed:.2f} as {form.form}")
    about = {"date": datetime.date.today().isoformat(), "sapwood": sw.__version__, **describe(device)}
    keep(Path(options.out), "deployed", {"about": about | {"dtype": str(dtype)}, "rows": rows})
    least = min(rows, key=lambda r: r["speed"])
    console.print(f"least: {least['speed']:.3f} at {least['shape']}, {least['zeros']:.0%}, batch {least['batch']}")


def keep(path: Path, part: str, found: dict[str, Any]) -> None:
    kept = json.loads(path.read_text()) if path.exists() else {}
    kept[part] = found
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(kept, indent=1, default=str) + "\n")


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
    if options.part == "deployed":
        deployed(options, shapes if options.shapes else STACKS, Console(width=150))
        return
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
    keep(Path(options.out), options.part, {"about": about, "rows": rows})
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
