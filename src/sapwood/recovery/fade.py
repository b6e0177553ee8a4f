"""Channels that fade out before they are cut: what reads them shrinks to zero, step by step, while the rest learns.

At the end the cut changes nothing: the model has already learned to do without. A growing penalty on the channels
that go (Wang et al., 2021) does much the same; here they reach zero at a step that is known beforehand.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from sapwood.errors import explain
from sapwood.masking.targets import input_dim
from sapwood.types import Plan


class Fade:
    """After step k of n, what reads the channels that the plan removes is at most (n - k) / n of what it was."""

    def __init__(self, model: nn.Module, plan: Plan, steps: int, optimizer: torch.optim.Optimizer) -> None:
        self.steps, self.done = steps, 0
        readers = reading_weights(model, plan)
        if plan.keep and not readers:
            got, remedy = "none", "Leave fade out: these channels are read by something else."
            raise explain("weights that read the channels to cut", got, remedy, "fade")
        self._weights = [weight for weight, _, _ in readers]
        device = self._weights[0].device if readers else torch.device("cpu")
        self._less = torch.zeros(1, device=device)
        self._gone = []
        for weight, dim, kept in readers:
            gone = torch.ones(weight.shape[dim], device=device)
            gone[list(kept)] = 0
            self._gone.append(gone.view([-1 if d == dim else 1 for d in range(weight.dim())]))
        self._hook = optimizer.register_step_post_hook(self._after_step)

    def advance(self) -> None:
        """Say, before a step, how much of what is left goes with it."""
        left = max(1, self.steps - self.done)
        self._less.fill_(1 / left)
        self.done += 1

    @torch.no_grad()
    def _after_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        for weight, gone in zip(self._weights, self._gone, strict=True):
            weight.mul_((1 - gone * self._less).to(weight.dtype))

    def release(self) -> None:
        self._hook.remove()


def reading_weights(model: nn.Module, plan: Plan) -> list[tuple[nn.Parameter, int, tuple[int, ...]]]:
    """Weights whose inputs the plan cuts: the weight, the dimension of its inputs, what stays of them."""
    found = []
    for name, parameter in model.named_parameters():
        dims = plan.keep.get(name, {})
        if parameter.dim() > 1 and dims:
            dim = input_dim(model, name, parameter)
            if dim in dims:
                found.append((parameter, dim, tuple(dims[dim])))
    return found
