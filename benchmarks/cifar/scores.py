"""Channel scores of the ablation that the library does not name: LAMP and first-order Taylor, as functions."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

ChannelScore = Callable[[torch.Tensor, int], torch.Tensor]


def lamp(weight: torch.Tensor, dim: int) -> torch.Tensor:
    """The square of a channel's norm over the sum of those that are at least as large in its weight."""
    squares = weight.detach().double().square().sum(dim=[d for d in range(weight.dim()) if d != dim])
    ordered, places = squares.sort()
    rest = ordered.flip(0).cumsum(0).flip(0).clamp_min(1e-30)
    result = torch.empty_like(squares)
    result[places] = ordered / rest
    return result.float()


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
