"""``Regrow``: zeros that may come back, since what was masked goes on learning out of sight.

A masked weight has a gradient, too. What the optimizer would have made of it is gathered beside the model, so that the
next round of masking ranks all weights as they would be by now, and one that went too early comes back in place of
another (dynamic pruning with feedback, Lin et al., 2020). The model has its zeros after every step all the same.

Nothing answers to what is hidden: its gradients say the same step after step, and it would run away. So it moves
slowly, all of it together no further in a step than PACE times as far as what is seen.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.nn.utils import get_total_norm

from sapwood.masking.hold import Held, Hold

PACE = 0.2
"""How far what is hidden moves in a step, at most, for each unit that the weights move which are seen."""


class Regrow(Hold):
    """Holds zeros and keeps what those of the weights named would be, ``hidden``, which is zero where a weight is not.

    Hidden weights fade by the learning rate times the weight decay in every step.
    """

    def __init__(self, held: Mapping[str, Held], optimizer: torch.optim.Optimizer, growing: Iterable[str]) -> None:
        super().__init__(list(held.values()), optimizer)
        self.weights = {name: held[name][0] for name in growing}
        self.hidden = {name: torch.zeros_like(weight) for name, weight in self.weights.items()}
        self._before = {name: weight.detach().clone() for name, weight in self.weights.items()}
        self._groups = _by_group(self.weights, optimizer)
        self._aside: list[torch.Tensor] = []

    @torch.no_grad()
    def reveal(self) -> None:
        """Put everything back as it would be by now, for the next masking; then ``hide``."""
        for name, weight in self.weights.items():
            weight.add_(self.hidden[name])

    @torch.no_grad()
    def hide(self, values: Mapping[str, torch.Tensor]) -> None:
        """Hold the zeros there are now, and let them go on from these values; in the same memory, as ``renew``."""
        self.renew()
        for name, weight in self.weights.items():
            self.hidden[name].copy_(values[name]).masked_fill_(weight != 0, 0)
            self._before[name].copy_(weight)

    @torch.no_grad()
    def apply(self) -> None:
        """After a step: zeros are put back, and what it did to them goes to what is hidden, at its pace."""
        weights, hidden, before = ([*found.values()] for found in (self.weights, self.hidden, self._before))
        moved = torch._foreach_mul(weights, 1.0)
        super().apply()
        torch._foreach_sub_(moved, weights)
        seen = get_total_norm(torch._foreach_sub(weights, before))
        torch._foreach_mul_(moved, (PACE * seen / get_total_norm(moved).clamp_min(1e-30)).clamp(max=1.0))
        for group, names in self._groups:
            left = 1 - group["lr"] * group.get("weight_decay", 0.0)
            scale = left.view(()) if isinstance(left, torch.Tensor) else left
            torch._foreach_mul_([self.hidden[n] for n in names], scale)
        torch._foreach_add_(hidden, moved)
        torch._foreach_copy_(before, weights)

    @torch.no_grad()
    def clear_gradients(self) -> None:
        """Lays the gradients of zeros aside, until ``restore_gradients``."""
        grads = self._gradients()
        self._aside = list(torch._foreach_mul(grads, 1.0)) if grads else []
        super().clear_gradients()
        if grads:
            torch._foreach_sub_(self._aside, grads)

    @torch.no_grad()
    def restore_gradients(self, scale: torch.Tensor) -> None:
        """What was laid aside, scaled as clipping has scaled the others."""
        if self._aside:
            torch._foreach_mul_(self._aside, scale)
            torch._foreach_add_(self._gradients(), self._aside)
            self._aside = []

    def _gradients(self) -> list[torch.Tensor]:
        grads = (weight.grad for weight in self.weights.values())
        return [grad for grad in grads if grad is not None and grad.layout == torch.strided]


def _by_group(weights: Mapping[str, torch.Tensor], optimizer: Any) -> list[tuple[dict[str, Any], list[str]]]:
    """The optimizer's settings for the weights, with the names of those they are for."""
    names = {id(weight): name for name, weight in weights.items()}
    found = [(g, [names[id(p)] for p in g["params"] if id(p) in names]) for g in optimizer.param_groups]
    return [(group, own) for group, own in found if own]
