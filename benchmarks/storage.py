"""Size and loading speed of a 90% sparse model's bundle against plain safetensors.

    python -m benchmarks.storage [--out FILE]

Both give a new model that holds the weights in memory of its own, taking turns; files are in the page
cache. "plain" loads the dense safetensors file, copies each tensor out of the mapped file and assigns it to
a model on the meta device; "bundle" is ``sw.load(path, model)`` with a model on the meta device, digests
verified. "bundle, unverified" leaves the digests out, as plain safetensors has none. "into a ready model" is
``model.load_state_dict(load_file(path))`` against ``sw.load_(path, model)``: both fill memory that
is there already, nothing is allocated. "first load" is the same, once in a new process, into a model just built,
as a program that starts does it; several processes take turns. Bundles are verified everywhere but in "unverified".

Each round waits for a quiet moment, and is run again when other programs kept the cores busy meanwhile:
plain loading copies by a team of threads that wait for each other, which then takes several times as long
and would flatter the bundle. Before each call there is a pause, because the threads of the last one go on
spinning for some milliseconds and would take a core from whatever comes next.
"""

from __future__ import annotations

import argparse
import copy
import datetime
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from safetensors.torch import load_file, save_file
from torch import nn

import sapwood as sw

ROUNDS, STARTS = 25, 7
PAUSE = 0.05
"""Seconds before each call: the threads that torch copies with spin for a while after they are done."""
PATIENCE = 600
"""Seconds to wait for a quiet moment."""
FIRST = """
import sys, time
from safetensors.torch import load_file
from benchmarks.storage import build, wait_for_quiet
import sapwood as sw
model = build()
wait_for_quiet()
start = time.perf_counter()
if sys.argv[1] == "plain":
    model.load_state_dict(load_file(sys.argv[2] + "/plain.safetensors"))
else:
    sw.load_(sys.argv[2] + "/bundle", model)
print(time.perf_counter() - start)
"""


def build() -> nn.Module:
    return nn.Sequential(*[nn.Linear(2048, 2048) for _ in range(12)])


def sparse(model: nn.Module, zeros: float) -> nn.Module:
    with torch.no_grad():
        for layer in model:
            layer.weight[torch.rand_like(layer.weight) < zeros] = 0
    return model


def seconds(call: Callable[[], object]) -> float:
    time.sleep(PAUSE)
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def others() -> float:
    """Seconds of processor time that all but this program and its children have used; 0 where nobody counts them."""
    try:
        ticks = [int(n) for n in Path("/proc/stat").read_text().splitlines()[0].split()[1:]]
    except OSError:
        return 0.0
    own = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    busy = sum(ticks[:3] + ticks[5:8]) / os.sysconf("SC_CLK_TCK")
    return busy - sum(usage.ru_utime + usage.ru_stime for usage in own)


def wait_for_quiet() -> None:
    """Until other programs leave most of the cores' time alone."""
    for _ in range(PATIENCE * 5):
        before = others()
        time.sleep(0.2)
        if others() - before < 0.05:
            return
    raise SystemExit(f"Expected a quiet machine; other programs kept it busy for {PATIENCE} s. Try again later.")


def take_turns(ways: dict[str, Callable[[], object]], rounds: int) -> tuple[dict[str, list[float]], int]:
    """Seconds of each in rounds with the machine to itself, and how many rounds were thrown away."""
    turns: list[dict[str, float]] = []
    lost = 0
    while len(turns) < rounds:
        wait_for_quiet()
        before, start = others(), time.perf_counter()
        once = {name: seconds(call) for name, call in ways.items()}
        if others() - before < 0.25 * (time.perf_counter() - start):
            turns.append(once)
        else:
            lost += 1
    return {name: [once[name] for once in turns] for name in ways}, lost


def measure(zeros: float, folder: Path) -> dict[str, Any]:
    torch.manual_seed(0)
    model = sparse(build(), zeros) if zeros else build()
    plan = sw.make_plan(model, torch.randn(1, 2048), sw.Budget(channels=1.0))
    sw.save(folder / "bundle", model, plan)
    save_file(model.state_dict(), folder / "plain.safetensors")
    with torch.device("meta"):
        target = build()

    def plain() -> None:
        own = {n: t.clone() for n, t in load_file(folder / "plain.safetensors").items()}
        copy.deepcopy(target).load_state_dict(own, assign=True)

    ready = build()
    ways: dict[str, Callable[[], object]] = {
        "plain": plain,
        "into a ready model": lambda: ready.load_state_dict(load_file(folder / "plain.safetensors")),
        "bundle into a ready model": lambda: sw.load_(folder / "bundle", ready),
        "bundle": lambda: sw.load(folder / "bundle", target),
        "bundle, unverified": lambda: sw.load(folder / "bundle", target, verify=False),
    }

    def first(way: str) -> float:
        command = [sys.executable, "-c", FIRST, way, str(folder)]
        return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)

    turns, lost = take_turns(ways, ROUNDS)
    for _ in range(STARTS):
        for way in ("plain", "bundle"):
            turns.setdefault(f"first load, {way}", []).append(first(way))
    loaded = sw.load(folder / "bundle", target).state_dict()
    assert all(torch.equal(loaded[n], t) for n, t in model.state_dict().items())
    sizes = (folder / "bundle" / "model.safetensors").stat().st_size, (folder / "plain.safetensors").stat().st_size
    medians = {name: statistics.median(times) for name, times in turns.items()}
    return {
        "zeros": zeros,
        "size_ratio": sizes[0] / sizes[1],
        "seconds": medians,
        "rounds_thrown_away": lost,
        "speed": {
            "bundle": medians["plain"] / medians["bundle"],
            "bundle, unverified": medians["plain"] / medians["bundle, unverified"],
            "against a ready model": medians["into a ready model"] / medians["bundle into a ready model"],
            "first load": medians["first load, plain"] / medians["first load, bundle"],
        },
        "turns": turns,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", default="benchmarks/results/storage.json")
    options = parser.parse_args()
    rows = []
    for zeros in (0.0, 0.5, 0.9):
        with tempfile.TemporaryDirectory() as folder:
            rows.append(measure(zeros, Path(folder)))
    about = {
        "date": datetime.date.today().isoformat(),
        "torch": torch.__version__,
        "cpu_threads": torch.get_num_threads(),
        "command": "python -m benchmarks.storage",
    }
    Path(options.out).write_text(json.dumps({"environment": about, "rows": rows}, indent=1))
    table = Table(
        title="A bundle of 50M float32 parameters against plain safetensors: milliseconds plain / bundle, speed"
    )
    columns = ("zeros", "file size", "new memory", "unverified", "ready model", "first load")
    for column in columns:
        table.add_column(column, justify="right")
    for row in rows:
        times, speed = row["seconds"], row["speed"]
        pairs = (
            ("plain", "bundle", "bundle"),
            ("plain", "bundle, unverified", "bundle, unverified"),
            ("into a ready model", "bundle into a ready model", "against a ready model"),
            ("first load, plain", "first load, bundle", "first load"),
        )
        cells = [f"{1000 * times[a]:.0f} / {1000 * times[b]:.0f} ms: {speed[c]:.2f} x" for a, b, c in pairs]
        table.add_row(f"{row['zeros']:.0%}", f"{row['size_ratio']:.3f} x", *cells)
    Console().print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
