"""What masks cost: holding zeros in a training step, and ranking a large model's weights.

    python -m benchmarks.masks [--out FILE] [--parameters 1.1e9]

Enforcement: training steps of one model with and without the hook of ``sw.hold`` take turns in one run (order
shuffled); the cost is the median of the round-by-round ratio. Batches are of 16 on a CPU and of 256 on a GPU.
Ranking: ``sw.mask_`` at 90%, global, on a stack of linear layers, in a process of its own; memory is the peak
resident size over that of the weights.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

import sapwood as sw
from sapwood.measurement import take_turns


def resnet(batch: int) -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    try:
        from tests.zoo.torchvision_models import import_torchvision

        models = import_torchvision().models
    except ImportError:
        from torchvision import models
    return models.resnet18(), torch.randn(batch, 3, 96, 96), torch.randint(0, 1000, (batch,))


def transformer(batch: int) -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    layer = nn.TransformerEncoderLayer(256, 4, 1024, batch_first=True, dropout=0.0)
    model = nn.Sequential(nn.TransformerEncoder(layer, 4, enable_nested_tensor=False), nn.Flatten(), nn.LazyLinear(10))
    x = torch.randn(batch, 64, 256)
    model(x)
    return model, x, torch.randint(0, 10, (batch,))


def step(model: nn.Module, x: torch.Tensor, y: torch.Tensor, optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    def run() -> None:
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()

    return run


def enforcement(name: str, make: Callable[[], Any], kind: str, seconds: float, device: str) -> dict[str, Any]:
    torch.manual_seed(0)
    model, x, y = make(256 if device == "cuda" else 16)
    x, y = x.to(device), y.to(device)
    model = sw.mask(model.to(device), sw.Budget(sparsity=0.9))
    parameters = model.parameters()
    optimizer = torch.optim.SGD(parameters, lr=1e-3, momentum=0.9) if kind == "sgd" else torch.optim.AdamW(parameters)
    holding = sw.hold(model, optimizer)
    holding.release()
    free = step(model, x, y, optimizer)

    def held() -> None:  # the same model and the same memory, with the hook that sw.hold registers
        hook = optimizer.register_step_post_hook(holding._after_step)
        free()
        hook.remove()

    calls = {"free": free, "held": held}
    times = take_turns(calls, seconds=seconds)
    cost = 1 / times["held"].speed - 1
    low, high = 1 / times["held"].speed_high - 1, 1 / times["held"].speed_low - 1
    return {
        "model": name,
        "optimizer": kind,
        "device": device,
        "step_ms": times["free"].median_ms,
        "cost": cost,
        "quartiles": [low, high],
        "rounds": times["free"].rounds,
    }


RANK = """
import json, resource, sys, time
import torch
from torch import nn
import sapwood as sw
torch.set_num_threads(2)
count, dtype = int(float(sys.argv[1])), getattr(torch, sys.argv[2])
width = 4096
layers = max(1, count // width**2)
with torch.device("meta"):
    model = nn.Sequential(*[nn.Linear(width, width, bias=False, dtype=dtype) for _ in range(layers)])
model.to_empty(device="cpu")
for layer in model:
    layer.weight.data.normal_(0, 0.02)
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
weights = sum(p.nbytes for p in model.parameters())
before = peak()
start = time.perf_counter()
sw.mask_(model, sw.Budget(sparsity=0.9))
seconds = time.perf_counter() - start
after = peak()
zeros = sw.sparsity(model)
print(json.dumps({"weights": zeros.weights, "zeros": zeros.zeros, "seconds": seconds, "bytes": weights,
                  "memory": (weights + after - before) / weights, "exact": zeros.zeros == round(0.9 * zeros.weights),
                  "dtype": sys.argv[2]}))
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", default="benchmarks/results/masks.json")
    parser.add_argument("--parameters", default="1.1e9")
    parser.add_argument("--seconds", type=float, default=30)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    makers = {"ResNet-18, 96 x 96": resnet, "transformer, 64 x 256": transformer}
    steps = [
        enforcement(name, make, kind, options.seconds, options.device)
        for name, make in makers.items()
        for kind in ("sgd", "adamw")
    ]
    ranks = []
    for dtype in ("float32", "bfloat16"):
        command = [sys.executable, "-c", RANK, options.parameters, dtype]
        ranks.append(json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout))
    about = {
        "date": datetime.date.today().isoformat(),
        "torch": torch.__version__,
        "cpu_threads": torch.get_num_threads(),
        "machine": platform.machine(),
        "device": torch.cuda.get_device_name() if options.device == "cuda" else "cpu",
        "command": "python -m benchmarks.masks",
    }
    result = {"environment": about, "enforcement": steps, "ranking": ranks}
    Path(options.out).write_text(json.dumps(result, indent=1))
    table = Table(
        "model", "optimizer", "step ms", "cost of holding", "quartiles", title="Zeros held in a training step"
    )
    for row in steps:
        low, high = row["quartiles"]
        cells = (f"{row['step_ms']:.1f}", f"{row['cost']:+.2%}", f"{low:+.2%} to {high:+.2%}")
        table.add_row(row["model"], row["optimizer"], *cells)
    Console().print(table)
    table = Table("weights", "dtype", "seconds", "peak memory / weights", "exact", title="Global ranking at 90%")
    for row in ranks:
        cells = (f"{row['seconds']:.1f}", f"{row['memory']:.2f}", str(row["exact"]))
        table.add_row(f"{row['weights']:,}", row["dtype"], *cells)
    Console().print(table)
    return 0


if __name__ == "__main__":
    start = time.perf_counter()
    code = main()
    used = resource.getrusage(resource.RUSAGE_SELF).ru_utime
    print(f"{time.perf_counter() - start:.0f} s, {used:.0f} s of CPU time here", file=sys.stderr)
    sys.exit(code)
