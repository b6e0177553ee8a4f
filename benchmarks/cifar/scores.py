"""The channel score of the ablation that the library does not name: first-order Taylor, as a function."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

ChannelScore = Callable[[torch.Tensor, int], torch.Tensor]


def taylor(model: nn.Module, batches: Iterable[Any]) -> ChannelScore:
    """How much the loss would change, to first order, without the channel; gradients are those of this model."""
    copy = {n: p.detach().clone().requires_grad_() for n, p in model.named_parameters()}
    model.eval()
    for x, y in batches:
        nn.functional.cross_entropy(torch.func.functional_call(model, copy, (x,)), y).backward()
    known = {_key(p): (p.detach() * p.grad).abs() for p in copy.values() if p.grad is not None}

    def score(weight: torch.Tensor, dim: int) -> torch.Tensor:
        change = known[_key(weight)]
        return change.sum(dim=[d for d in range(weight.dim()) if d != dim])

    return score


def _key(weight: torch.Tensor) -> tuple[Any, ...]:
    """Tells weights apart by their values: what is scored is a copy of the model."""
    values = weight.detach().double()
    return tuple(weight.shape), round(float(values.sum()), 6), round(float(values.square().sum()), 6)
