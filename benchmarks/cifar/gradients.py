"""How much of a gradient's norm belongs to zeros, which do not move: what clipping must leave out.

python -m benchmarks.cifar.gradients runs/cifar/ends/sparse-95-230-test-0.safetensors [--sparsity 0.98]
    the norm of the whole gradient and of that of weights which are not zero, over a few batches of training images,
    with the base as teacher and a quarter of another image mixed in; --sparsity masks further first
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path

import torch
from torch import nn

import sapwood as sw
from benchmarks.cifar.data import MEAN, STD, WEIGHTS, load
from benchmarks.cifar.model import base, digest
from sapwood.recovery import TensorLoader
from sapwood.recovery.distillation import distance

BATCHES, BATCH, MIXED, TEMPERATURE, SHARE = 8, 256, 0.75, 4.0, 0.9


def norms(model: nn.Module, teacher: nn.Module, loader: TensorLoader) -> list[tuple[float, float]]:
    """For each batch the norm of the gradient, and of what is left of it without the zeros."""
    kept = {name: (p != 0).detach() for name, p in model.named_parameters()}
    found = []
    model.train()
    for x, y in loader:
        other, soft = torch.randperm(len(y)), nn.functional.one_hot(y, 10).float()
        x, soft = torch.lerp(x[other], x, MIXED), torch.lerp(soft[other], soft, MIXED)
        model.zero_grad()
        with torch.no_grad():
            wanted = teacher(x)
        out = model(x)
        task = nn.functional.cross_entropy(out, soft)
        ((1 - SHARE) * task + SHARE * distance(out, wanted, TEMPERATURE)).backward()
        gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        whole = sum(float(g.square().sum()) for g in gradients.values())
        moving = sum(float((g * kept[n]).square().sum()) for n, g in gradients.items())
        found.append((whole**0.5, moving**0.5))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("weights", nargs="+", type=Path)
    parser.add_argument("--sparsity", type=float)
    parser.add_argument("--data", type=Path, default=Path("../shared/data/cifar10"))
    given = parser.parse_args()
    torch.manual_seed(0)
    train, _ = load(given.data, "test", torch.device("cpu"), BATCHES * BATCH)
    loader = TensorLoader(train.x, train.y, BATCH, pad=4, flip=True, mean=MEAN, std=STD, drop_last=True)
    teacher = base(given.data / WEIGHTS)
    for path in given.weights:
        model = base(path)
        before = digest(model)
        if given.sparsity is not None:
            sw.mask_(model, sw.Budget(sparsity=given.sparsity))
        pairs = norms(model, teacher, loader)
        line = {
            "weights": path.name, "digest": before[:16], "sparsity": round(sw.sparsity(model).total, 4),
            "whole": [round(a, 2) for a, _ in pairs], "moving": [round(b, 2) for _, b in pairs],
            "whole_by_moving_median": round(statistics.median(a / b for a, b in pairs), 2), "torch": torch.__version__,
        }  # fmt: skip
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
