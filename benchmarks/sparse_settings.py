"""Settings of the packed kernels against each other and against dense, in one run on a GPU.

    python -m benchmarks.sparse_settings --points 1:0.8,8:0.8,16:0.8 [--shapes 4096x4096,14336x4096]
        --settings 'now=' 'full=cuda.FULL=0.8' 'ways=cuda.WAYS={8: (28, 1, 0, 2), 16: (20, 1, 0, 2)}'

A setting is a name and what differs: ``cuda.NAME=value`` and ``nvrtc.NAME=value`` are module variables, others are
constants in the sources (``constexpr int NAME = ...``). Prints microseconds and speeds; weights come from memory, not
from a cache.
"""

from __future__ import annotations

import argparse
import ast
import math
import re
import shutil
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from sapwood.sparse import cuda, nvrtc
from sapwood.sparse.format import pack_weight

CALLS = 40
CACHE = 150_000_000
MODULES: dict[str, Any] = {"cuda": cuda, "nvrtc": nvrtc}
SOURCES = cuda.SOURCES


def use(setting: str, at: Path) -> Callable[[], None]:
    """Apply it; gives what takes it back."""
    before: list[tuple[Any, str, Any]] = [(cuda, "SOURCES", cuda.SOURCES)]
    shutil.copytree(SOURCES, at, dirs_exist_ok=True)
    cuda.SOURCES = at
    for word in filter(None, setting.split(";")):
        name, _, value = word.rpartition("=")
        place, _, own = name.partition(".")
        if own:
            before.append((MODULES[place], own, getattr(MODULES[place], own)))
            setattr(MODULES[place], own, ast.literal_eval(value))
            continue
        found = 0
        for source in at.rglob("*.cu"):
            text, count = re.subn(rf"(constexpr int {name} = )-?\d+", rf"\g<1>{value}", source.read_text())
            source.write_text(text)
            found += count
        if not found:
            raise SystemExit(f"{name}: no constant of this name in the kernels")
    cuda._most.cache_clear()
    return lambda: [setattr(*one) for one in before] and None


def replayed(call: Callable[[int], torch.Tensor]) -> torch.cuda.CUDAGraph:
    call(0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.Stream(), capture_error_mode="thread_local"):
        for i in range(CALLS):
            call(i)
    graph.replay()
    return graph


def in_turns(graphs: dict[str, torch.cuda.CUDAGraph], rounds: int = 25) -> dict[str, float]:
    taken: dict[str, list[float]] = defaultdict(list)
    for _ in range(rounds):
        for name, graph in graphs.items():
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            taken[name].append(1000 * start.elapsed_time(end) / CALLS)
    return {name: statistics.median(times) for name, times in taken.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="4096x4096,1024x4096,14336x4096,4096x14336")
    parser.add_argument("--points", default="1:0.8,4:0.8,8:0.8,16:0.8", help="batch:zeros")
    parser.add_argument("--settings", nargs="+", default=["now="])
    options = parser.parse_args()
    points = [(int(b), float(z)) for b, z in (p.split(":") for p in options.points.split(","))]
    settings = dict(word.split("=", 1) for word in options.settings)
    means: dict[tuple[int, float, str], list[float]] = defaultdict(list)
    folder = Path(tempfile.mkdtemp())
    for rows, columns in (map(int, s.split("x")) for s in options.shapes.split(",")):
        for zeros in sorted({z for _, z in points}):
            weight = torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16)
            weight[torch.rand(rows, columns, device="cuda") < zeros] = 0
            packed = pack_weight(weight)
            dense = [weight.clone() for _ in range(max(2, min(CALLS, -(-CACHE // weight.nbytes))))]
            copies = [packed.clone() for _ in range(max(2, min(CALLS, -(-CACHE // packed.nbytes))))]
            for batch in (b for b, z in points if z == zeros):
                x = torch.randn(batch, columns, device="cuda", dtype=torch.bfloat16)
                wanted = F.linear(x.float(), weight.float())
                graphs = {"dense": replayed(lambda i, x=x, dense=dense: F.linear(x, dense[i % len(dense)]))}
                for name, setting in settings.items():
                    back = use(setting, folder / name)
                    off = float((cuda.linear(x, packed, None).float() - wanted).norm() / wanted.norm())
                    if off < 6e-3:
                        graphs[name] = replayed(
                            lambda i, x=x, copies=copies: cuda.linear(x, copies[i % len(copies)], None)
                        )
                    else:
                        print(f"WRONG {name}: off by {off:.1e}")
                    back()
                took = in_turns(graphs)
                for name in graphs:
                    means[batch, zeros, name].append(took["dense"] / took[name])
                told = "  ".join(f"{n} {us:.1f} ({took['dense'] / us:.2f})" for n, us in took.items())
                print(f"{rows}x{columns} {zeros:.0%} batch {batch}: {told}", flush=True)
    for (batch, zeros, name), speeds in means.items():
        print(f"mean, batch {batch}, {zeros:.0%}, {name}: {math.exp(statistics.fmean(map(math.log, speeds))):.3f}")


if __name__ == "__main__":
    main()
