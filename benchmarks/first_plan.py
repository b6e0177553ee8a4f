"""How long the first plan for a latency takes: a new process, nothing measured or compiled before.

    python -m benchmarks.first_plan --models resnet50,vit_b_16 --batch 64 [--share 0.5] [--backend auto] [--out FILE]
                                    [--together]

Everything that ``sw.make_plan`` does counts: deploying and measuring the dense model, timing operators, deploying and
measuring cut models. Results are merged into the JSON file, by model, batch and backend.
``--together`` plans for all models side by side, which saves a rented device's time: each takes longer than it would
alone, so that the seconds are upper bounds.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch


def once(options: argparse.Namespace) -> dict[str, Any]:
    import sapwood as sw
    from benchmarks.latency import Bench
    from sapwood.measurement.machine import describe

    bench = Bench(options)
    model, x = bench.model(options.models), bench.inputs(options.batch)
    stages: dict[str, float] = {}
    last = ["", time.time()]

    def tell(what: str, done: int, of: int) -> None:
        now = time.time()
        stages[str(last[0])] = stages.get(str(last[0]), 0.0) + now - float(last[1])
        last[:] = [what, now]

    began = time.time()
    plan = sw.make_plan(model, x, sw.Budget(latency=options.share), backend=options.backend, tell=tell)
    tell("", 0, 0)
    return {
        "date": datetime.date.today().isoformat(),
        "seconds": round(time.time() - began, 1),
        "stages_s": {k: round(v, 1) for k, v in stages.items() if k},
        "asked": options.share,
        "latency": round(1 / plan.achieved["speed"], 4),
        **{k: v for k, v in describe(bench.device).items() if isinstance(v, (str, int, float))},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="resnet50,vit_b_16")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--share", type=float, default=0.5)
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="bfloat16" if torch.cuda.is_available() else "float32")
    parser.add_argument("--out", default="benchmarks/results/first_plan.json")
    parser.add_argument("--together", action="store_true")
    parser.add_argument("--once", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.once:
        print("RESULT " + json.dumps(once(options)))
        return
    names = options.models.split(",")
    with tempfile.TemporaryDirectory() as empty:
        if options.together:
            plans = [start(name, Path(empty)) for name in names]
            keep(options, zip(names, plans, strict=True), "beside the others" if len(names) > 1 else "alone")
        else:
            keep(options, ((name, start(name, Path(empty) / name)) for name in names), "alone")


def start(name: str, empty: Path) -> subprocess.Popen[str]:
    """A new process with empty caches; those that share a folder do not measure at the same time."""
    env = {**os.environ, "SAPWOOD_CACHE": f"{empty}/sapwood", "TORCHINDUCTOR_CACHE_DIR": f"{empty}/inductor-{name}"}
    env["TRITON_CACHE_DIR"] = f"{empty}/triton-{name}"
    command = [sys.executable, "-m", "benchmarks.first_plan", *sys.argv[1:], "--models", name, "--once"]
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True)


def keep(options: argparse.Namespace, plans: Iterable[tuple[str, subprocess.Popen[str]]], ran: str) -> None:
    for name, process in plans:
        lines = [line for line in process.communicate()[0].splitlines() if line.startswith("RESULT ")]
        found = json.loads(lines[-1].removeprefix("RESULT ")) if lines else {"failed": process.returncode}
        path = Path(options.out)
        kept = json.loads(path.read_text()) if path.exists() else {}
        kept[f"{name}, batch {options.batch}, {options.backend}, {options.device}"] = {**found, "ran": ran}
        path.write_text(json.dumps(kept, indent=1) + "\n")
        print(f"{name}: {found}", flush=True)


if __name__ == "__main__":
    main()
