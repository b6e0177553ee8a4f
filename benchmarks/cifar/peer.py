"""Torch-Pruning from the same weights: it cuts, the same ``sw.recover`` trains. Found at scratch/tp or installed."""

from __future__ import annotations

import copy
import importlib
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

STEPS, STRENGTH = 400, 5e-4
SPARSE_SHARE = 0.25
"""Of all epochs, for learning under its regularizer before the cut."""


def torch_pruning() -> Any:
    place = Path(__file__).parents[2] / "scratch" / "tp"
    if place.exists() and str(place) not in sys.path:
        sys.path.append(str(place))
    try:
        return importlib.import_module("torch_pruning")
    except ImportError as error:
        raise SystemExit(
            f"Torch-Pruning is not here ({error}): carry scratch/tp, or pip install torch-pruning"
        ) from None


def make_pruner(model: Any, example: torch.Tensor, method: str) -> Any:
    """l1: the same share everywhere; group and sparse: one ranking of all groups by L2 norm, as its benchmarks do."""
    tp = torch_pruning()
    common: dict[str, Any] = {"ignored_layers": [model.fc], "iterative_steps": STEPS}
    common |= {"pruning_ratio": 0.98, "max_pruning_ratio": 0.9}
    if method == "l1":
        importance = tp.importance.GroupMagnitudeImportance(p=1)
        return tp.pruner.BasePruner(model, example, importance=importance, global_pruning=False, **common)
    importance = tp.importance.GroupMagnitudeImportance(p=2, normalizer="max")
    kind = tp.pruner.GroupNormPruner
    return kind(model, example, importance=importance, global_pruning=True, reg=STRENGTH, **common)


def shrunk(model: nn.Module, example: torch.Tensor, method: str, fewer: float, pruner: Any = None) -> nn.Module:
    """A copy to train: Torch-Pruning keeps autograd's nodes, and with them a stream."""
    small = copy.deepcopy(shrink(model, example, method, fewer, pruner))
    for weight in small.parameters():
        weight.grad = None
    return small


def shrink(model: nn.Module, example: torch.Tensor, method: str, fewer: float, pruner: Any = None) -> nn.Module:
    """In small steps, to the multiply-accumulates nearest to dense / fewer: with one share for all layers the steps
    are not small."""
    tp = torch_pruning()
    model.eval()
    pruner = pruner or make_pruner(model, example, method)
    dense, _ = tp.utils.count_ops_and_params(model, example)
    before, last = copy.deepcopy(model), dense
    for _ in range(STEPS):
        pruner.step()
        now, _ = tp.utils.count_ops_and_params(model, example)
        if now <= dense / fewer:
            return model if math.log(dense / now / fewer) <= math.log(fewer * last / dense) else before
        if now < last:
            before, last = copy.deepcopy(model), now
    return model


def regularized(pruner: Any, model: nn.Module) -> Callable[[list[dict[str, Any]], float], torch.optim.Optimizer]:
    """SGD that adds the gradient of its regularizer before every step."""
    pruner.update_regularizer()

    def make(groups: list[dict[str, Any]], lr: float) -> torch.optim.Optimizer:
        optimizer = torch.optim.SGD(groups, lr=lr, momentum=0.9, nesterov=True)
        optimizer.register_step_pre_hook(lambda *_: pruner.regularize(model))
        return optimizer

    return make
