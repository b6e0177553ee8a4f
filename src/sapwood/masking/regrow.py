"""``Regrow``: zeros that may come back, since what was masked goes on learning out of sight.

A masked weight has a gradient, too. What the optimizer would have made of it is gathered beside the model, so that the
next round of masking ranks all weights as they would be by now, and one that went too early comes back in place of
another (dynamic pruning with feedback, Lin et al., 2020). The model has its zeros after every step all the same.

Nothing answers to what is hidden: its gradients say the same step after step, and it would run away. So it moves
slowly, all of it together no further in a step than PACE times as far as what is seen.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from sapwood.masking.hold import Held, Hold

PACE = 0.2
"""How far what is hidden moves in a step, at most, for each unit that the weights move which are seen."""


class Regrow(Hold):
    """Holds zeros and keeps what they would be, ``hidden``, by name; where a weight is not zero, that is zero."""

    def __init__(self, held: Mapping[str, Held], optimizer: torch.optim.Optimizer) -> None:
        super().__init__(list(held.values()), optimizer)
        self.weights = {name: weight for name, (weight, _) in held.items()}
        self.hidden = {name: torch.zeros_like(weight) for name, weight in self.weights.items()}
        self._ones = {name: torch.zeros_like(weight) for name, weight in self.weights.items()}
        self._groups = _by_group(self.weights, optimizer)
        self._aside: list[torch.Tensor] = []
        self.renew()

    @torch.no_grad()
    def renew(self) -> None:
        super().renew()
        for name, weight in self.weights.items():
            self._ones[name].copy_(weight != 0)

    @torch.no_grad()
    def reveal(self) -> dict[str, torch.Tensor]:
        """Put everything back as it would be by now, for the next masking; gives copies, for ``hide``."""
        for name, weight in self.weights.items():
            weight.add_(self.hidden[name])
        return {name: weight.detach().clone() for name, weight in self.weights.items()}

    @torch.no_grad()
    def hide(self, whole: Mapping[str, torch.Tensor]) -> None:
        """What was masked since ``whole`` was the weights goes on learning; in the same memory, as ``renew``."""
        for name, weight in self.weights.items():
            self.hidden[name].copy_(whole[name]).sub_(weight)
        self.renew()

    @torch.no_grad()
    def apply(self) -> None:
        """After a step: its part that went to zeros is added to what they would be, which decays as weights do."""
        weights, hidden, ones = ([*found.values()] for found in (self.weights, self.hidden, self._ones))
        for group, names in self._groups:
            left = 1 - group["lr"] * group.get("weight_decay", 0.0)
            scale = left.view(()) if isinstance(left, torch.Tensor) else left
            torch._foreach_mul_([self.hidden[n] for n in names], scale)
        seen = torch._foreach_mul(weights, ones)
        torch._foreach_add_(hidden, weights)
        torch._foreach_sub_(hidden, seen)
        torch._foreach_copy_(weights, seen)

    @torch.no_grad()
    def clear_gradients(self) -> None:
        """Lays the gradients of zeros aside, until ``restore_gradients``."""
        grads = self._gradients()
        if not grads:
            return
        seen = torch._foreach_mul(grads, [self._ones[n] for n, w in self.weights.items() if w.grad is not None])
        self._aside = [*torch._foreach_sub(grads, seen)]
        torch._foreach_copy_(grads, seen)

    @torch.no_grad()
    def restore_gradients(self) -> None:
        """After clipping: what was laid aside, at its pace."""
        if not self._aside:
            return
        grads = self._gradients()
        norms = [torch.nn.utils.get_total_norm(part) for part in (grads, self._aside)]
        torch._foreach_mul_(self._aside, (PACE * norms[0] / norms[1].clamp_min(1e-30)).clamp(max=1.0))
        torch._foreach_add_(grads, self._aside)
        self._aside = []

    def _gradients(self) -> list[torch.Tensor]:
        return [w.grad for w in self.weights.values() if w.grad is not None]


def _by_group(weights: Mapping[str, torch.Tensor], optimizer: Any) -> list[tuple[dict[str, Any], list[str]]]:
    """The optimizer's settings for the weights, with the names of those they are for."""
    names = {id(weight): name for name, weight in weights.items()}
    found = [(g, [names[id(p)] for p in g["params"] if id(p) in names]) for g in optimizer.param_groups]
    return [(group, own) for group, own in found if own]
