"""What many tests do: build, randomise, halve, and look at the result."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import sapwood as sw
from sapwood.capture.run import as_call, results_in
from tests.nets import CASES
from tests.zoo.harness import randomise

HALF = sw.Budget(channels=0.5)


def build(name: str) -> tuple[nn.Module, Any]:
    make, inputs = CASES[name]
    return randomise(make()), inputs()


def halve(model: nn.Module, inputs: Any, **options: Any) -> sw.Pruned:
    return sw.prune(model, inputs, HALF, **{"score": "l1", "allocate": "uniform", **options})


def outputs(model: nn.Module, inputs: Any) -> list[torch.Tensor]:
    args, kwargs = as_call(inputs)
    with torch.no_grad():
        return list(results_in(model, model.eval()(*args, **kwargs)))


def size(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def snapshot(model: nn.Module) -> dict[str, torch.Tensor]:
    return {n: t.clone() for n, t in model.state_dict().items()}


def same(model: nn.Module, before: dict[str, torch.Tensor]) -> bool:
    after = model.state_dict()
    return list(after) == list(before) and all(torch.equal(after[n], before[n]) for n in before)
