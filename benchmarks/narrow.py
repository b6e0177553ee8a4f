"""Convolutions of few channels in training: our kernels against cuDNN's, and by setting.

    python -m benchmarks.narrow [--kinds 16-16-32,...] [--images 256] [--settings] [--out FILE]

A kind is inputs-outputs-height of a 3x3 convolution. Times are of calls in a CUDA graph, in microseconds; the data of
one call fit the GPU's cache, as in training, where they have just been written. ``--settings`` tries sizes of blocks,
with a process for each kind that compiles; only one measures at a time.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

KINDS = "3-16-32,16-16-32,32-32-16,64-64-8,16-7-32,7-16-32,32-15-16,15-32-16,64-30-8,30-64-8"
PRODUCTS = ("output", "gradient of inputs", "gradient of weights")

Call = Callable[[], torch.Tensor]


def some(*shape: int) -> torch.Tensor:
    made = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
    return made.contiguous(memory_format=torch.channels_last)


def calls_of(kind: str, images: int, settings: bool) -> dict[str, dict[str, Call]]:
    """By product, then by what computes it; cuDNN first, ours as it is second."""
    from sapwood.recovery import narrow_kernels as ours
    from sapwood.recovery.narrow import _theirs

    channels, made, height = map(int, kind.split("-"))
    x, weight, grad = (
        some(images, channels, height, height),
        some(made, channels, 3, 3),
        some(images, made, height, height),
    )
    found: dict[str, dict[str, Call]] = {
        PRODUCTS[0]: {
            "cuDNN": lambda: F.conv2d(x, weight, padding=1),
            "ours": lambda: ours.product(x, weight, False, 1),
        },
        PRODUCTS[1]: {
            "cuDNN": lambda: _theirs(grad, x, weight, [True, False])[0],
            "ours": lambda: ours.product(grad, weight, True, 1),
        },
        PRODUCTS[2]: {
            "cuDNN": lambda: _theirs(grad, x, weight, [False, True])[1],
            "ours": lambda: ours.weights(x, grad, weight, 1),
        },
    }
    for way in range(2, len(ours.PRODUCTS) + 1):
        found[PRODUCTS[0]][f"ours, way {way}"] = lambda way=way: ours.product(x, weight, False, way)
        found[PRODUCTS[1]][f"ours, way {way}"] = lambda way=way: ours.product(grad, weight, True, way)
    for way in range(2, len(ours.BLOCKS) + 1):
        found[PRODUCTS[2]][f"ours, way {way}"] = lambda way=way: ours.weights(x, grad, weight, way)
    if settings:
        for sizes in itertools.product((2, 4, 8, 16), (1, 2, 3, 4)):
            name = "eights {}, ahead {}".format(*sizes)
            found[PRODUCTS[0]][name] = lambda s=sizes: ours.product_with(x, weight, False, *s)
            found[PRODUCTS[1]][name] = lambda s=sizes: ours.product_with(grad, weight, True, *s)
        for pixels, blocks in itertools.product((64, 128, 256, 512), (1, 2, 3, 4)):
            found[PRODUCTS[2]][f"pixels {pixels}, blocks {blocks}"] = lambda s=(pixels, blocks): ours.weights_with(
                x, grad, weight, *s
            )
    return found


def measured(kind: str, images: int, settings: bool) -> dict[str, Any]:
    from sapwood.measurement.clock import alone
    from sapwood.recovery.narrow import milliseconds

    device, found = torch.device("cuda", 0), {}
    torch.backends.cudnn.benchmark = True
    every = calls_of(kind, images, settings)
    failed: dict[str, str] = {}
    for product, calls in every.items():
        with alone(device):
            wanted = calls["cuDNN"]().float()
        for name, call in list(calls.items()):
            try:
                error = float((call().float() - wanted).norm() / wanted.norm())
                if error > 0.02:
                    raise ArithmeticError(f"off by {error:.2g}")
            except Exception as problem:
                failed[f"{product}, {name}"] = str(problem)[:100]
                del calls[name]
    with alone(device):
        for product, calls in every.items():
            took = milliseconds(list(calls.values()), device)
            found[product] = {name: round(1000 * ms, 2) for name, ms in zip(calls, took, strict=True)}
    return {"microseconds": found, "failed": failed}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", default=KINDS)
    parser.add_argument("--images", type=int, default=256)
    parser.add_argument("--settings", action="store_true")
    parser.add_argument("--out", default="benchmarks/results/narrow_h200.json")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print("RESULT " + json.dumps(measured(options.kinds, options.images, options.settings)), flush=True)
        return
    kinds = options.kinds.split(",")
    command = [sys.executable, "-m", "benchmarks.narrow", *sys.argv[1:], "--one", "--kinds"]
    running = [(k, subprocess.Popen([*command, k], stdout=subprocess.PIPE, text=True)) for k in kinds]
    path, found = Path(options.out), {}
    for kind, process in running:
        lines = [line for line in process.communicate()[0].splitlines() if line.startswith("RESULT ")]
        found[kind] = json.loads(lines[-1].removeprefix("RESULT ")) if lines else {"failed": process.returncode}
        for product, times in found[kind].get("microseconds", {}).items():
            best = sorted(times.items(), key=lambda pair: pair[1])[:4]
            told = "; ".join(f"{name} {took}" for name, took in best)
            print(f"{kind} {product}: cuDNN {times.get('cuDNN')}, ours {times.get('ours')} | {told}", flush=True)
        if found[kind].get("failed"):
            print(f"{kind} failed: {found[kind]['failed']}", flush=True)
    about = {"date": datetime.date.today().isoformat(), "device": torch.cuda.get_device_name(0)}
    about |= {"torch": torch.__version__, "images": str(options.images)}
    path.write_text(json.dumps({**about, "kinds": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
