"""Optimizer state that follows a cut: momentum survives, shapes fit."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from sapwood.capture.skeleton import named_tensors, unwrap
from sapwood.errors import explain
from sapwood.surgery.cut import slice_like
from sapwood.types import Plan


def cut_optimizer(
    optimizer: torch.optim.Optimizer, model: nn.Module, small: nn.Module, plan: Plan
) -> torch.optim.Optimizer:
    """A new optimizer of the same class over the small model's parameters, with its state cut along."""
    names = {id(p): n for n, p in named_tensors(unwrap(model)).items()}
    new = named_tensors(unwrap(small))
    groups: list[dict[str, Any]] = []
    for group in optimizer.param_groups:
        fresh = {k: v for k, v in group.items() if k != "params"}
        fresh["params"] = [new[_name(p, names)] for p in group["params"]]
        groups.append(fresh)
    result = type(optimizer)(groups, **_required(optimizer))
    for ours, theirs in zip(result.param_groups, optimizer.param_groups, strict=True):
        ours.update({k: v for k, v in theirs.items() if k != "params"})
    for parameter, state in optimizer.state.items():
        name = _name(parameter, names)
        result.state[new[name]] = {k: _follow(v, parameter, name, k, plan) for k, v in state.items()}
    return result


def _required(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {"lr": optimizer.defaults["lr"]} if "lr" in optimizer.defaults else {}


def _name(parameter: torch.Tensor, names: dict[int, str]) -> str:
    if id(parameter) not in names:
        raise explain(
            "an optimizer over the dense model's parameters",
            f"one that holds another tensor of shape {tuple(parameter.shape)}",
            "Pass the model the optimizer was built for.",
            "cut_optimizer",
        )
    return names[id(parameter)]


def _follow(value: Any, parameter: torch.Tensor, name: str, key: str, plan: Plan) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    if value.shape == parameter.shape:
        return slice_like(name, value, plan).clone(memory_format=torch.preserve_format)
    if value.numel() == 1 or name not in plan.keep:
        return value.clone()
    raise explain(
        f"state {key!r} of {name!r} shaped like its parameter {tuple(parameter.shape)}",
        f"shape {tuple(value.shape)}",
        "Build a new optimizer for the cut model; only SGD and Adam-like state can follow.",
        "cut_optimizer",
    )
